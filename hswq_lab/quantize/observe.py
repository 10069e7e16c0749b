"""CalibrationReport and `observe`: a layer's inputs in the basis in which they will be quantised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from hswq_lab.results import Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from torch import Tensor


@dataclass(frozen=True)
class LayerActivations:
    """The inputs of one layer over a calibration.

    Attributes:
        layer: its name.
        group: rotation group in which they were measured.
        rows: number of input rows seen; 0 if the layer was never reached.
        amax: largest magnitude after rotation.
        p999: 99.9th percentile over rows of the row's largest magnitude after rotation: a diagnostic only.
        needed: amax / 2688, the input_scale that clips nothing; None if never reached or all inputs were 0.
        input_scale: what the model has now, None if it has none.
    """

    layer: str
    group: int | None
    rows: int
    amax: float
    p999: float
    needed: float | None
    input_scale: float | None

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
        loras: LoRAs that were attached.
        rows: layers in network order.
        mean_squares: layer → mean square of each rotated input channel, fp32 [K].
    """

    model: str
    source: str
    prompts: list[str]
    seeds: list[int]
    steps: int
    cfg: float
    loras: list[str]
    rows: list[LayerActivations]
    mean_squares: dict[str, Tensor] = field(repr=False, default_factory=dict)

    @property
    def unreached(self) -> list[str]:
        """Layers that got no scale: never reached, or only zeros came."""
        return [row.layer for row in self.rows if row.needed is None]

    @property
    def exceeding(self) -> list[str]:
        """Layers whose present input_scale is too small for what was seen."""
        return [row.layer for row in self.rows if row.exceeds is not None and row.exceeds > 1]

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: layer, group, rows, amax, p999, needed, input_scale, exceeds."""
        return pd.DataFrame([{**vars(row), "exceeds": row.exceeds} for row in self.rows])


def observe(
    model: Model,
    prompts: Sequence[str | Tensor] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 12,
    cfg: float = 2.5,
    groups: Mapping[str, int | None] | None = None,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Runs a model over prompts and records the range of every layer's rotated inputs; the model is not changed.

    Args:
        model: 16-bit, or a pack; with its LoRAs, in its own mode.
        prompts: one for each seed, or one for all; the model's own by default.
        seeds: of the starting noises; the first of `SEEDS_20` by default, one for each prompt.
        steps: Euler steps; every step is observed.
        cfg: guidance scale; the unconditional half is observed too.
        groups: layer → rotation group; by default that of the packed weight, else the one that belongs to K.
        progress: told after every picture.
    """
    raise NotImplementedError
