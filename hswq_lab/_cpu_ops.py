"""The ops of `hswq_lab._library` on a CPU: checks, allocates, and hands addresses to the extension."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hswq_lab import _C, _reference
from hswq_lab._op_arguments import (
    DTYPES,
    Matrix,
    Pair,
    address,
    bias_of,
    block_scales,
    common_k,
    empty_nvfp4,
    group_size,
    importance_of,
    int8_scale,
    int8_weight,
    layout,
    matrix,
    method_number,
    nvfp4,
    result_dtype,
    rows_of,
    values_of,
)
from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import check_scales, describe
from hswq_lab.formats._rows import ceil_to

_threads = torch.get_num_threads


def amax(x: Tensor) -> Tensor:
    if x.dtype not in DTYPES:
        return _reference.amax(x)
    flat, out = rows_of(x), torch.empty((), dtype=torch.float32)
    _C.amax(_threads(), matrix(flat), out.data_ptr())
    return out


def rotate(x: Tensor, group: int | None) -> Tensor:
    if x.dtype not in DTYPES or group is None:
        return _reference.rotate(x, group)
    k = x.shape[-1] if x.dim() else 0
    size = group_size(group, k)
    flat = rows_of(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    _C.rotate(_threads(), matrix(flat), size, (y.data_ptr(), flat.shape[0], k, k, DTYPES[x.dtype]))
    return y


def quantize_nvfp4(
    x: Tensor,
    tensor_scale: Tensor,
    group: int | None,
    method: str,
    importance: Tensor | None,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x = values_of(x)
    size = group_size(group, x.shape[1])
    h = importance_of(x, importance, method)
    clipped = torch.empty((), dtype=torch.int64)
    codes, scales = _quantize(x, tensor_scale, size, method_number(method), h, seed, None, clipped)
    return codes, scales, clipped


def requantize_nvfp4(x: Tensor, tensor_scale: Tensor, scales: Tensor, group: int | None, seed: int) -> Pair:
    x = values_of(x)
    size = group_size(group, x.shape[1])
    kept = block_scales(x, "scales", scales, *x.shape)
    return _quantize(x, tensor_scale, size, 0, None, seed, kept, None)


def dequantize_nvfp4(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    group: int | None,
) -> Tensor:
    rows, cols = shape
    w, _keep = nvfp4(codes, "codes", codes, scales, rows, cols)
    native = dtype if dtype in DTYPES else torch.float32
    s, y = _scalar(tensor_scale), torch.empty((rows, cols), dtype=native)
    _C.dequantize(_threads(), w, s.data_ptr(), group_size(group, cols), matrix(y))
    return y.to(dtype)


def fp4_gemm(
    x_codes: Tensor,
    x_scales: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    shape: list[int],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    m, n = shape
    k = common_k(2 * x_codes.shape[-1], 2 * w_codes.shape[-1])
    x, _keep_x = nvfp4(x_codes, "x_codes", x_codes, x_scales, m, k)
    w, _keep_w = nvfp4(x_codes, "w_codes", w_codes, w_scales, n, k)
    b, a = bias_of(x_codes, bias, n), _scalar(alpha)
    y = torch.empty((m, n), dtype=result_dtype(dtype))
    _C.fp4_gemm(_threads(), x, w, a.data_ptr(), address(b), matrix(y))
    return y


def _w4_on_one_scale(
    kernel: Callable[..., None],
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    """What W4A4 and W4A8 share: x is rounded on one tensor scale, by the kernel."""
    k = x.shape[-1]
    w, _keep = nvfp4(x, "w_codes", w_codes, w_scales, n, k)
    flat, y, b = rows_of(x), _result(x, n), bias_of(x, bias, n)
    s_x, s_w = _scalar(input_scale), _scalar(w_scale)
    kernel(
        _threads(),
        matrix(flat),
        group_size(group, k),
        s_x.data_ptr(),
        w,
        s_w.data_ptr(),
        address(b),
        _flat(y, flat.shape[0]),
    )
    return y


linear_w4a4 = partial(_w4_on_one_scale, _C.linear_w4a4)


def linear_w4a8(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    product = partial(_w4_on_one_scale, _C.linear_w4a8) if _C.has_w4() else _reference.linear_w4a8
    return product(x, w_codes, w_scales, w_scale, input_scale, group, n, bias)


fp8_weight = _reference.fp8_weight  # kept FP8 weights are for cards: on a CPU they would only be larger
linear_fp8 = _reference.linear_fp8


def linear_w4a16(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    k = x.shape[-1]
    if x.dtype != torch.bfloat16 or not _C.has_w4():
        return _w4a16_through_torch(x, w_codes, w_scales, w_scale, group, n, bias)
    w, _keep = nvfp4(x, "w_codes", w_codes, w_scales, n, k)
    flat, y, b = rows_of(x), _result(x, n), bias_of(x, bias, n)
    s_w = _scalar(w_scale)
    _C.linear_w4a16(
        _threads(), matrix(flat), group_size(group, k), w, s_w.data_ptr(), address(b), _flat(y, flat.shape[0])
    )
    return y


def linear_int8(x: Tensor, q: Tensor, s: Tensor, group: int | None, bias: Tensor | None) -> Tensor:
    weight = int8_weight(x, q)
    n, k = weight.shape[0], common_k(x.shape[-1], weight.shape[1])
    flat, y, b, scale = rows_of(x), _result(x, n), bias_of(x, bias, n), int8_scale(x, s, n)
    _C.linear_int8(
        _threads(),
        matrix(flat),
        group_size(group, k),
        weight.data_ptr(),
        scale.data_ptr(),
        scale.dim() == 0,
        address(b),
        _flat(y, flat.shape[0]),
    )
    return y


def quantize_int8(w: Tensor, group: int | None, seed: int | None) -> Pair:
    w = values_of(w)
    scale = torch.empty((w.shape[0], 1), dtype=torch.float32)
    return _quantize_int8(w, scale, group, seed, keep=False), scale


def requantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int) -> Pair:
    w = values_of(w)
    kept = int8_scale(w, scale, w.shape[0]).clone()
    return _quantize_int8(w, kept, group, seed, keep=True), kept


def dequantize_int8(q: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype) -> Tensor:
    weight, s = int8_weight(q, q), int8_scale(q, scale, q.shape[0])
    y = torch.empty(q.shape, dtype=dtype if dtype in DTYPES else torch.float32)
    _C.dequantize_int8(
        _threads(), weight.data_ptr(), s.data_ptr(), s.dim() == 0, group_size(group, q.shape[1]), matrix(y)
    )
    return y.to(dtype)


def swizzle(linear: Tensor) -> Tensor:
    check_scales(linear)
    source = linear.contiguous()
    rows, cols = linear.shape
    out = torch.empty((ceil_to(rows, 128), ceil_to(cols, 4)), dtype=linear.dtype)
    _C.swizzle(source.data_ptr(), rows, cols, out.data_ptr())
    return out


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    check_scales(swizzled)
    source = layout("swizzled", swizzled, swizzled.dtype, (ceil_to(rows, 128), ceil_to(cols, 4)))
    out = torch.empty((rows, cols), dtype=swizzled.dtype)
    _C.unswizzle(source.data_ptr(), rows, cols, out.data_ptr())
    return out


def _quantize(
    x: Tensor,
    tensor_scale: Tensor,
    group: int,
    method: int,
    importance: Tensor | None,
    seed: int | None,
    kept: Tensor | None,
    clipped: Tensor | None,
) -> Pair:
    codes, scales = empty_nvfp4(x)
    s = _scalar(tensor_scale)
    _C.quantize(
        _threads(),
        matrix(x),
        group,
        s.data_ptr(),
        method,
        address(importance),
        seed is not None,
        (seed or 0) % 2**64,
        address(kept),
        codes.data_ptr(),
        scales.data_ptr(),
        address(clipped),
    )
    return codes, scales


def _quantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int | None, *, keep: bool) -> Tensor:
    q = torch.empty(w.shape, dtype=torch.int8)
    size, number = group_size(group, w.shape[1]), (seed or 0) % 2**64
    one = scale.dim() == 0
    _C.quantize_int8(
        _threads(), matrix(w), size, seed is not None, number, keep, one, scale.data_ptr(), q.data_ptr()
    )
    return q


def _w4a16_through_torch(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    """Weights decoded by the kernel (block scales only: exact in any of the dtypes), fp32 product by torch."""
    one = torch.ones((), dtype=torch.float32)
    weight = dequantize_nvfp4(w_codes, w_scales, one, [n, x.shape[-1]], torch.float32, None)
    y = torch.mm(rows_of(rotate(x, group)).float(), weight.t()).mul_(_scalar(w_scale))
    if (b := bias_of(x, bias, n)) is not None:
        y += b
    return y.to(x.dtype).reshape(*x.shape[:-1], n)


def _flat(y: Tensor, rows: int) -> Matrix:
    n = y.shape[-1]
    return (y.data_ptr(), rows, n, n, DTYPES[y.dtype])


def _result(x: Tensor, n: int) -> Tensor:
    return torch.empty((*x.shape[:-1], n), dtype=result_dtype(x.dtype))


def _scalar(value: Tensor) -> Tensor:
    """fp32 in memory: the caller keeps it in a variable until the extension has read it."""
    if value.numel() != 1 or not value.is_cpu:
        raise HswqError(
            "a tensor scale is one number beside the tensor", found=f"{describe(value)} on {value.device}"
        )
    return value if value.dtype == torch.float32 else value.float()
