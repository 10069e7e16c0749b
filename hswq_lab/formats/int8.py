"""INT8 with one fp32 scale a row (format ``int8_tensorwise``), rotated or not. The definition of the numbers.

All in fp32: ``w_rot = rotate_fp32(w, group)``; ``s = max(amax of the row, 1e-6) / 127``; ``v = w_rot / s``; ``q = clamp(round(v), -127, 127)`` with ties to
even. With a seed the magnitude is rounded stochastically: ``floor(|v|)`` plus 1 where Philox's u of the element ``row * K + column`` is less than
``|v| - floor(|v|)``; integers keep their value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import row_chunks
from hswq_lab.formats.philox import uniform
from hswq_lab.formats.rotation import rotate_fp32

INT8_MAX = 127.0
LEAST_AMAX = 1e-6


def quantize_int8(w: Tensor, group: int | None, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Rotates by ``group`` (None: not) and quantises each row by its own scale.

    Args:
        w: [N, K], any float dtype, unrotated.
        group: rotation group or None.
        seed: rounds stochastically; None rounds to nearest.

    Returns:
        q: int8 [N, K]; scale: fp32 [N, 1].

    Raises:
        HswqError: w is not a matrix, or the group does not divide K.
    """
    _check_matrix(w)
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty((w.shape[0], 1), dtype=torch.float32, device=w.device)
    for rows in row_chunks(*w.shape):
        rotated = rotate_fp32(w[rows], group)
        scale[rows] = _own_scale(rotated)
        q[rows] = encode_int8(
            rotated, scale[rows], None if seed is None else uniform(seed, rows, w.shape[1], w.device)
        )
    return q, scale


def requantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Quantises changed weights with the scales they had, stochastically: baking in place.

    A row keeps its scale unless its largest value would round beyond 127 (``amax / s > 127.5``); then it gets ``amax / 127``. A scalar scale
    goes by the largest value of the whole matrix.

    Args:
        w: [N, K], any float dtype, unrotated.
        scale: fp32 [N, 1] or scalar, kept where it can be.
        group: rotation group or None.
        seed: of the stochastic rounding.

    Returns:
        q: int8 [N, K]; the scale, shaped as given.
    """
    _check_matrix(w)
    rotated = rotate_fp32(w, group)
    amax = _row_amax(rotated)
    if scale.numel() == 1:
        amax = amax.amax().reshape(scale.shape) if amax.numel() else torch.zeros_like(scale)
    scale = torch.where(amax / scale > INT8_MAX + 0.5, amax / INT8_MAX, scale.float())
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    for rows in row_chunks(*w.shape):
        s = scale if scale.numel() == 1 else scale[rows]
        q[rows] = encode_int8(rotated[rows], s, uniform(seed, rows, w.shape[1], w.device))
    return q, scale


def dequantize_int8(
    q: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The UNROTATED values [N, K]: ``q * s`` in fp32, rotated back by ``group``, rounded once to ``dtype``."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    for rows in row_chunks(*q.shape):
        s = scale if scale.numel() == 1 else scale[rows]
        out[rows] = rotate_fp32(q[rows].float() * s.float(), group).to(dtype)
    return out


def encode_int8(x: Tensor, scale: Tensor, u: Tensor | None = None) -> Tensor:
    """int8 codes of fp32 x for a scale that broadcasts against it: nearest even, or stochastic by ``u``; saturates at +-127."""
    v = x / scale
    if u is None:
        rounded = v.round()
    else:
        low = v.abs().floor()
        rounded = torch.copysign(low + (u < v.abs() - low), v)
    return rounded.clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def _own_scale(rotated: Tensor) -> Tensor:
    return _row_amax(rotated).clamp(min=LEAST_AMAX) / INT8_MAX


def _row_amax(x: Tensor) -> Tensor:
    return x.abs().amax(dim=1, keepdim=True)


def _check_matrix(w: Tensor) -> None:
    if w.dim() != 2 or w.shape[1] == 0 or not w.is_floating_point():
        raise HswqError(
            "only matrices of floats are quantised",
            found=f"{str(w.dtype).removeprefix('torch.')} {list(w.shape)}",
            expected="[N, K] with K > 0",
        )
