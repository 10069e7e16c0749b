"""hswq-lab bake, lora convert, lora merge: LoRAs into a pack with the evidence that they arrived, or as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import hswq_lab as hl
from hswq_lab.cli.common import bar, finish, load, say, say_written, table
from hswq_lab.errors import HswqError
from hswq_lab.lora import convert_lora, merge_loras, save_lora

if TYPE_CHECKING:
    import argparse

    from hswq_lab.lora import LoraFile


def bake(args: argparse.Namespace) -> int:
    """Bakes LoRAs into a copy of a pack; writes it only if all of them arrived."""
    loras = [with_strength(text) for text in args.loras]
    pack = load(args.pack, args)
    source = load(args.source, args) if args.source is not None else None
    for path, strength in loras:
        with bar(f"baking {Path(path).name}") as progress:
            pack.attach(
                load_as_told(path, args),
                strength=strength,
                how="bake" if source is None else "bake_from_source",
                source=None if source is None else source.checkpoint,
                allow_unmatched=args.allow_unmatched,
                allow_baked=args.allow_baked,
                progress=progress,
            )
    report = pack.bake_report()
    if args.effect:
        with bar("effect") as progress:
            report = report.with_effect(pack.effect(source, progress=progress))
    say(table(report.summary()))
    say(report)
    passed = report.verdict == "OK"
    if passed:
        with bar("writing") as progress:
            hl.save(pack, args.out, progress=progress)
        say_written(args.out)
    else:
        say(f"not written, because the verdict is {report.verdict}")
    return finish(args, report, passed=passed)


def convert(args: argparse.Namespace) -> int:
    """Writes a LoRA in another dialect."""
    model = load(args.model, args)
    save_lora(args.out, *convert_lora(load_as_told(args.file, args), model, args.to))
    report = hl.load_lora(args.out).report(model)
    say(report)
    say_written(args.out)
    return finish(args, report)


def merge(args: argparse.Namespace) -> int:
    """Writes several LoRAs as one of a given rank."""
    loras = [(load_as_told(path, args), strength) for path, strength in map(with_strength, args.loras)]
    model = load(args.model, args)
    with bar("merging") as progress:
        merged = merge_loras(
            loras, model, args.rank, args.to, progress=progress, allow_unmatched=args.allow_unmatched
        )
    save_lora(args.out, merged.tensors, merged.metadata)
    say(merged.report)
    say_written(args.out)
    return finish(args, merged.report)


def load_as_told(path: str, args: argparse.Namespace) -> LoraFile:
    """A LoRA, read as the options say."""
    return hl.load_lora(path, full_lokr_scale=args.full_lokr_scale)


def with_strength(text: str) -> tuple[str, float]:
    """FILE or FILE:STRENGTH; a file that is named so is taken as it is.

    Raises:
        HswqError: what follows the last colon is no number.
    """
    path, colon, strength = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, 1.0
    try:
        return path, float(strength)
    except ValueError as error:
        raise HswqError("a LoRA's strength is a number", found=text, expected="FILE:0.8") from error
