"""hl.compare: the same seeds through a reference and its variants, here or on any executor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from hswq_lab.arguments import seeds_of
from hswq_lab.errors import HswqError
from hswq_lab.executors import gather
from hswq_lab.model import check_model, named_models
from hswq_lab.models.sampler import Run
from hswq_lab.progress import Progress, part, progress_of
from hswq_lab.trajectory.pictures import distance
from hswq_lab.trajectory.report import Compared, TrajectoryReport
from hswq_lab.trajectory.seeds import SEEDS_20
from hswq_lab.trajectory.trace import check_comparable, trace

if TYPE_CHECKING:
    from hswq_lab.model import Model
    from hswq_lab.spec import ModelSpec

Prompt: TypeAlias = str | Tensor
"""Text, or caption features [tokens, cap_feat_dim] for a model without a text encoder here."""

REFERENCE = "reference"


def compare(
    model: Model,
    variants: Mapping[str, Model],
    seeds: Sequence[int] = SEEDS_20,
    prompts: Prompt | Sequence[Prompt] | None = None,
    steps: int = 12,
    cfg: float = 2.5,
    shift: float | None = None,
    size: tuple[int, int] | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> TrajectoryReport:
    """Runs every seed through the reference and every variant, and measures each step. No model is changed.

    A seed's numbers do not depend on what else is run, nor on the executor: every run is made alone.

    Args:
        model: the reference, usually the 16-bit model.
        variants: name → model, e.g. {"parity": pack.in_mode("parity"), "tc": pack.in_mode("tc")}.
        seeds: of the starting noises, each once.
        prompts: as many as seeds (paired with them) or one for all; default: the model's own, the first
            ones if it has more than there are seeds.
        steps: Euler steps.
        cfg: guidance scale.
        shift: noise shift of all models; default: the reference's.
        size: (height, width) in pixels of all models; default: the reference's.
        progress: told for every run that ended; it can cancel between two steps (on an executor: at any
            time).
        executor: where the runs are made, e.g. `ProcessPoolExecutor` or Dask's `client.get_executor()`;
            default: here, one after the other. Workers get a `ModelSpec`, never a model.

    Raises:
        HswqError: seeds and prompts do not fit together, no variant, one that cannot be compared, or a
            reference that comes to NaN or infinity.
    """
    check_model(model)
    variants = named_models(variants)
    pairs = pair(model, seeds, prompts)
    if not variants or REFERENCE in variants:
        raise HswqError(
            "there is nothing to compare, or a variant has the reference's name",
            found=sorted(variants),
            expected=f"a name for each variant, other than {REFERENCE!r}",
        )
    shift = model.default_shift if shift is None else shift
    settings = Settings(steps, cfg, shift, model.default_size if size is None else size)
    models = {REFERENCE: model, **variants}
    runs = (
        _runs_here(models, pairs, settings, progress)
        if executor is None
        else _runs_there(models, pairs, settings, progress, executor)
    )
    compared = {name: _compared(each) for name, each in models.items()}
    return replace(compare_runs(runs.pop(REFERENCE), runs), compared=compared)


def _compared(model: Model) -> Compared:
    checkpoint = model.checkpoint
    file = "" if checkpoint.path is None else str(checkpoint.path)
    return Compared(
        model.name, file, checkpoint.sha256, model.request.mode, [str(each) for each in model.loras]
    )


def compare_runs(reference: Sequence[Run], variants: Mapping[str, Sequence[Run]]) -> TrajectoryReport:
    """Measures runs that were made before.

    Args:
        reference: the reference's run for each seed.
        variants: name → its run for each seed, in the same order.

    Raises:
        HswqError: no runs, other numbers of them, two that differ in noise, steps, σ list or prompt, or a
            reference that holds NaN or infinity.
    """
    if not reference or any(len(runs) != len(reference) for runs in variants.values()):
        counts = {REFERENCE: len(reference), **{name: len(runs) for name, runs in variants.items()}}
        raise HswqError("every variant needs one run for each of the reference's", found=counts)
    first = reference[0]
    for run in reference:
        _check_finite(run)
        if (run.sigmas, run.cfg, run.latents.shape) != (first.sigmas, first.cfg, first.latents.shape):
            raise HswqError(
                "different noise levels, guidance or sizes among the reference's runs",
                tensor=f"seed {run.seed}",
                found=f"{run.steps} steps, cfg {run.cfg:g}, latents {tuple(run.latents.shape)}",
                expected=f"{first.steps} steps, cfg {first.cfg:g}, latents {tuple(first.latents.shape)}",
            )
    for name, runs in variants.items():
        for ours, theirs in zip(reference, runs, strict=True):
            check_comparable(ours, theirs, name)
    return TrajectoryReport(
        model=first.model,
        variants=list(variants),
        seeds=[run.seed for run in reference],
        prompts=[run.prompt for run in reference],
        steps=len(first.latents),
        cfg=first.cfg,
        shift=first.shift,
        size=first.size,
        sigmas=first.sigmas,
        noise_hashes=[run.noise_hash for run in reference],
        traces=[
            trace(ours, theirs, name, distance(ours, theirs))
            for name, runs in variants.items()
            for ours, theirs in zip(reference, runs, strict=True)
        ],
        reference_runs=list(reference),
        variant_runs={name: list(runs) for name, runs in variants.items()},
    )


def _check_finite(reference: Run) -> None:
    """Refuses a reference run that holds NaN or infinity: every variant would be blamed for it."""
    steps = torch.isfinite(torch.stack([reference.latents, reference.x0])).flatten(2).all(2).all(0)
    if not bool(steps.all()):
        first = int(steps.logical_not().nonzero()[0])
        raise lost_reference(reference.model, reference.seed, first, reference.steps)


def lost_reference(model: str, seed: int, step: int, steps: int) -> HswqError:
    """What is to be said of a reference run that comes to NaN or infinity in a step (from 0)."""
    return HswqError(
        "the reference itself comes to NaN or infinity, so nothing can be compared with it",
        tensor=f"{model}, seed {seed}",
        found=f"in step {step} of {steps}, counted from 0",
        fix="check its file, its LoRAs and its dtype: activations of large models overflow fp16",
    )


def pair(
    model: Model, seeds: Sequence[int], prompts: Prompt | Sequence[Prompt] | None
) -> list[tuple[Prompt, int]]:
    """(prompt, seed) for each seed: as many prompts as seeds are paired, one goes with every seed.

    Raises:
        HswqError: no seeds, one of them twice, or another number of prompts.
    """
    seeds = seeds_of(seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise HswqError("seeds are needed, each of them once", found=seeds)
    if prompts is None:
        own = model.prompts
        given: list[Prompt] = list(own[: len(seeds)] if len(own) > len(seeds) else own)
    elif isinstance(prompts, (str, Tensor)):
        given = [prompts]
    elif not isinstance(prompts, Sequence):
        raise HswqError("prompts are a text or a list", found=repr(prompts)[:80], expected='["one", "two"]')
    else:
        given = list(prompts)
    if len(given) == 1:
        given *= len(seeds)
    if len(given) != len(seeds):
        raise HswqError(
            "prompts and seeds do not pair",
            found=f"{len(given)} prompts, {len(seeds)} seeds",
            expected="as many prompts as seeds, or one prompt",
        )
    return list(zip(given, seeds, strict=True))


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison share."""

    steps: int
    cfg: float
    shift: float
    size: tuple[int, int]

    def run(self, model: Model, prompt: Prompt, seed: int, progress: Progress | None = None) -> Run:
        """One run of one model."""
        return model.generate(prompt, seed, self.steps, self.cfg, self.shift, self.size, progress=progress)


