"""Which 16-bit model something was measured on or made from, and a warning where another one is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hswq_lab.checkpoint.provenance import Provenance

if TYPE_CHECKING:
    from hswq_lab.model import Model

_SHOWN = 12  # digits of a digest: enough to tell two files apart


@dataclass(frozen=True)
class MeasuredOn:
    """The 16-bit model that impacts were measured on.

    Attributes:
        model: its name.
        sha256: of its checkpoint; "" where it is not known.
    """

    model: str
    sha256: str

    def warning(self, model: Model) -> str | None:
        """What is to be said where `model` is another one; None where it is this one, or nothing is known.

        The same weights in another file have another digest, so this is a doubt and no error.
        """
        if not self.sha256 or self.sha256 == model.checkpoint.sha256:
            return None
        return (
            f"the impact was measured on {self.model} (SHA-256 {self.sha256[:_SHOWN]}), and this is {_told(model)}: "
            "unless both hold the same weights its layers rank otherwise, so measure this model with "
            "hl.sensitivity, or `hswq-lab sensitivity`"
        )


def source_warning(pack: Model, model: Model) -> str | None:
    """What is to be said where `model` does not seem to be the 16-bit model that a pack was made from, else None.

    A pack that does not name its source is taken at its word.
    """
    if model.is_packed:
        return (
            f"{_told(model)} is itself a pack, and what is asked for is the 16-bit model that {pack.name} was made "
            "from: the inputs of a pack's layers hold its own errors"
        )
    source = Provenance(pack.checkpoint.metadata, model.checkpoint)
    if source.told is None or source.certain:
        return None
    return (
        f"{pack.name} was made from a file with SHA-256 {source.told[:_SHOWN]}, and this is {_told(model)}: unless "
        "both hold the same weights its inputs are others, and their scales wrong for the pack; give the 16-bit "
        "model that the pack was made from, or none"
    )


def _told(model: Model) -> str:
    path = model.checkpoint.path
    where = "in memory" if path is None else path
    return f"{model.name} ({where}, SHA-256 {model.checkpoint.sha256[:_SHOWN]})"
