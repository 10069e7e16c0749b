"""FP8 with one fp32 scale a tensor, E4M3 ("fn") and E5M2: the definition of the numbers.

All in fp32, nothing fused: ``s = max(amax / largest, 2^-126)`` unless given; ``y = clamp(x / s, -largest,
largest)``; the code nearest to y, ties to even, subnormals kept. With a seed the magnitude goes to one of
its two neighbours instead, the upper one where Philox's u of the element ``row * K + column`` is less than
the fraction of the way to it; representable values stay. NaN stays NaN, an infinity saturates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import check_matrix, dtype_name
from hswq_lab.formats._rows import row_chunks
from hswq_lab.formats.nvfp4 import amax
from hswq_lab.formats.philox import uniform

LEAST_SCALE = 2.0**-126


class _Layout(NamedTuple):
    mantissa_bits: int
    least_exponent: int  # of a normal number
    largest: float
    half_step_above: float  # up to here the nearest value is the largest one


_LAYOUTS = {
    torch.float8_e4m3fn: _Layout(3, -6, 448.0, 464.0),
    torch.float8_e5m2: _Layout(2, -14, 57344.0, 61440.0),
}


def fp8_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor's own scale, fp32 scalar ``max(amax / largest, 2^-126)``: never 0, whatever the data.

    Raises:
        HswqError: dtype is not an FP8 weight format.
    """
    return (amax(x) / _layout(dtype).largest).clamp(min=LEAST_SCALE)


def quantize_fp8(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None = None, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantises by the rules of this module.

    Args:
        x: [N, K], fp32, bf16 or fp16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale: fp32 scalar > 0; None takes `fp8_scale`.
        seed: rounds stochastically; None rounds to nearest.

    Returns:
        The data, [N, K] in ``dtype``; the scale, fp32 scalar.

    Raises:
        HswqError: x is not a matrix, or dtype is not an FP8 weight format.
    """
    check_matrix(x)
    scale = fp8_scale(x, dtype) if scale is None else scale.float()
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    for rows in row_chunks(*x.shape):
        u = None if seed is None else uniform(seed, rows, x.shape[1], x.device)
        data[rows] = encode_fp8(x[rows].float() / scale, dtype, u)
    return data, scale


def requantize_fp8(x: Tensor, dtype: torch.dtype, scale: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Quantises changed values with the scale they had, stochastically: baking in place.

    The scale is kept while the largest value still rounds to the format's largest or less; else it becomes
    `fp8_scale`. Arguments and results as of `quantize_fp8`.
    """
    fits = amax(x) / scale.float() <= _layout(dtype).half_step_above
    return quantize_fp8(x, dtype, torch.where(fits, scale.float(), fp8_scale(x, dtype)), seed)


def dequantize_fp8(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``value * s`` in fp32, rounded once to ``dtype``; the shape of ``data``."""
    return (data.float() * scale.float()).to(dtype)


def encode_fp8(y: Tensor, dtype: torch.dtype, u: Tensor | None = None) -> Tensor:
    """FP8 of scaled fp32 values: nearest, or stochastic by u (fp32 in [0, 1), broadcast); saturates."""
    mantissa_bits, least_exponent, largest, _ = _layout(dtype)
    y = y.clamp(-largest, largest)
    if u is None:
        return y.to(dtype)
    magnitude = y.abs()
    exponent = (torch.frexp(magnitude)[1] - 1).clamp(min=least_exponent)
    step = torch.ldexp(torch.ones_like(y), exponent - mantissa_bits)
    steps = magnitude / step
    low = steps.floor()
    return torch.copysign((low + (u < steps - low)) * step, y).to(dtype)


def _layout(dtype: torch.dtype) -> _Layout:
    if dtype not in _LAYOUTS:
        known = " or ".join(dtype_name(d) for d in _LAYOUTS)
        raise HswqError("not an FP8 weight format", found=dtype_name(dtype), expected=known)
    return _LAYOUTS[dtype]
