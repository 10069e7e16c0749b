"""One layer of a checkpoint under the glass: its codes, its block scales, its tails in both bases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch.nn import functional

from hswq_lab.checkpoint.anything import Anything, as_checkpoint
from hswq_lab.checkpoint.closeness import closeness, dense
from hswq_lab.errors import HswqError
from hswq_lab.formats import (
    Fp8Weight,
    Int8Weight,
    Mxfp8Weight,
    Nvfp4Weight,
    PackedWeight,
    decode_e2m1,
    group_for,
    rotate_fp32,
    unpack_nibbles,
    unswizzle,
)
from hswq_lab.formats.mxfp8 import MX_BLOCK
from hswq_lab.results import Result

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.checkpoint import Checkpoint
    from hswq_lab.checkpoint.closeness import Closeness
    from hswq_lab.checkpoint.slots import Value

MAP_SIDE = 96
"""The map of block scales has at most this many rows and columns; larger ones are averaged."""

TAIL_BINS, TAIL_END = 48, 12.0
"""Bins and end of the histogram of |w| / rms."""

BLOCK = 16


@dataclass(frozen=True)
class Tails:
    """How the values of a weight spread in one basis.

    Attributes:
        basis: "as it is used" (unrotated) or "as it is stored" (or would be: rotated in groups of the width's own).
        crest: max |w| / rms.
        kurtosis: mean w⁴ / (mean w²)²; 3 for a Gaussian.
        block_crest: mean over blocks of 16 of max |w| / rms of the block: what one scale a block has to bear.
        counts: of |w| / rms in `TAIL_BINS` equal bins from 0 to `TAIL_END`, the rest in the last one.
    """

    basis: str
    crest: float
    kurtosis: float
    block_crest: float
    counts: list[int] = field(repr=False)


@dataclass(frozen=True)
class LayerDetail(Result):
    """Everything that can be seen of one weight.

    Attributes:
        name: of the parameter.
        format: "16-bit" for a tensor.
        shape: logical (N, K).
        group: rotation group of the stored values.
        nbytes: on disk, scales included.
        dtype: of the tensor, or of the packed data.
        marker: what the file says about the layer; empty for a tensor.
        code_values: value of each code before any scale; empty for a tensor.
        code_counts: how often each occurs.
        scales: block (or row) scales times the tensor scale, averaged to at most `MAP_SIDE` on a side.
        tails: in both bases.
        sqnr_db: to the source, unrotated; None without one.
        cosine: likewise.
        file: that it was read from; "in memory" without one.
    """

    name: str
    format: str
    shape: tuple[int, int]
    group: int | None
    nbytes: int
    dtype: str
    marker: dict[str, Any]
    code_values: list[float] = field(repr=False)
    code_counts: list[int] = field(repr=False)
    scales: list[list[float]] = field(repr=False)
    tails: list[Tails] = field(repr=False)
    sqnr_db: float | None = None
    cosine: float | None = None
    file: str = "in memory"

    def to_frame(self) -> pd.DataFrame:
        """One row a code: value, count; of a tensor, which has none, one a bin of |w| / rms: from, a count a basis."""
        if self.code_values:
            return pd.DataFrame({"value": self.code_values, "count": self.code_counts})
        begins = [place * TAIL_END / TAIL_BINS for place in range(TAIL_BINS)]
        return pd.DataFrame({"from": begins, **{tails.basis: tails.counts for tails in self.tails}})

    def __str__(self) -> str:
        """A line for a console: the file, the layer, how it is stored."""
        stored = self.format if self.marker else f"not packed, {self.dtype}"
        n, k = self.shape
        return f"{self.file}: {self.name}, {stored}, {n} × {k}, {self.bits:.2f} bits a weight"

    @property
    def bits(self) -> float:
        """On disk, a weight."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


def layer_detail(weights: Anything, name: str, source: Anything | None = None) -> LayerDetail:
    """Looks at one weight; nothing else is read.

    Args:
        weights: a Checkpoint, a Model, or a path.
        name: of a matrix, with or without ".weight".
        source: 16-bit weights to compare with.

    Raises:
        HswqError: no such tensor, an empty one, its bytes break a rule of its format, or the source's has another
            shape.
    """
    checkpoint = as_checkpoint(weights)
    key = name if name in checkpoint else f"{name.removesuffix('.weight')}.weight"
    value, entry = checkpoint[key], checkpoint.entry(key)
    used = _matrix(dense(value), key)
    if used.numel() == 0:
        raise HswqError("an empty tensor has nothing to look at", tensor=key, found=list(used.shape))
    packed = value if isinstance(value, PackedWeight) else None
    values, counts = _codes(packed)
    close = None if source is None else _closeness(used, as_checkpoint(source), key)
    return LayerDetail(
        name=key,
        format=entry.format,
        shape=(used.shape[0], used.shape[1]),
        group=entry.group,
        nbytes=entry.nbytes,
        dtype=str(entry.dtype).removeprefix("torch."),
        marker={} if packed is None else packed.marker(),
        code_values=values,
        code_counts=counts,
        scales=_scale_map(value),
        tails=_both_bases(used, entry.group),
        sqnr_db=None if close is None else close.sqnr_db,
        cosine=None if close is None else close.cosine,
        file=str(checkpoint.path or "in memory"),
    )


def _matrix(values: Tensor, key: str) -> Tensor:
    """In fp32, with everything but the last dimension taken together."""
    if values.ndim == 0:
        raise HswqError("a single number is no matrix", tensor=key)
    return values.float().reshape(-1, values.shape[-1])


def _closeness(used: Tensor, source: Checkpoint, key: str) -> Closeness:
    reference = _matrix(dense(source[key]), key)
    if reference.shape != used.shape:
        raise HswqError(
            "the source has another shape", file=source.path, tensor=key, found=list(reference.shape),
            expected=list(used.shape), fix="give the 16-bit original of this very file, or no source",
        )  # fmt: skip
    return closeness(used, reference)


def _both_bases(used: Tensor, group: int | None) -> list[Tails]:
    group = group or group_for(used.shape[1])
    bases = {"as it is used": used, f"rotated by {group}": rotate_fp32(used, group)}
    return [_tails(name, values) for name, values in bases.items() if group or name == "as it is used"]


def _tails(basis: str, values: Tensor) -> Tails:
    rms = values.square().mean().sqrt()
    if not rms > 0:
        return Tails(basis, 0.0, 0.0, 0.0, [values.numel()] + [0] * (TAIL_BINS - 1))
    relative = values.abs() / rms
    width = values.shape[1] // BLOCK * BLOCK
    blocks = relative[:, :width].reshape(-1, BLOCK)
    block_rms = blocks.square().mean(1).sqrt().clamp(min=1e-30)
    bins = (relative.flatten() * (TAIL_BINS / TAIL_END)).long().clamp(max=TAIL_BINS - 1)
    return Tails(
        basis=basis,
        crest=float(relative.max()),
        kurtosis=float(relative.square().square().mean()),
        block_crest=float((blocks.amax(1) / block_rms).mean()) if len(blocks) else 0.0,
        counts=torch.bincount(bins, minlength=TAIL_BINS).tolist(),
    )


def _codes(value: PackedWeight | None) -> tuple[list[float], list[int]]:
    """(value of each code, how often it occurs), ascending; +0 and −0 are one."""
    match value:
        case None:
            return [], []
        case Nvfp4Weight():
            n, k = value.shape
            counts = torch.bincount(unpack_nibbles(value.codes)[:n, :k].flatten().long(), minlength=16)
            decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8))
        case Int8Weight():
            counts = torch.bincount(value.q.flatten().long() + 128, minlength=256)
            decoded = torch.arange(-128, 128).float()
        case Fp8Weight() | Mxfp8Weight():
            stored = value.data
            every = torch.arange(256, dtype=torch.uint8)
            counts = torch.bincount(stored.contiguous().view(torch.uint8).flatten().long(), minlength=256)
            decoded = every.view(stored.dtype).float()
        case _:
            raise HswqError("nobody knows the codes of this packed format here", found=value.format)
    totals: dict[float, int] = {}
    for code, count in zip(decoded.tolist(), counts.tolist(), strict=True):
        if code == code:  # noqa: PLR0124  # NaN codes have no place on an axis
            totals[code + 0.0] = totals.get(code + 0.0, 0) + count
    ordered = sorted(totals.items())
    return [code for code, _ in ordered], [count for _, count in ordered]


def _scale_map(value: Value) -> list[list[float]]:
    match value:
        case Nvfp4Weight():
            rows, columns = value.codes.shape[0], value.codes.shape[1] // (BLOCK // 2)
            scales = unswizzle(value.scales, rows, columns).float() * value.scale
            scales = scales[: value.shape[0]]
        case Mxfp8Weight():
            rows, columns = value.data.shape[0], value.data.shape[1] // MX_BLOCK
            scales = unswizzle(value.scales, rows, columns).float()[: value.shape[0]]
        case Int8Weight():
            scales = value.scale.reshape(-1, 1)
        case PackedWeight():
            return [[float(value.disk_tensors()["weight_scale"].float().mean())]]
        case _:
            return []
    size = (min(MAP_SIDE, scales.shape[0]), min(MAP_SIDE, scales.shape[1]))
    averaged: list[list[float]] = functional.adaptive_avg_pool2d(scales.float()[None], size)[0].tolist()
    return averaged
