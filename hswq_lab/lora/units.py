"""The modules that a dialect speaks of: whole layers (fused qkv) or diffusers' split ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch

from hswq_lab.errors import HswqError
from hswq_lab.lora.parts import Dora, Full, LowRank, Part
from hswq_lab.models.names import diffusers_names

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.lora.delta import LayerDelta

_MERGE = "use merge_loras, which writes any kind of delta as a LoRA of a given rank"


@dataclass(frozen=True, eq=False)
class Unit:
    """One module as a dialect names it: rows `start` to `stop` of a layer, with its deltas.

    The part's own rows count from the layer's first row, as in `LayerDelta`.
    """

    name: str
    start: int
    stop: int
    part: Part | None
    bias: Tensor | None


def units_of(delta: LayerDelta, *, split: bool) -> list[Unit]:
    """A layer's delta as modules of a split or of a fused dialect; modules without a delta are left out.

    Raises:
        HswqError: a kind of delta cannot be cut or joined the way the dialect needs it.
    """
    n = delta.shape[0]
    names = list(diffusers_names(delta.layer)) if split else [delta.layer]
    rows = n // len(names)
    bias = delta.bias()
    units = []
    for index, name in enumerate(names):
        start, stop = index * rows, (index + 1) * rows
        part = _part(delta, start, stop)
        piece = None if bias is None or not bias[start:stop].any() else bias[start:stop]
        if part is not None or piece is not None:
            units.append(Unit(name, start, stop, part, piece))
    return units


def _part(delta: LayerDelta, start: int, stop: int) -> Part | None:
    """The delta of exactly these rows, in one part."""
    parts = [part for part in delta.parts if part.start < stop and start < part.stop]
    if not parts:
        return None
    cut = [_cut(part, max(part.start, start), min(part.stop, stop)) for part in parts]
    kept = [part for part in cut if part is not None]
    if len(kept) == 1 and (kept[0].start, kept[0].stop) == (start, stop):
        return kept[0]
    return _joined(kept, start, stop) if kept else None


def _cut(part: Part, start: int, stop: int) -> Part | None:
    """Some rows of a part; None where they are zero."""
    if (start, stop) == (part.start, part.stop):
        return part
    rows = slice(start - part.start, stop - part.start)
    if isinstance(part, LowRank):
        up = part.up[rows]
        used = (up.float() != 0).any(dim=0)  # a block-diagonal merge falls apart into its blocks again
        if not used.any():
            return None
        return replace(part, start=start, stop=stop, up=up[:, used], down=part.down[used])
    if isinstance(part, Full):
        return replace(part, start=start, stop=stop, diff=part.diff[rows])
    if isinstance(part, Dora) and part.axis == "out":
        inner = _cut(part.inner, start, stop) or _nothing(part.inner, start, stop)
        return replace(part, start=start, stop=stop, inner=inner, magnitude=part.magnitude[rows])
    raise HswqError(
        "this delta of a fused layer cannot be split", tensor=part.key, found=_in_words(part), fix=_MERGE
    )


def _nothing(part: Part, start: int, stop: int) -> LowRank:
    """A LoRA of rank 1 that is zero: a DoRA's magnitude still acts where its factors do not."""
    if not isinstance(part, LowRank):
        raise HswqError(
            "this DoRA of a fused layer cannot be split", tensor=part.key, found=_in_words(part), fix=_MERGE
        )
    return LowRank(
        part.key, start, stop, part.scale, part.down[:1], torch.zeros_like(part.up[: stop - start, :1])
    )


def _joined(parts: list[Part], start: int, stop: int) -> Part:
    """Several parts as one on rows start … stop: low-rank ones block-diagonally, full ones stacked."""
    if all(isinstance(part, Dora) and part.axis == "out" for part in parts) and _covers(parts, start, stop):
        doras = [part for part in parts if isinstance(part, Dora)]
        inner = _joined([part.inner for part in doras], start, stop)
        magnitude = torch.cat([part.magnitude.float() for part in sorted(doras, key=lambda part: part.start)])
        return Dora(parts[0].key, start, stop, 1.0, inner, magnitude, "out")
    low_rank = [part for part in parts if isinstance(part, LowRank)]
    if len(low_rank) == len(parts):
        return _block_diagonal(low_rank, start, stop)
    full = [part for part in parts if isinstance(part, Full)]
    if len(full) == len(parts):
        total = torch.zeros(stop - start, full[0].diff.shape[1])
        for part in full:
            total[part.start - start : part.stop - start] = part.dense()
        return Full(full[0].key, start, stop, 1.0, total)
    kinds = ", ".join(_in_words(part) for part in parts)
    raise HswqError("these deltas cannot be fused", tensor=parts[0].key, found=kinds, fix=_MERGE)


def _covers(parts: list[Part], start: int, stop: int) -> bool:
    return sum(part.stop - part.start for part in parts) == stop - start


def _block_diagonal(parts: list[LowRank], start: int, stop: int) -> LowRank:
    """Down factors stacked, up factors on a diagonal; different scales are multiplied into up, in fp32."""
    scales = {part.scale for part in parts}
    common = scales.pop() if len(scales) == 1 else None
    blocks = [part.up if common is not None else part.up.float() * part.scale for part in parts]
    down = torch.cat([part.down for part in parts])
    kinds = [down.dtype, *(block.dtype for block in blocks)]
    # No float8 kind promotes to another.
    dtype = reduce(torch.promote_types, [kind if kind.itemsize > 1 else torch.float32 for kind in kinds])
    up = torch.zeros(stop - start, down.shape[0], dtype=dtype)
    column = 0
    for part, block in zip(parts, blocks, strict=True):
        rank = block.shape[1]
        up[part.start - start : part.stop - start, column : column + rank] = block.to(dtype)
        column += rank
    return LowRank(parts[0].key, start, stop, 1.0 if common is None else common, down, up)


def _in_words(part: Part) -> str:
    return f"DoRA ({part.axis}) of {part.inner.kind}" if isinstance(part, Dora) else part.kind
