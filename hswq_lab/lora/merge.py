"""Several LoRAs as one of a given rank, by singular values, with the error of the cut stated per module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
import torch

from hswq_lab.arguments import finite, whole
from hswq_lab.errors import HswqError
from hswq_lab.lora.bake import total_delta
from hswq_lab.lora.convert import Dialect, check_dialect, write_units
from hswq_lab.lora.file import check_lora
from hswq_lab.lora.parts import LowRank
from hswq_lab.lora.source import MERGED_KEY
from hswq_lab.lora.targets import layers_of, weight_of
from hswq_lab.lora.units import Unit
from hswq_lab.models.names import diffusers_names
from hswq_lab.progress import Progress, progress_of
from hswq_lab.results import Result

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.lora.delta import LayerDelta
    from hswq_lab.lora.file import LoraFile
    from hswq_lab.lora.matching import Coverage
    from hswq_lab.lora.targets import HasLayers, LayerShapes


_ROUNDING = 1e-6  # relative to the terms: a sum below it is what rounding in fp32 left of their cancelling


@dataclass(frozen=True)
class MergedModule:
    """One module of the merged LoRA.

    Attributes:
        norm: of the exact sum ΔW.
        rank: kept; 0 where only a bias is left.
        error: ‖ΔW − ΔW_kept‖ / ‖ΔW‖.
        terms: Σ ‖strength · ΔWᵢ‖ of the LoRAs; much more than `norm` where they cancel each other.
    """

    module: str
    norm: float
    rank: int
    error: float
    terms: float


@dataclass(frozen=True, repr=False)
class MergeReport(Result):
    """What a merge kept.

    Attributes:
        rows: one a module that was written.
        cancelled: modules whose deltas add up to nothing, up to rounding; they are not written.
        coverage: of each LoRA, how many of its modules match a layer; the others are not in the merge.
    """

    loras: tuple[str, ...]
    rank: int
    rows: list[MergedModule]
    cancelled: list[str] = field(default_factory=list)
    coverage: tuple[Coverage, ...] = ()

    computed: ClassVar[tuple[str, ...]] = ("error", "error_of_terms", "warnings")

    @property
    def warnings(self) -> list[str]:
        """One a LoRA of which modules were left out."""
        return [found.warning for found in self.coverage if found.left_out]

    @property
    def error(self) -> float:
        """Over all modules: the root of the lost part of Σ ‖ΔW‖²."""
        return _ratio(self._lost, sum(row.norm**2 for row in self.rows))

    @property
    def error_of_terms(self) -> float:
        """The same error against the LoRAs' own norms, Σ `terms`²: smaller than `error` where they cancel."""
        return _ratio(self._lost, sum(row.terms**2 for row in self.rows))

    @property
    def _lost(self) -> float:
        return sum((row.error * row.norm) ** 2 for row in self.rows)

    def to_frame(self) -> pd.DataFrame:
        """One row a module; one that was left out is a row of rank 0 without its norms."""
        lost = [{"module": each, "rank": 0} for found in self.coverage for each in found.left_out]
        return pd.DataFrame([*(vars(row) for row in self.rows), *lost])

    def __repr__(self) -> str:
        worst = max(self.rows, key=lambda row: row.error)
        first = (
            f"{' + '.join(self.loras)} at rank {self.rank}: error {self.error:.2%} over {len(self.rows)} "
            f"modules, worst {worst.module} with {worst.error:.2%}"
        )
        lines = [first]
        left = _ratio(sum(row.norm**2 for row in self.rows), sum(row.terms**2 for row in self.rows))
        if 0 < left < 0.5:
            lines.append(
                f"  the LoRAs cancel each other down to {left:.2%} of their norms; of these, the error is "
                f"{self.error_of_terms:.2%}"
            )
        if self.cancelled:
            lines.append(f"  {len(self.cancelled)} modules cancel to nothing, the first {self.cancelled[0]}")
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.warnings)])


