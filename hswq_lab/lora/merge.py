"""Several LoRAs as one of a given rank, by singular values, with the error of the cut stated per module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import torch

from hswq_lab.arguments import finite, whole
from hswq_lab.errors import HswqError
from hswq_lab.lora.bake import total_delta
from hswq_lab.lora.convert import Dialect, write_units
from hswq_lab.lora.parts import LowRank
from hswq_lab.lora.targets import layers_of, weight_of
from hswq_lab.lora.units import Unit
from hswq_lab.models.names import diffusers_names
from hswq_lab.progress import Progress, silent
from hswq_lab.results import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hswq_lab.lora.delta import LayerDelta
    from hswq_lab.lora.file import LoraFile
    from hswq_lab.lora.targets import HasLayers, LayerShapes


@dataclass(frozen=True)
class MergedModule:
    """One module of the merged LoRA: the norm of the exact sum, the rank kept, and ‖ΔW − ΔW_kept‖ / ‖ΔW‖."""

    module: str
    norm: float
    rank: int
    error: float


@dataclass(frozen=True, repr=False)
class MergeReport(Result):
    """What a merge kept."""

    loras: tuple[str, ...]
    rank: int
    rows: list[MergedModule]

    @property
    def error(self) -> float:
        """Over all modules: the root of the lost part of Σ ‖ΔW‖²."""
        total = sum(row.norm**2 for row in self.rows)
        return math.sqrt(sum((row.error * row.norm) ** 2 for row in self.rows) / total) if total else 0.0

    def to_frame(self) -> pd.DataFrame:
        """One row a module."""
        return pd.DataFrame([vars(row) for row in self.rows])

    def __repr__(self) -> str:
        worst = max(self.rows, key=lambda row: row.error)
        return (
            f"{' + '.join(self.loras)} at rank {self.rank}: error {self.error:.2%} over {len(self.rows)} "
            f"modules, worst {worst.module} with {worst.error:.2%}"
        )


@dataclass(frozen=True)
class Merged:
    """A merged LoRA, to be written with `save_lora`."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    report: MergeReport


def merge_loras(
    loras: Sequence[tuple[LoraFile, float]],
    layers: LayerShapes | HasLayers,
    rank: int,
    to: Dialect = "native",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Merged:
    """Several LoRAs with strengths as one: each module's Σ strength · ΔW, cut to `rank` singular values.

    Sums of plain LoRAs are factorised from their factors (QR, then a small SVD), other kinds through the
    dense matrix. The cut is the best one of its rank (Eckart and Young 1936). Biases are added exactly.

    Args:
        loras: files with strengths.
        layers: name → (N, K), or a model (needed for DoRA, whose norms come from the model's weights).
        rank: of every module; modules of smaller rank keep theirs.
        to: dialect; in split dialects q, k and v get `rank` each.
        dtype: of the factors written.
        progress: told after each layer.

    Raises:
        HswqError: no LoRAs, a rank below 1, a strength that is no finite number, a file that does not fit, or
            a DoRA without a model.
    """
    if not loras:
        raise HswqError("a merge needs LoRAs", found="none")
    rank = whole(rank, "the rank")
    loras = [(lora, finite(strength, f"the strength of {lora.name}")) for lora, strength in loras]
    deltas = [(lora.deltas(layers), strength) for lora, strength in loras]
    touched = [name for name in layers_of(layers) if any(name in found for found, _ in deltas)]
    tell = progress or silent
    units, rows = [], []
    for done, layer in enumerate(touched):
        tell(done, len(touched), layer)
        here = [(found[layer], strength) for found, strength in deltas if layer in found]
        names = list(diffusers_names(layer)) if to != "native" else [layer]
        for unit, row in _merged_units(here, names, weight_of(layers, layer), rank, dtype):
            units.append(unit)
            rows.append(row)
    tell(len(touched), len(touched), "done")
    labels = tuple(f"{lora.name} ×{strength:g}" for lora, strength in loras)
    sources = "; ".join(f"{lora.name} x{strength:g} sha256={lora.sha256}" for lora, strength in loras)
    tensors, metadata = write_units(units, to, {"hswq.merged_from": sources, "hswq.merged_rank": str(rank)})
    return Merged(tensors, metadata, MergeReport(labels, rank, rows))


def _merged_units(
    deltas: list[tuple[LayerDelta, float]],
    names: list[str],
    weight: Tensor | None,
    rank: int,
    dtype: torch.dtype,
) -> list[tuple[Unit, MergedModule]]:
    n, k = deltas[0][0].shape
    biases = [bias * strength for delta, strength in deltas if (bias := delta.bias()) is not None]
    bias = torch.stack(biases).sum(0) if biases else None
    if weight is None and any(delta.needs_weight for delta, _ in deltas):
        raise HswqError("merging DoRA needs the weights", tensor=deltas[0][0].layer, fix="give a model")
    low_rank = all(isinstance(part, LowRank) for delta, _ in deltas for part in delta.parts)
    if low_rank:
        left, right = _stacked(deltas)
    else:
        left, right = total_delta(deltas, torch.zeros(n, k) if weight is None else weight), torch.eye(k)
    rows = n // len(names)
    found = []
    for index, name in enumerate(names):
        part = slice(index * rows, (index + 1) * rows)
        up, down, report = _cut(name, left[part], right, rank)
        piece = None if bias is None or not bias[part].any() else bias[part]
        kept = (
            LowRank(name, part.start, part.stop, 1.0, down.to(dtype), up.to(dtype)) if report.rank else None
        )
        if kept is not None or piece is not None:
            found.append((Unit(name, part.start, part.stop, kept, piece), report))
    return found


def _stacked(deltas: list[tuple[LayerDelta, float]]) -> tuple[Tensor, Tensor]:
    """Σ strength · ΔW = left [N, R] · right [R, K], in fp64."""
    branches = [(branch, strength) for delta, strength in deltas if (branch := delta.branch()) is not None]
    left = torch.cat(
        [branch.up.double() * (branch.scale.double() * strength) for branch, strength in branches], 1
    )
    return left, torch.cat([branch.down.double() for branch, _ in branches])


def _cut(name: str, left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor, MergedModule]:
    """The best up · down of at most this rank for left · right; singular values are shared evenly."""
    q_left, r_left = torch.linalg.qr(left.double())
    q_right, r_right = torch.linalg.qr(right.double().T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    norm = float(s.norm())
    kept = min(rank, int((s > s[:1].sum() * 1e-7).sum()))
    error = float(s[kept:].norm()) / norm if norm else 0.0
    root = s[:kept].sqrt()
    up, down = q_left @ (u[:, :kept] * root), (root[:, None] * vh[:kept]) @ q_right.T
    return up, down, MergedModule(name, norm, kept, error)
