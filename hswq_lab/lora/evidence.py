"""What a LoRA did to a layer, measured on the weights: retained share, added error, the right basis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from hswq_lab.formats import Int8Weight, Nvfp4Weight, PackedWeight
from hswq_lab.lora.change import Change, Sums, change_sums, compared
from hswq_lab.lora.targets import unpacked

if TYPE_CHECKING:
    from hswq_lab.lora.delta import Branch

Way = Literal["branch", "bake", "bake_from_source"]
Verdict = Literal["OK", "MISMATCH", "MISSING", "N/A"]
Kind = Literal["nvfp4", "int8", "other_qt", "16-bit", "bias"]

ENOUGH = 0.9  # a smaller retained share, beyond its error, is warned about
TOO_MUCH = 1.1  # and so is a larger one
_SAME = 0.7  # ‖W' − (W+ΔW)‖ / ‖W+ΔW‖ is √2 for a result in another basis, below .2 for every format
_STRANGE = 0.5  # ‖W − S‖ / ‖S‖ is √2 for weights that have nothing to do with each other
_NOT_ITS_SOURCE = "the source does not fit: the pack was made from other weights"
_WRONG_BASIS = "the delta was added in the wrong basis"
_NO_ERROR = 1e-6  # relative; below it a weight equals its source up to fp32 noise


@dataclass(frozen=True, kw_only=True)
class LayerEvidence:
    """One layer of a `BakeReport`.

    W is the pristine weight, W' the new one, ΔW the sum of all deltas times their strengths.

    Attributes:
        kind: the reference log's classes; "other_qt" are quantised formats that are neither NVFP4 nor INT8.
            "bias" is a row about the layer's bias: W, W' and ΔW are then b, b' and Δb.
        format: of the stored weight.
        group: its rotation group.
        rows: rows that ΔW touches.
        delta_norm: ‖ΔW‖.
        ratio: ‖ΔW‖ / ‖W‖ over the touched rows; None where W was not needed (branches).
        retained: r = ⟨W'−W, ΔW⟩ / ⟨ΔW, ΔW⟩, in the unrotated basis; None for a zero ΔW.
        retained_se: its standard error (least squares through the origin).
        added_error: ‖W'−W−ΔW‖ / ‖ΔW‖.
        source_error_before: ‖W − S‖ / ‖S‖ of the pack to the source S; None without a source.
        source_error_after: ‖W' − (S+ΔW)‖ / ‖S+ΔW‖.
        unrotated: for rotated weights: ΔW was added in the unrotated basis (its share there is not smaller
            than in the rotated one, beyond the error).
        rerotated: for rotated weights: the result is in its weight's basis again.
        verdict: "N/A" for a zero ΔW, "MISSING" if nothing arrived, "MISMATCH" for a wrong basis, else "OK".
        norms_from: where DoRA's norms came from: "source", "pack", or empty without DoRA.
        calibrated: whether the weight carries an input_scale, which was measured without this LoRA.
        warning: empty, or what is wrong and what would be exact.
    """

    layer: str
    way: Way
    kind: Kind
    format: str
    group: int | None
    rows: int
    delta_norm: float
    ratio: float | None = None
    retained: float | None
    retained_se: float | None
    added_error: float | None
    source_error_before: float | None = None
    source_error_after: float | None = None
    unrotated: bool | None = None
    rerotated: bool | None = None
    verdict: Verdict
    norms_from: str = ""
    calibrated: bool = False
    warning: str = ""

    @property
    def growth(self) -> float | None:
        """How much the layer's error to the source grew: after / before; None where there was none before."""
        before, after = self.source_error_before, self.source_error_after
        return after / before if before is not None and after is not None and before > _NO_ERROR else None


@dataclass(frozen=True, eq=False)
class Baked:
    """One layer with deltas in it, and what `measure` looks at: `change` was added, `source` is the 16-bit [N, K]."""

    name: str
    way: Way
    before: Tensor | PackedWeight
    after: Tensor | PackedWeight
    change: Change
    source: Tensor | None
    norms_from: str


