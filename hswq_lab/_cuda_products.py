"""Matrix products on a card: packed operands, and who multiplies them.

Products go to cuBLASLt: FP4 on the tensor cores where the library offers it (Blackwell); elsewhere the exact 16-bit
values of the codes, fp32 sums, scales and bias in the epilogue, which is the same product up to the order of its sums.
A few rows go to csrc/cuda/skinny.cu, up to some thousand on Hopper to csrc/cuda/w4_product.cu, INT8 on Hopper to
csrc/cuda/int8_product.cu, FP8 and other INT8 through torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from hswq_lab import _C
from hswq_lab._op_arguments import DTYPES, Matrix, Pair, address, bias_of, matrix, nvfp4
from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import ceil_to

Where = tuple[int, int]  # the device's number, the stream's address
Scales = tuple[Tensor, Tensor | None]  # fp32 numbers on the card, whose product scales a result

cuda = _C.cuda
_WORKSPACE = 32 << 20
_SKINNY_ROWS = 64  # what csrc/cuda/skinny.cu takes at most
_FEW_ROWS, _MANY_ROWS = 16, 2048  # between which csrc/cuda/w4_product.cu is faster than it and than cuBLASLt
_FP4 = 3  # an operand of csrc/cuda/cublaslt.h; the others are numbered like DTYPES
_INT8_ROWS = 17  # torch._int_mm takes no fewer


class Codes:
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
        y = empty(self.codes, (self.rows, self.columns), dtype)
        cuda.dequantize(*where(y), self.packed, 0, 0, matrix(y))
        return y

    def fp8(self) -> Pair:
        """`formats.gemm.fp8_weight`, padded: E4M3 [ceil16 rows, ceil16 k], fp32 [ceil16 rows, 1]."""
        rows = self.codes.shape[0]
        y = empty(self.codes, (rows, self.columns), torch.float8_e4m3fn)
        row_scale = empty(self.codes, (rows, 1), torch.float32)
        packed = (self.codes.data_ptr(), self.scales.data_ptr(), rows, self.columns)
        cuda.fp8_weight(*where(y), packed, row_scale.data_ptr(), y.data_ptr())
        return y, row_scale


@cache
def why_no_fp4(device: int) -> str:
    """Why W4A4 is not done by FP4 tensor cores on this device, "" if it is: the library's own heuristic is asked."""
    return str(cuda.probe_fp4(device))


# ---- products ----------------------------------------------------------------------------------------------


