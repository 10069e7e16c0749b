"""hswq-lab inspect, check, convert, diff: what is in files, whether it is right, and in other layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hswq_lab as hl
from hswq_lab.checkpoint import convert as convert_checkpoint
from hswq_lab.checkpoint.header import read_header
from hswq_lab.cli import lora
from hswq_lab.cli.common import bar, finish, load, say, table
from hswq_lab.errors import HswqError
from hswq_lab.models.foreign import looks_like_lora
from hswq_lab.shipped import checkpoint_path

if TYPE_CHECKING:
    import argparse

SCALES = ["tensor", "median", "largest", "input_scale"]  # an NVFP4 layer's, as stored; INT8 has one a row
SHOWN = 20  # rows of a difference in a console table; the files have them all


def is_lora(path: str) -> bool:
    """Whether a file's keys are a LoRA's; a folder is one if it is in PEFT's layout.

    Raises:
        HswqError: the file is missing or is no safetensors file.
    """
    where = checkpoint_path(path)
    if where.is_dir():
        return (where / "adapter_config.json").is_file()
    return where.name.endswith(".safetensors") and looks_like_lora(read_header(where).tensors)


def inspect(args: argparse.Namespace) -> int:
    """Says what is in a checkpoint or a LoRA."""
    if is_lora(args.file):
        found = lora.load_as_told(args.file, args).report(
            {} if args.model is None else load(args.model, args)
        )
        columns = ["module", "kind", "rank", "scale", "norm"]
        say(table(found.to_frame()[[*columns, "layer", "rows", "status"] if args.model else columns]))
        if args.model:
            say(found)
        else:
            say("where these modules go is not known without a model: add --model")
        return finish(args, found)
    report = hl.inspect(args.file)
    frame = report.to_frame().rename(columns=lambda name: name.removeprefix("scale_"))
    say(table(frame[["name", "format", "dtype", "shape", "group", "bits", *SCALES, "nbytes"]], digits=4))
    say(report)
    return finish(args, report)


def check(args: argparse.Namespace) -> int:
    """Applies every rule to a file; fails if one is broken."""
    if not checkpoint_path(args.file).exists():
        raise HswqError("the file does not exist", file=args.file, fix="check the name and the folder")
    with bar("checking") as progress:
        report = hl.check(args.file, args.source, progress=progress)
    say(report)
    return finish(args, report, passed=report.ok)


def convert(args: argparse.Namespace) -> int:
    """Writes a checkpoint in another layout, or a LoRA in another dialect."""
    if is_lora(args.file):
        if args.to is None:
            raise HswqError("which dialect?", file=args.file, expected="--to peft, kohya or native")
        return lora.convert(args)
    with bar("converting") as progress:
        report = convert_checkpoint(
            args.file,
            args.out,
            to=args.to or "hswq",
            producer=args.producer,
            source=args.source,
            max_shard_bytes=args.shard_bytes,
            progress=progress,
        )
    say(report)
    return finish(args, report)


def diff(args: argparse.Namespace) -> int:
    """Compares two checkpoints name by name."""
    with bar("comparing") as progress:
        report = hl.diff(args.a, args.b, progress=progress)
    frame = report.to_frame()
    different = frame[frame["status"] != "same"].sort_values("sqnr_db", na_position="first", kind="stable")
    if len(different):
        say(table(different.head(SHOWN)))
        if len(different) > SHOWN:
            say(
                f"the {SHOWN} furthest apart of {len(different)} differences; --json and --save keep them all"
            )
    for key, (a, b) in report.metadata.items():
        say(f"metadata {key}: {_short(a)} | {_short(b)}")
    say(report)
    return finish(args, report)


def _short(value: str | None) -> str:
    if value is None:
        return "–"
    return value if len(value) <= 60 else value[:57] + "…"
