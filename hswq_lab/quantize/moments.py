"""Second moments of layers' inputs as they will be quantised: what GPTQ needs to know about activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hswq_lab import ops
from hswq_lab.layers import split_by_basis
from hswq_lab.progress import part, progress_of
from hswq_lab.quantize.activations import watching
from hswq_lab.quantize.observe import observe
from hswq_lab.quantize.pairs import choose_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from hswq_lab.formats import Method
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.trajectory.compare import Prompt

FOLDS = 2


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over rows x (rotated, fp32) and x̂ (what the layer makes of them: rounded but for its input basis).

    Attributes:
        gram: Σ x̂ᵀx̂, fp32 [K, K].
        cross: Σ xᵀx̂, fp32 [K, K].
        rows: number of rows.
    """

    gram: Tensor
    cross: Tensor
    rows: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.gram + other.gram, self.cross + other.cross, self.rows + other.rows)


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Moments of one layer, for two sets of prompts, seeds and noise levels, so that one can check the other.

    Attributes:
        layer: its name.
        group: rotation group in which its inputs were quantised.
        input_scale: with which they were quantised: amax / 2688 of the same inputs.
        folds: moments of the even and of the odd pairs; without rows where there was only one pair.
    """

    layer: str
    group: int | None
    input_scale: float
    folds: tuple[Moments, Moments]


class _MomentSums:
    """A watcher that sums up moments into the current fold."""

    def __init__(
        self,
        group: int | None,
        k: int,
        input_scale: float,
        basis: Tensor | None,
        method: Method,
        device: torch.device,
    ) -> None:
        self.group = group
        self._basis = None if basis is None else basis.to(device)
        self._method = method
        self.scale = torch.tensor(input_scale, device=device)
        self.fold = 0
        self._gram = torch.zeros((FOLDS, k, k), device=device)
        self._cross = torch.zeros((FOLDS, k, k), device=device)
        self._rows = [0] * FOLDS

    def add(self, x: Tensor) -> None:
        """Takes in x [..., K], unrotated."""
        rows = x.reshape(-1, x.shape[-1])
        rest = rows if self._basis is None else split_by_basis(rows, self._basis)[1]
        codes, scales, _ = ops.rotate_quantize_nvfp4_counted(rest, self.scale, self.group, self._method)
        shape = (rows.shape[0], rows.shape[1])
        quantised = ops.dequantize_nvfp4(codes, scales, self.scale, shape, torch.float32)
        rotated = ops.rotate(rows.float(), self.group)
        if self._basis is not None:
            quantised += rotated - ops.rotate(rest.float(), self.group)
        self._gram[self.fold] += quantised.T @ quantised
        self._cross[self.fold] += rotated.T @ quantised
        self._rows[self.fold] += len(rows)

    def folds(self) -> tuple[Moments, Moments]:
        """The sums."""
        even, odd = (Moments(self._gram[i], self._cross[i], self._rows[i]) for i in range(FOLDS))
        return even, odd


def gather_moments(
    model: Model,
    groups: Mapping[str, int | None],
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    bases: Mapping[str, Tensor] | None = None,
    activation_scales: Method = "rtn",
    steps: int = 12,
    cfg: float = 2.5,
    progress: Progress | None = None,
) -> dict[str, LayerMoments]:
    """Runs a model twice over prompts: for the layers' ranges, then for moments of their quantised inputs.

    Odd pairs take one step more, so that the two folds share neither prompts nor seeds nor noise levels. What
    holds in both will hold elsewhere.

    Args:
        model: 16-bit; not changed.
        groups: layer → rotation group in which it will be stored; 16·K² bytes a layer are needed.
        prompts: one for each seed, or one for all; the model's own by default. The more, and the more
            different, the better: what is fitted to few captions is worse on all others.
        seeds: of the starting noises; by default one for each prompt, none of them in `SEEDS_20`.
        bases: layer → the input basis that it will have, at its rank, from `gather_bases`.
        activation_scales: how block scales of the activations will be found.
        steps: Euler steps.
        cfg: guidance scale.
        progress: told after every step.

    Returns:
        By layer; a layer that was never reached, or whose inputs are all zero, is left out.

    Raises:
        HswqError: prompts and seeds do not pair, an unknown layer, or inputs that are not finite.
    """
    tell = progress_of(progress)
    pairs = choose_pairs(model, prompts, seeds)
    texts, numbers = [prompt for prompt, _ in pairs], [seed for _, seed in pairs]
    total = 2 * len(pairs)
    first = part(tell, 0, len(pairs), total)
    report = observe(
        model, texts, numbers, steps=steps, cfg=cfg, groups=groups, bases=bases or {}, progress=first
    )
    copy = model.on(model.device)
    linears = copy.linears()
    sums = {
        row.layer: _MomentSums(
            row.group,
            linears[row.layer].in_features,
            row.needed,
            (bases or {}).get(row.layer),
            activation_scales,
            copy.device,
        )
        for row in report.rows
        if row.needed is not None
    }
    with watching(linears, sums):
        for number, (prompt, seed) in enumerate(pairs):
            for layer_sums in sums.values():
                layer_sums.fold = number % FOLDS
            inner = part(tell, len(pairs) + number, len(pairs) + number + 1, total)
            copy.generate(prompt, seed, steps + number % FOLDS, cfg, progress=inner)
    return {
        layer: LayerMoments(layer, each.group, float(each.scale), each.folds())
        for layer, each in sums.items()
    }
