"""The FP4 GEMM and the linears on packed weights. The definition of the numbers.

`fp4_gemm`, `linear_w4a4` and `linear_int8` are defined bit for bit. In `linear_w4a16` and `linear_w4a8` the
order of the fp32 sum over K is free; everything before and after it is fixed. Linears take UNROTATED x,
[..., K], and rotate it by the weight's own group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import row_chunks
from hswq_lab.formats.e4m3 import E4M3_MAX, encode_e4m3
from hswq_lab.formats.int8 import quantize_int8
from hswq_lab.formats.nvfp4 import decode_blocks, quantize_nvfp4
from hswq_lab.formats.rotation import rotate, rotate_fp32
from hswq_lab.formats.rounding import least_exponent, round_once

if TYPE_CHECKING:
    from torch import Tensor

# Chunks of operands so much larger than usual: a step of the loop over blocks pays for large tiles only.
_FACTOR = 8


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
    """``Y = alpha * sum (x_code * x_scale) * (w_code * w_scale) + bias``.

    Bit for bit: per block of 16 along K, ``D = sum (2 * v_x) * (2 * v_w)`` is an integer, at most 2304 in
    magnitude. In fp64, blocks in order of K, ``acc += D * (0.25 * c_x * c_w)``, a product that is exact.
    Then ``acc * alpha``, then ``+ bias``, in fp64, then one rounding to ``dtype``.

    Args:
        x_codes: of x [M, K], uint8 [ceil16(M), K16/2].
        x_scales: of x, float8_e4m3fn swizzled.
        w_codes: of w [N, K], uint8 [ceil16(N), K16/2].
        w_scales: of w, float8_e4m3fn swizzled.
        alpha: fp32 scalar, s_x * s_w.
        shape: the logical (M, N).
        bias: [N], any float dtype, or None.
        dtype: of the result: fp32, bf16 or fp16.

    Returns:
        [M, N].

    Raises:
        HswqError: the two K differ, or tensors do not have the shapes that belong to M, N and K.
    """
    m, n = shape
    k = 2 * x_codes.shape[1]
    if k != 2 * w_codes.shape[1]:
        raise HswqError("K of x and of w differ", found=f"{k} and {2 * w_codes.shape[1]} columns of codes")
    y = torch.empty((m, n), dtype=dtype, device=x_codes.device)
    for x_rows, x_values, x_c in decode_blocks(x_codes, x_scales, (m, k), _FACTOR):
        for w_rows, w_values, w_c in decode_blocks(w_codes, w_scales, (n, k), _FACTOR):
            acc = _block_sums(x_values, x_c, w_values, w_c) * alpha.double()
            if bias is not None:
                acc += bias[w_rows].double()
            y[x_rows, w_rows] = round_once(acc, dtype)
    return y


def _block_sums(x_values: Tensor, x_c: Tensor, w_values: Tensor, w_c: Tensor) -> Tensor:
    """The fp64 sums over blocks of `fp4_gemm`, [m, n], of operands as `decode_blocks` yields them."""
    acc = torch.zeros((x_values.shape[0], w_values.shape[0]), dtype=torch.float64, device=x_values.device)
    for block in range(x_values.shape[1]):
        # Integers up to 2304: fp32 adds them exactly, in any order.
        dots = (2 * x_values[:, block]) @ (2 * w_values[:, block]).T
        acc += dots.double() * (0.25 * x_c[:, block].double() * w_c[:, block].double().T)
    return acc


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
    """NVFP4 activations: x rotated in fp32 and quantised with the static input_scale, then `fp4_gemm`.

    alpha = input_scale * w_scale, in fp32.

    Args:
        x: [..., K], fp32, bf16 or fp16, which is also the result's dtype.
        w_codes: of the weight [n, K], uint8 [ceil16(n), ceil16(K)/2].
        w_scales: its block scales, float8_e4m3fn swizzled.
        w_scale: its tensor scale, fp32 scalar.
        input_scale: the activations' tensor scale, fp32 scalar.
        group: the weight's rotation group, or None.
        n: the weight's logical rows.
        bias: [n] or None.

    Returns:
        [..., n].

    Raises:
        HswqError: shapes do not agree.
    """
    flat = x.reshape(-1, x.shape[-1])
    x_codes, x_scales = quantize_nvfp4(rotate_fp32(flat, group), input_scale)
    alpha = input_scale.float() * w_scale.float()
    y = fp4_gemm(x_codes, x_scales, w_codes, w_scales, alpha, (flat.shape[0], n), bias, x.dtype)
    return y.reshape(*x.shape[:-1], n)


def linear_w4a16(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None = None,
) -> Tensor:
    """16-bit activations: x rotated in fp32 and rounded once to its dtype, times block-scaled weights.

    These, ``value * block scale``, are exact in 16 bits. Summed in fp32; the sum times w_scale, plus bias, in
    fp32; one rounding to x's dtype. Arguments, result and errors as of `linear_w4a4`.
    """
    rotated = rotate(x, group).float()
    acc = torch.empty((*x.shape[:-1], n), dtype=torch.float32, device=x.device)
    for rows, values, c in decode_blocks(w_codes, w_scales, (n, x.shape[-1])):
        acc[..., rows] = rotated @ (values * c).flatten(1)[:, : x.shape[-1]].T
    return _scaled(acc, w_scale.float(), bias, x.dtype)


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
    """FP8 activations: ``E4M3(rotate_fp32(x) / s8)``, ``s8 = 6 * input_scale``, times `fp8_weight`.

    (s8 is amax / 448.) Summed in fp32; the sum times ``(s8 * w_scale) * row scale``, plus bias, in fp32; one
    rounding to x's dtype. Zeros stay zeros even where input_scale is 0. Arguments, result and errors as of
    `linear_w4a4`.
    """
    w8, row_scale = fp8_weight(w_codes, w_scales, (n, x.shape[-1]))
    return linear_fp8(x, w8, row_scale, w_scale, input_scale, group, bias)


def linear_fp8(
    x: Tensor,
    w8: Tensor,
    row_scale: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    bias: Tensor | None = None,
) -> Tensor:
    """`linear_w4a8` of a weight that `fp8_weight` has converted: w8 [n, K] (E4M3 or bytes), row_scale fp32 [n, 1]."""
    s8 = 6.0 * input_scale.float()
    rotated = rotate_fp32(x, group)
    x8 = encode_e4m3(torch.where(rotated == 0, rotated, rotated / s8)).float()
    return _scaled(
        x8 @ w8.view(torch.float8_e4m3fn).float().T,
        (s8 * w_scale.float()) * row_scale.flatten(),
        bias,
        x.dtype,
    )


def fp8_weight(w_codes: Tensor, w_scales: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """An NVFP4 weight in E4M3 with a power of two a row, its tensor scale left out.

    The row scale p is the least power of two with ``max|value * c| / p <= 448`` (1 for a row of zeros); the
    codes are ``E4M3(value * c / p)``. With a power of two, the values .5, 1, 2 and 4 times a block scale
    stay exact.

    Args:
        w_codes: uint8 [ceil16(N), ceil16(K)/2].
        w_scales: float8_e4m3fn swizzled.
        shape: the logical (N, K).

    Returns:
        float8_e4m3fn [N, K]; fp32 [N, 1].

    Raises:
        HswqError: the tensors do not have the shapes that belong to (N, K).
    """
    w8 = torch.empty(shape, dtype=torch.float8_e4m3fn, device=w_codes.device)
    row_scale = torch.empty((shape[0], 1), dtype=torch.float32, device=w_codes.device)
    for rows, values, c in decode_blocks(w_codes, w_scales, shape):
        weight = (values * c).flatten(1)[:, : shape[1]]
        amax = weight.abs().amax(dim=1, keepdim=True)
        exponent = torch.where(amax == 0, 0, least_exponent(amax, E4M3_MAX))
        row_scale[rows] = torch.ldexp(torch.ones_like(amax), exponent)
        w8[rows] = encode_e4m3(weight / row_scale[rows])
    return w8, row_scale


def linear_int8(x: Tensor, q: Tensor, s: Tensor, group: int | None, bias: Tensor | None = None) -> Tensor:
    """W8A8: x rotated and quantised row by row as `quantize_int8` does, sums in int32.

    Bit for bit: ``fp32(sum) * (s_x * s)``, then ``+ bias``, each one fp32 operation, nothing fused; one
    rounding to x's dtype.

    Args:
        x: [..., K], fp32, bf16 or fp16, which is also the result's dtype.
        q: int8 [N, K].
        s: fp32 [N, 1] or scalar.
        group: the weight's rotation group, or None.
        bias: [N] or None.

    Returns:
        [..., N].

    Raises:
        HswqError: K of x and of q differ, or the group does not divide it.
    """
    if x.shape[-1] != q.shape[1]:
        raise HswqError("K of x and of w differ", found=f"{x.shape[-1]} and {q.shape[1]}")
    flat = x.reshape(-1, x.shape[-1])
    xq, xs = quantize_int8(flat, group)
    sums = torch.empty((flat.shape[0], q.shape[0]), dtype=torch.float32, device=x.device)
    for rows in row_chunks(*q.shape):
        # Sums below 2^31 are exact in fp64 in any order; the one rounding is the conversion to fp32.
        sums[:, rows] = (xq.double() @ q[rows].double().T).float()
    y = _scaled(sums, xs * s.float().reshape(1, -1), bias, x.dtype)
    return y.reshape(*x.shape[:-1], q.shape[0])


def _scaled(acc: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is not None and bias.shape != acc.shape[-1:]:
        raise HswqError(
            "bias is one number a row of the weight", found=list(bias.shape), expected=[acc.shape[-1]]
        )
    y = acc * scale
    return (y if bias is None else y + bias.float()).to(dtype)
