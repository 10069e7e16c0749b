"""How far one run strays from its reference, step by step: cosines, squared errors, drops, bifurcations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.models.sampler import Run
from hswq_lab.trajectory.pictures import PictureDistance

BIFURCATION_DROP = 0.05
"""The latent's cosine falling by more than this within a window is a bifurcation: it became another picture."""

THRESHOLD_STEPS = 12
"""The number of steps that the threshold was set for: it is a fall within a twelfth of the way."""

SAME_IMAGE = 0.98
"""From this final cosine on, two final latents are called the same image."""

ANOTHER_PICTURE = 0.9
"""Below this final cosine, two final latents are called different pictures."""


@dataclass(frozen=True)
class SeedTrace:
    """One variant against the reference for one seed. Lists have one value a step, first and last included.

    Attributes:
        variant: name of the variant.
        seed: of the common starting noise.
        prompt: of both runs.
        cos_latent: cosine of the latents AFTER each step; the gate rests on it.
        cos_x0: cosine of the clean latents predicted in each step; tells pictures apart earlier.
        mse_latent: mean squared error of the latents after each step.
        mse_x0: mean squared error of the predicted clean latents.
        picture: distance of the decoded final pictures.
    """

    variant: str
    seed: int
    prompt: str
    cos_latent: list[float]
    cos_x0: list[float]
    mse_latent: list[float]
    mse_x0: list[float]
    picture: PictureDistance

    @property
    def final_cos(self) -> float:
        """Cosine of the final latents."""
        return self.cos_latent[-1]

    @property
    def window(self) -> int:
        """Steps that a bifurcation may take, ⌈steps / 12⌉: one for up to 12 steps, a twelfth of the way for more.

        More steps are smaller steps, and the same turn to another picture is spread over several of them.
        """
        return math.ceil(len(self.cos_latent) / THRESHOLD_STEPS)

    @property
    def drops(self) -> list[float]:
        """max(cos[k−window] … cos[k−1]) − cos[k] of the latent after each step k = 0 … steps − 1.

        Before step 0 both runs have the same noise, whose cosine is 1.
        """
        states = [1.0, *self.cos_latent]
        return [
            max(states[max(0, after - self.window) : after]) - states[after]
            for after in range(1, len(states))
        ]

    @property
    def max_drop(self) -> float:
        """The biggest fall of the cosine within a window; 0 if it never falls, NaN (not known) if a step failed."""
        if self.failed_step is not None:
            return math.nan
        return max((drop for drop in self.drops if drop > 0), default=0.0)

    @property
    def bifurcation_step(self) -> int | None:
        """The step (counted from 0) in which the first bifurcation is complete, None if there is none."""
        return next((k for k, drop in enumerate(self.drops) if drop > BIFURCATION_DROP), None)

    @property
    def bifurcated(self) -> bool | None:
        """Whether some step was a bifurcation; None: none was seen, but a step failed, so it is not known."""
        if self.bifurcation_step is None and self.failed_step is not None:
            return None
        return self.bifurcation_step is not None

    @property
    def same_image(self) -> bool:
        """Whether the final cosine is at least 0.98 and no step failed."""
        return self.failed_step is None and self.final_cos >= SAME_IMAGE

    @property
    def failed_step(self) -> int | None:
        """The first step in which a measure is NaN or infinite (a latent was), None if there is none."""
        steps = zip(self.cos_latent, self.cos_x0, self.mse_latent, self.mse_x0, strict=True)
        return next((k for k, values in enumerate(steps) if not all(map(math.isfinite, values))), None)


def check_comparable(reference: Run, other: Run, variant: str) -> None:
    """Refuses to compare two runs that did not start from the same noise and take the same steps.

    Raises:
        HswqError: another number of steps, σ list, starting noise, prompt, guidance or latent shape.
    """
    pairs: dict[str, tuple[object, object]] = {
        "number of steps": (len(other.latents), len(reference.latents)),
        "list of noise levels": (other.sigmas, reference.sigmas),
        "seed": (other.seed, reference.seed),
        "starting noise": (other.noise_hash, reference.noise_hash),
        "prompt": (other.prompt, reference.prompt),
        "guidance scale": (other.cfg, reference.cfg),
        "latent shape": (tuple(other.latents.shape), tuple(reference.latents.shape)),
    }
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise HswqError(
                f"the runs cannot be compared: another {what}",
                tensor=f"{variant}, seed {other.seed}",
                found=found,
                expected=f"{expected} (the reference's)",
                fix="make both with the same prompt, seed, steps, cfg, shift and size",
            )


def trace(reference: Run, other: Run, variant: str, picture: PictureDistance) -> SeedTrace:
    """Measures one run against its reference, in fp64.

    Args:
        reference: the run to measure against.
        other: the run of the variant.
        variant: its name.
        picture: distance of the two pictures, see `pictures.distance`.

    Raises:
        HswqError: the runs cannot be compared, see `check_comparable`.
    """
    check_comparable(reference, other, variant)
    return SeedTrace(
        variant=variant,
        seed=other.seed,
        prompt=other.prompt,
        cos_latent=cosines(other.latents, reference.latents),
        cos_x0=cosines(other.x0, reference.x0),
        mse_latent=squared_errors(other.latents, reference.latents),
        mse_x0=squared_errors(other.x0, reference.x0),
        picture=picture,
    )


def cosines(a: Tensor, b: Tensor) -> list[float]:
    """Cosine of a[i] and b[i] for each i, in fp64; NaN where one of them is all zero or not finite."""
    x, y = a.flatten(1).double(), b.flatten(1).double()
    dot = (x * y).sum(1)
    return [float(value) for value in dot / torch.sqrt((x * x).sum(1) * (y * y).sum(1))]


def squared_errors(a: Tensor, b: Tensor) -> list[float]:
    """Mean squared difference of a[i] and b[i] for each i, in fp64."""
    return [float(value) for value in (a.double() - b.double()).flatten(1).square().mean(1)]
