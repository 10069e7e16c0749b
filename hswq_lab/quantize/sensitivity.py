"""sensitivity: the true impact of every layer on the final latent, with cheap proxies beside it."""

from __future__ import annotations

import math
import threading
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch.nn.functional import linear

from hswq_lab import packing
from hswq_lab.arguments import list_of_texts, path_of
from hswq_lab.errors import HswqError
from hswq_lab.executors import gather
from hswq_lab.formats import Nvfp4Weight, PackedWeight
from hswq_lab.model import check_model
from hswq_lab.progress import progress_of
from hswq_lab.quantize.impact import ImpactReport, LayerImpact
from hswq_lab.quantize.measured import source_warning
from hswq_lab.quantize.pairs import choose_pairs, label_of
from hswq_lab.quantize.plan import KEPT, Plan, canonical, check_same_layers
from hswq_lab.quantize.trial import Trial, TrialSettings

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from hswq_lab.formats import Method
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.spec import ModelSpec
    from hswq_lab.trajectory.compare import Prompt

DEFAULT_PROMPTS = 4
TASKS = 16
"""Pieces for an executor: few, as each worker makes the reference run once; many, as one may be lost."""

Unit = tuple[str, str]
"""A layer and a format."""


def sensitivity(
    model: Model,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 4,
    cfg: float = 2.5,
    formats: Sequence[str] = ("nvfp4",),
    scales: Method = "sweep",
    activation_scales: Method = "rtn",
    layers: Sequence[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> ImpactReport:
    """Measures what each layer alone, in its real target format, does to the final latent.

    A layer's impact is ‖x − x_ref‖²/‖x_ref‖² of the final latent when only it is packed: rotated, its weight
    with its real error, its activations quantised too (NVFP4 with a static scale from the reference run, INT8
    row by row).

    Args:
        model: 16-bit, without LoRAs; not changed.
        prompts: one for each seed, or one for all; by default the first four of the model's own.
        seeds: of the starting noises; by default one for each prompt, none of them in `SEEDS_20`.
        steps: Euler steps.
        cfg: guidance scale.
        formats: formats to measure, as in a plan; plans take INT8 as free where it was not measured (it costs
            about a hundredth of NVFP4).
        scales: how NVFP4 block scales are found: "rtn", "four_six" or "sweep".
        activation_scales: how those of the activations are.
        layers: names or globs; all by default. A plan leaves the others 16-bit.
        resume: JSON file that is written as layers finish, and read first if it is there.
        executor: where to run, e.g. Dask's `client.get_executor()`; default: here. Workers get a `ModelSpec`.
            The numbers are the same, bit for bit.
        progress: told of every layer, several times while it is measured, so that it can cancel between steps.

    Raises:
        HswqError: prompts and seeds do not pair, an unknown layer or format, or a file to resume that belongs
            to another model or other settings, or is no .json.
    """
    started = time.monotonic()
    settings = _settings(model, prompts, seeds, steps, cfg, scales, activation_scales)
    empty = _empty_report(model, settings)
    units = _units(model, layers, formats)
    store = _Store(empty, units, None if resume is None else path_of(resume, "the file to resume"), started)
    missing = [unit for unit in units if unit not in store.rows]
    tell, known = progress_of(progress), len(units) - len(missing)
    tell(known, len(units), "reference run")
    if missing and executor is None:
        trial = Trial(model, settings)
        for done, (layer, form) in enumerate(missing, known):
            trial.pulse = partial(tell, done, len(units), layer)
            store.add([_measured(trial, layer, form, trial.packed(layer, form))])
        tell(len(units), len(units), "done")
    elif missing and executor is not None:
        _measure_there(executor, model, settings, missing, store.add, progress)
    return store.report()


def impact_of_pack(
    model: Model,
    pack: Model,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 4,
    cfg: float = 2.5,
    progress: Progress | None = None,
) -> ImpactReport:
    """What each layer of a pack, with its own codes and scales, does alone to the 16-bit model.

    It names the layer that spoils a pack. NVFP4 layers run with their own input_scale, else with that of the
    reference run.

    Args:
        model: the 16-bit model that the pack was made from; neither is changed.
        pack: the pack, in any mode.
        prompts: as for `sensitivity`.
        seeds: as for `sensitivity`.
        steps: Euler steps.
        cfg: guidance scale.
        progress: as for `sensitivity`.

    Raises:
        HswqError: the pack has no packed layer, or is of another architecture.

    Warns:
        UserWarning: the pack names another checkpoint as its source.
    """
    for each in (model, pack):
        check_model(each)
    started = time.monotonic()
    check_same_layers(
        pack.layers(),
        model.layers(),
        "the pack has other layers than the model",
        "give the 16-bit model that the pack was made from",
    )
    if (doubt := source_warning(pack, model)) is not None:
        warnings.warn(doubt, stacklevel=2)
    packed = {
        layer: value
        for layer in pack.layers()
        if isinstance(value := pack.checkpoint[f"{layer}.weight"], PackedWeight)
    }
    if not packed:
        raise HswqError("no layer of this model is packed", tensor=pack.name)
    settings = _settings(model, prompts, seeds, steps, cfg, "sweep")
    trial, rows = Trial(model, settings), []
    trial.pulse = partial(progress_of(progress), 0, len(packed), "reference run")
    ready = _calibrated(trial, packed)
    for done, (layer, weight) in enumerate(packed.items()):
        trial.pulse = partial(progress_of(progress), done, len(packed), layer)
        rows.append(_measured(trial, layer, weight.format, ready[layer]))
    progress_of(progress)(len(packed), len(packed), "done")
    seconds = time.monotonic() - started
    return replace(_filled(_empty_report(model, settings), rows, seconds), scales=f"as in {pack.name}")


def _calibrated(trial: Trial, packed: Mapping[str, PackedWeight]) -> dict[str, PackedWeight | None]:
    """Weights that can run W4A4: those without an input_scale get that of the reference run, None if it has none."""
    bare = {
        layer: weight
        for layer, weight in packed.items()
        if isinstance(weight, Nvfp4Weight) and weight.input_scale is None
    }
    groups = {layer: weight.group for layer, weight in bare.items()}
    bases = {layer: weight.basis for layer, weight in bare.items() if weight.basis is not None}
    observed = trial.observed(groups, bases) if bare else {}
    return {**packed, **{layer: observed[layer].calibrated(weight) for layer, weight in bare.items()}}


def measure_elsewhere(spec: ModelSpec, settings: TrialSettings, units: Sequence[Unit]) -> list[LayerImpact]:
    """The unit of work of a worker, which keeps its last trial."""
    with _lock:
        key = (spec, settings.identity)
        if key not in _trials:
            _trials.clear()
            _trials[key] = Trial(spec.model(), settings)
        trial = _trials[key]
        return [_measured(trial, layer, form, trial.packed(layer, form)) for layer, form in units]


_lock = threading.Lock()
_trials: dict[tuple[ModelSpec, str], Trial] = {}


def _measure_there(
    executor: Executor,
    model: Model,
    settings: TrialSettings,
    units: Sequence[Unit],
    add: Callable[[list[LayerImpact]], None],
    progress: Progress | None,
) -> None:
    size = -(-len(units) // TASKS)
    pieces = [units[start : start + size] for start in range(0, len(units), size)]
    spec = model.spec()
    gather(
        executor,
        measure_elsewhere,
        [(spec, settings, piece) for piece in pieces],
        [piece[-1][0] for piece in pieces],
        progress,
        on_result=add,
    )


def _measured(trial: Trial, layer: str, form: str, weight: PackedWeight | None) -> LayerImpact:
    """The row of a layer; None stands for a layer that is never reached, on which no output depends."""
    n, k = trial.model.layers()[layer]
    if weight is None:
        return LayerImpact(layer, form, n, k, samples=[0.0] * len(trial.settings.pairs))
    module, inputs, dense = trial.module(layer, weight), trial.inputs(layer), trial.weight(layer).float()
    squared = float((packing.dequantize(weight) - dense).square().sum())
    exact = linear(inputs.float(), dense)
    bias = 0.0 if module.bias is None else module.bias.float()
    wrong = float((module(inputs).float() - bias - exact).square().sum())
    return LayerImpact(
        layer=layer,
        format=form,
        n=n,
        k=k,
        samples=trial.errors(trial.run({layer: weight})),
        weight_error=_share(squared, float(dense.square().sum())),
        weight_power=squared * float(inputs.float().square().mean()) if len(inputs) else 0.0,
        output_error=_share(wrong, float(exact.square().sum())),
        output_variance=_share(wrong, len(inputs)),
    )


def _share(part: float, whole: float) -> float:
    """part / whole; 0 of nothing is 0, as for a weight of zeros, or a layer that no input reached."""
    if whole:
        return part / whole
    return math.inf if part else 0.0


def _units(model: Model, layers: Sequence[str] | None, formats: Sequence[str]) -> list[Unit]:
    named = list_of_texts(formats, "the formats to measure", '["nvfp4", "int8"]')
    wanted = list(dict.fromkeys(canonical(form, form) for form in named))
    if KEPT in wanted:
        raise HswqError("16-bit is no format to measure", found=named, expected="e.g. nvfp4")
    globs = ["*"] if layers is None else list_of_texts(layers, "the layers to measure", '["layers.0.*"]')
    plan = Plan(dict.fromkeys(globs, wanted[0]))
    chosen = plan.for_layers(model.layers())
    return [(layer, form) for layer, what in chosen.items() if what.format != KEPT for form in wanted]


def _settings(
    model: Model,
    prompts: Prompt | Sequence[Prompt] | None,
    seeds: Sequence[int] | None,
    steps: int,
    cfg: float,
    scales: Method,
    activation_scales: Method = "rtn",
) -> TrialSettings:
    return TrialSettings(
        pairs=tuple(choose_pairs(model, prompts, seeds, DEFAULT_PROMPTS)),
        steps=steps,
        cfg=cfg,
        shift=model.default_shift,
        size=model.default_size,
        scales=scales,
        activation_scales=activation_scales,
    )


def _empty_report(model: Model, settings: TrialSettings) -> ImpactReport:
    """The report before anything was measured."""
    return ImpactReport(
        model=model.name,
        sha256=model.checkpoint.sha256,
        prompts=[label_of(prompt) for prompt, _ in settings.pairs],
        seeds=[seed for _, seed in settings.pairs],
        steps=settings.steps,
        cfg=settings.cfg,
        shift=settings.shift,
        size=settings.size,
        scales=settings.scales,
        activation_scales=settings.activation_scales,
        rows=[],
        unmeasured=model.layers(),
        captions=None if model.companion is None else model.companion.encoder_identity,
        dtype=str(model.dtype),
    )


def _filled(empty: ImpactReport, rows: list[LayerImpact], seconds: float) -> ImpactReport:
    measured = {row.layer for row in rows}
    rest = {layer: shape for layer, shape in empty.unmeasured.items() if layer not in measured}
    return replace(empty, rows=rows, unmeasured=rest, seconds=seconds)


@dataclass
class _Store:
    """The rows measured so far, kept in a file if there is one."""

    empty: ImpactReport
    units: Sequence[Unit]
    path: Path | None
    started: float

    def __post_init__(self) -> None:
        self.rows: dict[Unit, LayerImpact] = {}
        self.seconds_before = 0.0
        if self.path is not None and self.path.suffix.lower() != ".json":
            raise HswqError("a run continues from a .json file only", file=self.path, fix="name it ….json")
        if self.path is not None and self.path.exists():
            before = ImpactReport.load(self.path)
            self._check_same_work(before)
            self.seconds_before = before.seconds
            self.rows = {(row.layer, row.format): row for row in before.rows}

    def add(self, rows: list[LayerImpact]) -> None:
        """Takes in rows and writes the file."""
        self.rows |= {(row.layer, row.format): row for row in rows}
        if self.path is not None:
            self.report().save(self.path)

    def report(self) -> ImpactReport:
        """The report of what is there; rows that were in the file but were not asked for now come last."""
        ordered = [unit for unit in self.units if unit in self.rows]
        ordered += [unit for unit in self.rows if unit not in set(self.units)]
        seconds = self.seconds_before + time.monotonic() - self.started
        return _filled(self.empty, [self.rows[unit] for unit in ordered], seconds)

    def _check_same_work(self, before: ImpactReport) -> None:
        for name in (
            "sha256",
            "prompts",
            "seeds",
            "steps",
            "cfg",
            "shift",
            "size",
            "scales",
            "activation_scales",
            "captions",
            "dtype",
        ):
            found, expected = getattr(before, name), getattr(self.empty, name)
            unsaid = found is None and name in ("captions", "dtype")  # as in the first files
            if found != expected and not unsaid:
                raise HswqError(
                    f"the file to resume was made with another {name}",
                    file=self.path,
                    found=found,
                    expected=expected,
                    fix="delete it, or resume with the settings it was made with",
                )
        for row in before.rows:
            if self.empty.unmeasured.get(row.layer) != (row.n, row.k):
                raise HswqError(
                    "the file to resume has a layer that this model does not have in this size",
                    file=self.path,
                    tensor=row.layer,
                    found=(row.n, row.k),
                    expected=self.empty.unmeasured.get(row.layer, "no such layer"),
                    fix="delete the file, or this row of it",
                )
