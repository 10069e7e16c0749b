"""The ops of `hswq_lab._library` on a CPU: checks, allocates, and hands addresses to the extension."""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab import _C, _reference
from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import check_matrix, describe
from hswq_lab.formats._rows import ceil_to
from hswq_lab.formats.rotation import GROUPS

Pair = tuple[Tensor, Tensor]
Matrix = tuple[int, int, int, int, int]  # address, rows, columns, elements from row to row, dtype
Packed = tuple[int, int, int, int]  # addresses of codes and scales, rows, columns

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_METHODS = {"rtn": 0, "four_six": 1, "sweep": 2}
_threads = torch.get_num_threads


def amax(x: Tensor) -> Tensor:
    if x.dtype not in _DTYPES:
        return _reference.amax(x)
    flat, out = _rows(x), torch.empty((), dtype=torch.float32)
    _C.amax(_threads(), _matrix(flat), out.data_ptr())
    return out


def rotate(x: Tensor, group: int | None) -> Tensor:
    if x.dtype not in _DTYPES or group is None:
        return _reference.rotate(x, group)
    k = x.shape[-1] if x.dim() else 0
    size = _group(group, k)
    flat = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    _C.rotate(_threads(), _matrix(flat), size, (y.data_ptr(), flat.shape[0], k, k, _DTYPES[x.dtype]))
    return y


def quantize_nvfp4(
    x: Tensor,
    tensor_scale: Tensor,
    group: int | None,
    method: str,
    importance: Tensor | None,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x = _values(x)
    size = _group(group, x.shape[1])
    if method not in _METHODS:
        raise HswqError("unknown way to choose block scales", found=method, expected=" | ".join(_METHODS))
    h = _importance(importance, method, x.shape[1])
    clipped = torch.empty((), dtype=torch.int64)
    codes, scales = _quantize(x, tensor_scale, size, _METHODS[method], h, seed, None, clipped)
    return codes, scales, clipped


def requantize_nvfp4(x: Tensor, tensor_scale: Tensor, scales: Tensor, group: int | None, seed: int) -> Pair:
    x = _values(x)
    size = _group(group, x.shape[1])
    kept = _block_scales("scales", scales, x.shape[0], x.shape[1])
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
    w, _keep = _nvfp4("codes", codes, scales, rows, cols)
    native = dtype if dtype in _DTYPES else torch.float32
    s, y = _scalar(tensor_scale), torch.empty((rows, cols), dtype=native)
    _C.dequantize(_threads(), w, s.data_ptr(), _group(group, cols), _matrix(y))
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
    if x_codes.shape[-1] != w_codes.shape[-1]:
        raise HswqError(
            "K of x and of w differ", found=f"{2 * x_codes.shape[-1]} and {2 * w_codes.shape[-1]} columns"
        )
    k = 2 * x_codes.shape[-1]
    x, _keep_x = _nvfp4("x_codes", x_codes, x_scales, m, k)
    w, _keep_w = _nvfp4("w_codes", w_codes, w_scales, n, k)
    b, a = _bias(bias, n), _scalar(alpha)
    y = torch.empty((m, n), dtype=_output(dtype))
    _C.fp4_gemm(_threads(), x, w, a.data_ptr(), _address(b), _matrix(y))
    return y


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
    k = x.shape[-1]
    w, _keep = _nvfp4("w_codes", w_codes, w_scales, n, k)
    flat, y, b = _rows(x), _result(x, n), _bias(bias, n)
    s_x, s_w = _scalar(input_scale), _scalar(w_scale)
    _C.linear_w4a4(
        _threads(),
        _matrix(flat),
        _group(group, k),
        s_x.data_ptr(),
        w,
        s_w.data_ptr(),
        _address(b),
        _flat(y, flat.shape[0]),
    )
    return y


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
    if not _C.has_w4():
        return _reference.linear_w4a8(x, w_codes, w_scales, w_scale, input_scale, group, n, bias)
    k = x.shape[-1]
    w, _keep = _nvfp4("w_codes", w_codes, w_scales, n, k)
    flat, y, b = _rows(x), _result(x, n), _bias(bias, n)
    s_x, s_w = _scalar(input_scale), _scalar(w_scale)
    _C.linear_w4a8(
        _threads(),
        _matrix(flat),
        _group(group, k),
        s_x.data_ptr(),
        w,
        s_w.data_ptr(),
        _address(b),
        _flat(y, flat.shape[0]),
    )
    return y


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
    w, _keep = _nvfp4("w_codes", w_codes, w_scales, n, k)
    flat, y, b = _rows(x), _result(x, n), _bias(bias, n)
    s_w = _scalar(w_scale)
    _C.linear_w4a16(
        _threads(), _matrix(flat), _group(group, k), w, s_w.data_ptr(), _address(b), _flat(y, flat.shape[0])
    )
    return y


def linear_int8(x: Tensor, q: Tensor, s: Tensor, group: int | None, bias: Tensor | None) -> Tensor:
    n, k = _int8_weight(q)
    if x.shape[-1] != k:
        raise HswqError("K of x and of w differ", found=f"{x.shape[-1]} and {k}")
    flat, y, b = _rows(x), _result(x, n), _bias(bias, n)
    weight, scale = q.contiguous(), _row_scale(s, n)
    _C.linear_int8(
        _threads(),
        _matrix(flat),
        _group(group, k),
        weight.data_ptr(),
        scale.data_ptr(),
        scale.dim() == 0,
        _address(b),
        _flat(y, flat.shape[0]),
    )
    return y


def quantize_int8(w: Tensor, group: int | None, seed: int | None) -> Pair:
    w = _values(w)
    scale = torch.empty((w.shape[0], 1), dtype=torch.float32)
    return _quantize_int8(w, scale, group, seed, keep=False), scale


def requantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int) -> Pair:
    w = _values(w)
    kept = _row_scale(scale, w.shape[0]).clone()
    return _quantize_int8(w, kept, group, seed, keep=True), kept


