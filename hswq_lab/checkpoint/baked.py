"""The LoRAs that a file's metadata say are baked into its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from collections.abc import Mapping

LORAS_KEY = "hswq.loras"
"""Metadata of a file: the LoRAs that are baked into it, a JSON list of name, sha256, strength, how,
"made_of" with the hashes of LoRAs that one was converted or merged from,
and "applied" where it is not all of its modules, as in "1 of 70 modules"."""

SEEDS_KEY = "hswq.lora_seeds"
"""Metadata of a file with baked LoRAs: JSON, layer → seed of its stochastic rounding."""


@dataclass(frozen=True)
class BakedLora:
    """One LoRA in a file.

    Attributes:
        sha256: of the LoRA's own file, empty where the metadata do not tell it.
        applied: as in "1 of 70 modules"; empty where all of them are, or nothing is told.
        made_of: sha256 of the LoRAs that it was converted or merged from.
    """

    name: str
    sha256: str
    strength: float
    how: str
    applied: str = ""
    made_of: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ×{self.strength:g} ({self.how})" + (f", {self.applied}" if self.applied else "")


def baked_loras(metadata: Mapping[str, str]) -> list[BakedLora]:
    """The LoRAs in a file, in the order in which they were baked.

    Raises:
        HswqError: the entry is not what this package writes.
    """
    try:
        return [
            BakedLora(
                str(entry["name"]),
                str(entry.get("sha256", "")),
                float(entry["strength"]),
                str(entry["how"]),
                str(entry.get("applied", "")),
                tuple(map(str, entry.get("made_of", ()))),
            )
            for entry in json.loads(metadata.get(LORAS_KEY, "[]"))
        ]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise HswqError(
            "the file's list of baked LoRAs cannot be read",
            tensor=LORAS_KEY,
            found=metadata[LORAS_KEY][:200],
            expected="a JSON list of name, strength, how",
        ) from error


def baked_in_words(metadata: Mapping[str, str]) -> list[str]:
    """The same for reports, which say what they can: a list that cannot be read is told as such."""
    try:
        return [str(lora) for lora in baked_loras(metadata)]
    except HswqError:
        return [f"unknown LoRAs ({LORAS_KEY} cannot be read)"]


def baked_seeds(metadata: Mapping[str, str]) -> dict[str, object]:
    """Layer → seed of the rounding with which LoRAs were baked into it.

    Raises:
        HswqError: the entry is not what this package writes.
    """
    text = metadata.get(SEEDS_KEY, "{}")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise HswqError(
            "the file's seeds of baked LoRAs cannot be read",
            tensor=SEEDS_KEY,
            found=text[:80],
            expected="a JSON object, layer → seed",
        )
    return told


def baked_layers(metadata: Mapping[str, str]) -> frozenset[str] | None:
    """The layers that LoRAs are baked into; None where the metadata do not tell."""
    try:
        return frozenset(baked_seeds(metadata)) if SEEDS_KEY in metadata else None
    except HswqError:
        return None
