"""Split weights that a native layout holds as one: rows joined, packed ones with a common tensor scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from hswq_lab import ops
from hswq_lab.checkpoint.slots import Entry, Slot
from hswq_lab.errors import HswqError
from hswq_lab.formats import Fp8Weight, Int8Weight, Nvfp4Weight, dequantize_fp8, quantize_fp8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hswq_lab.checkpoint.slots import PackedSlot, Value

Part = TypeVar("Part", Tensor, Nvfp4Weight, Int8Weight, Fp8Weight)


@dataclass(frozen=True)
class FusedSlot(Slot):
    """One parameter that a file stores in parts, rows one after the other."""

    entry: Entry
    parts: tuple[Slot, ...]

    def load(self) -> Value:
        """See `Slot.load`."""
        return fuse([part.load() for part in self.parts], self.entry.name)

    def stored_parts(self) -> tuple[PackedSlot, ...]:
        """See `Slot.stored_parts`."""
        return tuple(stored for part in self.parts for stored in part.stored_parts())


def fused_slot(name: str, parts: Sequence[Slot]) -> FusedSlot:
    """The slot of a parameter from those of its parts.

    Raises:
        HswqError: the parts differ in format, rotation, dtype or width.
    """
    entries = [part.entry for part in parts]
    first = entries[0]
    for entry in entries:
        mine = (first.format, first.group, first.dtype, first.shape[1:])
        theirs = (entry.format, entry.group, entry.dtype, entry.shape[1:])
        if mine != theirs or not entry.shape:
            raise HswqError(
                "weights that the native layout holds as one are stored differently and cannot be joined",
                tensor=name,
                found=f"{first.name}: {_describe(first)}; {entry.name}: {_describe(entry)}",
                fix="pack the 16-bit source again",
            )
    rows = sum(entry.shape[0] for entry in entries)
    joined = Entry(
        name,
        first.format,
        (rows, *first.shape[1:]),
        first.dtype,
        first.group,
        sum(entry.nbytes for entry in entries),
        all(entry.calibrated for entry in entries),
    )
    return FusedSlot(joined, tuple(parts))


def _describe(entry: Entry) -> str:
    rotation = "" if entry.group is None else f", rotated by {entry.group}"
    return f"{entry.format} {str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}{rotation}"


def fuse(parts: Sequence[Value], name: str) -> Value:
    """Join the rows of values of one kind.

    INT8 keeps every byte (its scales are per row). NVFP4 and FP8 have one scale a tensor: the largest becomes
    the common one, and where a part's differs, its values are quantised again from what the part stood for,
    with the block-scale sweep for NVFP4. Nothing is rotated in between.

    Raises:
        HswqError: values of different kinds.
    """
    if tensors := _all(parts, Tensor):
        return torch.cat(tensors)
    if nvfp4 := _all(parts, Nvfp4Weight):
        return _fuse_nvfp4(nvfp4)
    if int8 := _all(parts, Int8Weight):
        scales = [part.scale.expand(part.shape[0], 1) for part in int8]
        shape = (sum(part.shape[0] for part in int8), int8[0].shape[1])
        return Int8Weight(torch.cat([part.q for part in int8]), torch.cat(scales), shape, int8[0].group)
    if fp8 := _all(parts, Fp8Weight):
        return _fuse_fp8(fp8)
    raise HswqError(
        "weights of these kinds cannot be joined", tensor=name, found=[type(p).__name__ for p in parts]
    )


def _all(parts: Sequence[Value], kind: type[Part]) -> list[Part]:
    """The parts, if all are of one kind; else nothing."""
    chosen = [part for part in parts if isinstance(part, kind)]
    return chosen if len(chosen) == len(parts) else []


def _fuse_nvfp4(parts: list[Nvfp4Weight]) -> Nvfp4Weight:
    common = torch.stack([part.scale for part in parts]).amax()
    # Values as stored, rotated or not: the group is not undone.
    values = [
        ops.dequantize_nvfp4(part.codes, part.scales, part.scale, part.shape, torch.float32) for part in parts
    ]
    joined = torch.cat(values)
    codes, scales = ops.quantize_nvfp4(joined, common, "sweep")
    inputs = _common_input_scale(parts)
    return Nvfp4Weight(codes, scales, common, (joined.shape[0], joined.shape[1]), parts[0].group, inputs)


def _fuse_fp8(parts: list[Fp8Weight]) -> Fp8Weight:
    common = torch.stack([part.scale for part in parts]).amax()
    dtype = parts[0].data.dtype
    data = [
        part.data
        if torch.equal(part.scale, common)
        else quantize_fp8(dequantize_fp8(part.data, part.scale), dtype, common)[0]
        for part in parts
    ]
    rows = sum(part.shape[0] for part in parts)
    return Fp8Weight(torch.cat(data), common, (rows, parts[0].shape[1]), _common_input_scale(parts))


def _common_input_scale(parts: Sequence[Nvfp4Weight] | Sequence[Fp8Weight]) -> Tensor | None:
    """The largest input_scale (all parts see the same input), None unless every part has one."""
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    return torch.stack(scales).amax() if len(scales) == len(parts) else None