def fp4_product(x: Codes, w: Codes, scales: Scales, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if w.native:
        b, late = _split_bias(x.codes, bias, w.rows, dtype)
        y = empty(x.codes, (x.rows, w.rows), torch.float32 if late is not None else dtype)
        a, c = ((p.codes.data_ptr(), p.rows, p.columns, p.columns, 0) for p in (x, w))
        blocks = (x.scales.data_ptr(), w.scales.data_ptr())
        if _multiply(_FP4, a, c, blocks, scales, b, y):
            return _finish(y, late, dtype)
    return decoded_product(x.values(sixteen_bits(dtype)), w, scales, bias, dtype)


def decoded_product(x: Tensor, w: Codes, scales: Scales, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``scales · x wᵀ + bias`` of 16- or 32-bit x, by a kernel that reads packed w where there is one."""
    kernel = _w4_kernel(x, w, dtype)
    if kernel is None:
        return _product(x, w.values(x.dtype), scales, bias, dtype)
    y = empty(x, (x.shape[0], w.rows), dtype)
    b = bias_of(x, bias, w.rows)
    kernel(*where(x), matrix(x), w.packed, scales[0].data_ptr(), address(scales[1]), address(b), matrix(y))
    return y


def _w4_kernel(x: Tensor, w: Codes, dtype: torch.dtype) -> Callable[..., None] | None:
    """csrc/cuda/w4_product.cu, skinny.cu, or None: what multiplies x by packed w on this card."""
    addresses = (x.data_ptr(), w.codes.data_ptr(), w.scales.data_ptr())
    if x.dtype == torch.float32 or w.columns % 32 or x.stride(0) % 8 or any(a % 16 for a in addresses):
        return None
    between = _FEW_ROWS < x.shape[0] <= _MANY_ROWS
    if between and dtype == x.dtype and w.rows % 8 == 0 and has_w4_product(x.device.index):
        return cuda.w4_product
    return cuda.skinny if x.shape[0] <= _SKINNY_ROWS else None


@cache
def has_w4_product(device: int) -> bool:
    """Whether this card has csrc/cuda/w4_product.cu."""
    return bool(cuda.has_w4_product(device))


def _product(x: Tensor, w: Tensor, scales: Scales, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``scales · x wᵀ + bias``, summed in fp32, rounded once: x [M, K], w [N, K] of one dtype."""
    m, n = x.shape[0], w.shape[0]
    b, late = _split_bias(x, bias, n, dtype)
    y = empty(x, (m, n), torch.float32 if late is not None else dtype)
    if y.numel() == 0:
        return y.to(dtype)
    if _multiply(DTYPES[x.dtype], matrix(x), matrix(w), (0, 0), scales, b, y):
        return _finish(y, late, dtype)
    sums = torch.mm(x, w.t()) if x.dtype == torch.float32 else torch.mm(x, w.t(), out_dtype=torch.float32)
    return _finish(sums.mul_(alpha_beta(1.0, *scales)[0]), bias_of(x, bias, n), dtype)


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
    workspace, scale = empty(y, (_WORKSPACE,), torch.uint8), alpha_beta(1.0, *scales)
    why = cuda.multiply(
        *where(y),
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


def fp8_product(
    x8: Tensor, w8: Tensor, row_scale: Tensor, scales: Pair, n: int, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``6 · scales · row_scale · x8 w8ᵀ + bias`` of E4M3 x8 [M, K] and w8 [ceil16 N, K]."""
    m = x8.shape[0]
    if m == 0 or n == 0:
        return empty(x8, (m, n), dtype)
    fused = bias is None or bias.dtype == dtype
    capability = torch.cuda.get_device_capability(x8.device)
    if dtype == torch.bfloat16 and fused and capability >= (9, 0) and w8.shape[0] == n:
        # One scale a row of x and of w: the only form with the epilogue inside, and bf16 its only result. Sums within
        # the tensor cores ("fast"): what that costs is measured in csrc/cuda/NOTES.md, less than rounding to bf16.
        row = alpha_beta(6.0, *scales, count=m)[:m].view(m, 1)
        return torch._scaled_mm(  # noqa: SLF001 - torch's one FP8 product
            x8, w8.t(), row, row_scale.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    if capability >= (8, 9):
        one = torch.ones((), dtype=torch.float32, device=x8.device)
        sums = torch._scaled_mm(x8, w8.t(), one, one, out_dtype=torch.float32)  # noqa: SLF001 - the same
    else:
        sums = torch.mm(x8.bfloat16(), w8.bfloat16().t(), out_dtype=torch.float32)
    col_scale = alpha_beta(6.0, *scales)[0] * row_scale.flatten()[:n]
    return _finish(sums[:, :n], bias_of(x8, bias, n), dtype, col_scale)


def int8_product(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """``y = x wᵀ · (x_scale · w_scale) + bias`` of int8 x [M, K] and w [N, K]; y [M, N]."""
    n, k = w.shape
    scales = (x_scale.data_ptr(), w_scale.data_ptr(), w_scale.dim() == 0, address(bias))
    fits = n % 8 == 0 and k % 16 == 0 and w.data_ptr() % 16 == 0 and y.dtype != torch.float32
    if fits and has_int8_product(x.device.index):
        operands = ((v.data_ptr(), v.shape[0], k, k, 0) for v in (x, w))
        cuda.int8_product(*where(x), *operands, *scales, matrix(y))
        return
    sums = _int8_sums(x, w)
    cuda.finish(*where(x), sums.data_ptr(), sums.stride(0), True, *scales, matrix(y))


@cache
def has_int8_product(device: int) -> bool:
    """Whether this card has csrc/cuda/int8_product.cu."""
    return bool(cuda.has_int8_product(device))


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
    y = empty(sums, sums.shape, dtype)
    numbers = (0, address(col_scale), False, address(bias))
    cuda.finish(*where(sums), sums.data_ptr(), sums.stride(0), False, *numbers, matrix(y))
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


# ---- calls -------------------------------------------------------------------------------------------------


def where(x: Tensor) -> Where:
    return x.device.index, torch.cuda.current_stream(x.device).cuda_stream


def empty(x: Tensor, shape: torch.Size | tuple[int, ...] | list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def scalar(value: Tensor, x: Tensor) -> Tensor:
    """fp32 on x's card: the caller keeps it in a variable until the kernel is enqueued."""
    if value.numel() != 1:
        raise HswqError("a tensor scale is one number", found=list(value.shape))
    return value.to(x.device, torch.float32)


def sixteen_bits(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else dtype


def alpha_beta(factor: float, a: Tensor, b: Tensor | None, count: int = 1) -> Tensor:
    """fp32 [count + 1] on the card: ``factor · a · b`` count times, and 0."""
    numbers = empty(a, (count + 1,), torch.float32)
    cuda.alpha_beta(*where(a), factor, a.data_ptr(), address(b), count, numbers.data_ptr())
    return numbers
