"""Input bases: the directions that hold most of a layer's input, to be kept out of the inputs' rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hswq_lab.errors import HswqError
from hswq_lab.progress import part, progress_of
from hswq_lab.quantize.activations import watching
from hswq_lab.quantize.pairs import choose_pairs
from hswq_lab.quantize.plan import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.trajectory.compare import Prompt

LARGEST_RANK = 64


class SecondMoment:
    """A watcher that sums up xᵀx over rows of length 1, so that every token counts alike.

    What a token's rounding does is in proportion to the token's own length; in some layers caption tokens
    have seven times the energy of image tokens.
    """

    def __init__(self, k: int, device: torch.device) -> None:
        self._sum = torch.zeros((k, k), device=device)

    def add(self, x: Tensor) -> None:
        """Takes in x [..., K], unrotated."""
        rows = torch.nn.functional.normalize(x.reshape(-1, x.shape[-1]).float(), dim=1)
        self._sum += rows.T @ rows

    def basis(self, rank: int = LARGEST_RANK) -> Tensor:
        """The principal directions, the first first: float8_e4m3fn [rank or K, K], rows of mean square 1."""
        _, vectors = torch.linalg.eigh(self._sum.double())
        rows = vectors.flip(1).T[:rank] * len(vectors) ** 0.5
        stored: Tensor = rows.to(torch.float8_e4m3fn).contiguous()
        return stored


def gather_bases(
    model: Model,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    layers: Iterable[str] | None = None,
    steps: int = 12,
    cfg: float = 2.5,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Runs a model over prompts and finds the principal directions of every layer's inputs.

    Args:
        model: 16-bit; not changed.
        prompts: one for each seed, or one for all; the model's own by default.
        seeds: of the starting noises; by default one for each prompt, none of them in `SEEDS_20`.
        layers: all by default; 4·K² bytes a layer are needed.
        steps: Euler steps; all of them count.
        cfg: guidance scale.
        progress: told after every step.

    Returns:
        Layer → float8_e4m3fn [64 or K, K], unrotated, rows of mean square 1; a pack takes the first rows.

    Raises:
        HswqError: prompts and seeds do not pair, or an unknown layer.
    """
    pairs = choose_pairs(model, prompts, seeds)
    copy = model.on(model.device)  # a network of its own: no hook reaches the caller's
    linears = copy.linears()
    wanted = list(linears if layers is None else layers)
    for layer in wanted:
        if layer not in linears:
            raise HswqError("the model has no such layer", tensor=layer, fix=nearest(layer, linears))
    sums = {layer: SecondMoment(linears[layer].in_features, copy.device) for layer in wanted}
    with watching(linears, sums):
        for done, (prompt, seed) in enumerate(pairs):
            tell = part(progress_of(progress), done, done + 1, len(pairs))
            copy.generate(prompt, seed, steps, cfg, progress=tell)
    return {layer: each.basis().cpu() for layer, each in sums.items()}
