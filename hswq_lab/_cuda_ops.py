"""The ops of `hswq_lab._library` on a card: checks, allocates, enqueues on the current stream; nothing waits.

Element-wise work is done by csrc/cuda. Products go to cuBLASLt: FP4 on the tensor cores where the library offers it
(Blackwell); elsewhere the exact 16-bit values of the codes, fp32 sums, scales and bias in the epilogue, which is the
same product up to the order of its sums. INT8 and FP8 products go through torch.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from hswq_lab import _C, _reference
from hswq_lab._op_arguments import (
    DTYPES,
    Matrix,
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
from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import ceil_to

Where = tuple[int, int]  # the device's number, the stream's address
Scales = tuple[Tensor, Tensor | None]  # fp32 numbers on the card, whose product scales a result

_cuda = _C.cuda
_WORKSPACE = 32 << 20
_SKINNY_ROWS = 32  # more rows go faster through cuBLASLt, decoded; the kernel itself takes up to 64
_FP4 = 3  # an operand of csrc/cuda/cublaslt.h; the others are numbered like DTYPES
_INT8_ROWS = 17  # torch._int_mm takes no fewer
_OWN, _KEPT, _KEPT_SCALAR = range(3)  # Int8Scales of csrc/cuda/api.h


def amax(x: Tensor) -> Tensor:
    if x.dtype not in DTYPES or x.numel() == 0:
        return _reference.amax(x)
    flat = x.reshape(-1, 256) if x.is_contiguous() and x.numel() % 256 == 0 else rows_of(x)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    _cuda.amax(*_where(x), matrix(flat), out.data_ptr())
    return out


def rotate(x: Tensor, group: int | None) -> Tensor:
    if x.dtype not in DTYPES or group is None:
        return _reference.rotate(x, group)
    k = x.shape[-1] if x.dim() else 0
    size, flat, y = group_size(group, k), rows_of(x), _empty(x, x.shape, x.dtype)
    _cuda.rotate(*_where(x), matrix(flat), size, matrix(y.view(-1, k)))
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
    clipped = _empty(x, (), torch.int64)
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
    s, y = _scalar(tensor_scale, codes), _empty(codes, shape, dtype if dtype in DTYPES else torch.float32)
    _cuda.dequantize(*_where(codes), w, s.data_ptr(), group_size(group, cols), matrix(y))
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
    x = _Codes("x_codes", x_codes, x_scales, m, k)
    w = _Codes("w_codes", beside(x_codes, w_codes), w_scales, n, k)
    return _fp4_product(x, w, (_scalar(alpha, x_codes), None), bias, result_dtype(dtype))


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
    w = _Codes("w_codes", beside(x, w_codes), w_scales, n, k)
    size, dtype = group_size(group, k), result_dtype(x.dtype)
    s_x = _scalar(input_scale, x)
    scales = (s_x, _scalar(w_scale, x))
    if w.native:
        codes, blocks = _quantize(flat, s_x, size, 0, None, None, None, None)
        y = _fp4_product(_Codes("x_codes", codes, blocks, m, k), w, scales, bias, dtype)
    else:
        values = _empty(x, (m, w.columns), _sixteen_bits(dtype))
        _cuda.rounded_values(*_where(x), matrix(flat), size, s_x.data_ptr(), matrix(values))
        y = _decoded_product(values, w, scales, bias, dtype)
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
    flat = rows_of(x)
    m, k = flat.shape
    w = _Codes("w_codes", beside(x, w_codes), w_scales, n, k)
    dtype, s = result_dtype(x.dtype), _scalar(input_scale, x)
    x8 = _empty(x, (m, w.columns), torch.float8_e4m3fn)
    _cuda.quantize_fp8(*_where(x), matrix(flat), group_size(group, k), s.data_ptr(), x8.data_ptr(), w.columns)
    w8, row_scale = w.fp8()
    scale = _alpha_beta(6.0, s, _scalar(w_scale, x))[0]
    y = _fp8_product(x8, w8, row_scale, scale, n, bias, dtype)
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
    w = _Codes("w_codes", beside(x, w_codes), w_scales, n, k)
    dtype, size = result_dtype(x.dtype), group_size(group, k)
    rotated = flat
    if size or k != w.columns:
        rotated = _empty(x, (m, w.columns), dtype)
        _cuda.rotate(*_where(x), matrix(flat), size, matrix(rotated))
    y = _decoded_product(rotated, w, (_scalar(w_scale, x), None), bias, dtype)
    return y.view(*x.shape[:-1], n)


def linear_int8(x: Tensor, q: Tensor, s: Tensor, group: int | None, bias: Tensor | None) -> Tensor:
    weight = int8_weight(x, q)
    n, k = weight.shape[0], common_k(x.shape[-1], weight.shape[1])
    flat, y = rows_of(x), _empty(x, (*x.shape[:-1], n), result_dtype(x.dtype))
    b, scale = bias_of(x, bias, n), int8_scale(x, s, n)
    m = flat.shape[0]
    xs, xq = _empty(x, (m, 1), torch.float32), _empty(x, (m, k), torch.int8)
    _int8(flat, None, group_size(group, k), None, _OWN, xs, xq)
    sums = _int8_sums(xq, weight)
    _cuda.finish(
        *_where(x),
        sums.data_ptr(),
        sums.stride(0),
        True,
        xs.data_ptr(),
        scale.data_ptr(),
        scale.dim() == 0,
        address(b),
        matrix(y.view(m, n)),
    )
    return y


def quantize_int8(w: Tensor, group: int | None, seed: int | None) -> Pair:
    w = values_of(w)
    scale, q = _empty(w, (w.shape[0], 1), torch.float32), _empty(w, w.shape, torch.int8)
    _int8(w, None, group_size(group, w.shape[1]), seed, _OWN, scale, q)
    return q, scale


def requantize_int8(w: Tensor, scale: Tensor, group: int | None, seed: int) -> Pair:
    w = values_of(w)
    kept = int8_scale(w, scale, w.shape[0])
    new, q = torch.empty_like(kept), _empty(w, w.shape, torch.int8)
    kind = _KEPT if kept.dim() else _KEPT_SCALAR
    _int8(w, kept, group_size(group, w.shape[1]), seed, kind, new, q)
    return q, new


def dequantize_int8(q: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype) -> Tensor:
    weight, s = int8_weight(q, q), int8_scale(q, scale, q.shape[0])
    y = _empty(q, q.shape, dtype if dtype in DTYPES else torch.float32)
    size = group_size(group, q.shape[1])
    _cuda.dequantize_int8(*_where(q), weight.data_ptr(), s.data_ptr(), s.dim() == 0, size, matrix(y))
    return y.to(dtype)


def swizzle(linear: Tensor) -> Tensor:
    source = linear.contiguous()
    rows, cols = linear.shape
    out = _empty(linear, (ceil_to(rows, 128), ceil_to(cols, 4)), linear.dtype)
    _cuda.swizzle(*_where(linear), source.data_ptr(), rows, cols, out.data_ptr())
    return out


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    source = layout("swizzled", swizzled, swizzled.dtype, (ceil_to(rows, 128), ceil_to(cols, 4)))
    out = _empty(swizzled, (rows, cols), swizzled.dtype)
    _cuda.unswizzle(*_where(swizzled), source.data_ptr(), rows, cols, out.data_ptr())
    return out


# ---- packed operands ---------------------------------------------------------------------------------------


class _Codes:
    """A packed matrix [rows, k] on a card, and the forms in which products take it."""

    def __init__(self, name: str, codes: Tensor, scales: Tensor, rows: int, k: int) -> None:
        self.rows, self.columns = rows, ceil_to(k, 16)
        packed, (self.codes, self.scales) = nvfp4(codes, name, codes, scales, rows, k)
        self.packed = (*packed[:3], self.columns)

    @property
    def native(self) -> bool:
        """Whether the card multiplies it as it is."""
        return self.columns % 32 == 0 and not why_no_fp4(self.codes.device.index)

    def values(self, dtype: torch.dtype) -> Tensor:
        """value · block scale [rows, ceil16 k]: exact in 16 bits."""
        y = _empty(self.codes, (self.rows, self.columns), dtype)
        _cuda.dequantize(*_where(y), self.packed, 0, 0, matrix(y))
        return y

    def fp8(self) -> Pair:
        """E4M3 [ceil16 rows, ceil16 k] with a power of two a row, fp32 [ceil16 rows]; see formats.gemm.fp8_weight."""
        rows = self.codes.shape[0]
        y = _empty(self.codes, (rows, self.columns), torch.float8_e4m3fn)
        row_scale, largest = torch.empty((2, rows), dtype=torch.float32, device=y.device).unbind()
        packed = (self.codes.data_ptr(), self.scales.data_ptr(), rows, self.columns)
        _cuda.fp8_weight(*_where(y), packed, largest.data_ptr(), row_scale.data_ptr(), y.data_ptr())
        return y, row_scale


@cache
def why_no_fp4(device: int) -> str:
    """Why W4A4 is not done by FP4 tensor cores on this device, "" if it is: the library's own heuristic is asked."""
    return str(_cuda.probe_fp4(device))


