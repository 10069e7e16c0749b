"""Pictures from a network: prompts to features, the guided prediction, Euler's way from noise to latent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from numbers import Integral

import torch
from torch import Tensor, nn

from hswq_lab.arguments import finite, whole
from hswq_lab.errors import HswqError
from hswq_lab.models.architecture import Architecture
from hswq_lab.models.companion import Companion
from hswq_lab.models.sampler import Run, Step, Velocity, euler, noise_hash, sigmas, starting_noise
from hswq_lab.modes import ModeRequest
from hswq_lab.progress import Progress, progress_of


class PictureMaker:
    """What a model does with its network; `hswq_lab.model.Model` brings the network and the rest."""

    name: str
    companion: Companion | None
    config: Architecture
    device: torch.device
    dtype: torch.dtype
    request: ModeRequest
    _lock: threading.RLock

    def network(self) -> nn.Module:
        """The network, built now if it is not there."""
        raise NotImplementedError

    def encode(self, prompt: str | Tensor) -> Tensor:
        """Caption features [tokens, cap_feat_dim] of a prompt; a tensor is taken as features already."""
        if isinstance(prompt, Tensor):
            return prompt
        if not isinstance(prompt, str):
            raise HswqError(
                "a prompt is text, or caption features as a tensor",
                found=f"{type(prompt).__name__} {prompt!r}"[:80],
            )
        if self.companion is None:
            raise HswqError(
                "this model has no text encoder here",
                tensor=self.name,
                fix="pass caption features as a tensor",
            )
        return self.companion.encode(prompt)

    def velocity(self, prompt: str | Tensor, cfg: float = 1.0, negative: str | Tensor = "") -> Velocity:
        """The guided prediction v = x0 − ε as a function of (latent, sigma).

        v = v_neg + cfg · (v_prompt − v_neg) (Ho and Salimans 2022); cfg = 1 evaluates the prompt alone.
        """
        network = self.network()
        prompts = [prompt] if cfg == 1 else [prompt, negative]
        captions = [self.encode(text).to(self.device, self.dtype) for text in prompts]

        def predict(latent: Tensor, sigma: float) -> Tensor:
            batch = latent.to(self.device, self.dtype).expand(len(captions), *latent.shape)
            t = torch.full((len(captions),), 1 - sigma, device=self.device, dtype=torch.float32)
            with self._lock, torch.no_grad():
                out: Tensor = network(batch, t, captions).float().cpu()
            return out[0] if cfg == 1 else out[1] + cfg * (out[0] - out[1])

        return predict

    def generate(
        self,
        prompt: str | Tensor,
        seed: int = 42,
        steps: int = 12,
        cfg: float = 2.5,
        shift: float | None = None,
        size: tuple[int, int] | None = None,
        *,
        negative: str | Tensor = "",
        callback: Callable[[Step], None] | None = None,
        progress: Progress | None = None,
    ) -> Run:
        """Makes a picture by Euler flow matching; same seed, same bits.

        Args:
            prompt: text, or caption features [tokens, cap_feat_dim].
            seed: of the starting noise.
            steps: Euler steps.
            cfg: guidance scale; 1 means none.
            shift: noise shift; the companion's default, else the family's.
            size: (height, width) in pixels; the companion's default, else the family's.
            negative: what guidance leads away from; text or features.
            callback: sees each step after it was made.
            progress: told after each step.

        Raises:
            HswqError: impossible arguments, or no text encoder for a text prompt.
        """
        cfg = finite(cfg, "the guidance scale")
        levels = sigmas(
            whole(steps, "the number of steps"), shift := self.default_shift if shift is None else shift
        )
        size = self.default_size if size is None else size
        noise = starting_noise(self.latent_shape(size), seed)
        latents, x0 = [], []
        tell = progress_of(progress)
        label = prompt if isinstance(prompt, str) else "given caption features"

        def record(step: Step) -> None:
            latents.append(step.latent)
            x0.append(step.x0)
            tell(step.index + 1, steps, label)
            if callback is not None:
                callback(step)

        tell(0, steps, label)
        euler(self.velocity(prompt, cfg, negative), noise, levels, record)
        return Run(
            model=self.name,
            mode=self.request.mode,
            prompt=label,
            seed=seed,
            steps=steps,
            cfg=cfg,
            shift=shift,
            size=(int(size[0]), int(size[1])),
            sigmas=levels,
            noise_hash=noise_hash(noise),
            latents=torch.stack(latents),
            x0=torch.stack(x0),
            codec=self.companion.codec if self.companion else None,
        )

    @property
    def default_shift(self) -> float:
        """The noise shift of a run that asks for none: the companion's, else the family's."""
        return self.companion.shift if self.companion else self.config.shift

    @property
    def default_size(self) -> tuple[int, int]:
        """(height, width) in pixels of a run that asks for none: the companion's, else the family's."""
        return self.companion.size if self.companion else self.config.picture_size

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """(channels, height, width) of the latent of a picture of this size in pixels.

        Raises:
            HswqError: a side is not a multiple of the smallest token.
        """
        cell = self.companion.pixels_per_latent if self.companion else self.config.pixels_per_latent
        step = cell * self.config.token
        if not _is_pair(size) or any(side <= 0 or side % step for side in size):
            raise HswqError(
                "the size does not fit the model",
                found=size,
                expected=f"(height, width), multiples of {step} pixels",
            )
        return (self.config.latent_channels, int(size[0]) // cell, int(size[1]) // cell)


def _is_pair(size: object) -> bool:
    return (
        isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, Integral) for side in size)
    )
