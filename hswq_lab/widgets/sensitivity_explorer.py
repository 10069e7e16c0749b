"""SensitivityExplorer: which layer costs what, and where to cut between NVFP4 and INT8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets

from hswq_lab.plots import impact_figure, plans_figure, style
from hswq_lab.widgets import markup
from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.panel import Panel
from hswq_lab.widgets.sensitivity_state import Forecast, SensitivityState, parse_mib

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from hswq_lab.model import Model
    from hswq_lab.quantize import ImpactReport, ParetoReport
    from hswq_lab.widgets.live_figure import Click


_WIDE, _NARROW = {"width": "430px"}, {"width": "200px"}


class SensitivityExplorer(Panel):
    """Impact bars with a cut that a slider moves, and what the plans measured so far reach.

    Args:
        model: the 16-bit model.
        report: its impacts from `hl.sensitivity`; without, they can be measured in the panel.
        steps: Euler steps of measured plans.
        seeds: prompts of measured plans.
        executor: where impacts are measured, e.g. a process pool.
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
        self.state = SensitivityState(model, report, steps=steps, seeds=seeds, executor=executor)
        count = len(model.layers())
        self.impact_seeds = ipywidgets.BoundedIntText(
            value=2, min=1, max=20, description="prompts", layout=_NARROW
        )
        self.impact_steps = ipywidgets.BoundedIntText(
            value=4, min=1, max=50, description="steps", layout=_NARROW
        )
        self.measure_button = ipywidgets.Button(
            description="Measure impacts",
            button_style="" if report else "primary",
            tooltip="quantise each layer alone and compare the final latents",
        )
        self.cut = ipywidgets.IntSlider(
            value=round(0.6 * count), min=0, max=count, description="NVFP4", continuous_update=False, layout=_WIDE,
            tooltip="how many of the least sensitive layers become NVFP4",
        )  # fmt: skip
        self.budget = ipywidgets.Text(
            description="≤ MiB", placeholder="any size", continuous_update=False, layout=_NARROW,
            tooltip="at most so many MiB of Linears: moves the cut",
        )  # fmt: skip
        self._cut_of_budget: int | None = None
        self.order = ipywidgets.Dropdown(
            options=("impact", "block", "kind"), description="order", layout=_NARROW,
            tooltip="of the bars: the least sensitive first, or grouped",
        )  # fmt: skip
        self.forecast = ipywidgets.HTML()
        self.bars = LiveFigure(style.placeholder("measure the impacts first"))
        self.plan_button = ipywidgets.Button(
            description="Measure this plan", tooltip="pack it in memory, calibrate it, and run it"
        )
        self.path = ipywidgets.Text(value="pack.safetensors", description="file", layout={"width": "330px"})
        self.pack_button = ipywidgets.Button(description="Pack this plan", tooltip="write it into the file")
        self.plans = LiveFigure(style.placeholder("what each cut reaches comes here"))
        body = [
            ipywidgets.HBox([self.impact_seeds, self.impact_steps, self.measure_button]),
            ipywidgets.HBox([self.cut, self.budget, self.order]),
            self.forecast,
            self.bars,
            ipywidgets.HBox([self.plan_button, self.path, self.pack_button]),
            self.plans,
        ]
        super().__init__(
            "Where to cut",
            "Each bar is one layer quantised alone. Left of the cut: NVFP4; the others stay in INT8.",
            body,
            css_class="hswq-sensitivity",
        )
        self.measure_button.on_click(self.guarded(lambda _: self._measure_impacts()))
        self.plan_button.on_click(self.guarded(lambda _: self._measure_plan()))
        self.pack_button.on_click(self.guarded(lambda _: self._pack()))
        self.cut.observe(self.guarded(lambda _: self._moved()), names="value")
        self.budget.observe(self.guarded(lambda _: self._budgeted()), names="value")
        self.order.observe(self.guarded(lambda _: self._moved()), names="value")
        self.bars.on_click(self.guarded(self._cut_at))
        self.plans.on_click(self.guarded(self._cut_to))
        if report is not None:
            self._impacts_known(report)
        self.mind(
            cut=self.cut, order=self.order, prompts=self.impact_seeds, steps=self.impact_steps, path=self.path
        )

    def result(self) -> ImpactReport | ParetoReport | None:
        """What was measured of plans, else the impacts."""
        return self.state.measured or self.state.report

    def _measure_impacts(self) -> None:
        seeds, steps = int(self.impact_seeds.value), int(self.impact_steps.value)
        self.begin(lambda progress: self.state.measure_impacts(seeds, steps, progress), self._impacts_known)

    def _impacts_known(self, report: ImpactReport) -> None:
        self.cut.max = len(report.layers)  # only the layers that were measured can be chosen
        self.allow_exports()
        self._moved()

    def _moved(self) -> None:
        report, nvfp4 = self.state.report, int(self.cut.value)
        if report is None:
            return
        if nvfp4 != self._cut_of_budget:
            self.budget.value = ""  # another cut than the one that the budget gave
        self.bars.show(impact_figure(report, self.state.plan(nvfp4), order=self.order.value))
        predicted = [(each.bits, each.predicted) for each in self.state.forecasts()]
        self.plans.show(plans_figure(predicted, nvfp4, self.state.measured))
        self._tell(self.state.forecast(nvfp4), self.state.measured_cos(nvfp4))

    def _tell(self, forecast: Forecast, measured: float | None) -> None:
        facts = {
            "layers": f"{forecast.nvfp4} NVFP4, {self.cut.max - forecast.nvfp4} INT8",
            "size": f"{forecast.nbytes / 2**20:.2f} MiB of Linears, {forecast.bits:.3f} bits a weight",
            "final cosine": f"predicted {forecast.predicted:.5f}, "
            + ("not measured" if measured is None else f"measured {measured:.5f}"),
        }
        self.forecast.value = markup.facts(facts)

    def _budgeted(self) -> None:
        text = self.budget.value.strip()
        self.errors.value = ""
        if text:
            self._cut_of_budget = self.state.count_within(parse_mib(text))
            self.cut.value = self._cut_of_budget

    def _cut_at(self, bar: Click) -> None:
        """A click on a bar moves the cut behind it."""
        if self.state.report is not None:
            self.cut.value = style.texts(self.state.report.ranking()).index(bar.x) + 1

    def _cut_to(self, dot: Click) -> None:
        """A click on a predicted cut takes it."""
        if dot.note and isinstance(dot.note[0], int):
            self.cut.value = dot.note[0]

    def _measure_plan(self) -> None:
        nvfp4 = int(self.cut.value)
        self.begin(lambda progress: self.state.measure_plan(nvfp4, progress), self._plan_known)

    def _plan_known(self, _report: ParetoReport) -> None:
        self._moved()

    def _pack(self) -> None:
        nvfp4, path = int(self.cut.value), self.path.value
        self.begin(lambda progress: self.state.pack(nvfp4, path, progress), self._packed)

    def _packed(self, path: Path) -> None:
        self.say(f"written: {path} ({path.stat().st_size:,} bytes); calibrate it before mode tc")
