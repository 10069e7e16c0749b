"""Baking and its evidence in the extension: packed weights and factors in, addresses to the kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hswq_lab import _C
from hswq_lab._op_arguments import DTYPES
from hswq_lab.formats import Int8Weight, Nvfp4Weight, PackedWeight

_SUMS = 12
Tensors = list[Tensor]


def bake(
    packed: Nvfp4Weight | Int8Weight, left: Tensor, down: Tensor | None, seed: int
) -> tuple[PackedWeight, float]:
    """The changed weight with the scales of `packed` where they suffice, and the largest magnitude that was rounded.

    Args:
        packed: NVFP4, or INT8 with a scale a row.
        left: fp32 [N, R], or the delta itself [N, K].
        down: fp32 [R, K], or None.
        seed: of the rounding.
    """
    keep: Tensors = []
    codes, scales = (
        (packed.q, packed.scale) if isinstance(packed, Int8Weight) else (packed.codes, packed.scales)
    )
    new_codes = torch.empty(codes.shape, dtype=codes.dtype)
    new_scales = torch.empty(scales.shape, dtype=scales.dtype)
    amax = torch.empty((), dtype=torch.float32)
    _C.bake(
        torch.get_num_threads(),
        _weight(packed, keep),
        _delta(left, down, keep),
        seed % 2**64,
        new_codes.data_ptr(),
        new_scales.data_ptr(),
        amax.data_ptr(),
    )
    changed: PackedWeight = (
        replace(packed, q=new_codes, scale=new_scales)
        if isinstance(packed, Int8Weight)
        else replace(packed, codes=new_codes, scales=new_scales)
    )
    return changed, float(amax)


def change_sums(
    before: Tensor | PackedWeight,
    after: Tensor | PackedWeight,
    left: Tensor,
    down: Tensor | None,
    source: Tensor | None,
) -> list[float]:
    """The sums of `hswq_lab.lora.change.Sums`, in its order.

    Args:
        before: NVFP4, INT8, or a matrix of floats [N, K].
        after: likewise.
        left: as for `bake`.
        down: as for `bake`.
        source: [N, K], floats, or None.
    """
    keep: Tensors = []
    totals = torch.empty(_SUMS, dtype=torch.float64)
    _C.change_sums(
        torch.get_num_threads(),
        _weight(before, keep),
        _weight(after, keep),
        _delta(left, down, keep),
        (0, 0, 0, 0, 0) if source is None else _matrix(source, keep),
        totals.data_ptr(),
    )
    return totals.tolist()


def _delta(left: Tensor, down: Tensor | None, keep: Tensors) -> tuple[int, int, int]:
    return _address(left, keep), 0 if down is None else _address(down, keep), left.shape[1]


def _weight(
    weight: Tensor | PackedWeight, keep: Tensors
) -> tuple[int, tuple[int, int, int, int, int], int, int, int, int, bool]:
    """What the extension wants to know; tensors that have to live until it is done go into `keep`."""
    if isinstance(weight, Tensor):
        return 0, _matrix(weight, keep), 0, 0, 0, 0, False
    n, k = weight.shape
    sizes, group = (0, n, k, k, 0), weight.group or 0
    if isinstance(weight, Int8Weight):
        q, scale = _address(weight.q, keep), _address(weight.scale, keep)
        return 2, sizes, group, q, 0, scale, weight.scale.dim() == 0
    assert isinstance(weight, Nvfp4Weight)  # noqa: S101 - the callers take no other kind
    codes, scales = _address(weight.codes, keep), _address(weight.scales, keep)
    return 1, sizes, group, codes, scales, _address(weight.scale, keep), False


def _matrix(x: Tensor, keep: Tensors) -> tuple[int, int, int, int, int]:
    rows, cols = x.shape
    return _address(x, keep), rows, cols, cols, DTYPES[x.dtype]


def _address(x: Tensor, keep: Tensors) -> int:
    keep.append(x.contiguous())
    return keep[-1].data_ptr()
