"""hl.bench_model: a whole picture: wall time, memory, how alike it stayed, which arithmetic really ran."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd
import torch

from hswq_lab.bench.gemm import fallback_reason
from hswq_lab.bench.machine import describe
from hswq_lab.errors import HswqError
from hswq_lab.model import Model, named_models
from hswq_lab.progress import Progress, part, progress_of
from hswq_lab.results import Result
from hswq_lab.trajectory.pictures import distance
from hswq_lab.trajectory.trace import cosines

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.models.sampler import Run
    from hswq_lab.report import LoadReport


@dataclass(frozen=True)
class ModelRow:
    """One model making one picture.

    Attributes:
        model: its name in the benchmark.
        mode: the mode asked for.
        seconds: median wall time of a picture.
        slowest: the slowest of the timed pictures, in seconds.
        speedup: the first model's seconds / seconds.
        final_cos: cosine of the final latent with the first model's.
        ssim: of the picture with the first model's; NaN without a codec.
        psnr: likewise, in dB.
        weight_bytes: of the Linears' weights as they are stored.
        peak_bytes: most memory allocated on the card while a picture was made; None on a CPU.
        tflops: operations of the Linears (2·M·N·K, unpadded) / seconds / 10¹².
        hits: calls of Linears in one picture by the arithmetic that ran.
        fallbacks: how many of the packed ones ran in the reference implementation.
        why: the reason for that.
        clipped: share of activation blocks that a static scale clipped; None where there is no static scale.
    """

    model: str
    mode: str
    seconds: float
    slowest: float
    speedup: float
    final_cos: float
    ssim: float
    psnr: float
    weight_bytes: int
    peak_bytes: int | None
    tflops: float
    hits: dict[str, int]
    fallbacks: int
    why: str
    clipped: float | None


@dataclass(frozen=True)
class ModelBench(Result):
    """Rows of `bench_model`, and the machine they were measured on."""

    machine: dict[str, str]
    prompt: str
    seed: int
    steps: int
    cfg: float
    size: tuple[int, int]
    repeats: int
    rows: list[ModelRow] = field(repr=False)

    def to_frame(self) -> pd.DataFrame:
        """One row a model; the hits as text."""
        return pd.DataFrame([{**vars(row), "hits": _in_words(row.hits)} for row in self.rows])

    def __str__(self) -> str:
        height, width = self.size
        head = f"{self.machine['name']}: {self.steps} steps, {height}×{width}, seed {self.seed}"
        return "\n".join([head, *map(_line, self.rows)])


def bench_model(
    models: Model | Mapping[str, Model],
    prompt: str | Tensor | None = None,
    seed: int = 42,
    steps: int = 12,
    cfg: float = 2.5,
    size: tuple[int, int] | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> ModelBench:
    """Makes one picture several times with each model and compares the models with the first one.

    Args:
        models: one model, or name → model; the first is what the others are measured against.
        prompt: default: the first model's first own prompt.
        seed: of the starting noise.
        steps: Euler steps.
        cfg: guidance scale.
        size: (height, width) in pixels; default: the first model's.
        repeats: timed pictures a model, after one that is not timed.
        progress: told after every step.

    Raises:
        HswqError: no models, no repeats, or whatever `generate` raises.
    """
    named = {models.name: models} if isinstance(models, Model) else named_models(models)
    if not named or repeats < 1:
        raise HswqError(
            "a benchmark needs a model and a repeat", found=f"{len(named)} models, {repeats} repeats"
        )
    first = next(iter(named.values()))
    chosen = first.prompts[0] if prompt is None else prompt
    size = size or first.default_size
    total = len(named) * (1 + repeats)

    def picture(model: Model, inner: Progress) -> Run:
        return model.generate(chosen, seed, steps, cfg, first.default_shift, size, progress=inner)

    timed = []
    for place, (name, model) in enumerate(named.items()):
        start = place * (1 + repeats)
        inner = part(progress_of(progress), start, start + 1 + repeats, total, name)
        timed.append(_time(name, model, picture, repeats, inner))
    run = timed[0].run
    rows = [_row(each, timed[0]) for each in timed]
    return ModelBench(describe(first.device), run.prompt, seed, steps, cfg, run.size, repeats, rows)


@dataclass(frozen=True)
class _Timed:
    """What was seen of one model."""

    name: str
    model: Model
    seconds: list[float]
    run: Run
    peak_bytes: int | None
    before: LoadReport
    after: LoadReport

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def _time(
    name: str, model: Model, picture: Callable[[Model, Progress], Run], repeats: int, progress: Progress
) -> _Timed:
    """One picture to warm up, `repeats` to time; the counters of the last one alone."""
    run = picture(model, part(progress, 0, 1, 1 + repeats))
    before = after = model.report()
    seconds, on_card = [], model.device.type == "cuda"
    if on_card:
        torch.cuda.reset_peak_memory_stats(model.device)
    for turn in range(1, 1 + repeats):
        before = after
        start = time.perf_counter()
        run = picture(model, part(progress, turn, turn + 1, 1 + repeats))
        seconds.append(time.perf_counter() - start)
        after = model.report()
    peak = torch.cuda.max_memory_allocated(model.device) if on_card else None
    return _Timed(name, model, seconds, run, peak, before, after)


def _row(timed: _Timed, first: _Timed) -> ModelRow:
    alike = distance(first.run, timed.run)
    hits = Counter(timed.after.hits())
    hits.subtract(timed.before.hits())
    why = fallback_reason(timed.model.device)
    packed = sum(count for mode, count in hits.items() if mode not in ("16-bit", "fp8"))
    return ModelRow(
        model=timed.name,
        mode=timed.run.mode,
        seconds=timed.median,
        slowest=max(timed.seconds),
        speedup=first.median / timed.median,
        final_cos=cosines(timed.run.latents[-1:], first.run.latents[-1:])[0],
        ssim=alike.ssim,
        psnr=alike.psnr,
        weight_bytes=sum(row.bytes for row in timed.after.layers),
        peak_bytes=timed.peak_bytes,
        tflops=_growth(timed, "flop") / timed.median / 1e12,
        hits={mode: count for mode, count in hits.items() if count},
        fallbacks=packed if why else 0,
        why=why if packed else "",
        clipped=_growth(timed, "clipped") / blocks if (blocks := _growth(timed, "blocks")) else None,
    )


def _growth(timed: _Timed, counter: str) -> int:
    """How much a counter of the layers grew in one picture."""
    after, before = (
        sum(int(getattr(row, counter)) for row in report.layers) for report in (timed.after, timed.before)
    )
    return after - before


def _in_words(hits: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {mode}" for mode, count in hits.items())


def _line(row: ModelRow) -> str:
    why = f" ({row.why})" if row.why else ""
    return (
        f"  {row.model:<12} {row.seconds:.3f} s ({row.speedup:.2f}×), {row.weight_bytes / 2**20:.1f} MiB, "
        f"cos {row.final_cos:.4f}, SSIM {row.ssim:.4f}, {row.tflops:.3g} TFLOP/s; {_in_words(row.hits)}; "
        f"{row.fallbacks} fallbacks{why}"
    )
