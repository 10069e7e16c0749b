"""Packed weights as values: codes, scales, the logical shape, and the basis they are stored in."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hswq_lab.formats._checks import dtype_name
from hswq_lab.formats._packed_checks import Checks, Where
from hswq_lab.formats._rows import ceil_to
from hswq_lab.formats.block_scales import Method
from hswq_lab.formats.mxfp8 import MX_BLOCK
from hswq_lab.formats.nvfp4 import BLOCK
from hswq_lab.formats.swizzle import swizzled_shape


class PackedWeight(ABC):
    """A weight [N, K] in a number format. Frozen: a change is a new value. `validate` checks it.

    Attributes:
        shape: the logical (N, K), without padding.
        group: the rotation group of the STORED values along K, None if they are not rotated. No other place
            says so.
    """

    shape: tuple[int, int]
    group: int | None

    @property
    @abstractmethod
    def format(self) -> str:
        """Its name in files: nvfp4, int8_tensorwise, float8_e4m3fn, float8_e5m2 or mxfp8."""

    @abstractmethod
    def disk_tensors(self) -> dict[str, Tensor]:
        """The layer's tensors in a file by the suffix of their names, "weight" first; no marker, no bias."""

    @abstractmethod
    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        """Refuses wrong shapes, dtypes and scale values.

        Args:
            tensor: the layer's name, for the message.
            file: the file it came from, for the message.

        Raises:
            HswqError: with the tensor's full name, what was found and what was expected.
        """

    def marker(self) -> dict[str, Any]:
        """The JSON content of the layer's ``comfy_quant`` tensor."""
        rotation = {} if self.group is None else {"convrot": True, "convrot_groupsize": self.group}
        return {"format": self.format, **rotation}

    def to(self, device: torch.device | str) -> Self:
        """The same value on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]  # every kind is a dataclass

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.disk_tensors()["weight"].device

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors on disk: padding counts, marker and bias do not."""
        return sum(value.nbytes for value in self.disk_tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk for each of the N * K logical weights."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def same_bits(self, other: PackedWeight) -> bool:
        """Whether the other is the same value: kind, shape, basis and every byte. Devices may differ."""
        mine, theirs = self.disk_tensors(), other.disk_tensors()
        return (
            self.format == other.format
            and tuple(self.shape) == tuple(other.shape)
            and self.group == other.group
            and mine.keys() == theirs.keys()
            and all(_same_bytes(value, theirs[name]) for name, value in mine.items())
        )


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(PackedWeight):
    """NVFP4, rotated or not.

    Attributes:
        codes: uint8 [ceil16(N), ceil16(K)/2], the even column in the high nibble.
        scales: float8_e4m3fn, swizzled, [ceil128(N), ceil4(ceil16(K)/16)].
        scale: fp32 scalar, the tensor scale, a multiplier.
        shape: the logical (N, K).
        group: rotation group of the stored values, or None.
        input_scale: fp32 scalar, the static tensor scale of the (rotated) activations; None before
            calibration.
        basis: float8_e4m3fn [r, K] with rows of mean square 1, unrotated, or None. The part of an input in
            its span stays out of the activations' rounding (W4A4 only); the weight itself does not depend on
            it, so whoever does not know it runs the plain layer.
        activation_scales: how the block scales of activations are found while running (W4A4 only): "rtn", as
            everybody does, "four_six" or "sweep".
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group: int | None
    input_scale: Tensor | None = None
    basis: Tensor | None = None
    activation_scales: Method = "rtn"

    format: ClassVar[str] = "nvfp4"

    def disk_tensors(self) -> dict[str, Tensor]:
        """See `PackedWeight.disk_tensors`."""
        return _present(
            weight=self.codes,
            weight_scale=self.scales,
            weight_scale_2=self.scale,
            input_scale=self.input_scale,
            input_basis=self.basis,
        )

    def marker(self) -> dict[str, Any]:
        """See `PackedWeight.marker`; with ``orig_shape`` where the codes are padded."""
        chosen = {} if self.activation_scales == "rtn" else {"activation_scales": self.activation_scales}
        return super().marker() | _orig_shape(self.shape, BLOCK) | chosen

    def with_input_scale(self, input_scale: Tensor | None) -> Nvfp4Weight:
        """The same weight with another calibration; None: with none."""
        return dataclasses.replace(self, input_scale=input_scale)

    def with_activations_of(self, other: Nvfp4Weight) -> Nvfp4Weight:
        """The same weight with all that another says about the activations."""
        return dataclasses.replace(
            self,
            input_scale=other.input_scale,
            basis=other.basis,
            activation_scales=other.activation_scales,
        )

    @property
    def rank(self) -> int:
        """Rows of the basis; 0 without one."""
        return 0 if self.basis is None else self.basis.shape[0]

    def same_bits(self, other: PackedWeight) -> bool:
        """See `PackedWeight.same_bits`."""
        return super().same_bits(other) and self.marker() == other.marker()

    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        """See `PackedWeight.validate`. The tensor scale may be 0: that of a weight of zeros is."""
        checks = Checks(tensor, file)
        checks.shape_and_group(self.shape, self.group)
        rows, cols = (ceil_to(n, BLOCK) for n in self.shape)
        checks.layout("weight", self.codes, torch.uint8, (rows, cols // 2))
        checks.layout("weight_scale", self.scales, torch.float8_e4m3fn, swizzled_shape(rows, cols // BLOCK))
        checks.e4m3_scales("weight_scale", self.scales)
        checks.layout("weight_scale_2", self.scale, torch.float32, ())
        checks.scale_or_zero("weight_scale_2", self.scale)
        if self.input_scale is not None:
            checks.layout("input_scale", self.input_scale, torch.float32, ())
            checks.scale("input_scale", self.input_scale)
        if self.basis is not None:
            checks.layout("input_basis", self.basis, torch.float8_e4m3fn, (self.rank, self.shape[1]))
            checks.e4m3_values("input_basis", self.basis)


@dataclass(frozen=True, eq=False)
class Int8Weight(PackedWeight):
    """INT8 with a scale a row, rotated or not; or with one scale in all, not rotated, as some files have it.

    Attributes:
        q: int8 [N, K].
        scale: fp32 [N, 1] or scalar.
        shape: (N, K).
        group: rotation group of the stored values, or None.
    """

    q: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group: int | None

    format: ClassVar[str] = "int8_tensorwise"

    def disk_tensors(self) -> dict[str, Tensor]:
        """See `PackedWeight.disk_tensors`."""
        return {"weight": self.q, "weight_scale": self.scale}

    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        """See `PackedWeight.validate`. A rotated weight has a scale a row."""
        checks = Checks(tensor, file)
        checks.shape_and_group(self.shape, self.group)
        checks.layout("weight", self.q, torch.int8, self.shape)
        per_row = (self.shape[0], 1)
        shapes = [per_row, ()] if self.group is None else [per_row]
        checks.layout("weight_scale", self.scale, torch.float32, *shapes)
        checks.scale("weight_scale", self.scale)


@dataclass(frozen=True, eq=False)
class Fp8Weight(PackedWeight):
    """FP8 with one scale, never rotated.

    Attributes:
        data: float8_e4m3fn or float8_e5m2 [N, K].
        scale: fp32 scalar.
        shape: (N, K).
        input_scale: fp32 scalar or None, as some files have it.
    """

    data: Tensor
    scale: Tensor
    shape: tuple[int, int]
    input_scale: Tensor | None = None
    group: None = dataclasses.field(default=None, init=False)

    @property
    def format(self) -> str:
        """See `PackedWeight.format`."""
        return dtype_name(self.data.dtype)

    def disk_tensors(self) -> dict[str, Tensor]:
        """See `PackedWeight.disk_tensors`."""
        return _present(weight=self.data, weight_scale=self.scale, input_scale=self.input_scale)

    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        """See `PackedWeight.validate`."""
        checks = Checks(tensor, file)
        checks.shape_and_group(self.shape, self.group)
        e5m2 = self.data.dtype == torch.float8_e5m2
        checks.layout("weight", self.data, torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn, self.shape)
        for suffix, value in self.disk_tensors().items():
            if suffix != "weight":
                checks.layout(suffix, value, torch.float32, ())
                checks.scale(suffix, value)


@dataclass(frozen=True, eq=False)
class Mxfp8Weight(PackedWeight):
    """MXFP8, never rotated.

    Attributes:
        data: float8_e4m3fn [ceil32(N), ceil32(K)].
        scales: float8_e8m0fnu, swizzled, [ceil128(N), ceil4(ceil32(K)/32)].
        shape: the logical (N, K).
    """

    data: Tensor
    scales: Tensor
    shape: tuple[int, int]
    group: None = dataclasses.field(default=None, init=False)

    format: ClassVar[str] = "mxfp8"

    def disk_tensors(self) -> dict[str, Tensor]:
        """See `PackedWeight.disk_tensors`."""
        return {"weight": self.data, "weight_scale": self.scales}

    def marker(self) -> dict[str, Any]:
        """See `PackedWeight.marker`; with ``orig_shape`` where the codes are padded."""
        return super().marker() | _orig_shape(self.shape, MX_BLOCK)

    def validate(self, *, tensor: str | None = None, file: Where = None) -> None:
        """See `PackedWeight.validate`."""
        checks = Checks(tensor, file)
        checks.shape_and_group(self.shape, self.group)
        rows, cols = (ceil_to(n, MX_BLOCK) for n in self.shape)
        checks.layout("weight", self.data, torch.float8_e4m3fn, (rows, cols))
        shape = swizzled_shape(rows, cols // MX_BLOCK)
        checks.layout("weight_scale", self.scales, torch.float8_e8m0fnu, shape)
        checks.e8m0_scales("weight_scale", self.scales)


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {suffix: value for suffix, value in tensors.items() if value is not None}


def _orig_shape(shape: tuple[int, int], multiple: int) -> dict[str, Any]:
    return {"orig_shape": list(shape)} if any(n % multiple for n in shape) else {}


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bytes_a, bytes_b = (value.contiguous().reshape(-1).view(torch.uint8) for value in (a, b))
    return torch.equal(bytes_a, bytes_b.to(bytes_a.device))
