"""Prompts and seeds for measuring and calibrating: never the gate's seeds unless they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING

from hswq_lab.arguments import seeds_of
from hswq_lab.model import check_model
from hswq_lab.trajectory.compare import Prompt, pair
from hswq_lab.trajectory.seeds import SEEDS_20

if TYPE_CHECKING:
    from hswq_lab.model import Model


def fresh_seeds(number: int) -> list[int]:
    """1, 2, 3, … without the twenty that packs are judged by: no pack is fitted to its examination."""
    return list(islice(_not_of_the_gate(), number))


def choose_pairs(
    model: Model,
    prompts: Prompt | Sequence[Prompt] | None,
    seeds: Sequence[int] | None,
    number: int | None = None,
) -> list[tuple[Prompt, int]]:
    """(prompt, seed) pairs.

    Args:
        model: whose prompts are the default.
        prompts: one for each seed, or one for all; None: the model's own, the first `number` of them.
        seeds: None: fresh ones, as many as there are prompts.
        number: of default prompts; None: all.

    Raises:
        HswqError: the model is not loaded, or prompts and seeds do not pair.
    """
    check_model(model)
    seeds = None if seeds is None else seeds_of(seeds)
    if prompts is None:
        prompts = model.prompts[: len(seeds) if seeds is not None else number]
    if seeds is None:
        seeds = fresh_seeds(
            len(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else 1
        )
    return pair(model, seeds, prompts)


def label_of(prompt: Prompt) -> str:
    """What a report calls a prompt: the text, or a hash of given caption features."""
    if isinstance(prompt, str):
        return prompt
    digest = hashlib.sha256(prompt.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"caption features {digest[:12]}"


def _not_of_the_gate() -> Iterator[int]:
    return (seed for seed in count(1) if seed not in SEEDS_20)
