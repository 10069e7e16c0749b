"""What is added to one weight: put into it in one pass where it is packed, and the sums that tell what arrived."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from hswq_lab import ops, packing
from hswq_lab._backends import backend_for
from hswq_lab.formats import Int8Weight, Nvfp4Weight, PackedWeight
from hswq_lab.lora.rounding import round_stochastic
from hswq_lab.lora.rows import keep_rows
from hswq_lab.lora.targets import unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

Weight: TypeAlias = Tensor | PackedWeight
_NATIVE = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 512  # rows that are worked on at a time where the kernels do not; on a card all at once


@dataclass(frozen=True, eq=False)
class Change:
    """ΔW [N, K], fp32, unrotated.

    Attributes:
        left: [N, R], or the whole of ΔW [N, K] where there are no factors.
        down: [R, K]; ΔW = left · down. None without factors.
    """

    left: Tensor
    down: Tensor | None = None

    @property
    def touched(self) -> Tensor:
        """Rows that are changed, bool [N]; the others keep their codes bit for bit."""
        if self.left.shape[1] == 0:
            return torch.zeros(self.left.shape[0], dtype=torch.bool, device=self.left.device)
        # Two reductions are several times faster than a mask.
        return (self.left.amax(dim=1) != 0) | (self.left.amin(dim=1) != 0)

    def any(self) -> bool:
        """False where no row can be changed."""
        return self.left.shape[1] > 0 if self.down is not None else bool(self.left.any())

    def added_to(self, weight: Tensor) -> Tensor:
        """W + ΔW, fp32 [N, K], for a weight in fp32."""
        return weight + self.left if self.down is None else torch.addmm(weight, self.left, self.down)

    @cached_property  # where the kernels do not work, the bake and its evidence both need it
    def dense(self) -> Tensor:
        """ΔW; each product is rounded and then added, in the order of the ranks, as the kernels do."""
        if self.down is None:
            return self.left
        total = torch.zeros(self.left.shape[0], self.down.shape[1], device=self.left.device)
        for rows in _chunks(total):
            for rank, row in enumerate(self.down):
                total[rows] += self.left[rows, rank, None] * row
        return total


def bake(value: Weight, change: Change, name: str) -> Weight:
    """The weight with the change in it: its own scales, stochastically rounded with the layer's seed.

    By definition `packing.requantize` of the unrotated values plus ΔW, with untouched rows kept; on a CPU
    NVFP4 and INT8 weights go through it in one pass that holds a few rows in fp32.

    Stochastically for INT8 too, although its step is small: to nearest, a delta of 0.3 % of ‖W‖ keeps .002 of
    itself, one of 1 % .78, and only from 2 % on .997 (measured; stochastically 1.00 at every size). The price
    is an error to the source of 1.35, 1.68 and 1.73 times the pack's, where nearest would have 1.06, 1.35 and
    1.41. A delta that is gone cannot be had back, and the report names the growth, so this is what is offered.

    Raises:
        HswqError: the changed weight is not finite, or too large to be rotated.
    """
    seed = packing.layer_seed(name)
    if isinstance(value, PackedWeight):
        changed: Weight | None = _in_one_pass(value, change, seed)
        if changed is not None:
            return changed
        changed = packing.requantize(value, unpacked(value) + change.dense, seed, name=name)
    else:
        changed = round_stochastic(value.float() + change.dense, value.dtype, seed)
    return keep_rows(value, changed, ~change.touched)


def _in_one_pass(value: PackedWeight, change: Change, seed: int) -> PackedWeight | None:
    """None where the kernel cannot: another format or device, one scale for all rows, or one that must grow."""
    if backend_for(value.device) != "cpu":
        return None
    from hswq_lab import _cpu_bake  # noqa: PLC0415 - it cannot be imported without the extension

    match value:
        case Nvfp4Weight() if value.scale != 0:
            changed, amax = _cpu_bake.bake(value, change.left, change.down, seed)
            return None if packing.outgrows(value, amax) else changed
        case Int8Weight() if value.scale.dim() == 2:
            changed, amax = _cpu_bake.bake(value, change.left, change.down, seed)
            return changed if math.isfinite(amax) else None
        case _:
            return None


@dataclass(frozen=True)
class Sums:
    """Inner products over all touched weights: w = W, c = W'−W, d = ΔW; and over all of them against a source S.

    Attributes:
        rows: how many rows ΔW touches.
        missed: ‖c − d‖².
        c_turned: ⟨c, d·H⟩: what is left of the delta where it was added in the rotated basis; ⟨c, d⟩ without one.
        error_before: ‖W − S‖²; this and the next three are 0 without a source.
        source: ‖S‖².
        error_after: ‖W' − (S+ΔW)‖².
        source_after: ‖S+ΔW‖².
    """

    rows: float
    cc: float
    cd: float
    dd: float
    ww: float
    wd: float
    missed: float
    c_turned: float
    error_before: float
    source: float
    error_after: float
    source_after: float


def change_sums(before: Weight, after: Weight, change: Change, source: Tensor | None) -> Sums:
    """The sums that the evidence for a bake is made from, all in the unrotated basis.

    Args:
        before: the pristine weight [N, K].
        after: the changed one.
        change: what was to be added.
        source: the 16-bit weight [N, K], or None.
    """
    group = before.group if isinstance(before, PackedWeight) else None
    if backend_for(before.device) == "cpu":
        from hswq_lab import _cpu_bake  # noqa: PLC0415 - it cannot be imported without the extension

        old, new = (_readable(value) for value in (before, after))
        truth = None if source is None else _native(source)
        return Sums(*_cpu_bake.change_sums(old, new, change.left, change.down, truth))
    total = torch.zeros(len(fields(Sums)), dtype=torch.float64, device=change.left.device)
    old, new, delta, touched = unpacked(before), unpacked(after), change.dense, change.touched
    for rows in _chunks(old):
        own = None if source is None else source[rows].float()
        total += _sums_of(old[rows], new[rows], delta[rows], touched[rows], own, group)
    return Sums(*total.tolist())


def compared(arrived: Change, wanted: Change) -> Sums:
    """`Sums` of a matrix that stands beside the weight: c is `arrived`, d is `wanted`, w is not looked at (0).

    Of two changes with factors without any matrix [N, K]: ⟨L·D, L'·D'⟩ = trace((LᵀL')(D'Dᵀ)), in fp64.
    """
    if arrived.down is None or wanted.down is None:
        c, d = (x.left if x.down is None else x.left @ x.down for x in (arrived, wanted))
        return change_sums(torch.zeros_like(d), c, Change(d), None)
    left = torch.cat([arrived.left, wanted.left], dim=1).double()
    down = torch.cat([arrived.down, wanted.down]).double()
    products = (left.T @ left) * (down @ down.T)
    rank = arrived.down.shape[0]
    cc, cd, dd = (
        float(x.sum()) for x in (products[:rank, :rank], products[:rank, rank:], products[rank:, rank:])
    )
    missed = max(cc - 2 * cd + dd, 0.0)
    return Sums(float(wanted.touched.sum()), cc, cd, dd, 0.0, 0.0, missed, cd, 0.0, 0.0, 0.0, 0.0)


def _sums_of(
    w: Tensor, after: Tensor, d: Tensor, touched: Tensor, source: Tensor | None, group: int | None
) -> Tensor:
    """`Sums` of some rows; products of these are added in fp32."""
    errors = [torch.zeros((), device=w.device)] * 4
    if source is not None:
        wanted = source + d
        errors = [_dot(x, x) for x in (w - source, source, after - wanted, wanted)]
    w, after, d = w[touched], after[touched], d[touched]
    c = after - w
    pairs = ((c, c), (c, d), (d, d), (w, w), (w, d), (c - d, c - d), (c, ops.rotate(d, group)))
    return torch.stack([touched.sum().float(), *(_dot(a, b) for a, b in pairs), *errors]).double()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _readable(value: Weight) -> Weight:
    """A weight as the kernel reads it: other formats as fp32."""
    if isinstance(value, Tensor):
        return _native(value)
    return value if isinstance(value, (Nvfp4Weight, Int8Weight)) else unpacked(value)


def _native(values: Tensor) -> Tensor:
    return values if values.dtype in _NATIVE else values.float()


def _chunks(matrix: Tensor) -> Iterator[slice]:
    rows = matrix.shape[0]
    step = _ROWS if matrix.device.type == "cpu" else max(rows, 1)
    return (slice(start, start + step) for start in range(0, rows, step))
