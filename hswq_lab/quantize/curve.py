"""Measured plans: the nvK curve of an impact report, and a greedy search that measures every step."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from hswq_lab.arguments import whole
from hswq_lab.errors import HswqError
from hswq_lab.model import check_model
from hswq_lab.progress import progress_of
from hswq_lab.quantize.choose import the_goal
from hswq_lab.quantize.impact import ImpactReport
from hswq_lab.quantize.pairs import choose_pairs, label_of
from hswq_lab.quantize.pareto import ParetoPoint, ParetoReport
from hswq_lab.quantize.plan import KEPT, Plan, packed_nbytes
from hswq_lab.quantize.trial import Trial, TrialSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hswq_lab.formats import Method
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.quantize.moments import LayerMoments
    from hswq_lab.quantize.pack import Scales
    from hswq_lab.trajectory.compare import Prompt

DEFAULT_POINTS = 12
SMALL, LARGE = "nvfp4", "int8_tensorwise"


def pareto(
    model: Model,
    impact: ImpactReport,
    nvfp4: Sequence[int] | None = None,
    *,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    steps: int = 12,
    cfg: float = 2.5,
    scales: Scales = "sweep",
    moments: Mapping[str, LayerMoments] | None = None,
    keep: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ParetoReport:
    """Measures the nvK plan of an impact report for several K, calibrated and in mode tc.

    Errors of layers cancel or amplify each other, so the curve is not monotone: measure K − 1 and K + 1 too.
    Of an impact that was measured on another model a UserWarning tells.

    Args:
        model: 16-bit; not changed.
        impact: its impact report.
        nvfp4: the K to measure, each once; by default about a dozen from 0 to all.
        prompts: one for each seed, or one for all; the model's own by default.
        seeds: of the starting noises; by default one for each prompt, none of them in `SEEDS_20`.
        steps: Euler steps.
        cfg: guidance scale.
        scales: how NVFP4 weights are found: "rtn", "four_six", "sweep" or "gptq", which needs moments.
        moments: from `gather_moments`: NVFP4 weights by GPTQ, whatever `scales` says.
        keep: pins, as for `ImpactReport.plan`.
        progress: told of every layer that is packed and every pass through the network.

    Raises:
        HswqError: prompts and seeds do not pair, a K that is not possible, GPTQ without moments, or an impact of
            other layers.
    """
    _check_impact(model, impact)
    if nvfp4 is None:
        # Pinned layers may make the ends impossible; the plan says so.
        count = len(impact.layers)
        nvfp4 = sorted({round(count * i / (DEFAULT_POINTS - 1)) for i in range(DEFAULT_POINTS)})
    counts = list(dict.fromkeys(nvfp4)) if isinstance(nvfp4, Iterable) else []
    if not counts:
        raise HswqError("the K to measure are a list of whole numbers", found=nvfp4, expected="[39, 40, 41]")
    plans = [impact.plan(nvfp4=k, keep=keep) for k in counts]
    trial = Trial(model, _settings(model, prompts, seeds, steps, cfg, _method(scales, moments)), moments)
    curve, tell, done = _Curve(trial), progress_of(progress), itertools.count()
    total = trial.passes + sum(len(plan) + trial.passes for plan in plans)  # the reference run comes first

    def pulse(label: str) -> None:
        tell(min(next(done), total - 1), total, label)  # unrotated layers and bases take a further run

    for k, plan in zip(counts, plans, strict=True):
        trial.pulse = partial(pulse, f"nv{k}")
        curve.add(f"nv{k}", dict(plan))
    tell(total, total, "done")
    return curve.report()


def greedy(
    model: Model,
    impact: ImpactReport,
    *,
    bits: float | None = None,
    final_cos: float | None = None,
    width: int = 3,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    steps: int = 4,
    cfg: float = 2.5,
    scales: Scales = "sweep",
    moments: Mapping[str, LayerMoments] | None = None,
    keep: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ParetoReport:
    """Turns layers from INT8 to NVFP4 one by one, each time the best of a few, measured with all before.

    The few are those with the least impact a byte; the best is the one with the least added error a byte.
    Of an impact that was measured on another model a UserWarning tells.

    Args:
        model: 16-bit; not changed.
        impact: its impact report, which orders the candidates.
        bits: stop once the mean bits a weight are at most this.
        final_cos: stop before the mean final cosine falls below this.
        width: candidates measured for each step.
        prompts: as for `pareto`, but by default the first four of the model's own.
        seeds: as for `pareto`.
        steps: Euler steps.
        cfg: guidance scale.
        scales: as for `pareto`.
        moments: as for `pareto`.
        keep: pins, layer glob → format; these layers do not move. Others that were not measured stay 16-bit.
        progress: as for `pareto`.

    Returns:
        A point for every layer turned, the first with none: take `report.plan(bits=…)`.

    Raises:
        HswqError: the goal is missing, twice there, or not reached with every layer turned; a pin that matches
            nothing, or an impact of other layers.
    """
    _check_impact(model, impact)
    the_goal(bits=bits, final_cos=final_cos)
    whole(width, "the width")
    pins = Plan(keep or {})
    pins.for_layers(model.layers())  # refuses a pin that matches nothing
    pinned = {layer: form for layer in model.layers() if (form := pins.form_of(layer)) is not None}
    formats = dict.fromkeys(impact.layers, LARGE) | pinned
    left = _by_price(impact, pinned)
    curve = _Curve(
        Trial(model, _settings(model, prompts, seeds, steps, cfg, _method(scales, moments), 4), moments)
    )
    tell, total = progress_of(progress), len(left)
    curve.trial.pulse = partial(tell, 0, total, "reference run")
    curve.add("all INT8", formats)
    while bits is None or curve.points[-1].bits > bits:
        curve.trial.pulse = partial(tell, total - len(left), total, curve.points[-1].label)
        if not left:
            break
        layer, point = curve.best_next(formats, left[:width])
        if final_cos is not None and point.mean < final_cos:
            break
        formats[layer] = SMALL
        left.remove(layer)
        curve.points.append(point)
    if bits is not None and curve.points[-1].bits > bits:
        raise HswqError(
            "no plan is that small", found=bits, expected=f"at least {curve.points[-1].bits:.3f} bits"
        )
    if final_cos is not None and curve.points[0].mean < final_cos:
        raise HswqError(
            "no plan reaches that goal", found=final_cos, expected=f"{curve.points[0].mean:.4f} at best"
        )
    tell(total, total, "done")
    return curve.report()


class _Curve:
    """Points measured with one trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.points: list[ParetoPoint] = []
        self._started = time.monotonic()

    def add(self, label: str, formats: Mapping[str, str], changed: str = "") -> None:
        """Measures a plan and keeps the point."""
        self.points.append(self.measure(label, formats, changed))

    def measure(self, label: str, formats: Mapping[str, str], changed: str = "") -> ParetoPoint:
        """Measures a plan: layer → format."""
        packed = {}
        for layer, form in formats.items():
            self.trial.pulse()
            if form != KEPT:
                packed[layer] = self.trial.packed(layer, form)
        latents = self.trial.run({layer: weight for layer, weight in packed.items() if weight is not None})
        layers, plan = self.trial.model.layers(), Plan(formats)
        errors = self.trial.errors(latents)
        return ParetoPoint(
            label=label,
            nvfp4=plan.count(SMALL, layers),
            bits=plan.bits(layers),
            nbytes=plan.nbytes(layers),
            cosines=self.trial.cosines(latents),
            impact=sum(errors) / len(errors),
            formats=dict(plan),
            changed=changed,
        )

    def best_next(self, formats: Mapping[str, str], candidates: Sequence[str]) -> tuple[str, ParetoPoint]:
        """The candidate that adds the least error a byte as NVFP4, measured together with all the others."""
        before, shapes = self.points[-1], self.trial.model.layers()
        label = f"nv{before.nvfp4 + 1}"
        points = {layer: self.measure(label, {**formats, layer: SMALL}, layer) for layer in candidates}
        best = min(points, key=lambda each: (points[each].impact - before.impact) / _saving(shapes[each]))
        return best, points[best]

    def report(self) -> ParetoReport:
        """Everything measured so far."""
        settings = self.trial.settings
        return ParetoReport(
            model=self.trial.model.name,
            sha256=self.trial.model.checkpoint.sha256,
            mode="tc",
            scales=self.trial.method,
            prompts=[label_of(prompt) for prompt, _ in settings.pairs],
            seeds=[seed for _, seed in settings.pairs],
            steps=settings.steps,
            cfg=settings.cfg,
            shift=settings.shift,
            size=settings.size,
            points=list(self.points),
            seconds=time.monotonic() - self._started,
        )


