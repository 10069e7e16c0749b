"""What the ops on a CPU and on a card ask of their arguments, and the shapes in which an extension takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import check_matrix, describe
from hswq_lab.formats._rows import ceil_to
from hswq_lab.formats.rotation import GROUPS

Pair = tuple[Tensor, Tensor]
Matrix = tuple[int, int, int, int, int]  # address, rows, columns, elements from row to row, dtype
Packed = tuple[int, int, int, int]  # addresses of codes and scales, rows, columns

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_METHODS = {"rtn": 0, "four_six": 1, "sweep": 2}


def matrix(x: Tensor) -> Matrix:
    """A matrix whose rows are contiguous."""
    return (x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), DTYPES[x.dtype])


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] as a matrix whose rows are contiguous."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def values_of(x: Tensor) -> Tensor:
    """What is quantised: a matrix of fp32, bf16 or fp16."""
    check_matrix(x)
    return rows_of(x if x.dtype in DTYPES else x.float())


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def beside(x: Tensor, other: Tensor) -> Tensor:
    """The kernels follow addresses: every tensor of a call has to be on x's device."""
    if other.device != x.device:
        raise HswqError(
            "tensors of one operation are on different devices",
            found=f"{other.device}",
            expected=f"{x.device}",
        )
    return other


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise HswqError(
            "a linear's x and result are fp32, bf16 or fp16", found=str(dtype).removeprefix("torch.")
        )
    return dtype


def bias_of(x: Tensor, bias: Tensor | None, n: int) -> Tensor | None:
    """fp32 [N], contiguous."""
    if bias is None:
        return None
    if bias.shape != (n,):
        raise HswqError("bias is one number a row of the weight", found=list(bias.shape), expected=[n])
    return beside(x, bias).float().contiguous()


def group_size(group: int | None, k: int) -> int:
    """The extension's number of a rotation of K columns: 0 is none."""
    if group is None:
        return 0
    if group not in GROUPS or k == 0 or k % group:
        raise HswqError(
            "x cannot be rotated in such groups",
            found=f"group {group}, {k} columns",
            expected="4, 16, 64 or 256, a divisor",
        )
    return group


def method_number(method: str) -> int:
    if method not in _METHODS:
        raise HswqError("unknown way to choose block scales", found=method, expected=" | ".join(_METHODS))
    return _METHODS[method]


def importance_of(x: Tensor, importance: Tensor | None, method: str) -> Tensor | None:
    """fp32 [K], contiguous, beside x."""
    if importance is None:
        return None
    k = x.shape[1]
    if method == "rtn" or importance.shape != (k,):
        raise HswqError(
            "an importance is one number a column, and only the methods that compare errors use it",
            found=f"{describe(importance)} with {method}",
            expected=f"[{k}] with sweep or four_six",
        )
    return importance.to(x.device, torch.float32).contiguous()


def common_k(k_x: int, k_w: int) -> int:
    if k_x != k_w:
        raise HswqError("K of x and of w differ", found=f"{k_x} and {k_w}")
    return k_x


def int8_weight(x: Tensor, q: Tensor) -> Tensor:
    if q.dim() != 2 or q.dtype != torch.int8:
        raise HswqError("INT8 weights are a matrix of int8", found=describe(q), expected="int8 [N, K]")
    return beside(x, q).contiguous()


def int8_scale(x: Tensor, scale: Tensor, rows: int) -> Tensor:
    """fp32, [rows, 1] or a single number."""
    if scale.dim() and scale.shape != (rows, 1):
        raise HswqError(
            "INT8 scales are one a row or one in all", found=list(scale.shape), expected=[rows, 1]
        )
    return beside(x, scale).float().contiguous()


def empty_nvfp4(x: Tensor) -> Pair:
    """Codes and swizzled block scales for a matrix like x."""
    rows, cols = x.shape
    codes = torch.empty((ceil_to(rows, 16), ceil_to(cols, 16) // 2), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(_scales_shape(rows, cols), dtype=torch.float8_e4m3fn, device=x.device)


def nvfp4(x: Tensor, name: str, codes: Tensor, scales: Tensor, rows: int, cols: int) -> tuple[Packed, Pair]:
    """What the extension wants to know, and the tensors that have to live until it is done."""
    c = layout(name, beside(x, codes), torch.uint8, (ceil_to(rows, 16), ceil_to(cols, 16) // 2))
    s = block_scales(x, name.replace("codes", "scales"), scales, rows, cols)
    return (c.data_ptr(), s.data_ptr(), rows, cols), (c, s)


def block_scales(x: Tensor, name: str, scales: Tensor, rows: int, cols: int) -> Tensor:
    """E4M3 scales, or their bytes: files have them either way."""
    dtype = torch.uint8 if scales.dtype == torch.uint8 else torch.float8_e4m3fn
    return layout(name, beside(x, scales), dtype, _scales_shape(rows, cols))


def layout(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    if x.shape != shape or x.dtype != dtype:
        expected = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise HswqError(
            "packed tensors do not belong to this shape", tensor=name, found=describe(x), expected=expected
        )
    return x if x.is_contiguous() else x.contiguous()


def _scales_shape(rows: int, cols: int) -> tuple[int, int]:
    return ceil_to(rows, 128), ceil_to(ceil_to(cols, 16) // 16, 4)
