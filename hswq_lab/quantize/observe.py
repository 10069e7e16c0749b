"""CalibrationReport and `observe`: a layer's inputs in the basis in which they will be quantised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from hswq_lab.checkpoint.baked import baked_in_words
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight, group_for
from hswq_lab.progress import part, progress_of
from hswq_lab.quantize.activations import Activations, observing
from hswq_lab.quantize.pairs import choose_pairs, label_of
from hswq_lab.quantize.plan import KEPT, layer_name, nearest
from hswq_lab.results import Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.trajectory.compare import Prompt


@dataclass(frozen=True)
class LayerActivations:
    """The inputs of one layer over a calibration.

    Attributes:
        layer: its name.
        group: rotation group in which they were measured.
        rows: number of input rows seen; 0 if the layer was never reached.
        amax: largest magnitude after rotation; with an input basis, of the whole input and of what it leaves.
        p999: 99.9th percentile over rows of the row's largest magnitude, likewise: a diagnostic only.
        needed: amax / 2688, the input_scale that clips nothing; None if never reached or all inputs were 0.
        input_scale: what the model has now, None if it has none.
        blocks: blocks of 16 inputs held against that scale; 0 without one.
        clipped: those of them that it clips.
        rank: of the input basis; 0 without one.
    """

    layer: str
    group: int | None
    rows: int
    amax: float
    p999: float
    needed: float | None
    input_scale: float | None
    blocks: int = 0
    clipped: int = 0
    rank: int = 0

    @property
    def exceeds(self) -> float | None:
        """How much too small the scale is, needed / input_scale; above 1 it clips; None if one is missing."""
        return None if self.needed is None or self.input_scale is None else self.needed / self.input_scale


@dataclass(frozen=True)
class CalibrationReport(Result):
    """Activation ranges of every layer over real prompts and all steps.

    Attributes:
        model: whose layers' inputs were observed.
        source: "16-bit" or "parity": in what arithmetic.
        prompts: one for each seed.
        seeds: of the starting noises.
        steps: Euler steps.
        cfg: guidance scale.
        loras: LoRAs in its file and on it.
        rows: layers in network order.
        warnings: what was not measured as the pack will run.
        mean_squares: layer → mean square of each rotated input channel, fp32 [K]. Not saved.
    """

    model: str
    source: str
    prompts: list[str]
    seeds: list[int]
    steps: int
    cfg: float
    loras: list[str]
    rows: list[LayerActivations]
    warnings: list[str] = field(default_factory=list, kw_only=True)
    mean_squares: dict[str, Tensor] = field(repr=False, default_factory=dict, metadata={"saved": False})

    @property
    def unreached(self) -> list[str]:
        """Layers that got no scale: never reached, or only zeros came."""
        return [row.layer for row in self.rows if row.needed is None]

    @property
    def exceeding(self) -> list[str]:
        """Layers whose present input_scale is too small for what was seen."""
        return [row.layer for row in self.rows if row.exceeds is not None and row.exceeds > 1]

    def of(self, layer: str) -> LayerActivations:
        """The row of a layer.

        Raises:
            HswqError: it was not observed.
        """
        name = layer_name(layer)
        for row in self.rows:
            if row.layer == name:
                return row
        raise HswqError(
            "this layer was not observed", tensor=name, fix=nearest(name, (row.layer for row in self.rows))
        )

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: its values as in `LayerActivations`, in their order, then exceeds."""
        return pd.DataFrame([{**vars(row), "exceeds": row.exceeds} for row in self.rows])


def observe(
    model: Model,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 12,
    cfg: float = 2.5,
    groups: Mapping[str, int | None] | None = None,
    bases: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Runs a model over prompts and records the range of every layer's rotated inputs; changes nothing.

    Args:
        model: 16-bit, or a pack; with its LoRAs, in its own mode.
        prompts: one for each seed, or one for all; the model's own by default.
        seeds: of the starting noises; by default one for each prompt, none of them in `SEEDS_20`.
        steps: Euler steps; every step is observed.
        cfg: guidance scale; the unconditional half is observed too.
        groups: layer → rotation group; by default that of the packed weight, else the one that belongs to K.
        bases: layer → input basis that its weight has or will have; by default those of the packed weights.
        progress: told after every step.

    Raises:
        HswqError: prompts and seeds do not pair, an unknown layer, or inputs that are not finite.
    """
    pairs = choose_pairs(model, prompts, seeds)
    # A copy shares the weights but has a network of its own: no hook and no counter reaches the caller's.
    copy = model.on(model.device)
    entries = {layer: model.checkpoint.entry(f"{layer}.weight") for layer in model.layers()}
    if groups is None:
        groups = {
            layer: entry.group if entry.packed else group_for(entry.shape[1])
            for layer, entry in entries.items()
        }
    scales = {layer: scale for layer in groups if (scale := _input_scale(model, layer)) is not None}
    bases = input_bases(model) if bases is None else bases
    with observing(copy.linears(), groups, scales, bases) as watched:
        for done, (prompt, seed) in enumerate(pairs):
            tell = part(progress_of(progress), done, done + 1, len(pairs))
            copy.generate(prompt, seed, steps, cfg, progress=tell)
    return CalibrationReport(
        model=model.name,
        source=model.request.mode if model.is_packed else KEPT,
        prompts=[label_of(prompt) for prompt, _ in pairs],
        seeds=[seed for _, seed in pairs],
        steps=steps,
        cfg=cfg,
        loras=[*baked_in_words(model.checkpoint.metadata), *map(str, model.loras)],
        rows=[_row(statistics) for statistics in watched.values()],
        mean_squares={layer: statistics.mean_square for layer, statistics in watched.items()},
    )


def input_bases(model: Model) -> dict[str, Tensor]:
    """Layer → input basis, for the packed weights that have one."""
    ranked = [layer for layer in model.layers() if model.checkpoint.entry(f"{layer}.weight").rank]
    weights = ((layer, model.checkpoint[f"{layer}.weight"]) for layer in ranked)
    return {
        layer: weight.basis
        for layer, weight in weights
        if isinstance(weight, Nvfp4Weight) and weight.basis is not None
    }


def _input_scale(model: Model, layer: str) -> float | None:
    if not model.checkpoint.entry(f"{layer}.weight").calibrated:
        return None
    weight = model.checkpoint[f"{layer}.weight"]
    return (
        float(weight.input_scale)
        if isinstance(weight, Nvfp4Weight) and weight.input_scale is not None
        else None
    )


def _row(statistics: Activations) -> LayerActivations:
    return LayerActivations(
        layer=statistics.layer,
        group=statistics.group,
        rows=statistics.rows,
        amax=statistics.amax,
        p999=statistics.row_percentile(0.999),
        needed=statistics.needed_scale,
        input_scale=statistics.input_scale,
        blocks=statistics.blocks,
        clipped=statistics.clipped,
        rank=statistics.rank,
    )
