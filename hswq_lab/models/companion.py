"""What a network needs beside its weights to make pictures: a text encoder, a latent codec, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from hswq_lab.models.sampler import Codec


class TextEncoder(Protocol):
    """Turns a prompt into caption features."""

    def __call__(self, prompt: str) -> Tensor:
        """A prompt → [tokens, cap_feat_dim] fp32; an empty prompt is allowed."""
        ...


@dataclass(frozen=True)
class Companion:
    """Text encoder, codec and defaults that belong to a model.

    Attributes:
        name: of the model it belongs to.
        codec: turns latents into pictures; None: there are none.
        prompts: default prompts, paired with SEEDS_20 where there are twenty.
        size: default picture size in pixels, (height, width).
        pixels_per_latent: side of a latent cell in pixels.
        shift: default noise shift.
        loras: LoRAs that ship with the model, name → path.
    """

    name: str
    encode: TextEncoder = field(repr=False)
    codec: Codec | None = field(repr=False)
    prompts: list[str] = field(repr=False)
    size: tuple[int, int] = (64, 64)
    pixels_per_latent: int = 4
    shift: float = 1.5
    loras: dict[str, str] = field(default_factory=dict, repr=False)
