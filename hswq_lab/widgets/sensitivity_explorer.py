"""SensitivityExplorer: which layer costs what, and where to cut between NVFP4 and INT8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets

from hswq_lab.errors import HswqError
from hswq_lab.plots import impact_figure, plans_figure, style
from hswq_lab.widgets import markup
from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.panel import Panel
from hswq_lab.widgets.sensitivity_state import Forecast, SensitivityState, parse_mib

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from hswq_lab.model import Model
    from hswq_lab.quantize import ImpactReport, ParetoReport, Plan
    from hswq_lab.widgets.live_figure import Click


_WIDE, _NARROW = {"width": "430px"}, {"width": "200px"}
_IMPACTS, _MEASURED, _PLAN = "impacts", "measured plans", "plan"


class SensitivityExplorer(Panel):
    """Impact bars with a cut that a slider moves, and what the plans measured so far reach.

    Args:
        model: the 16-bit model.
        report: its impacts from `hl.sensitivity`; without, they can be measured in the panel.
        steps: Euler steps at first, of impacts and plans that are measured here; by default the report's, else 4.
        seeds: prompts at first, with a seed each; by default as many as the report has, else 2.
        executor: where impacts are measured, e.g. a process pool.
    """

    def __init__(
        self,
        model: Model,
        report: ImpactReport | None = None,
        *,
        steps: int | None = None,
        seeds: int | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.state = SensitivityState(model, executor=executor)
        count = len(model.layers())
        self.prompts = ipywidgets.BoundedIntText(
            value=2 if seeds is None else seeds, min=1, max=self.state.most_prompts, description="prompts",
            layout=_NARROW, tooltip="how many of the model's prompts, a seed each, impacts and plans are measured with",
        )  # fmt: skip
        self.steps = ipywidgets.BoundedIntText(
            value=4 if steps is None else steps, min=1, max=100, description="steps", layout=_NARROW,
            tooltip="Euler steps that impacts and plans are measured with",
        )  # fmt: skip
        self.measure_button = ipywidgets.Button(
            description="Measure impacts",
            button_style="primary" if report is None else "",
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
        buttons = ipywidgets.HBox([self.plan_button, self.path, self.pack_button])
        body = [
            ipywidgets.HBox([self.prompts, self.steps, self.measure_button]),
            ipywidgets.HBox([self.cut, self.budget, self.order]),
            self.forecast,
            buttons,
            self.bars,
            self.plans,
        ]
        super().__init__(
            "Where to cut",
            "Each bar is one layer quantised alone. Left of the cut: NVFP4, right of it: INT8. Layers without a bar "
            "stay 16 bit.",
            body,
            css_class="hswq-sensitivity",
            below=buttons,
        )
        self.what = ipywidgets.Dropdown(
            description="export", layout=_NARROW, tooltip="what the buttons write; a plan as JSON only"
        )
        self._exports.children = [self.what, *self._exports.children]
        self.measure_button.on_click(self.guarded(lambda _: self._measure_impacts()))
        self.plan_button.on_click(self.guarded(lambda _: self._measure_plan()))
        self.pack_button.on_click(self.guarded(lambda _: self._pack()))
        self.cut.observe(self.guarded(lambda _: self._moved()), names="value")
        self.budget.observe(self.guarded(lambda _: self._budgeted()), names="value")
        for control in (self.order, self.prompts, self.steps):
            control.observe(self.guarded(lambda _: self._moved()), names="value")
        self.what.observe(self.guarded(lambda _: self._chosen_to_export()), names="value")
        self.bars.on_click(self.guarded(self._cut_at))
        self.plans.on_click(self.guarded(self._cut_to))
        if report is not None:
            self.guarded(self._take)(report, seeds, steps)
        self.mind(cut=self.cut, order=self.order, prompts=self.prompts, steps=self.steps, path=self.path)

    def result(self) -> ImpactReport | ParetoReport | Plan | None:
        """What is chosen beside the export buttons: the impacts, what was measured of plans, or the plan."""
        if self.state.report is None or self.what.value == _IMPACTS:
            return self.state.report
        return self.state.plan(int(self.cut.value)) if self.what.value == _PLAN else self._curve()

    def export_name(self) -> str:
        """As of every panel, with what is written."""
        return f"{super().export_name()}-{str(self.what.value).replace(' ', '-')}"

    def export(self, form: str) -> Path:
        """Writes what `result` gives, see `Panel.export`; a plan as "json" only, which `Plan.load` reads."""
        if self.what.value == _PLAN and form != "json":
            raise HswqError("a plan is written as JSON only", found=form, fix="press JSON")
        return super().export(form)

    def _take(self, report: ImpactReport, seeds: int | None, steps: int | None) -> None:
        self.state.take(report)
        self._impacts_known(report)
        if seeds is None:
            self.prompts.value = len(report.seeds)
        if steps is None:
            self.steps.value = report.steps

    def _settings(self) -> tuple[int, int]:
        """Prompts and steps, as they are on screen."""
        return int(self.prompts.value), int(self.steps.value)

    def _curve(self) -> ParetoReport | None:
        return self.state.measured(*self._settings())

    def _measure_impacts(self) -> None:
        prompts, steps = self._settings()
        self.begin(lambda progress: self.state.measure_impacts(prompts, steps, progress), self._impacts_known)

    def _impacts_known(self, report: ImpactReport) -> None:
        self.cut.max = len(report.layers)  # only the layers that were measured can be chosen
        self.allow_exports()
        self._moved()

    def _offer_exports(self) -> None:
        """Lists what there is to export; what was chosen stays, if it is still there."""
        offered = (_IMPACTS, *([] if self._curve() is None else [_MEASURED]), _PLAN)
        if self.what.options != offered:
            chosen = self.what.value
            self.what.options = offered
            self.what.value = chosen if chosen in offered else _IMPACTS

    def _chosen_to_export(self) -> None:
        for form, button in self.export_buttons.items():
            button.disabled = self.what.value == _PLAN and form != "json"

    def _moved(self) -> None:
        report, nvfp4 = self.state.report, int(self.cut.value)
        if report is None:
            return
        if nvfp4 != self._cut_of_budget:
            self.budget.value = ""  # another cut than the one that the budget gave
        self.bars.show(impact_figure(report, self.state.plan(nvfp4), order=self.order.value))
        predicted = [(each.bits, each.predicted) for each in self.state.forecasts()]
        self.plans.show(plans_figure(predicted, nvfp4, self._curve()))
        self._tell(report, self.state.forecast(nvfp4), self.state.measured_cos(nvfp4, *self._settings()))
        self._offer_exports()

    def _tell(self, report: ImpactReport, forecast: Forecast, measured: float | None) -> None:
        kept = f", {forecast.kept} left at 16 bit (no impact known)" if forecast.kept else ""
        rests = _rests_on(*self._settings())
        facts = {
            "layers": f"{forecast.nvfp4} NVFP4, {forecast.int8} INT8{kept}",
            "size": f"{forecast.nbytes / 2**20:.2f} MiB of Linears, {forecast.bits:.3f} bits a weight",
            "final cosine": f"predicted {forecast.predicted:.5f} ({_rests_on(len(report.seeds), report.steps)}), "
            + (f"not measured ({rests})" if measured is None else f"measured {measured:.5f} ({rests})"),
        }
        curve = self._curve()
        if measured is not None and curve is not None and _trial(report) != _trial(curve):
            facts["beware"] = "predicted and measured rest on different prompts, seeds or steps"
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
        nvfp4, (prompts, steps) = int(self.cut.value), self._settings()
        self.begin(
            lambda progress: self.state.measure_plan(nvfp4, prompts, steps, progress), self._plan_known
        )

    def _plan_known(self, _report: ParetoReport) -> None:
        self._moved()

    def _pack(self) -> None:
        nvfp4, path = int(self.cut.value), self.path.value
        self.begin(lambda progress: self.state.pack(nvfp4, path, progress), self._packed)

    def _packed(self, path: Path) -> None:
        self.say(f"written: {path} ({path.stat().st_size:,} bytes); calibrate it before mode tc")


def _rests_on(prompts: int, steps: int) -> str:
    return f"{style.count(prompts, 'prompt')}, {style.count(steps, 'step')}"


def _trial(report: ImpactReport | ParetoReport) -> tuple[object, ...]:
    """What a figure rests on."""
    return report.prompts, report.seeds, report.steps, report.cfg, report.shift, report.size
