"""Channels that smooth() rescaled by powers of two, as a file's metadata and its model's family tell them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError
from hswq_lab.models.families import architecture_of

if TYPE_CHECKING:
    from collections.abc import Mapping

SMOOTH_KEY = "hswq.smooth"
"""Metadata of a model whose channels were rescaled before packing: layers → number of rescaled channels."""


def smoothed_names(metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The parameters with rescaled channels: the columns of some weights, and what stands in front of them.

    Args:
        metadata: of a file.
        shapes: native name → shape, of the same model.
    """
    try:
        counts = json.loads(metadata.get(SMOOTH_KEY, "{}"))
        sites = list(architecture_of(shapes).sites())
    except (HswqError, ValueError, RecursionError):
        return frozenset()  # nobody can tell; whoever compares says what differs
    names: set[str] = set()
    for site in sites if isinstance(counts, dict) else ():
        if counts.get(", ".join(site.linears)):
            source = site.source.removesuffix(".weight")
            names |= {f"{source}.weight", f"{source}.bias", *(f"{layer}.weight" for layer in site.linears)}
    return frozenset(names)
