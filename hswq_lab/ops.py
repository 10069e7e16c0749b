"""The one door to the kernels: torch custom ops that run natively on a CPU or a card, or as pure torch.

x and w are matrices of any float dtype. Codes and scales are as on disk (see `hswq_lab.formats`), so they can be
compared with files; results have logical shapes, padding is internal. The numbers are defined in `hswq_lab.formats`.

The linears take UNROTATED x [..., K] and rotate it themselves, by the weight's own group (4, 16, 64, 256 or None). Of
NVFP4 weights [n, K] they take w_codes, uint8 [ceil16 n, ceil16 K / 2], w_scales, float8_e4m3fn, swizzled, and w_scale,
the fp32 scalar tensor scale; of activations input_scale, an fp32 scalar; bias is [n] or None. Results are [..., n] in
x's dtype.

Every function raises `hswq_lab.HswqError` where shapes, dtypes or groups do not belong together, before anything is
computed.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hswq_lab import _library
from hswq_lab._backends import (
    Backend,
    BackendName,
    asked_backend,
    backend_for,
    backends,
    describe_backends,
    use_backend,
)
from hswq_lab.formats.block_scales import Method

__all__ = [
    "Backend",
    "BackendName",
    "asked_backend",
    "backend_for",
    "backends",
    "dequantize_int8",
    "dequantize_nvfp4",
    "describe_backends",
    "fp4_gemm",
    "fp4_is_native",
    "fp8_weight",
    "linear_fp8",
    "linear_int8",
    "linear_w4a4",
    "linear_w4a8",
    "linear_w4a16",
    "quantize_int8",
    "quantize_nvfp4",
    "requantize_int8",
    "requantize_nvfp4",
    "rotate",
    "rotate_quantize_nvfp4",
    "rotate_quantize_nvfp4_counted",
    "swizzle",
    "tensor_scale",
    "tensor_scale_four_six",
    "unswizzle",
    "use_backend",
]

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
_ops = _library.OPS
_amax = _ops.amax.default
_rotate = _ops.rotate.default
_quantize_nvfp4 = _ops.quantize_nvfp4.default
_requantize_nvfp4 = _ops.requantize_nvfp4.default
_dequantize_nvfp4 = _ops.dequantize_nvfp4.default
_fp4_gemm = _ops.fp4_gemm.default
_linear_w4a4 = _ops.linear_w4a4.default
_linear_w4a8 = _ops.linear_w4a8.default
_fp8_weight = _ops.fp8_weight.default
_linear_fp8 = _ops.linear_fp8.default
_linear_w4a16 = _ops.linear_w4a16.default
_linear_int8 = _ops.linear_int8.default
_quantize_int8 = _ops.quantize_int8.default
_requantize_int8 = _ops.requantize_int8.default
_dequantize_int8 = _ops.dequantize_int8.default
_swizzle = _ops.swizzle.default
_unswizzle = _ops.unswizzle.default


def tensor_scale(x: Tensor) -> Tensor:
    """The tensor's own scale, fp32 scalar ``max|x| / 2688``; 0 for an all-zero or empty x."""
    return _over(_amax(x), 2688.0)


def tensor_scale_four_six(x: Tensor) -> Tensor:
    """The scale for weights quantised by "four_six", fp32 scalar ``max|x| / 1536``."""
    return _over(_amax(x), 1536.0)


def rotate(x: Tensor, group: int | None) -> Tensor:
    """ConvRot of the last dimension in groups of 4, 16, 64 or 256: fp32 inside, x's dtype out; its own inverse.

    Args:
        x: [..., K], any float dtype.
        group: a divisor of K; None copies x.
    """
    return cast(Tensor, _rotate(x, group))


def quantize_nvfp4(
    x: Tensor,
    tensor_scale: Tensor,
    method: Method = "rtn",
    importance: Tensor | None = None,
    seed: int | None = None,
) -> Pair:
    """NVFP4 codes and block scales of x [M, K], in the basis that x is in.

    Args:
        x: [M, K], any float dtype.
        tensor_scale: fp32 scalar s.
        method: how block scales are chosen: "rtn" (block maximum / 6), "four_six" or "sweep" (least squared error).
        importance: fp32 [K], weight of a column's squared error, for "sweep" and "four_six".
        seed: rounds stochastically (the bytes depend on the seed and on nothing else); None: to nearest.

    Returns:
        codes: uint8 [ceil16 M, ceil16 K / 2], even column in the high nibble; scales: float8_e4m3fn, swizzled,
        [ceil128 M, ceil4(K / 16)].
    """
    codes, scales, _ = _quantize_nvfp4(x, tensor_scale, None, method, importance, _signed(seed))
    return codes, scales


