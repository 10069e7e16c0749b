"""What a command may write to, asked before any work is done: OUT, and the files of --json and --save."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from hswq_lab.checkpoint.files import INDEX_SUFFIX
from hswq_lab.errors import HswqError
from hswq_lab.results import SAVED_AS

if TYPE_CHECKING:
    import argparse


def check_target(args: argparse.Namespace) -> None:
    """Whether OUT can be written.

    Raises:
        HswqError: OUT is a folder or one of the files that are read, its folder is missing or read-only, or it
            exists and --force is missing.
    """
    out: Path = args.out
    if out.suffix != ".safetensors":
        raise HswqError(
            "the result is a safetensors file", file=out, expected="a name that ends in .safetensors"
        )
    if not out.parent.is_dir():
        raise HswqError("the target's folder does not exist", file=out, fix=f"create {out.parent}")
    out = written_as(args)
    _refuse_inputs(out, args)
    if out.exists() and not args.force:
        raise HswqError("the target exists already", file=out, fix="choose another name, or add --force")
    _try_to_write(out)


def check_results(args: argparse.Namespace) -> None:
    """Whether the files of --json and --save can be written; each is another file than OUT and all that is read.

    Raises:
        HswqError: they cannot, or a result has no such form.
    """
    taken = [] if getattr(args, "out", None) is None else [written_as(args), args.out]
    for path in [*([args.json] if args.json else []), *args.save]:
        known = (".json",) if path == args.json else SAVED_AS
        if path.suffix.lower() not in known:
            raise HswqError(
                "a result has no such form", file=path, expected=f"a name that ends in {', '.join(known)}"
            )
        if any(path == other or _same(path, other) for other in taken):
            raise HswqError("two results would be one file", file=path, fix="give each a name of its own")
        _refuse_inputs(path, args)
        _try_to_write(path)
        taken.append(path)


def written_as(args: argparse.Namespace) -> Path:
    """The file that stands for OUT: OUT itself, or the index of its parts."""
    out: Path = args.out
    return out if getattr(args, "shard_bytes", None) is None else out.with_name(out.stem + INDEX_SUFFIX)


def _refuse_inputs(path: Path, args: argparse.Namespace) -> None:
    if path.is_dir():
        raise HswqError("the target is a folder", file=path, fix="add a file's name")
    if any(_same(path, source) for source in _inputs(args)):
        raise HswqError("the target is a file that is being read", file=path, fix="write under another name")


def _inputs(args: argparse.Namespace) -> list[Path]:
    """The files that arguments name, other than those that are written; FILE:STRENGTH too."""
    values = [value for name, value in vars(args).items() if name not in ("out", "json", "save")]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    texts = [str(item) for item in flat if isinstance(item, str | Path)]
    named = [*texts, *(text.rpartition(":")[0] for text in texts)]
    # Other than Path.exists it takes a prompt of any length.
    return [Path(name) for name in named if name and os.path.exists(name)]  # noqa: PTH110


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _try_to_write(path: Path) -> None:
    folder = next(place for place in (path.parent, *path.parent.absolute().parents) if place.exists())
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HswqError(
            "the target's folder cannot be written to", file=path, found=error.strerror
        ) from error
