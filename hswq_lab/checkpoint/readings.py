"""How a producer lays out NVFP4: nibble order, order of the block scales, sense of the global scale.

ComfyUI, ModelOpt and compressed-tensors store tensors of the same dtypes and often the same shapes; only
these choices differ, so a file read the wrong way gives plausible bytes and pure noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hswq_lab.errors import HswqError
from hswq_lab.formats import swizzle
from hswq_lab.formats._rows import ceil_to
from hswq_lab.formats.e2m1 import swap_nibbles


@dataclass(frozen=True)
class Reading:
    """One way to read NVFP4 tensors.

    Attributes:
        even: which nibble of a byte holds the even column.
        scales: "swizzled" (128x4 tiles, as tensor cores want them) or "linear" (row by row).
        factor: whether the global scale multiplies or divides.
    """

    even: Literal["high", "low"] = "high"
    scales: Literal["swizzled", "linear"] = "swizzled"
    factor: Literal["multiplier", "divisor"] = "multiplier"

    def __str__(self) -> str:
        """Words for a report."""
        return (
            f"even column in the {self.even} nibble, {self.scales} block scales, global scale a {self.factor}"
        )

    def codes(self, stored: Tensor) -> Tensor:
        """Stored bytes [N', K'/2] as our codes: even column high, padded to 16 rows and 8 bytes."""
        codes = stored if self.even == "high" else swap_nibbles(stored)
        rows, columns = codes.shape
        return functional.pad(codes, (0, -columns % 8, 0, -rows % 16)).contiguous()

    def block_scales(self, stored: Tensor, code_rows: int, code_bytes: int) -> Tensor:
        """Stored E4M3 scales as our swizzled ones, for codes stored as [code_rows, code_bytes]."""
        if self.scales == "swizzled":
            return stored
        rows, blocks = ceil_to(code_rows, 16), ceil_to(code_bytes, 8) // 8
        linear = stored[:rows, :blocks].contiguous().view(torch.uint8)
        padded = functional.pad(linear, (0, blocks - linear.shape[1], 0, rows - linear.shape[0]))
        return swizzle(padded).view(torch.float8_e4m3fn)

    def tensor_scale(self, stored: Tensor) -> Tensor:
        """The stored global scale, fp32, as a multiplier.

        Raises:
            HswqError: a divisor that is not finite and positive.
        """
        if self.factor == "multiplier":
            return stored
        if not (bool(torch.isfinite(stored)) and float(stored) > 0):
            raise HswqError(
                "the global scale is a divisor and cannot be used",
                found=float(stored),
                expected="a finite number above 0",
            )
        return stored.reciprocal()


COMFY = Reading()
MODELOPT = Reading("low", "linear", "multiplier")
COMPRESSED_TENSORS = Reading("low", "linear", "divisor")
PRODUCERS = {"comfy": COMFY, "modelopt": MODELOPT, "compressed-tensors": COMPRESSED_TENSORS}
