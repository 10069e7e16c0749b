"""Split weights that a native layout holds as one: rows joined, packed ones with a common tensor scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hswq_lab import ops
from hswq_lab.checkpoint.slots import Entry, Slot, scalar
from hswq_lab.errors import HswqError
from hswq_lab.formats import Fp8Weight, Int8Weight, Nvfp4Weight, dequantize_fp8, quantize_fp8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hswq_lab.checkpoint.slots import PackedSlot, Value

_TENSOR_SCALES = {"nvfp4": "weight_scale_2", "float8_e4m3fn": "weight_scale", "float8_e5m2": "weight_scale"}
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

    @property
    def keeps_bits(self) -> bool:
        """Whether no part is rounded again: rows have scales of their own, or all parts the same tensor scale."""
        if self.entry.format not in _TENSOR_SCALES:
            return True
        stored = self.stored_parts()
        scales = [part.parts.get(_TENSOR_SCALES[self.entry.format]) for part in stored]
        told = {1.0 if scale is None else float(scalar(scale)) for scale in scales}
        return len(told) == 1 and all(part.channels is None for part in stored)


def fused_slot(name: str, parts: Sequence[Slot]) -> FusedSlot:
    """The slot of a parameter from those of its parts.

    Raises:
        HswqError: the parts differ in format, rotation, dtype or width, or in what they do with their activations.
    """
    entries = [part.entry for part in parts]
    first = entries[0]
    for entry in entries:
        if _kind(entry) != _kind(first) or not entry.shape:
            raise HswqError(
                "weights that the native layout holds as one are stored differently and cannot be joined",
                tensor=name,
                found=f"{first.name}: {_describe(first)}; {entry.name}: {_describe(entry)}",
                fix="pack the 16-bit source again",
            )
    rows = sum(entry.shape[0] for entry in entries)
    joined = replace(
        first,
        name=name,
        shape=(rows, *first.shape[1:]),
        nbytes=sum(entry.nbytes for entry in entries),
        calibrated=all(entry.calibrated for entry in entries),
    )
    return FusedSlot(joined, tuple(parts))


def _kind(entry: Entry) -> tuple[object, ...]:
    """What rows must share that are to lie in one weight."""
    width = entry.shape[1:]
    return entry.format, entry.group, entry.dtype, width, entry.rank, entry.activation_scales


def _describe(entry: Entry) -> str:
    words = f"{entry.format} {str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"
    words += "" if entry.group is None else f", rotated by {entry.group}"
    words += f", input basis of rank {entry.rank}" if entry.rank else ""
    return words + ("" if entry.activation_scales == "rtn" else f", activations by {entry.activation_scales}")


def fuse(parts: Sequence[Value], name: str) -> Value:
    """Join the rows of values of one kind.

    INT8 keeps every byte (its scales are per row). NVFP4 and FP8 have one scale a tensor: the largest becomes
    the common one, and where a part's differs, its values are quantised again from what the part stood for,
    with the block-scale sweep for NVFP4; the others keep every byte. Nothing is rotated in between. All parts see
    the same input: the largest input_scale clips in none of them, and their input basis must be the same.

    Raises:
        HswqError: values of different kinds, or of different input bases.
    """
    if tensors := _all(parts, Tensor):
        return torch.cat(tensors)
    if nvfp4 := _all(parts, Nvfp4Weight):
        return _fuse_nvfp4(nvfp4, name)
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


def _fuse_nvfp4(parts: list[Nvfp4Weight], name: str) -> Nvfp4Weight:
    first = parts[0]
    for part in parts:
        bases = [each.basis.float() for each in (first, part) if each.basis is not None]
        if bases and not torch.equal(bases[0], bases[-1]):
            raise HswqError(
                "weights that the native layout holds as one have different input bases and cannot be joined",
                tensor=name,
                fix="pack the 16-bit source again",
            )
    common = torch.stack([part.scale for part in parts]).amax()
    codes, scales = zip(*(_rows_with_scale(part, common) for part in parts), strict=True)
    joined = torch.cat(codes)
    return replace(
        first,
        codes=pad(joined, (0, 0, 0, -len(joined) % 16)),
        scales=ops.swizzle(torch.cat(scales)).view(torch.float8_e4m3fn),
        scale=common,
        shape=(len(joined), first.shape[1]),
        input_scale=_common_input_scale(parts),
    )


def _rows_with_scale(part: Nvfp4Weight, common: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K/2] and block scales [N, K/16] as bytes, without padded rows, under another tensor scale."""
    n, codes, scales = part.shape[0], part.codes, part.scales
    if not torch.equal(part.scale, common):
        # Values as stored, rotated or not: the group is not undone.
        values = ops.dequantize_nvfp4(codes, scales, part.scale, part.shape, torch.float32)
        codes, scales = ops.quantize_nvfp4(values, common, "sweep")
    return codes[:n], ops.unswizzle(scales, n, codes.shape[1] // 8).view(torch.uint8)


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
