"""Caption features from a file: prompts for a model whose text encoder is not at hand.

A captions file is safetensors: a prompt → its features [tokens, cap_dim], any float dtype. The empty prompt, which
guidance leads away from, is stored as "(empty)": the format has no empty names. `hswq-lab embed` writes one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from hswq_lab.arguments import path_of
from hswq_lab.errors import HswqError
from hswq_lab.models.companion import Companion
from hswq_lab.partial import write_whole

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import Tensor

    from hswq_lab.vae import VaeCodec

EMPTY = "(empty)"


@dataclass(frozen=True)
class CaptionTable:
    """A text encoder that knows the prompts of a file and no other.

    Attributes:
        file: where they come from, for messages.
        features: prompt → [tokens, cap_dim].
    """

    file: str
    features: Mapping[str, Tensor] = field(repr=False)

    def __call__(self, prompt: str) -> Tensor:
        """The features of a prompt, fp32.

        Raises:
            HswqError: the file does not have it.
        """
        if prompt not in self.features:
            near = difflib.get_close_matches(prompt, list(self.features), n=1, cutoff=0.0)
            raise HswqError(
                "the captions file does not have this prompt",
                file=self.file,
                found=prompt or "the empty prompt, which cfg other than 1 needs",
                expected=f"such as {near[0]!r}" if near and near[0] else None,
                fix="encode it with hswq-lab embed",
            )
        return self.features[prompt].float()


def load_captions(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Prompt → features of a captions file, in the file's order.

    Raises:
        HswqError: no such file, or one that holds something else.
    """
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise HswqError("the captions file cannot be read", file=path, found=error) from error
    for prompt, features in stored.items():
        if features.dim() != 2 or not features.is_floating_point() or not len(features):
            raise HswqError(
                "these are no caption features",
                file=path,
                tensor=prompt,
                found=f"{features.dtype} {list(features.shape)}",
                expected="floats [tokens, cap_dim]",
            )
    return {"" if prompt == EMPTY else prompt: features for prompt, features in stored.items()}


def save_captions(path: str | os.PathLike[str], features: Mapping[str, Tensor]) -> Path:
    """Writes a captions file, whole or not at all: prompt → features [tokens, cap_dim].

    Raises:
        HswqError: a prompt that the format cannot hold, or the file cannot be written.
    """
    for name in (EMPTY, "__metadata__"):
        if name in features:
            raise HswqError("a captions file cannot hold this prompt", file=path, found=name)
    target = path_of(path, "a captions file")
    write_whole(target, to_bytes({prompt or EMPTY: value.contiguous() for prompt, value in features.items()}))
    return target


def caption_companion(
    path: str | os.PathLike[str], size: tuple[int, int] = (1024, 1024), vae: VaeCodec | None = None
) -> Companion:
    """A companion that encodes the prompts of a captions file.

    Args:
        path: of the file.
        size: default picture size in pixels, (height, width).
        vae: makes pictures of latents; None: there are latents and no pictures.
    """
    features = load_captions(path)
    return Companion(
        name=Path(path).name,
        encode=CaptionTable(str(path), features),
        codec=vae,
        prompts=[prompt for prompt in features if prompt],
        size=size,
        pixels_per_latent=8 if vae is None else vae.pixels_per_latent,
        shift=3.0,
    )