class BakedWeights(Protocol):
    """Where baked weights are kept while a network needs them, or one is about to."""

    def known(self, layer: str) -> Tensor | PackedWeight | None:
        """The layer's weight with everything that is baked into it, None if it has to be made."""
        ...

    def keep(self, layer: str, weight: PackedWeight) -> None:
        """Takes a weight that was just made."""
        ...

    def pristine(self, layer: str) -> PackedWeight | None:
        """The layer's weight as the checkpoint has it, where a network holds it on the device."""
        ...


def measure(case: Baked) -> LayerEvidence:
    """The evidence for one baked layer, from its weights alone."""
    sums = change_sums(case.before, case.after, case.change, case.source)
    row = replace(
        _row(case.name, case.way, case.before, sums, int(sums.rows) * case.before.shape[1]),
        ratio=_relative(sums.dd, sums.ww),
        source_error_before=_relative(sums.error_before, sums.source),
        source_error_after=_relative(sums.error_after, sums.source_after),
        norms_from=case.norms_from,
    )
    if row.verdict != "OK" or row.group is None or not isinstance(case.after, PackedWeight):
        return row
    # Whether the change looks no less like ΔW than like ΔW·H, what a bake without unrotating leaves.
    unrotated = (sums.c_turned - sums.cd) / sums.dd <= 2 * math.sqrt(2) * (row.retained_se or 0.0)
    rerotated = case.after.group == row.group and sums.missed <= _SAME**2 * _wanted(sums)
    if not (unrotated and rerotated):
        strange = (row.source_error_before or 0.0) > _STRANGE
        row = replace(row, verdict="MISMATCH", warning=_NOT_ITS_SOURCE if strange else _WRONG_BASIS)
    return replace(row, unrotated=unrotated, rerotated=rerotated)


def branch_evidence(
    name: str,
    value: Tensor | PackedWeight,
    wanted: Change,
    branches: list[tuple[Branch, float]],
    norms_from: str = "",
) -> LayerEvidence:
    """The evidence for side paths: the matrix that they multiply by, against ΔW.

    Args:
        name: the layer's name.
        value: the weight beside which the branches run.
        wanted: Σ strength · ΔW.
        branches: with strengths.
        norms_from: where DoRA's norms came from.
    """
    sums = compared(_carried(branches, value), wanted)
    row = _row(name, "branch", value, sums, wanted.left.shape[0] * value.shape[1])
    return replace(row, norms_from=norms_from)


def bias_evidence(
    name: str, way: Way, before: Tensor | None, after: Tensor | None, total: Tensor
) -> LayerEvidence:
    """The evidence for a layer's bias, a row of kind "bias".

    Args:
        name: the layer's name.
        way: how the delta was applied.
        before: the pristine bias [N]; None where the layer had none.
        after: the bias that the layer adds now; None where it still has none.
        total: Σ strength · Δb, fp32 [N].
    """
    device = total.device
    old = torch.zeros_like(total) if before is None else before.to(device).float()
    new = torch.zeros_like(total) if after is None else after.to(device).float()
    sums = change_sums(old[None], new[None], Change(total[None]), None)
    stored = before if before is not None else after if after is not None else total
    row = _row(name, way, stored, sums, total.numel())
    return replace(row, kind="bias", rows=int((total != 0).sum()), ratio=_relative(sums.dd, sums.ww))


def _row(name: str, way: Way, value: Tensor | PackedWeight, sums: Sums, n: int) -> LayerEvidence:
    """What `Sums` over n numbers say about what arrived; all else about the layer is left open."""
    retained, error, added = _share(sums, n)
    verdict: Verdict = "N/A" if retained is None else "MISSING" if sums.cc == 0 else "OK"
    return LayerEvidence(
        layer=name,
        way=way,
        kind=kind_of(value),
        format=format_of(value),
        group=value.group if isinstance(value, PackedWeight) else None,
        rows=int(sums.rows),
        delta_norm=math.sqrt(sums.dd),
        retained=retained,
        retained_se=error,
        added_error=added,
        verdict=verdict,
        calibrated=isinstance(value, Nvfp4Weight) and value.input_scale is not None,
        warning=_warning(way, verdict, retained, error, added),
    )


