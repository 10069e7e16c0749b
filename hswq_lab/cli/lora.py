"""hswq-lab bake: LoRAs into a pack, with the evidence that they arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hswq_lab as hl
from hswq_lab.cli.common import bar, finish, load, refuse_to_overwrite, say, table
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    import argparse


def bake(args: argparse.Namespace) -> int:
    """Bakes LoRAs into a copy of a pack; writes it only if all of them arrived."""
    refuse_to_overwrite(args.out, force=args.force)
    pack = load(args.pack, args)
    source = load(args.source, args).checkpoint if args.source is not None else None
    for text in args.lora:
        path, strength = _with_strength(text)
        pack.attach(
            hl.load_lora(path),
            strength=strength,
            how="bake" if source is None else "bake_from_source",
            source=source,
            allow_unmatched=args.allow_unmatched,
        )
    report = pack.bake_report()
    say(table(report.summary()))
    say(report)
    passed = report.verdict == "OK"
    if passed:
        with bar("writing") as progress:
            hl.save(pack, args.out, progress=progress)
        say(f"written: {args.out} ({args.out.stat().st_size:,} bytes)")
    else:
        say(f"not written, because the verdict is {report.verdict}")
    return finish(args, report, passed=passed)


def _with_strength(text: str) -> tuple[str, float]:
    """FILE or FILE=STRENGTH."""
    path, equals, strength = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        return path, float(strength)
    except ValueError as error:
        raise HswqError("a LoRA's strength is a number", found=text, expected="FILE=0.8") from error
