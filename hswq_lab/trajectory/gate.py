"""The verdict: does a variant follow the reference closely enough, and which seed is the worst."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hswq_lab.errors import HswqError
from hswq_lab.trajectory.trace import ANOTHER_PICTURE, SAME_IMAGE, SeedTrace

GATE_MEAN = 0.95
"""The reference gate: a mean final cosine of at least this, and no bifurcation."""

BOOTSTRAP_SEED = 20
RESAMPLES = 10_000


@dataclass(frozen=True)
class VariantVerdict:
    """The verdict on one variant.

    Attributes:
        variant: its name.
        seeds: how many seeds were run.
        mean: mean final cosine over the seeds that did not fail; NaN if all failed.
        interval: 95 % bootstrap interval of that mean; NaN where fewer than two seeds tell of one.
        minimum: the lowest final cosine of the seeds that did not fail.
        worst_seed: the seed that has it; a failed seed is the worst.
        bifurcated: seed → step (from 0) of its first bifurcation.
        failed: seed → step (from 0) in which NaN or infinity first appeared.
        astray: seed → final cosine below 0.9, the lowest first: it is another picture, bifurcation seen or not.
        window: steps within which a fall of the cosine is a bifurcation.
    """

    variant: str
    seeds: int
    mean: float
    interval: tuple[float, float]
    minimum: float
    worst_seed: int
    bifurcated: dict[int, int]
    failed: dict[int, int]
    astray: dict[int, float] = field(default_factory=dict)
    window: int = 1

    @property
    def passed(self) -> bool:
        """Passes the reference gate: mean final cosine ≥ 0.95, no bifurcation, no failed seed."""
        return self.mean >= GATE_MEAN and not self.bifurcated and not self.failed

    @property
    def same_image(self) -> bool:
        """Every seed's final cosine is at least 0.98."""
        return self.passed and self.minimum >= SAME_IMAGE

    @property
    def unknown(self) -> int:
        """The number of failed seeds in which no bifurcation was seen: without the failure there may be one."""
        return len(self.failed.keys() - self.bifurcated.keys())

    @property
    def text(self) -> str:
        """The verdict in a line."""
        figures = f"{self._closeness()}, {self._bifurcations()}"
        if not self.passed:
            return f"{self.variant}: fails the reference gate ({'; '.join(self._reasons())}); {figures}"
        remark = ", same image on every seed" if self.same_image else ""
        if self.astray:
            ends = ", ".join(f"{seed} ({cosine:.4f})" for seed, cosine in self.astray.items())
            which = "seed" if len(self.astray) == 1 else "seeds"
            remark = f", but {which} {ends} ended at another picture"
        return f"{self.variant}: passes the reference gate{remark}; {figures}"

    def _closeness(self) -> str:
        low, high = self.interval
        good = self.seeds - len(self.failed)
        if good == 0:
            return "final cosine not known"
        spread = "" if math.isnan(low) else f" [{low:.4f}, {high:.4f}]"
        # A failed seed has no cosine: the lowest is that of another one.
        worst = (
            f" among them, worst seed {self.worst_seed}, which failed"
            if self.failed
            else f", worst seed {self.worst_seed}"
        )
        return (
            f"final cosine mean {self.mean:.4f}{spread} over {good} {'seed' if good == 1 else 'seeds'}, "
            f"min {self.minimum:.4f}{worst}"
        )

    def _bifurcations(self) -> str:
        if self.unknown == self.seeds:
            return "bifurcations not known"
        within = f" (a fall within {self.window} steps)" if self.window > 1 else ""
        rest = f", not known of {self.unknown}" if self.unknown else ""
        return f"{len(self.bifurcated)} of {self.seeds} bifurcated{within}{rest}"

    def _reasons(self) -> list[str]:
        reasons = []
        if self.failed:
            reasons.append(f"NaN or infinity in seed {_seeds_and_steps(self.failed)}")
        if self.bifurcated:
            reasons.append(f"bifurcation in seed {_seeds_and_steps(self.bifurcated)}")
        if self.mean < GATE_MEAN:
            reasons.append(f"the mean is below {GATE_MEAN}")
        return reasons


def _seeds_and_steps(steps: dict[int, int]) -> str:
    return ", ".join(f"{seed} (step {step})" for seed, step in steps.items())


@dataclass(frozen=True)
class Verdict:
    """The verdicts on all variants of a comparison; `passed` if every one passed."""

    variants: list[VariantVerdict]

    @property
    def passed(self) -> bool:
        """Whether every variant passes the reference gate."""
        return all(verdict.passed for verdict in self.variants)

    @property
    def same_image(self) -> bool:
        """Whether every variant gives the same image on every seed."""
        return all(verdict.same_image for verdict in self.variants)

    @property
    def text(self) -> str:
        """One line a variant."""
        return "\n".join(verdict.text for verdict in self.variants)

    def __getitem__(self, variant: str) -> VariantVerdict:
        """The verdict on one variant."""
        for verdict in self.variants:
            if verdict.variant == variant:
                return verdict
        names = ", ".join(verdict.variant for verdict in self.variants)
        raise HswqError("no such variant was compared", found=variant, expected=names)

    def __str__(self) -> str:
        return self.text


def judge(variant: str, traces: Sequence[SeedTrace]) -> VariantVerdict:
    """The verdict on one variant from its traces, one a seed.

    Raises:
        HswqError: there are no traces.
    """
    if not traces:
        raise HswqError("there is nothing to judge: no seed was run", tensor=variant)
    good = [trace for trace in traces if trace.failed_step is None]
    failed = {trace.seed: trace.failed_step for trace in traces if trace.failed_step is not None}
    finals = [trace.final_cos for trace in good]
    worst = min(good, key=lambda trace: trace.final_cos) if good else None
    return VariantVerdict(
        variant=variant,
        seeds=len(traces),
        mean=float(np.mean(finals)) if finals else math.nan,
        interval=bootstrap_interval(finals),
        minimum=worst.final_cos if worst else math.nan,
        worst_seed=next(iter(failed), worst.seed if worst else traces[0].seed),
        bifurcated={t.seed: t.bifurcation_step for t in traces if t.bifurcation_step is not None},
        failed=failed,
        astray={
            trace.seed: trace.final_cos
            for trace in sorted(good, key=lambda trace: trace.final_cos)
            if trace.final_cos < ANOTHER_PICTURE
        },
        window=traces[0].window,
    )


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron 1979) from a fixed seed; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan, math.nan
    sample = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(BOOTSTRAP_SEED).integers(len(sample), size=(RESAMPLES, len(sample)))
    tail = (1 - level) / 2
    low, high = np.quantile(sample[draws].mean(axis=1), [tail, 1 - tail])
    return float(low), float(high)