def dequantize_int8(q: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype) -> Tensor:
    weight, s = q.contiguous(), _row_scale(scale, _int8_weight(q)[0])
    y = torch.empty(q.shape, dtype=dtype if dtype in _DTYPES else torch.float32)
    _C.dequantize_int8(
        _threads(), weight.data_ptr(), s.data_ptr(), s.dim() == 0, _group(group, q.shape[1]), _matrix(y)
    )
    return y.to(dtype)


def swizzle(linear: Tensor) -> Tensor:
    source = linear.contiguous()
    rows, cols = linear.shape
    out = torch.empty((ceil_to(rows, 128), ceil_to(cols, 4)), dtype=linear.dtype)
    _C.swizzle(source.data_ptr(), rows, cols, out.data_ptr())
    return out


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    source = _layout("swizzled", swizzled, swizzled.dtype, (ceil_to(rows, 128), ceil_to(cols, 4)))
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
    codes = torch.empty((ceil_to(x.shape[0], 16), ceil_to(x.shape[1], 16) // 2), dtype=torch.uint8)
    scales = torch.empty(_scales_shape(*x.shape), dtype=torch.float8_e4m3fn)
    s = _scalar(tensor_scale)
    _C.quantize(
        _threads(),
        _matrix(x),
        group,
        s.data_ptr(),
        method,
        _address(importance),
        seed is not None,
        (seed or 0) % 2**64,
        _address(kept),
        codes.data_ptr(),
        scales.data_ptr(),
        _address(clipped),
    )
    return codes, scales


def _quantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int | None, *, keep: bool) -> Tensor:
    q = torch.empty(w.shape, dtype=torch.int8)
    size, number = _group(group, w.shape[1]), (seed or 0) % 2**64
    one = scale.dim() == 0
    _C.quantize_int8(
        _threads(), _matrix(w), size, seed is not None, number, keep, one, scale.data_ptr(), q.data_ptr()
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
    y = torch.mm(_rows(rotate(x, group)).float(), weight.t()).mul_(w_scale)
    if bias is not None:
        y += bias
    return y.to(x.dtype).reshape(*x.shape[:-1], n)


def _matrix(x: Tensor) -> Matrix:
    return (x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), _DTYPES[x.dtype])


def _flat(y: Tensor, rows: int) -> Matrix:
    n = y.shape[-1]
    return (y.data_ptr(), rows, n, n, _DTYPES[y.dtype])


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as a matrix whose rows are contiguous."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _values(x: Tensor) -> Tensor:
    check_matrix(x)
    return _rows(x if x.dtype in _DTYPES else x.float())


def _result(x: Tensor, n: int) -> Tensor:
    return torch.empty((*x.shape[:-1], n), dtype=_output(x.dtype))


def _output(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES:
        raise HswqError(
            "a linear's x and result are fp32, bf16 or fp16", found=str(dtype).removeprefix("torch.")
        )
    return dtype


def _scalar(value: Tensor) -> Tensor:
    """fp32 in memory: the caller keeps it in a variable until the extension has read it."""
    if value.numel() != 1 or not value.is_cpu:
        raise HswqError(
            "a tensor scale is one number beside the tensor", found=f"{describe(value)} on {value.device}"
        )
    return value if value.dtype == torch.float32 else value.float()


def _bias(bias: Tensor | None, n: int) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != (n,):
        raise HswqError("bias is one number a row of the weight", found=list(bias.shape), expected=[n])
    return bias if bias.dtype == torch.float32 and bias.is_contiguous() else bias.float().contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _group(group: int | None, k: int) -> int:
    if group is None:
        return 0
    if group not in GROUPS or k == 0 or k % group:
        raise HswqError(
            "x cannot be rotated in such groups",
            found=f"group {group}, {k} columns",
            expected="4, 16, 64 or 256, a divisor",
        )
    return group


def _int8_weight(q: Tensor) -> tuple[int, int]:
    if q.dim() != 2 or q.dtype != torch.int8:
        raise HswqError("INT8 weights are a matrix of int8", found=describe(q), expected="int8 [N, K]")
    return q.shape[0], q.shape[1]


def _row_scale(scale: Tensor, rows: int) -> Tensor:
    if scale.dim() and scale.shape != (rows, 1):
        raise HswqError(
            "INT8 scales are one a row or one in all", found=list(scale.shape), expected=[rows, 1]
        )
    return scale.float().contiguous()


def _importance(importance: Tensor | None, method: str, k: int) -> Tensor | None:
    if importance is None:
        return None
    if method == "rtn" or importance.shape != (k,):
        raise HswqError(
            "an importance is one number a column, and only the methods that compare errors use it",
            found=f"{describe(importance)} with {method}",
            expected=f"[{k}] with sweep or four_six",
        )
    return importance.float().contiguous()


def _scales_shape(rows: int, cols: int) -> tuple[int, int]:
    return ceil_to(rows, 128), ceil_to(ceil_to(cols, 16) // 16, 4)


def _nvfp4(name: str, codes: Tensor, scales: Tensor, rows: int, cols: int) -> tuple[Packed, Pair]:
    """What the extension wants to know, and the tensors that have to live until it is done."""
    c = _layout(name, codes, torch.uint8, (ceil_to(rows, 16), ceil_to(cols, 16) // 2))
    s = _block_scales(name.replace("codes", "scales"), scales, rows, cols)
    return (c.data_ptr(), s.data_ptr(), rows, cols), (c, s)


def _block_scales(name: str, scales: Tensor, rows: int, cols: int) -> Tensor:
    """E4M3 scales, or their bytes: files have them either way."""
    dtype = torch.uint8 if scales.dtype == torch.uint8 else torch.float8_e4m3fn
    return _layout(name, scales, dtype, _scales_shape(rows, cols))


def _layout(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    if x.shape != shape or x.dtype != dtype:
        expected = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise HswqError(
            "packed tensors do not belong to this shape", tensor=name, found=describe(x), expected=expected
        )
    return x if x.is_contiguous() else x.contiguous()