# ---- products ----------------------------------------------------------------------------------------------


def _fp4_product(x: _Codes, w: _Codes, scales: Scales, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if w.native:
        b, late = _split_bias(x.codes, bias, w.rows, dtype)
        y = _empty(x.codes, (x.rows, w.rows), torch.float32 if late is not None else dtype)
        a, c = ((p.codes.data_ptr(), p.rows, p.columns, p.columns, 0) for p in (x, w))
        blocks = (x.scales.data_ptr(), w.scales.data_ptr())
        if _multiply(_FP4, a, c, blocks, scales, b, y):
            return _finish(y, late, dtype)
    return _decoded_product(x.values(_sixteen_bits(dtype)), w, scales, bias, dtype)


def _decoded_product(x: Tensor, w: _Codes, scales: Scales, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``scales · x wᵀ + bias`` of 16- or 32-bit x: few rows by a kernel that reads packed w, more through cuBLASLt."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and w.columns % 32 == 0
    if x.shape[0] > _SKINNY_ROWS or x.dtype == torch.float32 or not aligned:
        return _product(x, w.values(x.dtype), scales, bias, dtype)
    y = _empty(x, (x.shape[0], w.rows), dtype)
    b = bias_of(x, bias, w.rows)
    numbers = (scales[0].data_ptr(), address(scales[1]), address(b))
    _cuda.skinny(*_where(x), matrix(x), w.packed, *numbers, matrix(y))
    return y


def _product(x: Tensor, w: Tensor, scales: Scales, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``scales · x wᵀ + bias``, summed in fp32, rounded once: x [M, K], w [N, K] of one dtype."""
    m, n = x.shape[0], w.shape[0]
    b, late = _split_bias(x, bias, n, dtype)
    y = _empty(x, (m, n), torch.float32 if late is not None else dtype)
    if y.numel() == 0:
        return y.to(dtype)
    if _multiply(DTYPES[x.dtype], matrix(x), matrix(w), (0, 0), scales, b, y):
        return _finish(y, late, dtype)
    sums = torch.mm(x, w.t()) if x.dtype == torch.float32 else torch.mm(x, w.t(), out_dtype=torch.float32)
    return _finish(sums.mul_(_alpha_beta(1.0, *scales)[0]), bias_of(x, bias, n), dtype)


def _multiply(
    operand: int,
    x: Matrix,
    w: Matrix,
    blocks: tuple[int, int],
    scales: Scales,
    bias: Tensor | None,
    y: Tensor,
) -> bool:
    """Asks cuBLASLt; False, with a warning the first time, where it has no such product."""
    workspace, scale = _empty(y, (_WORKSPACE,), torch.uint8), _alpha_beta(1.0, *scales)
    why = _cuda.multiply(
        *_where(y),
        operand,
        x,
        w,
        *blocks,
        scale.data_ptr(),
        address(bias),
        matrix(y),
        workspace.data_ptr(),
        _WORKSPACE,
    )
    if why:
        _warn_once(why)
    return not why


@cache
def _warn_once(why: str) -> None:
    warnings.warn(f"a slower way is taken for a product: {why}", RuntimeWarning, stacklevel=2)


def _fp8_product(
    x8: Tensor,
    w8: Tensor,
    row_scale: Tensor,
    scale: Tensor,
    n: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    m = x8.shape[0]
    if m == 0 or n == 0:
        return _empty(x8, (m, n), dtype)
    fused = bias is None or bias.dtype == dtype
    capability = torch.cuda.get_device_capability(x8.device)
    if dtype == torch.bfloat16 and fused and capability >= (9, 0) and w8.shape[0] == n:
        # One scale a row of x and of w: the only form with the epilogue inside, and bf16 its only result.
        scale_x = scale.expand(m, 1).contiguous()
        return torch._scaled_mm(  # noqa: SLF001 - torch's one FP8 product
            x8, w8.t(), scale_x, row_scale.view(1, -1), bias=bias, out_dtype=dtype
        )
    if capability >= (8, 9):
        one = torch.ones((), dtype=torch.float32, device=x8.device)
        sums = torch._scaled_mm(x8, w8.t(), one, one, out_dtype=torch.float32)  # noqa: SLF001 - the same
    else:
        sums = torch.mm(x8.bfloat16(), w8.bfloat16().t(), out_dtype=torch.float32)
    return _finish(sums[:, :n], bias_of(x8, bias, n), dtype, scale * row_scale[:n])


def _int8_sums(x: Tensor, w: Tensor) -> Tensor:
    """int32 [at least M, at least N]; torch's product wants 17 rows or more, K and N in multiples of 8."""
    (m, k), n = x.shape, w.shape[0]
    rows = max(m, _INT8_ROWS)
    if (rows, ceil_to(k, 8)) != (m, k):
        x = torch.nn.functional.pad(x, (0, -k % 8, 0, rows - m))
    if (ceil_to(n, 8), ceil_to(k, 8)) != (n, k):
        w = torch.nn.functional.pad(w, (0, -k % 8, 0, -n % 8))
    return torch._int_mm(x, w.t())  # noqa: SLF001 - torch's one INT8 product


def _finish(sums: Tensor, bias: Tensor | None, dtype: torch.dtype, col_scale: Tensor | None = None) -> Tensor:
    """fp32 sums times a number a column, plus bias, rounded once."""
    if bias is None and col_scale is None and sums.dtype == dtype:
        return sums
    y = _empty(sums, sums.shape, dtype)
    numbers = (0, address(col_scale), False, address(bias))
    _cuda.finish(*_where(sums), sums.data_ptr(), sums.stride(0), False, *numbers, matrix(y))
    return y


def _split_bias(
    x: Tensor, bias: Tensor | None, n: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The bias for cuBLASLt, which takes it in the result's dtype only, or else for `_finish`.

    Where rows of the result are not whole 16-byte pieces, its epilogue is a pass of its own and rounds twice.
    """
    late = bias_of(x, bias, n)
    if bias is None or late is None:
        return None, None
    return (bias.contiguous(), None) if bias.dtype == dtype and n % 8 == 0 else (None, late)


# ---- arguments ---------------------------------------------------------------------------------------------


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
    s = _scalar(tensor_scale, x)
    _cuda.quantize(
        *_where(x),
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
    largest = _empty(x, (max(1, x.shape[0]),), torch.int32)
    random = (seed is not None, (seed or 0) % 2**64)
    numbers = (kind, address(kept), largest.data_ptr(), scale.data_ptr(), q.data_ptr())
    _cuda.quantize_int8(*_where(x), matrix(x), group, *random, *numbers)


def _alpha_beta(factor: float, a: Tensor, b: Tensor | None) -> Tensor:
    """fp32 [2] on the card: ``factor · a · b`` and 0."""
    pair = _empty(a, (2,), torch.float32)
    _cuda.alpha_beta(*_where(a), factor, a.data_ptr(), address(b), pair.data_ptr())
    return pair


def _where(x: Tensor) -> Where:
    return x.device.index, torch.cuda.current_stream(x.device).cuda_stream


def _empty(x: Tensor, shape: torch.Size | tuple[int, ...] | list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _scalar(value: Tensor, x: Tensor) -> Tensor:
    """fp32 on x's card: the caller keeps it in a variable until the kernel is enqueued."""
    if value.numel() != 1:
        raise HswqError("a tensor scale is one number", found=list(value.shape))
    return value.to(x.device, torch.float32)


def _sixteen_bits(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else dtype
