"""sensitivity: the true impact of every layer on the final latent, with cheap proxies beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from torch import Tensor

    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.quantize.impact import ImpactReport


def sensitivity(
    model: Model,
    prompts: Sequence[str | Tensor] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 4,
    cfg: float = 2.5,
    formats: Sequence[str] = ("nvfp4", "int8_tensorwise"),
    scales: str = "sweep",
    layers: Sequence[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> ImpactReport:
    """Measures what each layer alone, in its real target format, does to the final latent.

    Args:
        model: 16-bit; not changed.
        prompts: one for each seed, or one for all; by default four of the model's own.
        seeds: of the starting noises; the first of `SEEDS_20` by default, one for each prompt.
        steps: Euler steps.
        cfg: guidance scale.
        formats: formats to measure, as in a plan.
        scales: how weights are quantised, as for `pack`.
        layers: names or globs; all by default.
        resume: JSON file that is written as layers finish, and read first if it is there.
        executor: where to run; in this process by default.
        progress: told after every layer.
    """
    raise NotImplementedError