def requantize_nvfp4(
    x: Tensor, tensor_scale: Tensor, scales: Tensor, seed: int, group: int | None = None
) -> Pair:
    """NVFP4 of changed values with the scales they had, stochastically; blocks that no longer fit get a larger one.

    Args:
        x: [M, K], in the stored basis, or unrotated if ``group`` is given.
        tensor_scale: fp32 scalar, kept.
        scales: float8_e4m3fn, swizzled, of the values before the change.
        seed: of the rounding.
        group: rotates x first; None: not.

    Returns:
        codes and scales as `quantize_nvfp4`.
    """
    codes, new_scales = _requantize_nvfp4(x, tensor_scale, scales, group, cast(int, _signed(seed)))
    return codes, new_scales


def rotate_quantize_nvfp4(x: Tensor, tensor_scale: Tensor, group: int | None) -> Pair:
    """``quantize_nvfp4(rotate_fp32(x, group), tensor_scale)`` in one pass, from the unrounded fp32 values."""
    codes, scales, _ = _quantize_nvfp4(x, tensor_scale, group, "rtn", None, None)
    return codes, scales


def rotate_quantize_nvfp4_counted(
    x: Tensor, tensor_scale: Tensor, group: int | None, method: Method = "rtn"
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate_quantize_nvfp4`, and how many blocks the scale clipped (``amax / 6 / s > 448``), int64 scalar.

    `method` is as of `quantize_nvfp4`.
    """
    return cast(Triple, _quantize_nvfp4(x, tensor_scale, group, method, None, None))


def dequantize_nvfp4(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    group: int | None = None,
) -> Tensor:
    """The values of packed codes, in the basis they are stored in, or rotated back if ``group`` is given.

    Args:
        codes: uint8 [ceil16 M, ceil16 K / 2].
        scales: float8_e4m3fn, swizzled.
        tensor_scale: fp32 scalar.
        shape: logical (M, K).
        dtype: of the result, rounded to once.
        group: rotates the fp32 values (the rotation is its own inverse); None: not.
    """
    return cast(Tensor, _dequantize_nvfp4(codes, scales, tensor_scale, shape, dtype, group))


def fp4_gemm(
    x_codes: Tensor,
    x_scales: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    shape: tuple[int, int],
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``alpha · Σ (x code · x scale)(w code · w scale) + bias`` [M, N] of two packed matrices [M, K] and [N, K].

    Args:
        x_codes: uint8 [ceil16 M, K/2].
        x_scales: float8_e4m3fn, swizzled.
        w_codes: uint8 [ceil16 N, K/2].
        w_scales: float8_e4m3fn, swizzled.
        alpha: fp32 scalar s_x · s_w.
        shape: logical (M, N).
        bias: [N] or None.
        dtype: of the result.

    Returns:
        [M, N]. On a CPU exact up to one rounding: integers inside a block, fp64 over blocks.
    """
    return cast(Tensor, _fp4_gemm(x_codes, x_scales, w_codes, w_scales, alpha, shape, bias, dtype))


def linear_w4a4(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None = None,
) -> Tensor:
    """x [..., K] → [..., n]: rotate, quantise with the static ``input_scale``, `fp4_gemm`; the result has x's dtype.

    Args:
        x: [..., K], fp32, bf16 or fp16, unrotated.
        w_codes: uint8 [ceil16 n, ceil16 K / 2].
        w_scales: float8_e4m3fn, swizzled.
        w_scale: fp32 scalar, the weight's tensor scale.
        input_scale: fp32 scalar, the tensor scale of the rotated x: amax / 2688.
        group: the weight's rotation group, None: not rotated.
        n: outputs, without padding.
        bias: [n] or None.
    """
    return cast(Tensor, _linear_w4a4(x, w_codes, w_scales, w_scale, input_scale, group, n, bias))


def linear_w4a16(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None = None,
) -> Tensor:
    """x [..., K] → [..., n]: rotated x in its own dtype times block-scaled weights; fp32 sums, scale and bias."""
    return cast(Tensor, _linear_w4a16(x, w_codes, w_scales, w_scale, group, n, bias))


def linear_w4a8(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None = None,
) -> Tensor:
    """x [..., K] → [..., n]: rotated x as E4M3 (scale ``6 · input_scale`` = amax / 448) times E4M3 weights."""
    return cast(Tensor, _linear_w4a8(x, w_codes, w_scales, w_scale, input_scale, group, n, bias))


def fp8_weight(w_codes: Tensor, w_scales: Tensor, shape: tuple[int, int]) -> Pair:
    """The E4M3 form in which `linear_w4a8` multiplies an NVFP4 weight [N, K], for who keeps it.

    Args:
        w_codes: uint8 [ceil16 N, ceil16 K / 2].
        w_scales: float8_e4m3fn, swizzled.
        shape: logical (N, K).

    Returns:
        w8: float8_e4m3fn [ceil16 N, ceil16 K]; row_scale: fp32 [ceil16 N, 1], powers of two.
    """
    w8, row_scale = _fp8_weight(w_codes, w_scales, *shape)
    return w8, row_scale


def linear_fp8(
    x: Tensor,
    w8: Tensor,
    row_scale: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`linear_w4a8` of a kept `fp8_weight`: the same numbers without its conversion, for one more byte a weight.

    w8 and row_scale are those of `fp8_weight`; the rest is as of `linear_w4a4`.
    """
    return cast(Tensor, _linear_fp8(x, w8, row_scale, w_scale, input_scale, group, n, bias))


def quantize_int8(w: Tensor, group: int | None, seed: int | None = None) -> Pair:
    """INT8 of w [N, K] row by row, rotated first if ``group`` is given: q int8 [N, K], scale fp32 [N, 1].

    Args:
        w: [N, K], unrotated.
        group: rotation group or None.
        seed: rounds stochastically; None: to nearest.
    """
    q, scale = _quantize_int8(w, group, _signed(seed))
    return q, scale


def requantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int) -> Pair:
    """INT8 of changed, unrotated weights with the scales they had; rows that no longer fit get a larger one."""
    q, new_scale = _requantize_int8(w, scale, group, cast(int, _signed(seed)))
    return q, new_scale


def dequantize_int8(
    q: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The UNROTATED values [N, K], in ``dtype``, of INT8 weights q [N, K] stored in the basis of ``group``.

    scale is fp32 [N, 1], or a scalar for all rows.
    """
    return cast(Tensor, _dequantize_int8(q, scale, group, dtype))


def linear_int8(x: Tensor, q: Tensor, s: Tensor, group: int | None, bias: Tensor | None = None) -> Tensor:
    """x [..., K] → [..., N]: x rotated and quantised by rows, int8 products, int32 sums, scales and bias in fp32.

    q is int8 [N, K] in the basis of ``group``; s is fp32 [N, 1], or a scalar for all rows.
    """
    return cast(Tensor, _linear_int8(x, q, s, group, bias))


def swizzle(linear: Tensor) -> Tensor:
    """Block scales [r, c] (one byte each) in 128x4 order, [ceil128 r, ceil4 c], padded with zeros."""
    return cast(Tensor, _swizzle(linear))


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Block scales [rows, cols] in plain order; the inverse of `swizzle`."""
    return cast(Tensor, _unswizzle(swizzled, rows, cols))


def fp4_is_native(device: torch.device | str) -> bool:
    """Whether W4A4 runs on FP4 tensor cores on this device; elsewhere other means give the same numbers."""
    return torch.device(device).type == "cuda" and backends()["cuda"].native_fp4


def _over(value: Tensor, number: float) -> Tensor:
    """A true quotient: by a plain number torch multiplies with the reciprocal on a card, which rounds twice."""
    return value / torch.full_like(value, number)


def _signed(seed: int | None) -> int | None:
    """Seeds are taken modulo 2^64; torch's ints are signed."""
    return None if seed is None else (seed + 2**63) % 2**64 - 2**63
