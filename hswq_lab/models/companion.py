"""What a network needs beside its weights to make pictures: a text encoder, a latent codec, defaults."""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
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

    @cached_property
    def encoder_identity(self) -> str:
        """SHA-256 of the text encoder's content: equal where captions come out equal."""
        # A table is its captions, wherever it lies.
        return _content(getattr(self.encode, "features", self.encode))

    @cached_property
    def identity(self) -> str:
        """SHA-256 of everything that numbers depend on: encoder, codec and defaults."""
        defaults = (self.prompts, self.size, self.pixels_per_latent, self.shift)
        return _content((self.encoder_identity, self.codec, defaults))


def _content(thing: object) -> str:
    """SHA-256 of a pickle; what cannot be pickled, which no other process can know, is itself and nothing else."""
    stream = io.BytesIO()
    try:
        _Content(stream).dump(thing)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError):
        return f"object {id(thing)}"
    return hashlib.sha256(stream.getvalue()).hexdigest()


class _Content(pickle.Pickler):
    """Tensors by their values: torch would write where they lie, and which of them share storage."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.fast = True  # no memo: equal content in two objects and in one object twice are the same

    def reducer_override(self, thing: object) -> Any:  # noqa: ANN401 - as in the base class
        """What stands for a tensor."""
        if isinstance(thing, Tensor):
            values = thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            return str, (f"{thing.dtype} {list(thing.shape)} {hashlib.sha256(values).hexdigest()}",)
        return NotImplemented
