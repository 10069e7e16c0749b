"""Reference linears and the FP4 GEMM. The definition of the numbers; what is tested bit for bit and what is not stands with each.

x is [..., K], unrotated: the linears rotate inside, by the weight's own group. Weights and scales are as on disk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats.e4m3 import E4M3_MAX, encode_e4m3
from hswq_lab.formats.int8 import quantize_int8
from hswq_lab.formats.nvfp4 import decode_blocks, quantize_nvfp4
from hswq_lab.formats.rotation import rotate, rotate_fp32
from hswq_lab.formats.rounding import round_once


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
    """``Y = alpha * sum (x_code * x_scale)(w_code * w_scale) + bias``, exact on a CPU, bit for bit.

    Per block of 16 along K, ``D = sum (2 v_x)(2 v_w)`` is an integer, at most 2304 in magnitude. In fp64, blocks in order of K:
    ``acc += D * (c_x * c_w * 0.25)`` (that product is exact). Then ``acc * alpha``, ``+ bias``, both fp64, and one rounding to ``dtype``.

    Args:
        x_codes, x_scales: NVFP4 of x [M, K]: uint8 [ceil16(M), K16/2], float8_e4m3fn swizzled.
        w_codes, w_scales: NVFP4 of w [N, K], likewise.
        alpha: fp32 scalar s_x * s_w.
        shape: the logical (M, N).
        bias: [N], any float dtype, or None.
        dtype: of the result: fp32, bf16 or fp16.

    Returns:
        [M, N].

    Raises:
        HswqError: K or the shapes do not agree.
    """
    m, n = shape
    if x_codes.shape[1] != w_codes.shape[1]:
        raise HswqError(
            "K of x and of w differ", found=f"{2 * x_codes.shape[1]} and {2 * w_codes.shape[1]} columns"
        )
    k = 2 * x_codes.shape[1]
    xv, xc = _all_blocks(x_codes, x_scales, (m, k))
    wv, wc = _all_blocks(w_codes, w_scales, (n, k))
    acc = torch.zeros((m, n), dtype=torch.float64, device=x_codes.device)
    for block in range(k // 16):
        # Integers up to 2304: an fp32 matmul adds them exactly in any order.
        dots = (2 * xv[:, block]) @ (2 * wv[:, block]).T
        acc += dots.double() * (xc[:, block].double() * 0.25 * wc[:, block].double().T)
    y = acc * alpha.double()
    return round_once(y if bias is None else y + bias.double(), dtype)


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
    """x rotated in fp32, quantised to NVFP4 with the static ``input_scale``, then `fp4_gemm` with ``alpha = input_scale * w_scale`` in fp32.

    Args:
        x: [..., K]; fp32, bf16 or fp16, which is also the result's dtype.
        w_codes, w_scales, w_scale: the stored weight [n, K].
        input_scale: fp32 scalar.
        group: the weight's rotation group or None.
        n: the weight's logical rows.
        bias: [n] or None.

    Returns:
        [..., n].
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
    """16-bit activations: x rotated in fp32 and rounded once to its dtype, times ``value * block scale`` (exact in 16 bits), accumulated in
    fp32, times ``w_scale`` in fp32, plus bias, one rounding to x's dtype. The order of the fp32 sum is free, so kernels agree up to it.

    Arguments as `linear_w4a4`. Returns [..., n].
    """
    values, c = _all_blocks(w_codes, w_scales, (n, x.shape[-1]))
    weight = (values * c).flatten(1)[:, : x.shape[-1]]
    return _finish(rotate(x, group).float() @ weight.T, w_scale.float(), bias, x.dtype)


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
    """FP8 activations: ``E4M3(rotate_fp32(x) / s8)`` with ``s8 = 6 * input_scale`` (= amax / 448), times `fp8_weight`, accumulated in fp32, times
    ``(s8 * w_scale) * row scale`` in fp32, plus bias, one rounding to x's dtype. The order of the fp32 sum is free.

    Arguments as `linear_w4a4`. Returns [..., n].
    """
    s8 = 6.0 * input_scale.float()
    rotated = rotate_fp32(x, group)
    # A scale of 0 makes 0/0 of zeros: they stay 0.
    x8 = encode_e4m3(torch.where(rotated == 0, rotated, rotated / s8)).float()
    w8, row_scale = fp8_weight(w_codes, w_scales, (n, x.shape[-1]))
    return _finish(x8 @ w8.float().T, (s8 * w_scale.float()) * row_scale.T, bias, x.dtype)


def fp8_weight(w_codes: Tensor, w_scales: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """E4M3 weights from NVFP4, the tensor scale left out: ``value * block scale`` divided by a power of two a row, to nearest even.

    The row scale is the smallest power of two that brings the row's largest magnitude to 448 or less (1 for a row of zeros): with a
    power of two the values 0.5, 1, 2 and 4 times a block scale stay exact.

    Returns:
        float8_e4m3fn [N, K]; fp32 [N, 1].
    """
    values, c = _all_blocks(w_codes, w_scales, shape)
    weight = (values * c).flatten(1)[:, : shape[1]]
    mantissa, exponent = torch.frexp(weight.abs().amax(dim=1, keepdim=True) / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    row_scale = torch.ldexp(torch.ones_like(mantissa), exponent)
    return encode_e4m3(weight / row_scale), row_scale


def linear_int8(x: Tensor, q: Tensor, s: Tensor, group: int | None, bias: Tensor | None = None) -> Tensor:
    """W8A8: x rotated and quantised row by row as `quantize_int8` does, int32 sums, times ``x row scale * s`` in fp32, plus bias in fp32, one
    rounding to x's dtype. Bit for bit: ``fp32(sum) * (s_x * s_w)``, then ``+ bias``, each one fp32 operation, not fused.

    Args:
        x: [..., K]; fp32, bf16 or fp16, which is also the result's dtype.
        q: int8 [N, K]; s: fp32 [N, 1] or scalar.
        group: the weight's rotation group or None.
        bias: [N] or None.

    Returns:
        [..., N].
    """
    flat = x.reshape(-1, x.shape[-1])
    xq, xs = quantize_int8(flat, group)
    # Sums of up to 2^31: exact in fp64, whatever the order.
    total = (xq.double() @ q.double().T).float()
    y = _finish(total, xs * s.float().reshape(1, -1), bias, x.dtype)
    return y.reshape(*x.shape[:-1], q.shape[0])


def _finish(acc: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = acc * scale
    return (y if bias is None else y + bias.float()).to(dtype)


def _all_blocks(codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """E2M1 values fp32 [R, K16/16, 16] and block scales fp32 [R, K16/16, 1]."""
    chunks = list(decode_blocks(codes, scales, shape))
    if not chunks:
        blocks = codes.shape[1] // 8
        return codes.new_zeros((0, blocks, 16), dtype=torch.float32), codes.new_zeros(
            (0, blocks, 1), dtype=torch.float32
        )
    return torch.cat([c[1] for c in chunks]), torch.cat([c[2] for c in chunks])
