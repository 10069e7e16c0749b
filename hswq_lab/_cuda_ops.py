"""The ops of `hswq_lab._library` on a card: checks, allocates, enqueues on the current stream; nothing waits.

Element-wise work is done by csrc/cuda, products as `hswq_lab._cuda_products` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab import _reference
from hswq_lab._cuda_products import (
    Codes,
    cuda,
    decoded_product,
    empty,
    fp4_product,
    fp8_product,
    int8_product,
    scalar,
    sixteen_bits,
    where,
)
from hswq_lab._op_arguments import (
    DTYPES,
    Pair,
    address,
    beside,
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
from hswq_lab.formats._checks import check_scales
from hswq_lab.formats._rows import ceil_to

_OWN, _KEPT, _KEPT_SCALAR = range(3)  # Int8Scales of csrc/cuda/api.h


def amax(x: Tensor) -> Tensor:
    if x.dtype not in DTYPES or x.numel() == 0:
        return _reference.amax(x)
    flat = x.reshape(-1, 256) if x.is_contiguous() and x.numel() % 256 == 0 else rows_of(x)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    cuda.amax(*where(x), matrix(flat), out.data_ptr())
    return out


def rotate(x: Tensor, group: int | None) -> Tensor:
    if x.dtype not in DTYPES or group is None:
        return _reference.rotate(x, group)
    k = x.shape[-1] if x.dim() else 0
    size, flat, y = group_size(group, k), rows_of(x), empty(x, x.shape, x.dtype)
    cuda.rotate(*where(x), matrix(flat), size, matrix(y.view(-1, k)))
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
    clipped = empty(x, (), torch.int64)
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
    s, y = scalar(tensor_scale, codes), empty(codes, shape, dtype if dtype in DTYPES else torch.float32)
    cuda.dequantize(*where(codes), w, s.data_ptr(), group_size(group, cols), matrix(y))
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
    x = Codes("x_codes", x_codes, x_scales, m, k)
    w = Codes("w_codes", beside(x_codes, w_codes), w_scales, n, k)
    return fp4_product(x, w, (scalar(alpha, x_codes), None), bias, result_dtype(dtype))


def linear_w4a4(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    input_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    flat = rows_of(x)
    m, k = flat.shape
    w = Codes("w_codes", beside(x, w_codes), w_scales, n, k)
    size, dtype = group_size(group, k), result_dtype(x.dtype)
    s_x = scalar(input_scale, x)
    scales = (s_x, scalar(w_scale, x))
    if w.native:
        codes, blocks = _quantize(flat, s_x, size, 0, None, None, None, None)
        y = fp4_product(Codes("x_codes", codes, blocks, m, k), w, scales, bias, dtype)
    else:
        values = empty(x, (m, w.columns), sixteen_bits(dtype))
        cuda.rounded_values(*where(x), matrix(flat), size, s_x.data_ptr(), matrix(values))
        y = decoded_product(values, w, scales, bias, dtype)
    return y.view(*x.shape[:-1], n)


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
    w8, row_scale = Codes("w_codes", beside(x, w_codes), w_scales, n, x.shape[-1]).fp8()
    return linear_fp8(x, w8, row_scale, w_scale, input_scale, group, n, bias)


def fp8_weight(w_codes: Tensor, w_scales: Tensor, n: int, k: int) -> Pair:
    return Codes("w_codes", w_codes, w_scales, n, k).fp8()


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
    flat = rows_of(x)
    m, k = flat.shape
    dtype, s = result_dtype(x.dtype), scalar(input_scale, x)
    shape = (ceil_to(n, 16), ceil_to(k, 16))
    weight = layout("w8", beside(x, w8.view(torch.float8_e4m3fn)), torch.float8_e4m3fn, shape)
    rows = layout("row_scale", beside(x, row_scale), torch.float32, (shape[0], 1))
    x8 = empty(x, (m, shape[1]), torch.float8_e4m3fn)
    cuda.quantize_fp8(*where(x), matrix(flat), group_size(group, k), s.data_ptr(), x8.data_ptr(), shape[1])
    y = fp8_product(x8, weight, rows, (s, scalar(w_scale, x)), n, bias, dtype)
    return y.view(*x.shape[:-1], n)


def linear_w4a16(
    x: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    w_scale: Tensor,
    group: int | None,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    flat = rows_of(x)
    m, k = flat.shape
    w = Codes("w_codes", beside(x, w_codes), w_scales, n, k)
    dtype, size = result_dtype(x.dtype), group_size(group, k)
    rotated = flat
    if size or k != w.columns:
        rotated = empty(x, (m, w.columns), dtype)
        cuda.rotate(*where(x), matrix(flat), size, matrix(rotated))
    y = decoded_product(rotated, w, (scalar(w_scale, x), None), bias, dtype)
    return y.view(*x.shape[:-1], n)


def linear_int8(x: Tensor, q: Tensor, s: Tensor, group: int | None, bias: Tensor | None) -> Tensor:
    weight = int8_weight(x, q)
    n, k = weight.shape[0], common_k(x.shape[-1], weight.shape[1])
    flat, y = rows_of(x), empty(x, (*x.shape[:-1], n), result_dtype(x.dtype))
    b, scale = bias_of(x, bias, n), int8_scale(x, s, n)
    m = flat.shape[0]
    xs, xq = empty(x, (m, 1), torch.float32), empty(x, (m, k), torch.int8)
    _int8(flat, None, group_size(group, k), None, _OWN, xs, xq)
    int8_product(xq, weight, xs, scale, b, y.view(m, n))
    return y


def quantize_int8(w: Tensor, group: int | None, seed: int | None) -> Pair:
    w = values_of(w)
    scale, q = empty(w, (w.shape[0], 1), torch.float32), empty(w, w.shape, torch.int8)
    _int8(w, None, group_size(group, w.shape[1]), seed, _OWN, scale, q)
    return q, scale


def requantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int) -> Pair:
    w = values_of(w)
    kept = int8_scale(w, scale, w.shape[0])
    new, q = torch.empty_like(kept), empty(w, w.shape, torch.int8)
    kind = _KEPT if kept.dim() else _KEPT_SCALAR
    _int8(w, kept, group_size(group, w.shape[1]), seed, kind, new, q)
    return q, new


def dequantize_int8(q: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype) -> Tensor:
    weight, s = int8_weight(q, q), int8_scale(q, scale, q.shape[0])
    y = empty(q, q.shape, dtype if dtype in DTYPES else torch.float32)
    size = group_size(group, q.shape[1])
    cuda.dequantize_int8(*where(q), weight.data_ptr(), s.data_ptr(), s.dim() == 0, size, matrix(y))
    return y.to(dtype)


def swizzle(linear: Tensor) -> Tensor:
    check_scales(linear)
    source = linear.contiguous()
    rows, cols = linear.shape
    out = empty(linear, (ceil_to(rows, 128), ceil_to(cols, 4)), linear.dtype)
    cuda.swizzle(*where(linear), source.data_ptr(), rows, cols, out.data_ptr())
    return out


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    check_scales(swizzled)
    source = layout("swizzled", swizzled, swizzled.dtype, (ceil_to(rows, 128), ceil_to(cols, 4)))
    out = empty(swizzled, (rows, cols), swizzled.dtype)
    cuda.unswizzle(*where(swizzled), source.data_ptr(), rows, cols, out.data_ptr())
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
    s = scalar(tensor_scale, x)
    cuda.quantize(
        *where(x),
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


def _int8(
    x: Tensor, kept: Tensor | None, group: int, seed: int | None, kind: int, scale: Tensor, q: Tensor
) -> None:
    largest = empty(x, (max(1, x.shape[0]),), torch.int32)
    random = (seed is not None, (seed or 0) % 2**64)
    numbers = (kind, address(kept), largest.data_ptr(), scale.data_ptr(), q.data_ptr())
    cuda.quantize_int8(*where(x), matrix(x), group, *random, *numbers)
