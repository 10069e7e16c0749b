"""FP8 with one fp32 scale a tensor: E4M3 ("fn", largest 448) and E5M2 (largest 57344). The definition of the numbers.

All in fp32: ``s = max(amax / largest, 2^-126)`` unless given; ``y = clamp(x / s, -largest, largest)``; the code nearest to y, ties to even, subnormals
included. With a seed the magnitude goes to one of its two neighbours, the upper one where Philox's u of the element ``row * K + column`` is less than
the fraction of the way to it; representable values stay. NaN stays NaN, an infinity saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import row_chunks
from hswq_lab.formats.philox import uniform

LEAST_SCALE = 2.0**-126
# Mantissa bits and the exponent of the least normal value.
_LAYOUT = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}


def fp8_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor's own scale, fp32 scalar ``max(amax / largest, 2^-126)``: never 0, whatever the data."""
    _check_dtype(dtype)
    amax = x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    return (amax / torch.finfo(dtype).max).clamp(min=LEAST_SCALE)


def quantize_fp8(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None = None, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantises x [N, K] (any float dtype) to ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Args:
        x: [N, K].
        dtype: the FP8 type.
        scale: fp32 scalar > 0; None takes `fp8_scale`.
        seed: rounds stochastically; None rounds to nearest.

    Returns:
        data [N, K] in ``dtype``; the scale, fp32 scalar.

    Raises:
        HswqError: x is not a matrix or dtype is another one.
    """
    _check_dtype(dtype)
    if x.dim() != 2 or not x.is_floating_point():
        raise HswqError(
            "only matrices of floats are quantised", found=f"{x.dtype} {list(x.shape)}", expected="[N, K]"
        )
    scale = fp8_scale(x, dtype) if scale is None else scale.float()
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    for rows in row_chunks(*x.shape):
        y = x[rows].float() / scale
        data[rows] = encode_fp8(y, dtype, None if seed is None else uniform(seed, rows, x.shape[1], x.device))
    return data, scale


def requantize_fp8(x: Tensor, dtype: torch.dtype, scale: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Quantises changed values with the scale they had, stochastically: baking in place.

    The scale is kept unless the largest value would round beyond the format's largest; then it becomes `fp8_scale`.

    Args and returns as `quantize_fp8`.
    """
    _check_dtype(dtype)
    largest = torch.finfo(dtype).max
    half_step = 2.0 ** (torch.frexp(torch.tensor(largest))[1].item() - 2 - _LAYOUT[dtype][0])
    own = fp8_scale(x, dtype)
    fits = own * largest / scale.float() <= largest + half_step
    return quantize_fp8(x, dtype, torch.where(fits, scale.float(), own), seed)


def dequantize_fp8(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``value * s`` in fp32, rounded once to ``dtype``; the shape of ``data``."""
    return (data.float() * scale.float()).to(dtype)


def encode_fp8(y: Tensor, dtype: torch.dtype, u: Tensor | None = None) -> Tensor:
    """FP8 of scaled fp32 values: nearest even, or stochastic by ``u``; saturates at the largest value."""
    largest = torch.finfo(dtype).max
    y = y.clamp(-largest, largest)
    if u is None:
        return y.to(dtype)
    mantissa, least = _LAYOUT[dtype]
    magnitude = y.abs()
    exponent = (torch.frexp(magnitude)[1] - 1).clamp(min=least)
    step = torch.ldexp(torch.ones_like(y), exponent - mantissa)
    steps = magnitude / step
    low = steps.floor()
    return torch.copysign((low + (u < steps - low)) * step, y).to(dtype)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _LAYOUT:
        raise HswqError(
            "not an FP8 weight format", found=dtype, expected="torch.float8_e4m3fn or torch.float8_e5m2"
        )