def run_elsewhere(spec: ModelSpec, prompt: Prompt, seed: int, settings: Settings) -> Run:
    """The unit of work of a worker: one run, without the codec (whoever asked has it)."""
    with spec.asked():
        return replace(settings.run(spec.model(), prompt, seed), codec=None)


Runs: TypeAlias = dict[str, list[Run]]


def _runs_here(
    models: Mapping[str, Model],
    pairs: list[tuple[Prompt, int]],
    settings: Settings,
    progress: Progress | None,
) -> Runs:
    tell, total = progress_of(progress), len(models) * len(pairs)
    runs: Runs = {name: [] for name in models}
    for done, (name, (prompt, seed)) in enumerate(_units(models, pairs)):
        inner = part(tell, done, done + 1, total, _label(name, seed))
        runs[name].append(settings.run(models[name], prompt, seed, inner))
        if name == REFERENCE:
            _check_finite(runs[name][-1])  # before hours of work on variants
    return runs


def _runs_there(
    models: Mapping[str, Model],
    pairs: list[tuple[Prompt, int]],
    settings: Settings,
    progress: Progress | None,
    executor: Executor,
) -> Runs:
    specs = {name: model.spec() for name, model in models.items()}
    units = list(_units(models, pairs))
    made = gather(
        executor,
        run_elsewhere,
        [(specs[name], prompt, seed, settings) for name, (prompt, seed) in units],
        [_label(name, seed) for name, (_, seed) in units],
        progress,
    )
    runs: Runs = {name: [] for name in models}
    for (name, _), run in zip(units, made, strict=True):
        companion = models[name].companion
        runs[name].append(replace(run, codec=companion.codec if companion else None))
    return runs


def _units(
    models: Mapping[str, Model], pairs: list[tuple[Prompt, int]]
) -> Iterator[tuple[str, tuple[Prompt, int]]]:
    """Model by model, so that a worker builds few networks and keeps the ones it has."""
    return ((name, each) for name in models for each in pairs)


def _label(name: str, seed: int) -> str:
    return f"{name}, seed {seed}"
