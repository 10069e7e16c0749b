"""What every quantiser asks of its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from torch import Tensor

# One byte a value means codes, whose scale is somewhere else: never values.
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def describe(x: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{dtype_name(x.dtype)} {list(x.shape)}"


def check_matrix(x: Tensor) -> None:
    """Refuses what is not a matrix [rows, K > 0] of 16-, 32- or 64-bit floats.

    Raises:
        HswqError: with what was found.
    """
    if x.dim() != 2 or x.shape[1] == 0 or x.dtype not in VALUE_DTYPES:
        raise HswqError(
            "only matrices of 16- or 32-bit floats are quantised",
            found=describe(x),
            expected="[rows, K], K > 0",
        )


def check_scales(scales: Tensor) -> None:
    """Refuses what is not a matrix of one-byte values: the swizzle moves bytes.

    Raises:
        HswqError: with what was found.
    """
    if scales.dim() != 2 or scales.itemsize != 1:
        raise HswqError(
            "block scales are a matrix of one-byte values", found=describe(scales), expected="float8_e4m3fn"
        )