def _check_impact(model: Model, impact: ImpactReport) -> None:
    check_model(model)
    if not isinstance(impact, ImpactReport):
        raise HswqError(
            "this is no impact report",
            found=repr(impact)[:80],
            fix='hl.sensitivity(model), or ImpactReport.load("….json")',
        )
    impact.check_layers(model.layers())
    if (doubt := impact.measured_on.warning(model)) is not None:
        warnings.warn(doubt, stacklevel=3)


def _by_price(impact: ImpactReport, pinned: Mapping[str, str]) -> list[str]:
    """Layers that NVFP4 makes smaller and that are not pinned, the least impact a byte first."""
    free = {layer: shape for layer, shape in impact.layers.items() if layer not in pinned}
    smaller = [layer for layer, shape in free.items() if _saving(shape) > 0]
    return sorted(smaller, key=lambda layer: impact.of(layer).weight / _saving(impact.layers[layer]))


def _saving(shape: tuple[int, int]) -> int:
    return packed_nbytes(LARGE, shape) - packed_nbytes(SMALL, shape)


def _method(scales: Scales, moments: Mapping[str, LayerMoments] | None) -> Method:
    """How weights are found that no moments tell of; refuses GPTQ where there are no moments at all."""
    if scales != "gptq":
        return scales
    if moments is None:
        raise HswqError(
            "GPTQ has to know the layers' inputs",
            found='scales="gptq" without moments',
            fix="give moments=gather_moments(model, groups), groups being layer → rotation group",
        )
    return "sweep"


def _settings(
    model: Model,
    prompts: Prompt | Sequence[Prompt] | None,
    seeds: Sequence[int] | None,
    steps: int,
    cfg: float,
    scales: Method,
    number: int | None = None,
) -> TrialSettings:
    pairs = tuple(choose_pairs(model, prompts, seeds, number))
    return TrialSettings(pairs, steps, cfg, model.default_shift, model.default_size, scales)
