"""What mini-zimage needs beside its weights: codec, text encoder, prompts, pictures to compare with."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from hswq_lab.errors import HswqError
from hswq_lab.models.companion import Companion
from hswq_lab.shipped import asset

CELL = 4
CAP_DIM = 512
MAX_WORDS = 32
NULL_WORD = "<null>"
PICTURE = 64
LORAS = ("outline", "palette")
COLOURS = {
    "red": (214, 64, 54),
    "orange": (240, 140, 40),
    "yellow": (250, 214, 70),
    "green": (82, 170, 88),
    "teal": (56, 178, 172),
    "blue": (66, 124, 224),
    "purple": (140, 90, 200),
    "pink": (240, 140, 180),
    "brown": (140, 96, 66),
    "gray": (128, 132, 138),
}
"""Backgrounds that a caption may ask for, "… on blue", as sRGB; without these words it is white."""


@dataclass(frozen=True, eq=False)
class LinearCodec:
    """Pictures to latents by principal components of 4×4 cells, and back by the transpose.

    A cell of 4×4 RGB pixels (48 values in −1 … 1, channel-major as `pixel_unshuffle` makes them) becomes
    (values − mu) · v / s. The scales s are half-whitening: the fourth root of each component's variance,
    times a common factor that makes the mean latent variance 1.

    Attributes:
        mu: [48] fp32, the mean cell.
        v: [48, C] fp32, orthonormal columns.
        s: [C] fp32, positive.
    """

    mu: Tensor
    v: Tensor
    s: Tensor

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinearCodec:
        """Read the npz file with mu, v and s.

        Raises:
            HswqError: the file is missing, or is no codec.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: torch.from_numpy(file[name].astype(np.float32)) for name in ("mu", "v", "s")}
        except (OSError, KeyError, ValueError) as error:
            raise HswqError(
                "this is no latent codec",
                file=path,
                found=str(error),
                expected="an npz file with mu, v and s",
            ) from error
        return cls(**arrays)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the npz file."""
        np.savez(path, mu=self.mu.numpy(), v=self.v.numpy(), s=self.s.numpy())

    def to(self, device: torch.device | str) -> LinearCodec:
        """The same codec on a device."""
        return LinearCodec(self.mu.to(device), self.v.to(device), self.s.to(device))

    def encode(self, images: Tensor) -> Tensor:
        """RGB in 0 … 1, [(B,) 3, H, W] with sides divisible by 4 -> latents [(B,) C, H/4, W/4] fp32."""
        if (
            images.ndim not in (3, 4)
            or images.shape[-3] != 3
            or images.shape[-1] % CELL
            or images.shape[-2] % CELL
        ):
            raise HswqError(
                "a picture of this shape cannot be encoded",
                found=list(images.shape),
                expected="[3, H, W] or [B, 3, H, W] with sides divisible by 4",
            )
        cells = functional.pixel_unshuffle(images.float() * 2 - 1, CELL).movedim(-3, -1)
        return (((cells - self.mu) @ self.v) / self.s).movedim(-1, -3)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [(B,) C, h, w] -> RGB clamped to 0 … 1, [(B,) 3, 4h, 4w] fp32."""
        if latents.ndim not in (3, 4) or latents.shape[-3] != len(self.s):
            raise HswqError(
                "a latent of this shape cannot be decoded",
                found=list(latents.shape),
                expected=f"[{len(self.s)}, h, w] or [B, {len(self.s)}, h, w]",
            )
        cells = (latents.float().movedim(-3, -1) * self.s) @ self.v.T + self.mu
        return (functional.pixel_shuffle(cells.movedim(-1, -3), CELL) / 2 + 0.5).clamp(0, 1)


def words_of(prompt: str) -> list[str]:
    """The words that the text encoder sees: lower case letters and digits; `<null>` if there are none."""
    return re.findall(r"[a-z0-9]+", prompt.lower()) or [NULL_WORD]


