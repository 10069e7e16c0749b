"""Euler sampling of a flow-matching model, and the record of a run."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hswq_lab.arguments import finite, whole
from hswq_lab.errors import HswqError

Velocity = Callable[[Tensor, float], Tensor]
"""(latent [C,h,w] fp32, sigma) → predicted x0 − ε [C,h,w], guidance already applied."""


class Codec(Protocol):
    """Turns latents into pictures and back."""

    def decode(self, latent: Tensor) -> Tensor:
        """Latent [C,h,w] or [B,C,h,w] fp32 → RGB in 0…1, [3,H,W] or [B,3,H,W]."""
        ...


@dataclass(frozen=True)
class Step:
    """What a callback sees after one step.

    Attributes:
        index: 0 for the first step.
        sigma: the noise level that the step started from.
        latent: the latent AFTER the step, [C,h,w] fp32.
        x0: the clean latent that the model predicted in this step, [C,h,w] fp32.
    """

    index: int
    sigma: float
    latent: Tensor
    x0: Tensor


def sigmas(steps: int, shift: float) -> list[float]:
    """Noise levels of a run: steps + 1 values from 1 to 0.

    σ = shift·u / (1 + (shift − 1)·u) for u evenly spaced from 1 to 0 (the resolution shift of SD3, Esser et al. 2024,
    section 5.3.2).

    Raises:
        HswqError: fewer than one step, or a shift that is not positive.
    """
    if steps < 1:
        raise HswqError("a run needs at least one step", found=steps)
    if not finite(shift, "the shift") > 0:
        raise HswqError("the shift must be positive", found=shift)
    levels = [1 - i / steps for i in range(steps + 1)]
    return [shift * u / (1 + (shift - 1) * u) for u in levels]


def starting_noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gaussian noise of a seed, fp32, drawn on the CPU so that it is the same for every device.

    Raises:
        HswqError: a seed that is not in 0 … 2⁶³−1.
    """
    if (number := whole(seed, "a seed", 0)) >= 2**63:
        raise HswqError("a seed is a whole number from 0 to 2^63 - 1", found=seed)
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(number), dtype=torch.float32)


def noise_hash(noise: Tensor) -> str:
    """SHA-256 of the noise's fp32 bytes: two runs can be compared only if these are equal."""
    return hashlib.sha256(noise.contiguous().numpy().tobytes()).hexdigest()


def euler(
    velocity: Velocity, noise: Tensor, levels: list[float], callback: Callable[[Step], None] | None = None
) -> Tensor:
    """Integrates dx/dσ = −(x0 − ε) from pure noise down to σ = 0 in fp32 (explicit Euler).

    Args:
        velocity: predicts x0 − ε.
        noise: the latent at σ = 1, [C,h,w] fp32.
        levels: see `sigmas`.
        callback: called after every step, first and last included.

    Returns:
        The final latent, [C,h,w] fp32.
    """
    latent = noise
    for index, (sigma, following) in enumerate(pairwise(levels)):
        direction = velocity(latent, sigma).float()
        x0 = latent + sigma * direction
        latent = latent - (following - sigma) * direction
        if callback is not None:
            callback(Step(index, sigma, latent, x0))
    return latent


@dataclass(frozen=True, eq=False)
class Run:
    """One picture and the way to it; everything is on the CPU.

    Attributes:
        latents: the latent after each step, [steps,C,h,w] fp32.
        x0: the predicted clean latent in each step, [steps,C,h,w] fp32.
        sigmas: noise levels, steps + 1 values.
        noise_hash: SHA-256 of the starting noise.
        mode: the mode that was asked of the model.
    """

    model: str
    mode: str
    prompt: str
    seed: int
    steps: int
    cfg: float
    shift: float
    size: tuple[int, int]
    sigmas: list[float]
    noise_hash: str
    latents: Tensor = field(repr=False)
    x0: Tensor = field(repr=False)
    codec: Codec | None = field(repr=False, default=None)

    @property
    def final(self) -> Tensor:
        """The final latent, [C,h,w] fp32."""
        return self.latents[-1]

    @property
    def image(self) -> Image.Image:
        """The picture."""
        return self.picture(self.final)

    def x0_image(self, step: int) -> Image.Image:
        """The picture that the model had in mind in a step."""
        return self.picture(self.x0[step])

    def picture(self, latent: Tensor) -> Image.Image:
        """A latent of this run's kind as a picture.

        Raises:
            HswqError: the model has no codec, or the latent holds NaN or infinity.
        """
        return Image.fromarray(self.pixels(latent))

    def pixels(self, latent: Tensor | None = None) -> np.ndarray:
        """The final (or a given) latent as uint8 RGB, [H,W,3]; raises as `picture` does."""
        latent = self.final if latent is None else latent
        if self.codec is None:
            raise HswqError(
                "this model has no latent codec, so there is no picture",
                tensor=self.model,
                fix="decode run.latents with your own VAE",
            )
        if not bool(torch.isfinite(latent).all()):
            raise HswqError("the latent holds NaN or infinity, so there is no picture", tensor=self.model)
        rgb = self.codec.decode(latent).clamp(0, 1)
        return (rgb * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()

    def _repr_png_(self) -> bytes | None:
        if self.codec is None:
            return None
        buffer = io.BytesIO()
        self.image.resize((256, 256), resample=0).save(buffer, "PNG")
        return buffer.getvalue()
