"""Accept a checkpoint, a path, or anything that has a checkpoint (a Model)."""

from __future__ import annotations

import os
from typing import Protocol

from hswq_lab.checkpoint.checkpoint import Checkpoint
from hswq_lab.errors import HswqError


class HasCheckpoint(Protocol):
    """What a Model offers, seen from below."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Its weights."""
        ...


Anything = Checkpoint | HasCheckpoint | str | os.PathLike[str]


def as_checkpoint(source: Anything) -> Checkpoint:
    """The checkpoint that is meant; a path is opened.

    Raises:
        HswqError: the file cannot be opened, or it is none of the three.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, str | os.PathLike):
        return Checkpoint.open(source)
    checkpoint = getattr(source, "checkpoint", None)
    if not isinstance(checkpoint, Checkpoint):
        raise HswqError(
            "this is no checkpoint",
            found=repr(source)[:80],
            expected="a path, a checkpoint, or a loaded model",
        )
    return checkpoint
