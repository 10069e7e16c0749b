"""What a SensitivityExplorer shows, without widgets: impacts, a plan, what it would cost, what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError
from hswq_lab.loading import save
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
        measured: mean final cosine of exactly this number of NVFP4 layers, if it was measured.
    """

    nvfp4: int
    bits: float
    nbytes: int
    predicted: float
    measured: float | None


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
        self.model = model
        self.report = report
        self.measured: ParetoReport | None = None
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
        self.report = report
        return report

    def plan(self, nvfp4: int) -> Plan:
        """The plan with so many NVFP4 layers."""
        return self._measured_report().plan(nvfp4=nvfp4)

    def count_within(self, budget: int) -> int:
        """The smallest number of NVFP4 layers whose plan keeps within a number of bytes.

        Raises:
            HswqError: no plan is that small.
        """
        layers = self._measured_report().layers
        sizes = [self.plan(nvfp4).nbytes(layers) for nvfp4 in range(len(layers) + 1)]
        for nvfp4, size in enumerate(sizes):
            if size <= budget:
                return nvfp4
        raise HswqError(
            "no plan is that small", found=f"{budget:,} bytes", expected=f"at least {min(sizes):,}"
        )

    def forecast(self, nvfp4: int) -> Forecast:
        """What the plan with so many NVFP4 layers would be."""
        report, plan = self._measured_report(), self.plan(nvfp4)
        points = [] if self.measured is None else self.measured.points
        known = [point.mean for point in points if point.nvfp4 == nvfp4]
        return Forecast(
            nvfp4=nvfp4,
            bits=plan.bits(report.layers),
            nbytes=plan.nbytes(report.layers),
            predicted=report.predicted_cos(plan),
            measured=known[-1] if known else None,
        )

    def measure_plan(self, nvfp4: int, progress: Progress) -> ParetoReport:
        """Packs the plan, calibrated and in mode tc, runs it, and adds the point to those measured."""
        one = pareto(
            self.model,
            self._measured_report(),
            [nvfp4],
            prompts=self.model.prompts[: self._seeds],
            steps=self._steps,
            progress=progress,
        )
        before = [] if self.measured is None else [p for p in self.measured.points if p.nvfp4 != nvfp4]
        points = sorted([*before, *one.points], key=lambda point: point.nvfp4)
        self.measured = replace(one, points=points)
        return self.measured

    def pack(self, nvfp4: int, path: str | Path, progress: Progress) -> Path:
        """Packs the plan into a file, whole or not at all.

        Raises:
            HswqError: the file exists.
        """
        target = Path(path)
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
