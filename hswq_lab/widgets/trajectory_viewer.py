"""TrajectoryViewer: where variants leave the reference, and what they had in mind at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets

from hswq_lab.errors import HswqError
from hswq_lab.plots import divergence_figure, style
from hswq_lab.trajectory import SEEDS_20, TrajectoryReport
from hswq_lab.widgets import markup
from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.panel import Panel
from hswq_lab.widgets.trajectory_state import Frame, TrajectoryState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.model import Model
    from hswq_lab.widgets.live_figure import Click

_NOTE = (
    "Choose a seed (the worst is first) and a step, or click into a curve. The pictures show x0, the clean picture "
    "that each model had in mind in that step."
)


class TrajectoryViewer(Panel):
    """Shows a comparison, or runs one.

    Args:
        report: from `hl.compare`; it must hold its runs for the pictures.
        model: the reference of a comparison that the panel runs by itself.
        variants: name → model, for the same.
        seeds: how many of the published seeds a comparison takes at first.
        steps: Euler steps at first.
        cfg: guidance scale at first.
    """

    def __init__(
        self,
        report: TrajectoryReport | None = None,
        *,
        model: Model | None = None,
        variants: Mapping[str, Model] | None = None,
        seeds: int = 4,
        steps: int = 12,
        cfg: float = 2.5,
    ) -> None:
        self.state = TrajectoryState(report, model, variants)
        self.seed_count = ipywidgets.BoundedIntText(
            value=seeds, min=1, max=len(SEEDS_20), description="seeds", layout={"width": "150px"}
        )
        self.steps = ipywidgets.BoundedIntText(
            value=steps, min=1, max=100, description="steps", layout={"width": "150px"}
        )
        self.cfg = ipywidgets.BoundedFloatText(
            value=cfg, min=1.0, max=20.0, step=0.5, description="cfg", layout={"width": "150px"}
        )
        self.compare_button = ipywidgets.Button(
            description="Compare",
            icon="play",
            button_style="primary",
            tooltip="run every seed through every model",
        )
        self.controls = ipywidgets.HBox([self.seed_count, self.steps, self.cfg, self.compare_button])
        self.controls.layout.display = "" if self.state.can_compare else "none"
        self.verdict = ipywidgets.HTML()
        self.seed = ipywidgets.Dropdown(description="seed", layout={"width": "auto", "max_width": "900px"})
        self.step = ipywidgets.IntSlider(
            min=0,
            max=0,
            description="step",
            continuous_update=False,
            layout={"width": "auto", "max_width": "560px"},
            tooltip="step of the run, from 0",
        )
        self.pictures = ipywidgets.HTML()
        self.figure = LiveFigure(style.placeholder("the curves come here"))
        self.view = ipywidgets.VBox([self.seed, self.step, self.pictures, self.figure])
        self.view.layout.display = "none"
        super().__init__(
            "Trajectories", _NOTE, [self.controls, self.verdict, self.view], css_class="hswq-trajectory"
        )
        self.compare_button.on_click(self.guarded(lambda _: self.compare()))
        self.seed.observe(self.guarded(lambda _: self._choose()), names="value")
        self.step.observe(self.guarded(lambda _: self._look()), names="value")
        self.figure.on_click(self.guarded(self._go_to))
        self.guarded(self._begin)(report)
        self.mind(seeds=self.seed_count, steps=self.steps, cfg=self.cfg, seed=self.seed, step=self.step)

    def compare(self) -> None:
        """Runs the comparison that the controls describe."""
        seeds, steps, cfg = int(self.seed_count.value), int(self.steps.value), float(self.cfg.value)
        self.begin(lambda progress: self.state.compare(seeds, steps, cfg, progress), self._show_report)

    def result(self) -> TrajectoryReport | None:
        """The report that is shown."""
        return self.state.report

    def _begin(self, report: object) -> None:
        if isinstance(report, TrajectoryReport):
            self._show_report(report)
        elif report is not None:
            self.state.report = None
            raise HswqError(
                "this is no report of a comparison",
                found=type(report).__name__,
                fix="pass what hl.compare returns",
            )
        elif not self.state.can_compare:
            raise HswqError(
                "there is nothing to show",
                fix="TrajectoryViewer(hl.compare(…)), or TrajectoryViewer(model=…, variants={…}) to run it here",
            )

    def _show_report(self, report: TrajectoryReport) -> None:
        self.verdict.value = "".join(
            markup.banner(each.text, good=each.passed) for each in report.verdict.variants
        )
        self.view.layout.display = ""
        self.allow_exports()
        options = self.state.seeds()
        self.step.max = report.steps - 1
        self.seed.options = options
        self.seed.value = next(iter(options.values()))
        self._choose()

    def _choose(self) -> None:
        """Another seed: to its most interesting step."""
        if self.seed.value is None:
            return
        step = self.state.first_step_to_show(self.seed.value)
        if step != self.step.value:
            self.step.value = step  # its observer looks
        else:
            self._look()

    def _go_to(self, point: Click) -> None:
        """A click into a curve chooses its seed (the median has none) and the step."""
        seeds = {str(seed): seed for seed in self.state.report.seeds} if self.state.report else {}
        if point.note and str(point.note[0]) in seeds:
            self.seed.value = seeds[str(point.note[0])]
        self.step.value = int(float(point.x))

    def _look(self) -> None:
        report, seed, step = self.state.report, self.seed.value, int(self.step.value)
        if report is None or seed not in report.seeds or step >= report.steps:
            return  # a new report is on its way into the controls
        self.figure.show(divergence_figure(report, seed, step))
        self.look(lambda progress: self.state.frame(seed, step, progress), self._show_frame)

    def _show_frame(self, frame: Frame) -> None:
        self.pictures.value = markup.note(frame.facts) + markup.pictures(frame.pictures)
