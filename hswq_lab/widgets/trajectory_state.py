"""What a TrajectoryViewer shows, without widgets: seeds in order, pictures of a step, a comparison that can be run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from hswq_lab.errors import HswqError
from hswq_lab.model import check_model, named_models
from hswq_lab.trajectory import SEEDS_20, TrajectoryReport, compare

if TYPE_CHECKING:
    from hswq_lab.model import Model
    from hswq_lab.models.sampler import Run
    from hswq_lab.progress import Progress
    from hswq_lab.trajectory import SeedTrace

_DROPPED = "this report holds no runs, so there are no pictures to show"
_KEEP_THEM = "use the report as hl.compare returns it: without_runs() and files keep only the curves"
_BLANK = (96, 96, 96)


@dataclass(frozen=True)
class Frame:
    """What a step looks like.

    Attributes:
        pictures: caption → decoded x0, the reference first.
        facts: one line about the seed and the step.
    """

    pictures: dict[str, Image.Image]
    facts: str


class TrajectoryState:
    """A report, and where another one can come from.

    Args:
        report: from `hl.compare`, with its runs.
        model: the reference of comparisons that are run here.
        variants: name → model, for the same.
    """

    def __init__(
        self,
        report: TrajectoryReport | None = None,
        model: Model | None = None,
        variants: Mapping[str, Model] | None = None,
    ) -> None:
        if model is not None:
            check_model(model)
        self.report = report
        self.model = model
        self.variants = named_models({} if variants is None else variants)
        self._decoded: dict[tuple[Run, int], Image.Image] = {}  # by run: a look may outlast its report

    @property
    def can_compare(self) -> bool:
        """Whether there are models to run."""
        return self.model is not None

    def compare(self, seeds: int, steps: int, cfg: float, progress: Progress) -> TrajectoryReport:
        """Runs the first `seeds` of the twenty published seeds; the old report is kept if that fails.

        Raises:
            HswqError: no models, no variants, or whatever `hl.compare` raises.
        """
        if self.model is None:
            raise HswqError("there is no model to run", fix="TrajectoryViewer(model=…, variants={…})")
        chosen = SEEDS_20[:seeds]
        report = compare(self.model, self.variants, chosen, steps=steps, cfg=cfg, progress=progress)
        self.report = report
        self._decoded.clear()
        return report

    def seeds(self) -> dict[str, int]:
        """Label → seed, the worst first: failed ones, then by the lowest final cosine of any variant."""
        report = self._needed()
        worst = {seed: min(map(_badness, self._traces(seed))) for seed in report.seeds}
        return {self._label(seed): seed for seed in sorted(report.seeds, key=lambda seed: worst[seed])}

    def first_step_to_show(self, seed: int) -> int:
        """Where a seed is worth a look: its first bifurcation or failure, else the last step."""
        traces = self._traces(seed)
        steps = [step for t in traces for step in (t.bifurcation_step, t.failed_step) if step is not None]
        return min(steps, default=self._needed().steps - 1)

    def frame(self, seed: int, step: int, progress: Progress) -> Frame:
        """The decoded x0 of the reference and of every variant in a step.

        Raises:
            HswqError: the runs were dropped, or the model has no codec.
        """
        report = self._needed()
        if not report.reference_runs:
            raise HswqError(_DROPPED, found="a report without runs", fix=_KEEP_THEM)
        place = report.seeds.index(seed)
        runs = {"reference": report.reference_runs[place]}
        runs |= {name: report.variant_runs[name][place] for name in report.variants}
        traces = {trace.variant: trace for trace in report.traces if trace.seed == seed}
        pictures = {}
        for done, (name, run) in enumerate(runs.items()):
            progress(done, len(runs), f"decoding {name}")
            caption = f"{report.model}, the reference"
            if name in traces:
                caption = (
                    f"{name}: cos x0 {_number(traces[name].cos_x0[step])}, "
                    f"latent {_number(traces[name].cos_latent[step])}"
                )
            pictures[caption] = self._decode(run, step)
        progress(len(runs), len(runs), "decoded")
        facts = f"step {step} of 0 to {report.steps - 1}, σ = {report.sigmas[step]:.3f}, seed {seed}"
        return Frame(pictures, f"{facts}, “{report.prompts[place]}”")

    def _decode(self, run: Run, step: int) -> Image.Image:
        known = self._decoded.get((run, step))
        if known is None:
            x0 = run.x0[step]
            broken = not bool(x0.isfinite().all())
            known = Image.new("RGB", run.size[::-1], _BLANK) if broken else run.picture(x0)
            self._decoded[run, step] = known
        return known

    def _traces(self, seed: int) -> list[SeedTrace]:
        return [trace for trace in self._needed().traces if trace.seed == seed]

    def _label(self, seed: int) -> str:
        notes = []
        for trace in self._traces(seed):
            note = f"{trace.variant} {_number(trace.final_cos)}"
            if trace.failed_step is not None:
                note = f"{trace.variant} NaN at step {trace.failed_step}"
            elif trace.bifurcation_step is not None:
                note += f" ✕ step {trace.bifurcation_step}"
            notes.append(note)
        return f"{seed}: {', '.join(notes)}"

    def _needed(self) -> TrajectoryReport:
        if self.report is None:
            raise HswqError("nothing was compared yet", fix="press Compare")
        return self.report


def _badness(trace: SeedTrace) -> float:
    return -math.inf if trace.failed_step is not None else trace.final_cos


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "NaN"