def _carried(branches: list[tuple[Branch, float]], value: Tensor | PackedWeight) -> Change:
    """The matrix that side paths multiply x by, with their strengths."""
    if all(branch.gain is None and not branch.kron for branch, _ in branches):
        left = [branch.up.float() * (branch.scale * strength) for branch, strength in branches]
        return Change(torch.cat(left, dim=1), torch.cat([branch.down.float() for branch, _ in branches]))
    gained = any(branch.gain is not None for branch, _ in branches)
    weight = unpacked(value) if gained else torch.zeros(())
    dense = [branch_dense(branch, weight) * strength for branch, strength in branches]
    return Change(torch.stack(dense).sum(0))


def branch_dense(branch: Branch, weight: Tensor) -> Tensor:
    """The matrix fp32 [N, K] that a side path multiplies x by at strength 1; `weight` is for DoRA."""
    dense = branch.up.float() @ (branch.down.float() * branch.scale[:, None])
    for term in branch.kron:
        part = torch.kron(term.w1.float(), term.w2.float()) * term.scale
        dense[term.start : term.stop] += part if term.gain is None else part * term.gain[:, None]
    return dense if branch.gain is None else dense + weight * branch.gain[:, None]


def kind_of(value: Tensor | PackedWeight) -> Kind:
    """The class that the reference system's log counts a weight in."""
    if isinstance(value, Tensor):
        return "16-bit"
    return (
        "nvfp4" if isinstance(value, Nvfp4Weight) else "int8" if isinstance(value, Int8Weight) else "other_qt"
    )


def format_of(value: Tensor | PackedWeight) -> str:
    """The format's name in files, or the dtype's."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else value.format


def _wanted(sums: Sums) -> float:
    """‖W+ΔW‖²."""
    return sums.ww + 2 * sums.wd + sums.dd


def _share(sums: Sums, n: int) -> tuple[float | None, float | None, float | None]:
    """(retained share, its standard error, added error) over n weights; None for a zero ΔW."""
    if sums.dd == 0:
        return None, None, None
    retained = sums.cd / sums.dd
    # ‖c − d‖² = ‖c − r·d‖² + (1 − r)²·‖d‖² gives the residual without cancellation.
    residual = max(sums.missed - (1 - retained) ** 2 * sums.dd, 0.0)
    error = math.sqrt(residual / max(n - 1, 1) / sums.dd)
    return retained, error, math.sqrt(sums.missed / sums.dd)


def _relative(part: float, norm: float) -> float | None:
    """‖part‖ / ‖whole‖ from the squares; None where there is no whole."""
    return math.sqrt(part / norm) if norm else None


def _warning(
    way: Way, verdict: Verdict, retained: float | None, error: float | None, added: float | None
) -> str:
    exact = {
        "branch": "",
        "bake": "; a branch is exact, and baking from the source keeps the whole delta",
        "bake_from_source": "; a branch is exact",
    }[way]
    if verdict == "MISSING":
        return f"nothing of the delta arrived{exact}"
    if retained is None or error is None or added is None:
        return ""
    faults = []
    if retained + 2 * error < ENOUGH:
        faults.append(f"only {retained:.0%} of the delta arrived (± {error:.0%})")
    if retained - 2 * error > TOO_MUCH:
        faults.append(f"{retained:.0%} of the delta arrived (± {error:.0%}), more than was asked for")
    if added > 1:
        faults.append(f"the added error is {added:.1f} times the delta")
    return " and ".join(faults) + exact if faults else ""
