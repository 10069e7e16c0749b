"""Watching the inputs of Linears in the basis in which they will be quantised, and changing nothing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from hswq_lab import ops
from hswq_lab.errors import HswqError
from hswq_lab.layers import split_by_basis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hswq_lab.formats import Nvfp4Weight
    from hswq_lab.layers import LabLinear

LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0
"""An input_scale s holds magnitudes up to 2688·s: the largest block scale times the largest code."""

BLOCK = 16
_BINS_PER_OCTAVE = 32
_LOWEST = -64
_BINS = 128 * _BINS_PER_OCTAVE


class Activations:
    """Running statistics of one layer's rotated inputs.

    With an input basis two things are looked at: the whole input, which modes and programs that do not know the
    basis round, and what the basis leaves of it, which mode tc rounds. Either may be the larger one.

    Args:
        layer: its name.
        group: the rotation group to look in; None: unrotated.
        k: in features.
        input_scale: count the blocks that this scale clips; None: count none.
        device: where the inputs are.
        basis: the layer's input basis [r, K], if it has one.
    """

    def __init__(
        self,
        layer: str,
        group: int | None,
        k: int,
        input_scale: float | None,
        device: torch.device,
        basis: Tensor | None = None,
    ) -> None:
        self.layer = layer
        self.group = group
        self.rank = 0 if basis is None else len(basis)
        self._basis = None if basis is None else basis.to(device)
        self.input_scale = input_scale
        self._scale = None if input_scale is None else torch.tensor(input_scale, device=device)
        self.rows = 0
        self.blocks = 0
        self._clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._amax = torch.zeros((), device=device)
        self._square_sum = torch.zeros(k, dtype=torch.float64, device=device)
        self._histogram = torch.zeros(_BINS, dtype=torch.int64, device=device)

    def add(self, x: Tensor) -> None:
        """Takes in x [..., K], unrotated."""
        rows = x.reshape(-1, x.shape[-1])
        if not rows.numel():
            return
        rotated = ops.rotate(rows.float(), self.group)
        largest, rest = rotated.abs().amax(dim=1), rows
        if self._basis is not None:
            _, rest = split_by_basis(rows, self._basis)
            largest = torch.maximum(largest, ops.rotate(rest.float(), self.group).abs().amax(dim=1))
        self.rows += len(rotated)
        # maximum() carries NaN on, so that `amax` can refuse it.
        self._amax = torch.maximum(self._amax, largest.amax())
        self._square_sum += rotated.double().square().sum(dim=0)
        octaves = torch.log2(largest.nan_to_num(posinf=0.0).clamp(min=2.0**_LOWEST)) - _LOWEST
        bins = (octaves * _BINS_PER_OCTAVE).long().clamp(max=_BINS - 1)
        self._histogram += torch.bincount(bins, minlength=_BINS)
        if self._scale is not None:
            self.blocks += len(rows) * -(-rows.shape[1] // BLOCK)
            self._clipped += ops.rotate_quantize_nvfp4_counted(rest, self._scale, self.group)[2]

    @property
    def amax(self) -> float:
        """The largest magnitude so far, of the whole inputs and of what is rounded; 0 before the first row.

        Raises:
            HswqError: the inputs held NaN or infinity.
        """
        value = float(self._amax)
        if not torch.isfinite(self._amax):
            raise HswqError("the layer's inputs are not finite", tensor=self.layer, found=value)
        return value

    @property
    def needed_scale(self) -> float | None:
        """amax / 2688 in fp32, None where that is 0.

        Where rounding would leave a block scale beyond 448, and the largest block count as clipped, it is the
        next number up.
        """
        amax = torch.tensor(self.amax, dtype=torch.float32)
        scale = amax / (LARGEST_CODE * LARGEST_SCALE)
        while scale > 0 and amax / LARGEST_CODE / scale > LARGEST_SCALE:
            scale = torch.nextafter(scale, amax)
        return float(scale) or None

    def calibrated(self, weight: Nvfp4Weight) -> Nvfp4Weight | None:
        """The layer's weight with the scale that these inputs need; None where they need none."""
        scale = self.needed_scale
        return None if scale is None else weight.with_input_scale(torch.tensor(scale, device=weight.device))

    @property
    def mean_square(self) -> Tensor:
        """Mean square of each rotated channel, fp32 [K] on the CPU."""
        return (self._square_sum / max(self.rows, 1)).float().cpu()

    @property
    def clipped(self) -> int:
        """Blocks of 16 of what mode tc rounds whose largest magnitude the input_scale cannot hold."""
        return int(self._clipped)

    def row_percentile(self, share: float) -> float:
        """The magnitude that a share of the rows stay below, within 2.2 %, at most `amax`; 0 without rows."""
        if not self.rows:
            return 0.0
        reached = int((self._histogram.cumsum(0) < share * self.rows).sum())
        return min(float(2.0 ** ((reached + 1) / _BINS_PER_OCTAVE + _LOWEST)), self.amax)


class Watcher(Protocol):
    """What looks at a layer's inputs."""

    def add(self, x: Tensor) -> None:
        """Takes in x [..., K], unrotated, as the layer gets it."""


@contextmanager
def watching(linears: Mapping[str, LabLinear], watchers: Mapping[str, Watcher]) -> Iterator[None]:
    """Within this context watchers see every input of their layers; no hook is left behind, whatever happens.

    Args:
        linears: the network's Linears by name.
        watchers: layer → who looks at its inputs.

    Raises:
        HswqError: an unknown layer.
    """
    missing = sorted(watchers.keys() - linears.keys())
    if missing:
        raise HswqError("the model has no such layer to observe", tensor=missing[0])
    hooks = []
    try:
        for layer, watcher in watchers.items():
            hooks.append(linears[layer].register_forward_pre_hook(_shown_to(watcher)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def observing(
    linears: Mapping[str, LabLinear],
    groups: Mapping[str, int | None],
    scales: Mapping[str, float],
    bases: Mapping[str, Tensor] | None = None,
) -> Iterator[dict[str, Activations]]:
    """`watching` with `Activations`.

    Args:
        linears: the network's Linears by name.
        groups: the layers to watch, each with the rotation group to look in.
        scales: layer → input_scale whose clipping is counted, where there is one.
        bases: layer → input basis, where there is one; None: nowhere.

    Raises:
        HswqError: an unknown layer.
    """
    watched, bases = {}, bases or {}
    for layer, group in groups.items():
        if layer not in linears:
            raise HswqError("the model has no such layer to observe", tensor=layer)
        linear = linears[layer]
        watched[layer] = Activations(
            layer, group, linear.in_features, scales.get(layer), linear.weight.device, bases.get(layer)
        )
    with watching(linears, watched):
        yield watched


def _shown_to(watcher: Watcher) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def show(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            watcher.add(inputs[0])

    return show
