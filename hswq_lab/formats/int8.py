"""INT8 with one fp32 scale a row (``int8_tensorwise`` in files): the definition of the numbers.

All in fp32, nothing fused: ``w_rot = rotate_fp32(w, group)``; ``s = max(amax of the row, 1e-6) / 127``; ``v
= w_rot / s``; ``q = clamp(round(v), -127, 127)``, ties to even. With a seed the magnitude is rounded
stochastically instead: ``floor(|v|)``, plus 1 where Philox's u of the element ``row * K + column`` is less
than ``|v| - floor(|v|)``; so integers keep their value.

A row with a NaN or an infinity has that as its scale and dequantises to NaN: q is 0 where v is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.formats._checks import check_matrix
from hswq_lab.formats._rows import row_chunks
from hswq_lab.formats.philox import uniform
from hswq_lab.formats.rotation import rotate_fp32

INT8_MAX = 127.0
LEAST_AMAX = 1e-6


def quantize_int8(w: Tensor, group: int | None, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Rotates by ``group`` and quantises each row by its own scale.

    Args:
        w: [N, K], fp32, bf16 or fp16, unrotated.
        group: rotation group; None does not rotate.
        seed: rounds stochastically; None rounds to nearest.

    Returns:
        q, int8 [N, K]; scale, fp32 [N, 1].

    Raises:
        HswqError: w is not a matrix, or the group does not divide K.
    """
    check_matrix(w)
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty((w.shape[0], 1), dtype=torch.float32, device=w.device)
    for rows in row_chunks(*w.shape):
        rotated = rotate_fp32(w[rows], group)
        scale[rows] = _row_amax(rotated).clamp(min=LEAST_AMAX) / INT8_MAX
        q[rows] = encode_int8(rotated, scale[rows], _random(seed, rows, w))
    return q, scale


def requantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Quantises changed weights with the scales they had, stochastically: baking in place.

    A row keeps its scale s while it fits, that is, while its largest value still rounds to 127 or less
    (``amax / s <= 127.5``); else it takes ``amax / 127``. A scalar scale goes by the largest value of the
    matrix.

    Args:
        w: [N, K], fp32, bf16 or fp16, unrotated.
        scale: fp32 [N, 1] or scalar.
        group: rotation group or None.
        seed: of the stochastic rounding.

    Returns:
        q, int8 [N, K]; the scale, shaped as given.

    Raises:
        HswqError: w is not a matrix, or the group does not divide K.
    """
    check_matrix(w)
    amax = torch.empty((w.shape[0], 1), dtype=torch.float32, device=w.device)
    for rows in row_chunks(*w.shape):
        amax[rows] = _row_amax(rotate_fp32(w[rows], group))
    if scale.dim() == 0:
        amax = amax.amax()
    scale = torch.where(amax / scale > INT8_MAX + 0.5, amax / INT8_MAX, scale.float())
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    for rows in row_chunks(*w.shape):
        q[rows] = encode_int8(rotate_fp32(w[rows], group), _rows_of(scale, rows), _random(seed, rows, w))
    return q, scale


def dequantize_int8(
    q: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The UNROTATED weights: ``q * s`` in fp32, rotated back in fp32, rounded once to ``dtype``.

    Args:
        q: int8 [N, K].
        scale: fp32 [N, 1] or scalar.
        group: the group that q is rotated by; None: q is not rotated.
        dtype: of the result.

    Returns:
        [N, K].
    """
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    for rows in row_chunks(*q.shape):
        out[rows] = rotate_fp32(q[rows].float() * _rows_of(scale, rows), group).to(dtype)
    return out


def encode_int8(x: Tensor, scale: Tensor, u: Tensor | None = None) -> Tensor:
    """int8 codes of fp32 x for a scale that broadcasts against it: nearest, or stochastic by u; saturates."""
    v = x / scale
    if u is None:
        rounded = v.round()
    else:
        low = v.abs().floor()
        rounded = torch.copysign(low + (u < v.abs() - low), v)
    return rounded.clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0).to(torch.int8)


def _row_amax(x: Tensor) -> Tensor:
    return x.abs().amax(dim=1, keepdim=True)


def _rows_of(scale: Tensor, rows: slice) -> Tensor:
    return (scale if scale.dim() == 0 else scale[rows]).float()


def _random(seed: int | None, rows: slice, w: Tensor) -> Tensor | None:
    return None if seed is None else uniform(seed, rows, w.shape[1], w.device)
