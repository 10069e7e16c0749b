"""The data set on the training device: every picture on every background as a latent, captions as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hswq_lab.models.mini import COLOURS, MAX_WORDS, NULL_WORD, LinearCodec, word_vector, words_of

WHITE = (255, 255, 255)
BACKGROUNDS = [WHITE, *COLOURS.values()]
PAPER, INK = (250, 248, 240), (26, 28, 44)


@dataclass(frozen=True, eq=False)
class Noto:
    """rgb [N, 3, 64, 64] (premultiplied) and alpha [N, 1, 64, 64], fp32 in 0 … 1, with N captions."""

    rgb: Tensor
    alpha: Tensor
    captions: list[str]

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Noto:
        """Read what `noto.make` wrote."""
        with np.load(path) as file:
            rgba = torch.from_numpy(file["rgba"]).to(device).float().permute(0, 3, 1, 2) / 255
            return cls(rgba[:, :3].contiguous(), rgba[:, 3:].contiguous(), [str(c) for c in file["captions"]])

    def on(self, background: tuple[int, int, int], style: str = "plain") -> Tensor:
        """All pictures composited on a colour, in a style: [N, 3, 64, 64] in 0 … 1."""
        flat = self.rgb + (1 - self.alpha) * _colour(background, self.rgb)
        if style == "outline":
            return self._outline()
        if style == "palette":
            return flat[:, [2, 0, 1]]  # hue + 120°: red becomes green, green blue, blue red
        return flat

    def _outline(self) -> Tensor:
        """Ink where grey value or coverage change (Sobel), paper elsewhere; the background plays no part."""
        grey = (self.rgb + (1 - self.alpha)).mean(1, keepdim=True)
        edges = torch.maximum(_sobel(grey), _sobel(self.alpha))
        line = (3 * edges).clamp(0, 1)
        return line * _colour(INK, line) + (1 - line) * _colour(PAPER, line)


def _colour(rgb: tuple[int, int, int], like: Tensor) -> Tensor:
    return torch.tensor(rgb, device=like.device, dtype=like.dtype).view(1, 3, 1, 1) / 255


def _sobel(x: Tensor) -> Tensor:
    across = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], device=x.device) / 4
    kernel = torch.stack([across, across.T])[:, None]
    return functional.conv2d(functional.pad(x, (1, 1, 1, 1), mode="replicate"), kernel).norm(
        dim=1, keepdim=True
    )


def fit_codec(noto: Noto, components: int = 16) -> LinearCodec:
    """Principal components of all pictures, weighted as in training: half on white, half on the colours."""
    weights = [0.5] + [0.5 / len(COLOURS)] * len(COLOURS)
    first = torch.zeros(48, dtype=torch.float64, device=noto.rgb.device)
    second = torch.zeros(48, 48, dtype=torch.float64, device=noto.rgb.device)
    for weight, background in zip(weights, BACKGROUNDS, strict=True):
        cells = (
            functional.pixel_unshuffle(noto.on(background) * 2 - 1, 4).movedim(1, -1).reshape(-1, 48).double()
        )
        first += weight * cells.mean(0)
        second += weight * (cells.T @ cells) / len(cells)
    values, vectors = torch.linalg.eigh(second - torch.outer(first, first))
    values, vectors = values.flip(0)[:components], vectors.flip(1)[:, :components]
    vectors = vectors * torch.where(vectors.sum(0) < 0, -1.0, 1.0)
    scales = values**0.25 * values.sqrt().mean().sqrt()
    return LinearCodec(first.float().cpu(), vectors.float().cpu(), scales.float().cpu())


class Batches:
    """Draws training examples without leaving the device.

    Attributes:
        latents: [11 · N, 16, 16, 16]; picture i on background b is row b · N + i.
        words: [11 · N + 1, 32] rows of `vocabulary`, filled with its last, zero row; last caption: `<null>`.
        vocabulary: [words + 1, 512], the vectors of all words.
    """

    def __init__(self, noto: Noto, codec: LinearCodec, style: str) -> None:
        device = noto.rgb.device
        on_device = codec.to(device)
        self.count = len(noto.captions)
        self.latents = torch.cat([on_device.encode(noto.on(b, style)) for b in BACKGROUNDS])
        suffixes = ["", *(f" on {name}" for name in COLOURS)]
        captions = [words_of(c + suffix) for suffix in suffixes for c in noto.captions] + [[NULL_WORD]]
        numbers = {word: i for i, word in enumerate(sorted({w for c in captions for w in c}))}
        pad = len(numbers)
        rows = torch.full((len(captions), MAX_WORDS), pad)
        for row, caption in zip(rows, captions, strict=True):
            row[: len(caption)] = torch.tensor([numbers[w] for w in caption])
        self.pad = pad
        self.words = rows.to(device)
        vectors = [word_vector(word) for word in numbers]
        self.vocabulary = torch.stack([*vectors, torch.zeros_like(vectors[0])]).to(device)

    def draw(self, size: int, dropped: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [B, 16, 16, 16], caption features [B, 32, 512], and which of these are pads [B, 32]."""
        device = self.latents.device
        picture = torch.randint(self.count, (size,), device=device)
        coloured = torch.randint(1, len(BACKGROUNDS), (size,), device=device)
        background = torch.where(torch.rand(size, device=device) < 0.5, 0, coloured)
        row = background * self.count + picture
        silent = torch.rand(size, device=device) < dropped
        words = self.words[torch.where(silent, len(self.words) - 1, row)]
        return self.latents[row], self.vocabulary[words], words == self.pad
