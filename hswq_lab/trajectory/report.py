"""The result of a comparison: every step of every seed of every variant, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from hswq_lab.errors import HswqError
from hswq_lab.models.sampler import Run
from hswq_lab.results import Result, json_ready
from hswq_lab.trajectory.gate import Verdict, judge
from hswq_lab.trajectory.pictures import SSIM_PARAMETERS
from hswq_lab.trajectory.trace import SeedTrace


@dataclass(frozen=True)
class Compared:
    """What was run under a name.

    Attributes:
        model: its name.
        file: path that it was read from; "" if it is in memory only.
        sha256: of its checkpoint.
        mode: the mode that was asked of it.
        loras: LoRAs on it, with their strengths.
    """

    model: str
    file: str
    sha256: str
    mode: str
    loras: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        loras = "".join(f" + {lora}" for lora in self.loras)
        return f"{self.file or f'{self.model} in memory'}{loras}, SHA-256 {self.sha256}"


@dataclass(frozen=True)
class TrajectoryReport(Result):
    """Variants of a model against the reference, on the same seeds.

    Attributes:
        model: name of the reference.
        variants: names, in the order in which they were given.
        seeds: in the order in which they were given.
        prompts: one for each seed.
        steps: Euler steps of every run.
        cfg: guidance scale.
        shift: noise shift.
        size: of the pictures, (height, width) in pixels.
        sigmas: noise levels, steps + 1 values.
        noise_hashes: SHA-256 of the starting noise of each seed.
        traces: variant by variant, seed by seed.
        ssim_parameters: arguments of scikit-image's structural_similarity.
        compared: "reference" and variant → what ran under that name; empty where only the runs were given.
        reference_runs: the reference's run for each seed; empty after `without_runs`. Not saved.
        variant_runs: variant → its run for each seed; empty after `without_runs`. Not saved.
    """

    model: str
    variants: list[str]
    seeds: list[int]
    prompts: list[str]
    steps: int
    cfg: float
    shift: float
    size: tuple[int, int]
    sigmas: list[float]
    noise_hashes: list[str] = field(repr=False)
    traces: list[SeedTrace] = field(repr=False)
    ssim_parameters: dict[str, Any] = field(repr=False, default_factory=lambda: dict(SSIM_PARAMETERS))
    compared: dict[str, Compared] = field(repr=False, default_factory=dict)
    reference_runs: list[Run] = field(repr=False, default_factory=list, metadata={"saved": False})
    variant_runs: dict[str, list[Run]] = field(repr=False, default_factory=dict, metadata={"saved": False})

    def of(self, variant: str) -> list[SeedTrace]:
        """The traces of one variant, one a seed.

        Raises:
            HswqError: no such variant.
        """
        if variant not in self.variants:
            raise HswqError("no such variant was compared", found=variant, expected=", ".join(self.variants))
        return [trace for trace in self.traces if trace.variant == variant]

    def to_frame(self) -> pd.DataFrame:
        """One row a variant, seed and step (from 0); sigma is the noise level that the step started from."""
        rows = [
            (trace.variant, trace.seed, trace.prompt, step, self.sigmas[step], *values)
            for trace in self.traces
            for step, values in enumerate(
                zip(trace.cos_latent, trace.cos_x0, trace.mse_latent, trace.mse_x0, strict=True)
            )
        ]
        measures = ["cos_latent", "cos_x0", "mse_latent", "mse_x0"]
        return pd.DataFrame(rows, columns=["variant", "seed", "prompt", "step", "sigma", *measures])

    def summary(self) -> pd.DataFrame:
        """One row a variant and seed.

        Columns: variant, seed, final_cos, max_drop, bifurcated, same_image, ssim, psnr, lpips if measured. What is
        not known of a seed that failed is NaN, or None. max_drop is the biggest fall of the cosine within
        `SeedTrace.window` steps.
        """
        columns = ["variant", "seed", "final_cos", "max_drop", "bifurcated", "same_image"]
        frame = pd.DataFrame([[getattr(t, name) for name in columns] for t in self.traces], columns=columns)
        frame["ssim"] = [trace.picture.ssim for trace in self.traces]
        frame["psnr"] = [trace.picture.psnr for trace in self.traces]
        distances = [trace.picture.lpips for trace in self.traces]
        if any(distance is not None for distance in distances):
            frame["lpips"] = pd.Series(distances, dtype="float64")
        return frame

    @property
    def verdict(self) -> Verdict:
        """Which variants pass the reference gate, in words and in figures."""
        return Verdict([judge(variant, self.of(variant)) for variant in self.variants])

    def without_runs(self) -> TrajectoryReport:
        """The same report without latents and pictures, which are what fills the memory."""
        return replace(self, reference_runs=[], variant_runs={})

    def to_dict(self) -> dict[str, Any]:
        """See `Result.to_dict`; adds the summary and the verdict, which are computed."""
        verdict = self.verdict
        variants = [
            {**json_ready(v), "passed": v.passed, "same_image": v.same_image, "text": v.text}
            for v in verdict.variants
        ]
        summary = json_ready(self.summary().to_dict(orient="records"))
        return {
            **super().to_dict(),
            "summary": summary,
            "verdict": {"passed": verdict.passed, "same_image": verdict.same_image, "variants": variants},
        }

    def __str__(self) -> str:
        return "\n".join([self.verdict.text, *(f"{name}: {what}" for name, what in self.compared.items())])
