"""Rows that no delta touches keep their bits when a weight is requantised."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hswq_lab.formats import Fp8Weight, Int8Weight, Mxfp8Weight, Nvfp4Weight, PackedWeight, swizzle, unswizzle

if TYPE_CHECKING:
    from typing import TypeAlias

    Weight: TypeAlias = Tensor | PackedWeight
    _Blocked: TypeAlias = Nvfp4Weight | Mxfp8Weight


def keep_rows(before: Weight, after: Weight, untouched: Tensor) -> Weight:
    """`after` with the untouched rows of `before`, bit for bit, unless rows share a scale that changed.

    Args:
        before: the pristine weight.
        after: the same kind, requantised with the scales of `before`.
        untouched: bool [N].
    """
    kept = after
    match before, after:
        case Tensor(), Tensor():
            kept = _rows(untouched, before, after)
        case Nvfp4Weight(), Nvfp4Weight() if torch.equal(before.scale, after.scale):
            codes = _rows(untouched, before.codes, after.codes)
            kept = replace(after, codes=codes, scales=_swizzled_rows(untouched, before, after, block=16))
        case Mxfp8Weight(), Mxfp8Weight():
            data = _rows(untouched, before.data, after.data)
            kept = replace(after, data=data, scales=_swizzled_rows(untouched, before, after, block=32))
        case Int8Weight(), Int8Weight() if before.scale.dim() == 2:
            q, scale = _rows(untouched, before.q, after.q), _rows(untouched, before.scale, after.scale)
            kept = replace(after, q=q, scale=scale)
        case Int8Weight(), Int8Weight() if torch.equal(before.scale, after.scale):
            kept = replace(after, q=_rows(untouched, before.q, after.q))
        case Fp8Weight(), Fp8Weight() if torch.equal(before.scale, after.scale):
            kept = replace(after, data=_rows(untouched, before.data, after.data))
    return kept


def _rows(untouched: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Rows of one or the other; padding rows, which are zeros in both, are taken from `before`."""
    keep = functional.pad(untouched, (0, before.shape[0] - untouched.shape[0]), value=True)[:, None]
    if before.dtype.itemsize > 1:
        return torch.where(keep, before, after)
    return torch.where(keep, before.view(torch.uint8), after.view(torch.uint8)).view(before.dtype)


def _swizzled_rows(untouched: Tensor, before: _Blocked, after: _Blocked, block: int) -> Tensor:
    rows, columns = (-(-n // block) for n in before.shape)
    old, new = (
        unswizzle(weight.scales.view(torch.uint8), rows * block, columns) for weight in (before, after)
    )
    return swizzle(_rows(untouched, old, new)).view(before.scales.dtype)
