"""The 128x4 order in which FP4 and FP8 tensor cores read block scales (cuBLAS: VEC16_UE4M3, VEC32_UE8M0).

Row r, column c lies at ``((r//128)*C4 + c//4)*512 + (r%32)*16 + ((r%128)//32)*4 + c%4`` with C4 =
ceil(cols/4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import check_scales
from hswq_lab.formats._rows import ceil_to


def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """The shape of swizzled scales: both dimensions of [rows, cols] rounded up to whole 128x4 tiles."""
    return ceil_to(rows, 128), ceil_to(cols, 4)


def swizzle(linear: Tensor) -> Tensor:
    """Brings scales [r, c], one byte each, into 128x4 order: [ceil128(r), ceil4(c)], padded with zeros.

    Raises:
        HswqError: no matrix of one-byte values.
    """
    check_scales(linear)
    rows, cols = linear.shape
    shape = swizzled_shape(rows, cols)
    padded = torch.zeros(shape, dtype=torch.uint8, device=linear.device)
    padded[:rows, :cols] = linear.contiguous().view(torch.uint8)
    tiles = padded.view(shape[0] // 128, 4, 32, shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(shape).view(linear.dtype)


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Scales [rows, cols] in plain order: the inverse of `swizzle` for a matrix of that shape.

    Raises:
        HswqError: the tensor does not have the shape that swizzled scales of [rows, cols] have, or no one-byte values.
    """
    check_scales(swizzled)
    shape = swizzled_shape(rows, cols)
    if tuple(swizzled.shape) != shape:
        raise HswqError(
            f"swizzled scales do not belong to [{rows}, {cols}]",
            found=list(swizzled.shape),
            expected=list(shape),
        )
    tiles = swizzled.contiguous().view(torch.uint8).view(shape[0] // 128, shape[1] // 4, 32, 4, 4)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(shape)[:rows, :cols]
    return linear.contiguous().view(swizzled.dtype)
