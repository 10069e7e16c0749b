"""BakeReport: whether the LoRAs arrived, per layer and per kind of weight, for every way of applying them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import pandas as pd

from hswq_lab.results import Result

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hswq_lab.effect import EffectReport
    from hswq_lab.lora.evidence import Kind, LayerEvidence, Verdict, Way
    from hswq_lab.lora.matching import Coverage

_NOTED_GROWTH = 1.1

_KINDS: tuple[Kind, ...] = ("nvfp4", "int8", "other_qt", "16-bit")


@dataclass(frozen=True)
class KindVerdict:
    """The layers of one kind; one that carries a bake and a side path counts as both, and once as a layer.

    Attributes:
        layers: layers of the kind whose ΔW is not zero.
        baked: of them, layers whose weight changed.
        branched: of them, layers with a side path that carries the delta.
        rotated: of the baked ones, layers that are stored rotated.
        unrotated: of those, layers whose delta was added in the unrotated basis.
        rerotated: of those, layers whose result is in the rotated basis again.
        missing: layers with a delta that did not arrive.
    """

    kind: Kind
    layers: int
    baked: int
    branched: int
    rotated: int
    unrotated: int
    rerotated: int
    missing: int

    @property
    def verdict(self) -> Verdict:
        """OK, MISMATCH (wrong rotations), MISSING (not everything arrived) or N/A (none of the kind)."""
        if self.layers == 0:
            return "N/A"
        if self.missing:
            return "MISSING"
        return "OK" if self.unrotated == self.rerotated == self.rotated else "MISMATCH"


@dataclass(frozen=True, repr=False)
class BakeReport(Result):
    """What LoRAs did to a model's weights.

    Attributes:
        rows: one a touched layer and way, biases by themselves.
        loras: what was applied, e.g. "outline ×0.8 (bake)".
        effect: the effect test on real activations, if it was made.
        coverage: of each of them, how many of its modules match a layer.
        remarks: what to know about them as a whole, beside modules that were left out.
    """

    rows: list[LayerEvidence]
    loras: tuple[str, ...] = ()
    effect: EffectReport | None = None
    coverage: tuple[Coverage, ...] = ()
    remarks: tuple[str, ...] = ()

    computed: ClassVar[tuple[str, ...]] = ("verdict", "warnings", "notes", "log_line", "patches_left")

    def with_effect(self, effect: EffectReport) -> BakeReport:
        """The same with the effect test beside the evidence."""
        return replace(self, effect=effect)

    def kind(self, kind: Kind) -> KindVerdict:
        """The counts of one kind of weight."""
        rows = [row for row in self.rows if row.kind == kind and row.verdict != "N/A"]
        arrived = [row for row in rows if row.verdict != "MISSING"]
        baked = [row for row in arrived if row.way != "branch"]
        rotated = [row for row in baked if row.group is not None]
        return KindVerdict(
            kind=kind,
            layers=_layers(rows),
            baked=_layers(baked),
            branched=_layers(row for row in arrived if row.way == "branch"),
            rotated=len(rotated),
            unrotated=sum(row.unrotated is True for row in rotated),
            rerotated=sum(row.rerotated is True for row in rotated),
            missing=_layers(row for row in rows if row.verdict == "MISSING"),
        )

    @property
    def kinds(self) -> list[KindVerdict]:
        """The counts of every kind of weight, and of biases where a LoRA changes one."""
        biases: tuple[Kind, ...] = ("bias",) if any(row.kind == "bias" for row in self.rows) else ()
        return [self.kind(kind) for kind in _KINDS + biases]

    @property
    def patches_left(self) -> int:
        """Layers, and biases, with a delta that did not arrive."""
        return sum(kind.missing for kind in self.kinds)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of a kind; N/A if no delta was there at all."""
        found = {kind.verdict for kind in self.kinds}
        worst: tuple[Verdict, ...] = ("MISMATCH", "MISSING", "OK", "N/A")
        return next(verdict for verdict in worst if verdict in found)

    @property
    def log_line(self) -> str:
        """The counts as the reference system logs them."""
        counts = " ".join(f"{kind}_baked={self.kind(kind).baked}" for kind in _KINDS[:3])
        return f"{counts} patches_left={self.patches_left}"

    @property
    def warnings(self) -> list[str]:
        """The `overall` ones, then one a layer that has one."""
        warned = [f"{row.layer} ({row.format}): {row.warning}" for row in self.rows if row.warning]
        return [*self.overall, *warned]

    @property
    def overall(self) -> list[str]:
        """The warnings that are about the LoRAs as a whole: modules that were left out, a source that does not fit."""
        return [*(found.warning for found in self.coverage if found.left_out), *self.remarks]

    @property
    def notes(self) -> list[str]:
        """What is not wrong, but should be known: about calibration, the price of a bake, DoRA's norms."""
        calibrated = _layers(row for row in self.rows if row.calibrated and row.verdict != "N/A")
        notes = []
        if calibrated:
            notes.append(
                f"the input_scale of {calibrated} touched layers was measured without these LoRAs, which "
                "move the inputs of later layers: watch the clipped blocks in the load report, or calibrate again, "
                "without --model (model=): the 16-bit model does not have the LoRAs"
            )
        notes += [
            f"baking in place made the error to the source {growth:.2f} times what it was on {kind.kind} layers, the "
            "price of rounding by chance, which keeps small deltas; a branch or bake_from_source makes it no larger"
            for kind in self.kinds
            if (growth := self._growth(kind.kind, ("bake",))) is not None and growth > _NOTED_GROWTH
        ]
        notes += [
            f"DoRA's norms on {count} layers come from the {origin}"
            for origin in ("source", "pack")
            if (count := _layers(row for row in self.rows if row.norms_from == origin))
        ]
        return notes

    def _growth(self, kind: Kind, ways: tuple[Way, ...]) -> float | None:
        """The mean growth of the error to the source; None without a source or without bakes of these ways."""
        rows = [row for row in self.rows if row.kind == kind and row.way in ways]
        found = [row.growth for row in rows if row.growth is not None]
        return sum(found) / len(found) if found else None

    def summary(self) -> pd.DataFrame:
        """One row a kind: counts, verdict, the mean retained share weighted by ‖ΔW‖², the mean growth of the error."""
        frames = []
        for kind in self.kinds:
            rows = [row for row in self.rows if row.kind == kind.kind and row.retained is not None]
            energy = sum(row.delta_norm**2 for row in rows)
            share = sum((row.retained or 0.0) * row.delta_norm**2 for row in rows)
            warned = _layers(row for row in rows if row.warning)
            growth = self._growth(kind.kind, ("bake", "bake_from_source"))
            means = {"retained": share / energy if energy else None, "growth": growth}
            frames.append({**vars(kind), "verdict": kind.verdict, **means, "warned": warned})
        return pd.DataFrame(frames)

    def to_frame(self) -> pd.DataFrame:
        """One row a layer; with an effect test, "effect_cosine" and "effect_error" too.

        A module that matches no layer is a row as well: its name, and the verdict "LEFT OUT".
        """
        rows = [{**vars(row), "growth": row.growth} for row in self.rows]
        lost = [
            {"layer": module, "verdict": "LEFT OUT", "warning": f"{found.lora}: the model has no such layer"}
            for found in self.coverage
            for module in found.left_out
        ]
        frame = pd.DataFrame([*rows, *lost])
        if self.effect is None:
            return frame
        columns = {"cosine": "effect_cosine", "error": "effect_error"}
        measured = self.effect.to_frame()[["layer", *columns]].rename(columns=columns)
        return frame.merge(measured, on="layer", how="left")

    def __repr__(self) -> str:
        """A summary for a console."""
        lines = [f"{', '.join(self.loras) or 'no LoRAs'}: {self.verdict}", f"  {self.log_line}"]
        lines += [f"  warning: {text}" for text in self.overall]
        lines += [
            f"  {kind.kind}: {kind.verdict}, {kind.baked} baked, {kind.branched} branched of {kind.layers};"
            f" unrotated {kind.unrotated}, re-rotated {kind.rerotated} of {kind.rotated} rotated"
            for kind in self.kinds
            if kind.layers
        ]
        for kind in self.kinds:
            warned = [row for row in self.rows if row.kind == kind.kind and row.warning]
            if warned:
                worst = max(warned, key=lambda row: row.added_error or 0.0)
                where = f"{_layers(warned)} of {kind.layers} {kind.kind} layers, the worst {worst.layer}"
                lines.append(f"  warning: {where}: {worst.warning}")
        if self.effect is not None:
            lines.append(f"  {self.effect!r}".replace("\n", "\n  "))
        return "\n".join([*lines, *(f"  note: {text}" for text in self.notes)])


def _layers(rows: Iterable[LayerEvidence]) -> int:
    """How many layers rows are about."""
    return len({row.layer for row in rows})
