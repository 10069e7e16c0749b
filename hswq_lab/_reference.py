"""The ops of `hswq_lab._library` in plain torch, on any device: formats/ under the ops' own signatures."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hswq_lab import formats
from hswq_lab.formats.block_scales import Method

Pair = tuple[Tensor, Tensor]

amax = formats.amax
fp4_gemm = formats.fp4_gemm
linear_w4a4 = formats.linear_w4a4
linear_w4a8 = formats.linear_w4a8
linear_w4a16 = formats.linear_w4a16
linear_int8 = formats.linear_int8
quantize_int8 = formats.quantize_int8
requantize_int8 = formats.requantize_int8
dequantize_int8 = formats.dequantize_int8
swizzle = formats.swizzle
unswizzle = formats.unswizzle


def fp8_weight(w_codes: Tensor, w_scales: Tensor, n: int, k: int) -> Pair:
    w8, row_scale = formats.fp8_weight(w_codes, w_scales, (n, k))
    padded = torch.nn.functional.pad(w8.view(torch.uint8), (0, -k % 16, 0, -n % 16)).view(w8.dtype)
    return padded, torch.nn.functional.pad(row_scale, (0, 0, 0, -n % 16), value=1.0)


def linear_fp8(
    x: Tensor,
    w8: Tensor,
    row_scale: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    weight = w8[:n, : x.shape[-1]]
    return formats.linear_fp8(x, weight, row_scale[:n], w_scale, input_scale, group, bias)


def rotate(x: Tensor, group: int | None) -> Tensor:
    return x.clone() if group is None else formats.rotate(x, group)


def quantize_nvfp4(
    x: Tensor,
    tensor_scale: Tensor,
    group: int | None,
    method: str,
    importance: Tensor | None,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rotated = formats.rotate_fp32(x, group)
    codes, scales = formats.quantize_nvfp4(rotated, tensor_scale, cast(Method, method), importance, seed)
    return codes, scales, _clipped(rotated, tensor_scale)


def requantize_nvfp4(x: Tensor, tensor_scale: Tensor, scales: Tensor, group: int | None, seed: int) -> Pair:
    return formats.requantize_nvfp4(formats.rotate_fp32(x, group), tensor_scale, scales, seed)


def dequantize_nvfp4(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    group: int | None,
) -> Tensor:
    rows, cols = shape
    if group is None:
        return formats.dequantize_nvfp4(codes, scales, tensor_scale, (rows, cols), dtype)
    values = formats.dequantize_nvfp4(codes, scales, tensor_scale, (rows, cols), torch.float32)
    return formats.rotate_fp32(values, group).to(dtype)


def _clipped(rotated: Tensor, tensor_scale: Tensor) -> Tensor:
    """How many blocks of 16 have ``amax / 6 / s > 448``, int64 scalar."""
    padded = torch.nn.functional.pad(rotated, (0, -rotated.shape[1] % 16))
    b = padded.reshape(rotated.shape[0], padded.shape[1] // 16, 16).abs().amax(dim=2) / 6.0
    return ((b / tensor_scale.float() > 448.0) & (b != 0)).sum()