def _ratio(part: float, whole: float) -> float:
    """The root of one sum of squares over another; 0 for nothing."""
    return math.sqrt(part / whole) if whole else 0.0


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
    *,
    allow_unmatched: bool = False,
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
        allow_unmatched: leave out modules that match no layer, and say so in the report.

    Raises:
        HswqError: no LoRAs, an unknown dialect, a rank below 1, a strength that is no finite number, a file that
            does not fit, LoRAs that cancel each other, or a DoRA without a model.
    """
    rank = whole(rank, "the rank")
    check_dialect(to)
    if not isinstance(loras, Sequence) or not loras:
        raise HswqError("a merge needs LoRAs", found=repr(loras)[:80], expected="[(lora, 0.8), …]")
    loras = [_with_strength(each) for each in loras]
    deltas = [(lora.deltas(layers, allow_unmatched=allow_unmatched), strength) for lora, strength in loras]
    touched = [name for name in layers_of(layers) if any(name in found for found, _ in deltas)]
    tell = progress_of(progress)
    units, rows, cancelled = [], [], []
    for done, layer in enumerate(touched):
        tell(done, len(touched), layer)
        here = [(found[layer], strength) for found, strength in deltas if layer in found]
        names = list(diffusers_names(layer)) if to != "native" else [layer]
        weight = weight_of(layers, layer) if any(delta.needs_weight for delta, _ in here) else None
        for unit, row in _merged_units(here, names, weight, rank, dtype):
            if unit is not None:
                units.append(unit)
                rows.append(row)
            elif row.terms:
                cancelled.append(row.module)
    tell(len(touched), len(touched), "done")
    labels = tuple(f"{lora.name} ×{strength:g}" for lora, strength in loras)
    if cancelled and not units:
        raise HswqError(
            "there is nothing to write: the LoRAs cancel each other, their sum is zero up to rounding",
            found=" + ".join(labels),
            fix="choose other strengths",
        )
    coverage = tuple(lora.coverage(layers) for lora, _ in loras)
    sources = "; ".join(
        lora.ancestry(f"{lora.name} x{strength:g}") + (f" ({found.in_words})" if found.left_out else "")
        for (lora, strength), found in zip(loras, coverage, strict=True)
    )
    tensors, metadata = write_units(units, to, {MERGED_KEY: sources, "hswq.merged_rank": str(rank)})
    return Merged(tensors, metadata, MergeReport(labels, rank, rows, cancelled, coverage))


def _with_strength(pair: object) -> tuple[LoraFile, float]:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        found = repr(pair)[:80]
        raise HswqError("a merge takes LoRAs with their strengths", found=found, expected="[(lora, 0.8), …]")
    check_lora(pair[0])
    return pair[0], finite(pair[1], f"the strength of {pair[0].name}")


def _merged_units(
    deltas: list[tuple[LayerDelta, float]],
    names: list[str],
    weight: Tensor | None,
    rank: int,
    dtype: torch.dtype,
) -> list[tuple[Unit | None, MergedModule]]:
    """The modules of a layer; without a unit where nothing is left of their deltas."""
    n, k = deltas[0][0].shape
    biases = [bias * strength for delta, strength in deltas if (bias := delta.bias()) is not None]
    bias = _summed(biases) if biases else None
    if weight is None and any(delta.needs_weight for delta, _ in deltas):
        raise HswqError("merging DoRA needs the weights", tensor=deltas[0][0].layer, fix="give a model")
    left, right, terms = _sum_of(deltas, torch.zeros(n, k) if weight is None else weight)
    rows = n // len(names)
    found = []
    for index, name in enumerate(names):
        part = slice(index * rows, (index + 1) * rows)
        size = sum(_norm(each[part], factor) for each, factor in terms)
        up, down, report = _cut(name, left[part], right, rank, size)
        piece = None if bias is None or not bias[part].any() else bias[part]
        kept = (
            LowRank(name, part.start, part.stop, 1.0, down.to(dtype), up.to(dtype)) if report.rank else None
        )
        empty = kept is None and piece is None
        found.append((None if empty else Unit(name, part.start, part.stop, kept, piece), report))
    return found


def _summed(biases: list[Tensor]) -> Tensor:
    """Their sum, with zeros where only rounding is left of it."""
    terms = torch.stack(biases)
    total = terms.sum(0)
    return total.where(total.abs() > _ROUNDING * terms.abs().sum(0), torch.zeros(()))


def _sum_of(
    deltas: list[tuple[LayerDelta, float]], weight: Tensor
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor | None]]]:
    """Σ strength · ΔW = left [N, R] · right [R, K], and its terms as factors, or as a whole beside None."""
    if all(isinstance(part, LowRank) for delta, _ in deltas for part in delta.parts):
        factors = [_factors(delta, strength) for delta, strength in deltas]
        left, right = torch.cat([left for left, _ in factors], 1), torch.cat([right for _, right in factors])
        return left, right, [*factors]
    whole = [total_delta([each], weight) for each in deltas]
    return torch.stack(whole).sum(0), torch.eye(weight.shape[1]), [(each, None) for each in whole]


def _factors(delta: LayerDelta, strength: float) -> tuple[Tensor, Tensor]:
    """strength · ΔW = left [N, R] · right [R, K], in fp64."""
    branch = delta.branch()
    assert branch is not None  # noqa: S101 - all its parts are low-rank
    return branch.up.double() * (branch.scale.double() * strength), branch.down.double()


def _norm(left: Tensor, right: Tensor | None) -> float:
    """‖left · right‖, of factors without the dense matrix; of the left one alone beside None."""
    if right is None:
        return float(torch.linalg.vector_norm(left.double()))
    return math.sqrt(max(float(((left.T @ left) * (right @ right.T)).sum()), 0.0))


def _cut(
    name: str, left: Tensor, right: Tensor, rank: int, terms: float
) -> tuple[Tensor, Tensor, MergedModule]:
    """The best up · down of at most this rank for left · right; singular values are shared evenly."""
    q_left, r_left = torch.linalg.qr(left.double())
    q_right, r_right = torch.linalg.qr(right.double().T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    norm = float(s.norm())
    if norm <= _ROUNDING * terms:
        norm, s = 0.0, torch.zeros_like(s)
    kept = min(rank, int((s > s[:1].sum() * 1e-7).sum()))
    error = float(s[kept:].norm()) / norm if norm else 0.0
    root = s[:kept].sqrt()
    up, down = q_left @ (u[:, :kept] * root), (root[:, None] * vh[:kept]) @ q_right.T
    return up, down, MergedModule(name, norm, kept, error, terms)