@lru_cache(maxsize=4096)
def word_vector(word: str) -> Tensor:
    """512 values ±1: the bits of SHAKE-256 of the word, most significant first."""
    digest = np.frombuffer(hashlib.shake_256(word.encode()).digest(CAP_DIM // 8), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(digest).astype(np.float32) * 2 - 1)


def encode_text(prompt: str) -> Tensor:
    """A prompt -> features [words, 512] fp32; any word is allowed, an unknown one is an unknown direction.

    More than 32 words are cut with a warning: a longer caption would move the image to untrained positions.
    """
    words = words_of(prompt)
    if len(words) > MAX_WORDS:
        warnings.warn(
            f"the prompt has {len(words)} words; mini-zimage reads the first {MAX_WORDS}",
            UserWarning,
            stacklevel=2,
        )
    return torch.stack([word_vector(word) for word in words[:MAX_WORDS]])


@dataclass(frozen=True, eq=False)
class ContactSheet:
    """Some of the pictures that the model was trained on, to judge what it makes.

    Attributes:
        rgb: [N, 3, 64, 64] fp32 in 0 … 1, premultiplied.
        alpha: [N, 1, 64, 64] fp32 in 0 … 1.
        captions: N captions, without backgrounds.
    """

    rgb: Tensor
    alpha: Tensor
    captions: list[str]

    def on(self, colour: str | None) -> Tensor:
        """All pictures [N, 3, 64, 64] on a background of `COLOURS`, or on white."""
        paint = torch.tensor(COLOURS[colour] if colour else (255, 255, 255), dtype=torch.float32)
        return self.rgb + (1 - self.alpha) * (paint / 255).view(3, 1, 1)

    def target(self, prompt: str) -> Tensor | None:
        """The training picture [3, 64, 64] that a prompt such as "red heart on blue" names, if it is here."""
        caption, colour = without_background(prompt)
        return self.on(colour)[self.captions.index(caption)] if caption in self.captions else None


def without_background(prompt: str) -> tuple[str, str | None]:
    """("red heart", "blue") of "red heart on blue"; (prompt, None) where no background is named."""
    caption, _, colour = prompt.rpartition(" on ")
    return (caption, colour) if colour in COLOURS else (prompt, None)


def retrieval(images: Tensor, prompts: Sequence[str]) -> float:
    """Share of images whose nearest picture of the contact sheet is the one that was asked for.

    Args:
        images: [B, 3, 64, 64] in 0 … 1.
        prompts: B prompts, captions of the contact sheet with or without "on <colour>".

    Raises:
        HswqError: a prompt whose picture is not on the sheet, or a batch of another shape.
    """
    sheet = contact_sheet()
    if images.shape != (len(prompts), 3, PICTURE, PICTURE) or not prompts:
        raise HswqError(
            "retrieval needs one picture of 64×64 for each prompt",
            found=f"{list(images.shape)}, {len(prompts)} prompts",
        )
    parts = [without_background(prompt) for prompt in prompts]
    unknown = [caption for caption, _ in parts if caption not in sheet.captions]
    if unknown:
        raise HswqError(
            "the contact sheet has no picture for a prompt", found=unknown[0], expected="one of its captions"
        )
    hits = 0
    for image, (caption, colour) in zip(images.float().cpu(), parts, strict=True):
        distances = (sheet.on(colour) - image).square().mean(dim=(1, 2, 3))
        hits += sheet.captions[int(distances.argmin())] == caption
    return hits / len(prompts)


@lru_cache(maxsize=1)
def contact_sheet() -> ContactSheet:
    """The pictures and captions that ship for judging what the model makes."""
    captions = json.loads(asset("mini_contact.json").read_text(encoding="utf-8"))
    with Image.open(asset("mini_contact.png")) as image:
        rgba = torch.from_numpy(np.asarray(image.convert("RGBA")).astype(np.float32) / 255)
    cells = rgba.unflatten(1, (-1, PICTURE)).unflatten(0, (-1, PICTURE)).permute(0, 2, 4, 1, 3).flatten(0, 1)
    cells = cells[: len(captions)]
    alpha = cells[:, 3:]
    return ContactSheet(cells[:, :3] * alpha, alpha, captions)


def mini_companion() -> Companion:
    """Text encoder, codec, the twenty default prompts and the LoRAs of mini-zimage."""
    return Companion(
        name="mini-zimage",
        encode=encode_text,
        codec=LinearCodec.load(asset("mini_codec.npz")),
        prompts=json.loads(asset("mini_prompts.json").read_text(encoding="utf-8")),
        size=(PICTURE, PICTURE),
        pixels_per_latent=CELL,
        shift=1.5,
        loras={name: str(asset(f"mini_{name}.safetensors")) for name in LORAS},
    )
