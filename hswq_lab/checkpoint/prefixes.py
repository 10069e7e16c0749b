"""Prefixes in front of a model's parameter names: found, taken off for reading, put back for writing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "net.")
DEFAULT_PREFIX = PREFIXES[0]


def find_prefix(names: Iterable[str]) -> str:
    """The prefix of a file's model tensors, "" where they have none.

    The two long prefixes are unmistakable: one tensor is enough (a complete checkpoint also holds a VAE and text
    encoders). The short ones must be on most tensors.
    """
    listed = list(names)
    for prefix in PREFIXES:
        count = sum(name.startswith(prefix) for name in listed)
        if count and (prefix.endswith("diffusion_model.") or 2 * count > len(listed)):
            return prefix
    return ""


def resolve_layer(name: str, layers: Container[str]) -> str | None:
    """The layer that metadata means, bare or with any known prefix; None if there is none."""
    candidates = [name, *(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))]
    candidates += [
        candidate.removesuffix(".weight") for candidate in candidates if candidate.endswith(".weight")
    ]
    return next((candidate for candidate in candidates if candidate in layers), None)


@dataclass(frozen=True, eq=False)
class Naming:
    """How names are written in a file.

    Attributes:
        prefix: in front of the model's tensors.
        foreign: names without the prefix (a VAE, text encoders), which are written as they are.
    """

    prefix: str = DEFAULT_PREFIX
    foreign: frozenset[str] = frozenset()

    def stored(self, name: str) -> str:
        """The name in a file."""
        return name if name in self.foreign else self.prefix + name
