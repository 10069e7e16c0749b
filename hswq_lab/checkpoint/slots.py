"""Slots: one for each name of a checkpoint; what it holds is known at once, its tensors on demand."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hswq_lab.checkpoint.kinds import INPUT_BASIS
from hswq_lab.checkpoint.readings import COMFY, Reading
from hswq_lab.errors import HswqError
from hswq_lab.formats import Fp8Weight, Int8Weight, Mxfp8Weight, Nvfp4Weight, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hswq_lab.checkpoint.source import Stored
    from hswq_lab.formats import Method

Value = Tensor | PackedWeight
TensorState = tuple[int, int, tuple[int, ...]]
UNPACKED = "16-bit"


@dataclass(frozen=True)
class Entry:
    """What a name holds, told from header and marker alone.

    Attributes:
        format: "16-bit" for any unpacked tensor, else e.g. "nvfp4", "int8_tensorwise", "float8_e4m3fn".
        shape: logical (N, K) of a packed weight, else the tensor's shape.
        dtype: of the stored weight or tensor.
        group: rotation group of the stored values, None where they are not rotated.
        nbytes: on disk, scales included, marker and bias not.
        calibrated: whether an input_scale is there.
        rank: rows of the input_basis, 0 without one.
        activation_scales: how block scales of activations are found while running.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int | None = None
    nbytes: int = 0
    calibrated: bool = False
    rank: int = 0
    activation_scales: Method = "rtn"

    @property
    def packed(self) -> bool:
        """Whether the value is a PackedWeight."""
        return self.format != UNPACKED


class Slot(ABC):
    """A value of a checkpoint that may not be in memory yet."""

    entry: Entry

    @abstractmethod
    def load(self) -> Value:
        """The value; raises HswqError where the stored bytes break a rule of their format."""

    def scales(self) -> dict[str, Tensor]:
        """The scales of a packed value by role, as in `PackedWeight.disk_tensors`; nothing for a tensor."""
        value = self.load()
        if not isinstance(value, PackedWeight):
            return {}
        return {role: part for role, part in value.disk_tensors().items() if role != "weight"}

    def stored_parts(self) -> tuple[PackedSlot, ...]:
        """The packed weights of a file that the value consists of, their rows in order; none for a tensor."""
        return ()

    def renamed(self, name: str) -> Slot:
        """The same value under another name."""
        return RenamedSlot(replace(self.entry, name=name), self)


@dataclass(frozen=True)
class RenamedSlot(Slot):
    """A slot whose file calls it differently."""

    entry: Entry
    inner: Slot

    def load(self) -> Value:
        """See `Slot.load`."""
        return self.inner.load()

    def scales(self) -> dict[str, Tensor]:
        """See `Slot.scales`."""
        return self.inner.scales()

    def stored_parts(self) -> tuple[PackedSlot, ...]:
        """See `Slot.stored_parts`."""
        return self.inner.stored_parts()


@dataclass(frozen=True)
class MemorySlot(Slot):
    """A value that is in memory, not copied: a network may compute with it, and whoever gave it still holds it.

    Attributes:
        taken: what torch tells of its tensors when it was taken over, see `_state`.
    """

    entry: Entry
    value: Value
    taken: tuple[TensorState, ...]

    def load(self) -> Value:
        """See `Slot.load`: an object of its own on the same memory.

        Raises:
            HswqError: the value is no longer what was taken over.
        """
        if _state(self.value) != self.taken:
            raise HswqError(
                "the value was changed in place after the checkpoint took it over, and nobody has the old one",
                tensor=self.entry.name,
                fix="change a copy, and make a checkpoint of it with with_values(); load this one again",
            )
        return replace(self.value) if isinstance(self.value, PackedWeight) else self.value.detach()  # type: ignore[type-var]

    def __reduce__(self) -> tuple[object, ...]:
        # A copy has memory of its own.
        return memory_slot, (self.entry.name, self.load())


def _state(value: Value) -> tuple[TensorState, ...]:
    """What tells that a value's tensors are what they were: how often each was changed in place, its memory and shape.

    torch counts no changes in inference mode, through `.data`, NumPy or other programs, and by some fused kernels.
    """
    tensors = value.disk_tensors().values() if isinstance(value, PackedWeight) else (value,)
    return tuple(
        (
            0 if tensor.is_inference() else tensor._version,  # noqa: SLF001 - torch's only way
            tensor.data_ptr() if tensor.layout == torch.strided else 0,
            tuple(tensor.shape),
        )
        for tensor in tensors
    )


def memory_slot(name: str, value: Value) -> MemorySlot:
    """A slot for a tensor or packed weight in memory."""
    if isinstance(value, PackedWeight):
        parts = value.disk_tensors()
        calibrated = "input_scale" in parts
        shape, dtype = tuple(value.shape), parts["weight"].dtype
        entry = Entry(name, value.format, shape, dtype, value.group, value.nbytes, calibrated)
        if isinstance(value, Nvfp4Weight):
            entry = replace(entry, rank=value.rank, activation_scales=value.activation_scales)
    else:
        entry = Entry(name, UNPACKED, tuple(value.shape), value.dtype, None, value.nbytes)
    return MemorySlot(entry, value, _state(value))


