"""AWQ's pre_quant_scale: input channels scaled before the weight was packed, folded back into the weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hswq_lab import packing
from hswq_lab.checkpoint.kinds import FLOATS
from hswq_lab.checkpoint.slots import PackedSlot, Slot
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from hswq_lab.checkpoint.slots import Entry
    from hswq_lab.checkpoint.source import Stored
    from hswq_lab.formats import PackedWeight


@dataclass(frozen=True)
class FoldedSlot(Slot):
    """A packed weight W whose layer computes (x · scale) Wᵀ; the value is W · diag(scale), packed again.

    No format of ours has such a scale of channels, so the weight is dequantised, multiplied and requantised,
    which adds a second rounding. Its input_scale belonged to x · scale and is dropped.

    Attributes:
        inner: the weight as stored.
        scale: [K], stored.
    """

    entry: Entry
    inner: PackedSlot
    scale: Stored

    def load(self) -> PackedWeight:
        """See `Slot.load`."""
        packed = self.inner.load()
        scale = self.scale.read().float().reshape(1, -1)
        if not bool(torch.isfinite(scale).all()):
            raise HswqError(
                "pre_quant_scale is not finite", file=self.scale.path, tensor=self.scale.info.name
            )
        return packing.pack_weight(
            packing.dequantize(packed) * scale, packed.format, packed.group, "sweep", name=self.entry.name
        )

    def stored_parts(self) -> tuple[PackedSlot, ...]:
        """See `Slot.stored_parts`."""
        return (replace(self.inner, channels=self.scale),)


def folded(inner: PackedSlot, scale: Stored) -> FoldedSlot:
    """The slot of a weight with a pre_quant_scale.

    Raises:
        HswqError: the scale does not have one value for each input channel.
    """
    k = inner.entry.shape[1]
    if scale.dtype not in FLOATS or math.prod(scale.shape) != k:
        raise HswqError(
            "pre_quant_scale does not fit the weight",
            tensor=scale.info.name,
            found=f"{scale.info.dtype} {list(scale.shape)}",
            expected=f"{k} floats",
        )
    return FoldedSlot(replace(inner.entry, calibrated=False), inner, scale)
