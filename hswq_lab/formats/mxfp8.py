"""MXFP8: E4M3 codes, a power of two (E8M0) for every 32 of them along K: the definition of the numbers.

fp32 throughout: M and K are padded with zeros to multiples of 32; per block of 32 the exponent e is the
least one with ``max|x| / 2^e <= 448``, within -127 .. 127, stored as the byte e + 127 (0 for a block of
zeros, 255 for one with a NaN or an infinity, codes 0); the codes are E4M3(x / 2^e), to nearest, ties to
even, or stochastically as in `fp8`. Scales are in 128x4 order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import check_matrix
from hswq_lab.formats._rows import ceil_to, row_chunks
from hswq_lab.formats.e4m3 import E4M3_MAX
from hswq_lab.formats.fp8 import encode_fp8
from hswq_lab.formats.philox import uniform
from hswq_lab.formats.rounding import least_exponent
from hswq_lab.formats.swizzle import swizzle, unswizzle

if TYPE_CHECKING:
    from collections.abc import Callable

MX_BLOCK = 32
NAN_EXPONENT = 255
_BIAS = 127


def quantize_mxfp8(x: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantises x [M, K] (fp32, bf16 or fp16) by the rules of this module.

    Args:
        x: [M, K].
        seed: rounds stochastically; None rounds to nearest.

    Returns:
        data, float8_e4m3fn [ceil32(M), ceil32(K)]; scales, float8_e8m0fnu swizzled [ceil128(M),
        ceil4(K32/32)].

    Raises:
        HswqError: x is not a matrix.
    """
    return _quantize(x, lambda blocks, _: _exponents(blocks), seed)


def requantize_mxfp8(x: Tensor, scales: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Quantises changed values with the scales they had, stochastically; raises a block that no longer fits.

    Args:
        x: [M, K].
        scales: float8_e8m0fnu, swizzled, as of `quantize_mxfp8` for this shape.
        seed: of the stochastic rounding.

    Returns:
        data and scales as of `quantize_mxfp8`.

    Raises:
        HswqError: x is not a matrix, or the scales have another shape.
    """
    given = unswizzle(scales, ceil_to(x.shape[0], MX_BLOCK), ceil_to(x.shape[1], MX_BLOCK) // MX_BLOCK)
    kept = given.view(torch.uint8)
    return _quantize(x, lambda blocks, rows: torch.maximum(_exponents(blocks), kept[rows]), seed)


def dequantize_mxfp8(
    data: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """``value * 2^e`` in fp32, rounded once to ``dtype``.

    Args:
        data: float8_e4m3fn [ceil32(M), ceil32(K)].
        scales: float8_e8m0fnu, swizzled.
        shape: the logical (M, K).
        dtype: of the result.

    Returns:
        [M, K].

    Raises:
        HswqError: the tensors do not have the shapes that belong to (M, K).
    """
    rows32, cols32 = (ceil_to(n, MX_BLOCK) for n in shape)
    if tuple(data.shape) != (rows32, cols32):
        raise HswqError(
            f"the data do not belong to shape {tuple(shape)}",
            found=list(data.shape),
            expected=[rows32, cols32],
        )
    exponents = unswizzle(scales, rows32, cols32 // MX_BLOCK).view(torch.uint8)
    out = torch.empty(shape, dtype=dtype, device=data.device)
    for rows in row_chunks(shape[0], cols32):
        values = _in_blocks(data[rows].float()) * _power(exponents[rows])
        out[rows] = values.flatten(1)[:, : shape[1]].to(dtype)
    return out


def _quantize(
    x: Tensor, choose: Callable[[Tensor, slice], Tensor], seed: int | None
) -> tuple[Tensor, Tensor]:
    check_matrix(x)
    m, k = x.shape
    rows32, cols32 = ceil_to(m, MX_BLOCK), ceil_to(k, MX_BLOCK)
    data = torch.zeros((rows32, cols32), dtype=torch.uint8, device=x.device)
    exponents = torch.zeros((rows32, cols32 // MX_BLOCK), dtype=torch.uint8, device=x.device)
    for rows in row_chunks(m, cols32):
        blocks = _in_blocks(F.pad(x[rows].float(), (0, cols32 - k)))
        exponents[rows] = choose(blocks, rows)
        u = None
        if seed is not None:
            u = _in_blocks(F.pad(uniform(seed, rows, k, x.device), (0, cols32 - k)))
        codes = encode_fp8(blocks / _power(exponents[rows]), torch.float8_e4m3fn, u).view(torch.uint8)
        data[rows] = (codes * (exponents[rows] != NAN_EXPONENT).unsqueeze(2)).flatten(1)
    return data.view(torch.float8_e4m3fn), swizzle(exponents.view(torch.float8_e8m0fnu))


def _exponents(blocks: Tensor) -> Tensor:
    """Biased exponents, uint8 [r, n], of fp32 blocks [r, n, 32]."""
    amax = blocks.abs().amax(dim=2)
    exponent = (least_exponent(amax, E4M3_MAX) + _BIAS).clamp(0, 2 * _BIAS)
    exponent = torch.where(amax == 0, 0, exponent)
    return torch.where(torch.isfinite(amax), exponent, NAN_EXPONENT).to(torch.uint8)


def _power(exponents: Tensor) -> Tensor:
    """2^(byte - 127) as fp32 [r, n, 1]; NaN for 255."""
    return exponents.view(torch.float8_e8m0fnu).float().unsqueeze(2)


def _in_blocks(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1] // MX_BLOCK, MX_BLOCK)