@dataclass(frozen=True)
class PlainSlot(Slot):
    """A tensor in a file, taken as it is."""

    entry: Entry
    stored: Stored

    def load(self) -> Tensor:
        """See `Slot.load`."""
        return self.stored.read()


def plain_slot(name: str, stored: Stored) -> PlainSlot:
    """A slot for a tensor in a file."""
    return PlainSlot(Entry(name, UNPACKED, stored.shape, stored.dtype, None, stored.nbytes), stored)


@dataclass(frozen=True)
class PackedSlot(Slot):
    """A packed weight in a file.

    Attributes:
        parts: stored tensors by role: "weight", "weight_scale", "weight_scale_2", "input_scale",
            "input_basis".
        reading: how its producer laid out NVFP4.
        channels: [K], what x is multiplied by in front of this weight (AWQ), None if by nothing.
    """

    entry: Entry
    parts: Mapping[str, Stored]
    reading: Reading = COMFY
    channels: Stored | None = None

    @property
    def path(self) -> Path:
        """The file that holds the weight."""
        return self.parts["weight"].path

    def load(self) -> PackedWeight:
        """See `Slot.load`."""
        try:
            weight = self._build()
        except HswqError as error:
            if error.file is not None:
                raise
            raise located(error, self.path, self.entry.name) from error
        weight.validate(tensor=self.entry.name.removesuffix(".weight"), file=self.path)
        return weight

    def stored_parts(self) -> tuple[PackedSlot, ...]:
        """See `Slot.stored_parts`."""
        return (self,)

    def scales(self) -> dict[str, Tensor]:
        """See `Slot.scales`; the weight itself is not read."""
        n, parts = self.entry.shape[0], self.parts
        scales: dict[str, Tensor] = {}
        for role in ("weight_scale_2", "input_scale"):
            if role in parts:
                scales[role] = self.reading.tensor_scale(scalar(parts[role]))
        stored = parts.get("weight_scale")
        if stored is None:
            scales["weight_scale"] = torch.ones(())
        elif self.entry.format == "nvfp4":
            scales["weight_scale"] = self.reading.block_scales(block_scales(stored), *parts["weight"].shape)
        elif self.entry.format == "mxfp8":
            scales["weight_scale"] = stored.read().view(torch.float8_e8m0fnu)
        elif math.prod(stored.shape) == 1 and stored.shape != (n, 1):
            scales["weight_scale"] = scalar(stored)
        else:
            scales["weight_scale"] = stored.read().float().reshape(n, 1)
        return scales

    def _build(self) -> PackedWeight:
        shape, group = (self.entry.shape[0], self.entry.shape[1]), self.entry.group
        weight, scales = self.parts["weight"].read(), self.scales()
        main, inputs = scales["weight_scale"], scales.get("input_scale")
        match self.entry.format:
            case "nvfp4":
                codes = self.reading.codes(weight)
                basis = self.parts[INPUT_BASIS].read() if INPUT_BASIS in self.parts else None
                chosen = self.entry.activation_scales
                return Nvfp4Weight(codes, main, scales["weight_scale_2"], shape, group, inputs, basis, chosen)
            case "int8_tensorwise":
                return Int8Weight(weight, main, shape, group)
            case "float8_e4m3fn" | "float8_e5m2":
                return Fp8Weight(weight, main, shape, inputs)
            case "mxfp8":
                return Mxfp8Weight(weight, main, shape)
            case other:
                raise HswqError("no reader for this format", tensor=self.entry.name, found=other)


def located(error: HswqError, file: Path | None, tensor: str) -> HswqError:
    """The same error, naming the file, and the tensor if it names none."""
    return HswqError(
        error.problem,
        file=file,
        tensor=error.tensor or tensor,
        found=error.found,
        expected=error.expected,
        fix=error.fix,
    )


def scalar(stored: Stored) -> Tensor:
    """A stored scale as an fp32 scalar, whatever float dtype or one-element shape it has."""
    return stored.read().float().reshape(())


def block_scales(stored: Stored, rows: int | None = None) -> Tensor:
    """Stored block scales (or their first rows) as float8_e4m3fn: from bytes or a wider float, too.

    Raises:
        HswqError: wider floats that are no E4M3 numbers, so that a cast would change them.
    """
    scales = stored.read() if rows is None else stored.read_rows(rows)
    if scales.dtype == torch.uint8:
        return scales.view(torch.float8_e4m3fn)
    if scales.dtype == torch.float8_e4m3fn:
        return scales
    narrow = scales.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    if not torch.equal(narrow.float(), scales.float()):
        raise HswqError(
            "block scales are stored in a wide dtype and are no E4M3 numbers",
            tensor=stored.info.name,
            found=stored.dtype,
        )
    return narrow
