"""What a SensitivityExplorer shows, without widgets: impacts, a plan, what it would cost, what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError
from hswq_lab.loading import save
from hswq_lab.model import check_model
from hswq_lab.progress import Progress, part
from hswq_lab.quantize import ImpactReport, ParetoReport, pack_to_file, pareto, sensitivity
from hswq_lab.quantize import pack as make_pack
from hswq_lab.quantize.plan import KEPT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor

    from hswq_lab.model import Model
    from hswq_lab.quantize import Plan


@dataclass(frozen=True)
class Forecast:
    """What a plan would be.

    Attributes:
        nvfp4: layers in NVFP4.
        int8: layers in INT8.
        kept: layers that were not measured, which stay 16 bit.
        bits: mean bits a weight.
        nbytes: of the Linears.
        predicted: mean final cosine if the layers' errors were independent.
    """

    nvfp4: int
    int8: int
    kept: int
    bits: float
    nbytes: int
    predicted: float


class SensitivityState:
    """A 16-bit model, its impacts, and measured plans.

    Args:
        model: 16-bit; not changed.
        executor: where impacts are measured.

    Attributes:
        report: the impacts, once there are any.
    """

    def __init__(self, model: Model, *, executor: Executor | None = None) -> None:
        check_model(model)
        self.model = model
        self.report: ImpactReport | None = None
        self._measured: dict[tuple[int, int, float], ParetoReport] = {}  # (prompts, steps, cfg) → plans
        self._forecasts: list[Forecast] | None = None
        self._cfg = 2.5
        self._executor = executor

    @property
    def most_prompts(self) -> int:
        """How many prompts there are to measure with; 1 for a model that has none and cannot measure."""
        return 1 if self.model.companion is None else len(self.model.companion.prompts)

    def take(self, report: ImpactReport) -> None:
        """Takes impacts that were measured before; plans are then measured with their guidance.

        Raises:
            HswqError: they are none, or of another checkpoint or other captions; those taken before stay.
        """
        if not isinstance(report, ImpactReport):
            raise HswqError(
                "this is no impact report",
                found=type(report).__name__,
                fix='pass what hl.sensitivity returns, or ImpactReport.load("….json")',
            )
        if not report.rows:
            raise HswqError("this impact report has no layer", fix="measure some with hl.sensitivity")
        companion = self.model.companion
        captions = None if companion is None else companion.encoder_identity
        _check_same("checkpoint", report.sha256, self.model.checkpoint.sha256)
        if report.captions is not None:  # the first files do not say
            _check_same("text encoder, or with other captions", report.captions, captions)
        self.report, self._forecasts, self._cfg = report, None, report.cfg

    def measure_impacts(self, prompts: int, steps: int, progress: Progress) -> ImpactReport:
        """Measures every layer's impact in NVFP4; what was measured of plans before is kept."""
        report = sensitivity(
            self.model,
            self.model.prompts[:prompts],
            steps=steps,
            cfg=self._cfg,
            formats=("nvfp4",),
            scales="rtn",
            executor=self._executor,
            progress=progress,
        )
        self.report, self._forecasts = report, None
        return report

    def plan(self, nvfp4: int) -> Plan:
        """The plan with so many NVFP4 layers."""
        return self._measured_report().plan(nvfp4=nvfp4)

    def count_within(self, budget: int) -> int:
        """The smallest number of NVFP4 layers whose plan keeps within a number of bytes.

        Raises:
            HswqError: no plan is that small.
        """
        sizes = [forecast.nbytes for forecast in self.forecasts()]
        for nvfp4, size in enumerate(sizes):
            if size <= budget:
                return nvfp4
        raise HswqError(
            "no plan is that small",
            found=f"{budget / 2**20:.2f} MiB",
            expected=f"at least {min(sizes) / 2**20:.2f} MiB",
            fix="give the Linears more room",
        )

    def forecasts(self) -> list[Forecast]:
        """What every number of NVFP4 layers would be, from none to all; computed once for a report."""
        report = self._measured_report()
        if self._forecasts is None:
            self._forecasts = [self._forecast(report, nvfp4) for nvfp4 in range(len(report.layers) + 1)]
        return self._forecasts

    def forecast(self, nvfp4: int) -> Forecast:
        """What the plan with so many NVFP4 layers would be."""
        return self.forecasts()[nvfp4]

    def measured(self, prompts: int, steps: int) -> ParetoReport | None:
        """The plans that were measured with so many prompts and steps, if there are any."""
        return self._measured.get((prompts, steps, self._cfg))

    def measured_cos(self, nvfp4: int, prompts: int, steps: int) -> float | None:
        """Mean final cosine of the plan, if these very formats were measured with these prompts and steps."""
        curve, wanted = self.measured(prompts, steps), self._formats(self.plan(nvfp4))
        points = [] if curve is None else curve.points
        return next((point.mean for point in points if self._formats(point.formats) == wanted), None)

    def _formats(self, plan: Mapping[str, str]) -> dict[str, str]:
        """Of every layer of the model, those that a plan leaves alone too."""
        return {layer: plan.get(layer, KEPT) for layer in self.model.layers()}

    def _forecast(self, report: ImpactReport, nvfp4: int) -> Forecast:
        plan, layers = report.plan(nvfp4=nvfp4), report.layers | report.unmeasured
        return Forecast(
            nvfp4=nvfp4,
            int8=len(report.layers) - nvfp4,
            kept=len(report.unmeasured),
            bits=plan.bits(layers),
            nbytes=plan.nbytes(layers),
            predicted=report.predicted_cos(plan),
        )

    def measure_plan(self, nvfp4: int, prompts: int, steps: int, progress: Progress) -> ParetoReport:
        """Packs the plan, calibrated and in mode tc, runs it, and adds the point to those measured alike."""
        one = pareto(
            self.model,
            self._measured_report(),
            [nvfp4],
            prompts=self.model.prompts[:prompts],
            steps=steps,
            cfg=self._cfg,
            progress=part(progress, 0, 1000, 1000, f"measuring the plan of {nvfp4} NVFP4"),
        )
        curve, new = self.measured(prompts, steps) or one, one.points[0]
        others = [p for p in curve.points if self._formats(p.formats) != self._formats(new.formats)]
        points = sorted([*others, new], key=lambda point: point.nvfp4)
        whole = replace(one, points=points)
        self._measured[prompts, steps, self._cfg] = whole
        return whole

    def pack(self, nvfp4: int, path: str | Path, progress: Progress) -> Path:
        """Packs the plan into a file, whole or not at all.

        Raises:
            HswqError: no file is named, or it exists.
        """
        if not str(path).strip():
            raise HswqError("no file is named", fix="type a name, for example pack.safetensors")
        target = Path(path).expanduser()
        if target.exists():
            raise HswqError("the target exists already", file=target, fix="choose another name")
        plan = self.plan(nvfp4)
        if self.model.checkpoint.path is not None:
            return pack_to_file(self.model, target, plan, progress=progress)
        packed = make_pack(self.model, plan, progress=part(progress, 0, 50, 100))
        return save(packed, target, progress=part(progress, 50, 100, 100))

    def _measured_report(self) -> ImpactReport:
        if self.report is None:
            raise HswqError("the impacts were not measured yet", fix="press Measure impacts")
        return self.report


def _check_same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise HswqError(
            f"these impacts were measured on another {what}",
            found=found,
            expected=f"{expected}, as the model has it",
            fix="press Measure impacts, or pass the report of this model",
        )


def parse_mib(text: str) -> int:
    """A size as people type it, in MiB → bytes.

    Raises:
        HswqError: no number, or none above zero.
    """
    try:
        size = float(text.replace(",", "."))
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise HswqError("this is no size", found=text, expected="MiB of all Linears, for example 8.5")
    return round(size * 2**20)
