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

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from hswq_lab.model import Model
    from hswq_lab.quantize import Plan


@dataclass(frozen=True)
class Forecast:
    """What a plan would be.

    Attributes:
        nvfp4: layers in NVFP4.
        bits: mean bits a weight.
        nbytes: of the Linears.
        predicted: mean final cosine if the layers' errors were independent.
    """

    nvfp4: int
    bits: float
    nbytes: int
    predicted: float


class SensitivityState:
    """A 16-bit model, its impacts, and measured plans.

    Args:
        model: 16-bit; not changed.
        report: impacts that were measured before.
        steps: Euler steps of measured plans.
        seeds: number of prompts of measured plans.
        executor: where impacts are measured.
    """

    def __init__(
        self,
        model: Model,
        report: ImpactReport | None = None,
        *,
        steps: int = 12,
        seeds: int = 4,
        executor: Executor | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self.report = report
        self.measured: ParetoReport | None = None
        self._forecasts: list[Forecast] | None = None
        self._steps, self._seeds, self._executor = steps, seeds, executor

    def measure_impacts(self, seeds: int, steps: int, progress: Progress) -> ImpactReport:
        """Measures every layer's impact in NVFP4; what was measured of plans before is kept."""
        report = sensitivity(
            self.model,
            self.model.prompts[:seeds],
            steps=steps,
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

    def measured_cos(self, nvfp4: int) -> float | None:
        """Mean final cosine of exactly this number of NVFP4 layers, if it was measured."""
        points = [] if self.measured is None else self.measured.points
        return next((point.mean for point in points if point.nvfp4 == nvfp4), None)

    def _forecast(self, report: ImpactReport, nvfp4: int) -> Forecast:
        plan, layers = report.plan(nvfp4=nvfp4), report.layers | report.unmeasured
        return Forecast(nvfp4, plan.bits(layers), plan.nbytes(layers), report.predicted_cos(plan))

    def measure_plan(self, nvfp4: int, progress: Progress) -> ParetoReport:
        """Packs the plan, calibrated and in mode tc, runs it, and adds the point to those measured."""
        one = pareto(
            self.model,
            self._measured_report(),
            [nvfp4],
            prompts=self.model.prompts[: self._seeds],
            steps=self._steps,
            progress=part(progress, 0, 1000, 1000, f"measuring the plan of {nvfp4} NVFP4"),
        )
        before = [] if self.measured is None else [p for p in self.measured.points if p.nvfp4 != nvfp4]
        points = sorted([*before, *one.points], key=lambda point: point.nvfp4)
        self.measured = replace(one, points=points)
        return self.measured

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
