"""Packed weights as values: codes, scales, logical shape and the basis they are stored in."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import ceil_to
from hswq_lab.formats.e4m3 import NAN_CODE
from hswq_lab.formats.rotation import GROUPS
from hswq_lab.formats.swizzle import swizzled_shape

Where = str | os.PathLike[str] | None


class PackedWeight(ABC):
    """A weight [N, K] in a number format. Frozen: a change is a new value.

    Attributes:
        shape: the logical (N, K), without padding.
        group: the rotation group of the STORED values along K; None: they are not rotated. There is no other place that says so.
    """

    shape: tuple[int, int]
    group: int | None

    @property
    @abstractmethod
    def format(self) -> str:
        """The format's name in files: nvfp4, int8_tensorwise, float8_e4m3fn, float8_e5m2 or mxfp8."""

    @abstractmethod
    def disk_tensors(self) -> dict[str, Tensor]:
        """The tensors of the layer in a file, by the suffix of their names ("weight", "weight_scale", ...); no marker, no bias."""

    @abstractmethod
    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        """Refuses wrong shapes, dtypes and scale values.

        Args:
            tensor: the layer's name, for the message.
            file: the file it came from, for the message.

        Raises:
            HswqError: naming the tensor, what was found and what was expected.
        """

    def marker(self) -> dict[str, Any]:
        """The JSON content of the layer's ``comfy_quant`` tensor."""
        marker: dict[str, Any] = {"format": self.format}
        if self.group is not None:
            marker |= {"convrot": True, "convrot_groupsize": self.group}
        return marker

    def to(self, device: torch.device | str) -> Self:
        """The same value on another device."""
        moved = {f.name: value.to(device) for f, value in self._fields() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return next(iter(self.disk_tensors().values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk, padding included, marker and bias not."""
        return sum(t.nbytes for t in self.disk_tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk for each of the N * K logical weights."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def same_bits(self, other: PackedWeight) -> bool:
        """Whether the other is the same value: kind, shape, basis and every byte."""
        if type(self) is not type(other) or self.format != other.format:
            return False
        if tuple(self.shape) != tuple(other.shape) or self.group != other.group:
            return False
        mine, theirs = self.disk_tensors(), other.disk_tensors()
        return mine.keys() == theirs.keys() and all(_equal_bytes(mine[name], theirs[name]) for name in mine)

    def _fields(self) -> list[tuple[dataclasses.Field[Any], Any]]:
        return [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(PackedWeight):
    """NVFP4.

    Attributes:
        codes: uint8 [ceil16(N), ceil16(K)/2], the even column in the high nibble.
        scales: float8_e4m3fn, swizzled, [ceil128(N), ceil4(ceil16(K)/16)].
        scale: fp32 scalar, the tensor scale, a multiplier.
        shape: logical (N, K).
        group: rotation group of the stored values or None.
        input_scale: fp32 scalar, the static scale of the (rotated) activations; None before calibration.
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group: int | None
    input_scale: Tensor | None = None

    format: ClassVar[str] = "nvfp4"  # type: ignore[misc]

    def disk_tensors(self) -> dict[str, Tensor]:
        tensors = {"weight": self.codes, "weight_scale": self.scales, "weight_scale_2": self.scale}
        return tensors if self.input_scale is None else tensors | {"input_scale": self.input_scale}

    def marker(self) -> dict[str, Any]:
        padded = any(n % 16 for n in self.shape)
        return super().marker() | ({"orig_shape": list(self.shape)} if padded else {})

    def with_input_scale(self, input_scale: Tensor | None) -> Nvfp4Weight:
        """The same weight with another calibration (None: with none)."""
        return dataclasses.replace(self, input_scale=input_scale)

    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        check = _Check(tensor, file)
        check.basis(self.shape, self.group)
        rows, cols = (ceil_to(n, 16) for n in self.shape)
        check.layout("weight", self.codes, torch.uint8, (rows, cols // 2))
        check.layout("weight_scale", self.scales, torch.float8_e4m3fn, swizzled_shape(rows, cols // 16))
        check.block_scales("weight_scale", self.scales)
        check.layout("weight_scale_2", self.scale, torch.float32, ())
        # A tensor of zeros has scale 0; its block scales must be zero too, or the scale has been lost.
        check.scale("weight_scale_2", self.scale, zero_allowed=not bool(self.scales.view(torch.uint8).any()))
        if self.input_scale is not None:
            check.layout("input_scale", self.input_scale, torch.float32, ())
            check.scale("input_scale", self.input_scale)


@dataclass(frozen=True, eq=False)
class Int8Weight(PackedWeight):
    """INT8, a scale a row (or one in all, as some files have it).

    Attributes:
        q: int8 [N, K].
        scale: fp32 [N, 1] or scalar.
        shape: (N, K).
        group: rotation group of the stored values or None.
    """

    q: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group: int | None

    format: ClassVar[str] = "int8_tensorwise"  # type: ignore[misc]

    def disk_tensors(self) -> dict[str, Tensor]:
        return {"weight": self.q, "weight_scale": self.scale}

    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        check = _Check(tensor, file)
        check.basis(self.shape, self.group)
        check.layout("weight", self.q, torch.int8, self.shape)
        # A rotated weight is quantised row by row: one scale for all would be a sign of a wrong reading.
        shapes = ((self.shape[0], 1),) if self.group is not None else ((self.shape[0], 1), ())
        check.layout("weight_scale", self.scale, torch.float32, *shapes)
        check.scale("weight_scale", self.scale)


@dataclass(frozen=True, eq=False)
class Fp8Weight(PackedWeight):
    """FP8 with one scale; never rotated.

    Attributes:
        data: float8_e4m3fn or float8_e5m2 [N, K].
        scale: fp32 scalar.
        shape: (N, K).
        input_scale: fp32 scalar or None.
    """

    data: Tensor
    scale: Tensor
    shape: tuple[int, int]
    input_scale: Tensor | None = None

    group: ClassVar[int | None] = None  # type: ignore[misc]

    @property
    def format(self) -> str:
        return str(self.data.dtype).removeprefix("torch.")

    def disk_tensors(self) -> dict[str, Tensor]:
        tensors = {"weight": self.data, "weight_scale": self.scale}
        return tensors if self.input_scale is None else tensors | {"input_scale": self.input_scale}

    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        check = _Check(tensor, file)
        check.basis(self.shape, None)
        dtype = self.data.dtype if self.data.dtype == torch.float8_e5m2 else torch.float8_e4m3fn
        check.layout("weight", self.data, dtype, self.shape)
        for name, value in (("weight_scale", self.scale), ("input_scale", self.input_scale)):
            if value is not None:
                check.layout(name, value, torch.float32, ())
                check.scale(name, value)


class _Check:
    """The single checks of `validate`, with the place they are made at."""

    def __init__(self, tensor: str | None, file: Where) -> None:
        self._layer, self._file = tensor, file

    def _error(self, problem: str, name: str, found: object, expected: object) -> HswqError:
        tensor = name if self._layer is None else f"{self._layer}.{name}"
        return HswqError(problem, file=self._file, tensor=tensor, found=found, expected=expected)

    def basis(self, shape: tuple[int, int], group: int | None) -> None:
        if len(shape) != 2 or min(shape) < 1:
            raise self._error("a packed weight is a matrix", "weight", list(shape), "[N, K], both at least 1")
        if group is not None and (group not in GROUPS or shape[1] % group):
            raise self._error(
                "the rotation group does not divide K",
                "weight",
                group,
                f"one of {GROUPS} that divides {shape[1]}",
            )

    def layout(self, name: str, value: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        if value.dtype != dtype or tuple(value.shape) not in {tuple(shape) for shape in shapes}:
            expected = " or ".join(f"{_name(dtype)} {list(shape)}" for shape in shapes)
            raise self._error(
                "wrong shape or dtype", name, f"{_name(value.dtype)} {list(value.shape)}", expected
            )

    def block_scales(self, name: str, scales: Tensor) -> None:
        codes = scales.view(torch.uint8)
        for what, bad in (("NaN", (codes & NAN_CODE) == NAN_CODE), ("negative", codes > NAN_CODE)):
            if bad.any():
                byte = int(codes[bad][0])
                raise self._error(
                    f"block scales are {what}",
                    name,
                    f"{int(bad.sum())} bytes such as 0x{byte:02X}",
                    "0x00 to 0x7E",
                )

    def scale(self, name: str, value: Tensor, zero_allowed: bool = False) -> None:
        bad = ~torch.isfinite(value) | (value < 0) | ((value == 0) & (not zero_allowed))
        if bad.any():
            expected = "finite and above 0" if not zero_allowed else "finite, not negative"
            raise self._error("a scale cannot be used", name, float(value[bad][0]), expected)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _equal_bytes(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bytes_a, bytes_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(bytes_a, bytes_b.to(bytes_a.device)))
