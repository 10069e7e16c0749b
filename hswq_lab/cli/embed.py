"""hswq-lab embed: prompts to a captions file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hswq_lab.cli.common import bar, finish, say
from hswq_lab.embed import embed as embed_prompts
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def embed(args: argparse.Namespace) -> int:
    """Encodes prompts and writes their features."""
    prompts = [*args.prompt, *([] if args.prompts is None else _lines(args.prompts))]
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with bar("encoding") as progress:
        report = embed_prompts(args.folder, prompts, args.out, device, progress=progress)
    say(report)
    return finish(args, report)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HswqError("the file of prompts cannot be read", file=path, found=error) from error
