"""The model families that the package knows, and the one whose checkpoint a file is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hswq_lab.errors import HswqError
from hswq_lab.models.foreign import what_it_is
from hswq_lab.models.zimage import ZImageConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hswq_lab.models.architecture import Architecture

FAMILIES: Final[tuple[type[Architecture], ...]] = (ZImageConfig,)


def architecture_of(shapes: Mapping[str, tuple[int, ...]], file: Path | None = None) -> Architecture:
    """Family and sizes of the network whose parameters these are.

    Args:
        shapes: native name → shape.
        file: for messages.

    Raises:
        HswqError: it is none; what it looks like is said where names tell.
    """
    family = next((each for each in FAMILIES if each.sign in shapes), FAMILIES[0])
    try:
        return family.from_shapes(shapes)
    except HswqError as error:
        kind = what_it_is(shapes)
        if kind is not None:
            known = " or ".join(each.family for each in FAMILIES)
            raise HswqError(
                f"this is {kind}, not a {known} checkpoint", file=file, found=", ".join(list(shapes)[:2])
            ) from error
        raise HswqError(
            error.problem, file=file, tensor=error.tensor, found=error.found, expected=error.expected
        ) from error
