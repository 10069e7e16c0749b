"""Channels that smooth() rescaled by powers of two, as a file's metadata and its model's family tell them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.models.families import architecture_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.checkpoint.checkpoint import Checkpoint

SMOOTH_KEY = "hswq.smooth"
"""Metadata of a model whose channels were rescaled before packing: layers → number of rescaled channels."""

COLUMNS = "smooth_columns"
"""Beside a Linear's weight [N, K]: int8 [K], the exponents of the powers of two that its columns were multiplied by."""

ROWS = "smooth_rows"
"""Likewise int8 [N], of its rows and its bias; a layer without either has the original's units."""


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


def channel_factors(checkpoint: Checkpoint, layer: str) -> tuple[Tensor, Tensor]:
    """What smooth() multiplied a Linear's weight [N, K] by: rows fp32 [N], columns fp32 [K]; exact powers of two.

    Raises:
        HswqError: the file does not say it, or not for this layer's shape.
    """
    if not _tells_factors(checkpoint):
        raise HswqError(
            "the file says that smooth() rescaled channels, but not by how much",
            file=checkpoint.path,
            tensor=layer,
            expected=f"tensors named ….{COLUMNS} and ….{ROWS}, which smooth() writes now",
            fix="smooth and pack the 16-bit model again",
        )
    n, k = checkpoint.entry(f"{layer}.weight").shape
    rows, columns = (
        _factors(checkpoint, f"{layer}.{leaf}", size) for leaf, size in ((ROWS, n), (COLUMNS, k))
    )
    return rows, columns


def check_same_units(pack: Checkpoint, model: Checkpoint) -> None:
    """Refuses a model whose channels have other units than a pack's: its activations are not those of the pack."""
    known = [metadata.get(SMOOTH_KEY) for metadata in (pack.metadata, model.metadata)]
    if known[0] != known[1]:
        smoothed = ["not smoothed" if counts is None else "smoothed" for counts in known]
        raise HswqError(
            "smooth() rescaled channels of one of the two, or of each in another way",
            file=pack.path,
            found=f"the pack is {smoothed[0]}, the model {smoothed[1]}",
            fix="give the 16-bit model that was packed (what smooth() returned), or none",
        )


def _tells_factors(checkpoint: Checkpoint) -> bool:
    """Whether a smoothed checkpoint has the exponents of every layer that its metadata name."""
    if SMOOTH_KEY not in checkpoint.metadata:
        return True
    try:
        counts = json.loads(checkpoint.metadata[SMOOTH_KEY])
    except (ValueError, RecursionError):
        return False
    linears = (
        [layer for layers in counts for layer in layers.split(", ")] if isinstance(counts, dict) else [""]
    )
    return all(f"{layer}.{COLUMNS}" in checkpoint for layer in linears)


def _factors(checkpoint: Checkpoint, name: str, size: int) -> Tensor:
    exponents = checkpoint.get(name)
    if exponents is None:
        return torch.ones(size)
    if not isinstance(exponents, Tensor) or exponents.dtype != torch.int8 or exponents.shape != (size,):
        raise HswqError(
            "these are no exponents of channels",
            file=checkpoint.path,
            tensor=name,
            found=f"{getattr(exponents, 'dtype', 'packed')} {list(exponents.shape)}",
            expected=f"int8 [{size}]",
        )
    return torch.exp2(exponents.float())
