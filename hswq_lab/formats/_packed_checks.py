"""The single checks of a packed weight's tensors, with the place that their messages name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import describe, dtype_name
from hswq_lab.formats.e4m3 import NAN_CODE
from hswq_lab.formats.rotation import GROUPS

if TYPE_CHECKING:
    from torch import Tensor

Where = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Checks:
    """Checks of one layer; each raises HswqError naming the file and ``<layer>.<suffix>``.

    Attributes:
        layer: the layer's name, or None.
        file: the file it came from, or None.
    """

    layer: str | None
    file: Where

    def shape_and_group(self, shape: tuple[int, int], group: int | None) -> None:
        """The logical shape is a matrix, and the rotation group divides K."""
        if len(shape) != 2 or min(shape) < 1:
            raise self._error("a packed weight is a matrix", "weight", list(shape), "[N, K], both at least 1")
        if group is not None and (group not in GROUPS or shape[1] % group):
            expected = f"4, 16, 64 or 256, and a divisor of K = {shape[1]}"
            raise self._error("the rotation group does not fit the weight", "weight", group, expected)

    def layout(self, suffix: str, value: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        """The tensor has this dtype and one of these shapes."""
        if value.dtype != dtype or tuple(value.shape) not in {tuple(shape) for shape in shapes}:
            expected = " or ".join(f"{dtype_name(dtype)} {list(shape)}" for shape in shapes)
            raise self._error("wrong dtype or shape", suffix, describe(value), expected)

    def e4m3_scales(self, suffix: str, scales: Tensor) -> None:
        """No byte of the block scales is NaN or has its sign bit set."""
        codes = scales.view(torch.uint8)
        bad = (codes & NAN_CODE == NAN_CODE) | (codes > NAN_CODE)
        self._bytes(suffix, codes, bad, "block scales are NaN or negative", "0x00 to 0x7E")

    def e4m3_values(self, suffix: str, values: Tensor) -> None:
        """No byte is NaN."""
        codes = values.view(torch.uint8)
        self._bytes(suffix, codes, codes & NAN_CODE == NAN_CODE, "values are NaN", "E4M3 numbers")

    def e8m0_scales(self, suffix: str, scales: Tensor) -> None:
        """No byte of the block scales is NaN."""
        codes = scales.view(torch.uint8)
        self._bytes(suffix, codes, codes == 0xFF, "block scales are NaN", "0x00 to 0xFE")

    def scale(self, suffix: str, value: Tensor) -> None:
        """All values are finite and above 0."""
        self._values(suffix, value, ~torch.isfinite(value) | (value <= 0), "finite and above 0")

    def scale_or_zero(self, suffix: str, value: Tensor) -> None:
        """All values are finite and not negative."""
        self._values(suffix, value, ~torch.isfinite(value) | (value < 0), "finite and not negative")

    def _bytes(self, suffix: str, codes: Tensor, bad: Tensor, problem: str, expected: str) -> None:
        if bad.any():
            found = f"{int(bad.sum())} bytes such as 0x{int(codes[bad][0]):02X}"
            raise self._error(problem, suffix, found, expected)

    def _values(self, suffix: str, value: Tensor, bad: Tensor, expected: str) -> None:
        if bad.any():
            raise self._error("the scale cannot be used", suffix, float(value[bad][0]), expected)

    def _error(self, problem: str, suffix: str, found: object, expected: object) -> HswqError:
        name = suffix if self.layer is None else f"{self.layer}.{suffix}"
        return HswqError(problem, file=self.file, tensor=name, found=found, expected=expected)
