"""Deltas of a LoRA that was made for a model, on a pack of that model whose channels smooth() rescaled."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from hswq_lab.checkpoint.smoothed import channel_factors, is_smoothed
from hswq_lab.lora.file import PerLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.checkpoint import Checkpoint
    from hswq_lab.lora.delta import LayerDelta


def in_units_of(checkpoint: Checkpoint, deltas: Mapping[str, LayerDelta]) -> Mapping[str, LayerDelta]:
    """The deltas in the units of a checkpoint's weights: where those are diag(r) · W · diag(c), they become so, too.

    Raises (when a layer is asked for):
        HswqError: the checkpoint does not tell r and c, or a DoRA, which depends on the original's W.
    """
    if not is_smoothed(checkpoint):
        return deltas

    @lru_cache(maxsize=1)
    def rescaled(layer: str) -> LayerDelta:
        return deltas[layer].rescaled(*channel_factors(checkpoint, layer))

    return PerLayer(list(deltas), rescaled)
