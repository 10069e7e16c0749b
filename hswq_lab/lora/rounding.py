"""Stochastic rounding to 16 bits: what lets a small delta survive in a 16-bit weight too."""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.formats.philox import uniform

_ROWS = 256  # rows rounded at a time: bounds the memory for random bits
_CARD_ROWS = 4096  # likewise, where many small launches cost more


def round_stochastic(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """fp32 values in bf16 or fp16: one of the two neighbours, by chance, so that the mean is exact.

    A value that the dtype holds exactly stays as it is. The random bits depend on seed and element index
    only.

    Args:
        x: fp32 [N, K], within the range of `dtype`.
        dtype: bfloat16 or float16; float32 and float64 hold every value as it is.
        seed: of Philox, 64 bit.

    Returns:
        [N, K] in `dtype`.
    """
    if dtype in (torch.float32, torch.float64):
        return x.to(dtype)
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    step = _ROWS if x.device.type == "cpu" else _CARD_ROWS
    for start in range(0, x.shape[0], step):
        rows = slice(start, min(start + step, x.shape[0]))
        result[rows] = _round(x[rows], dtype, uniform(seed, rows, x.shape[1], x.device))
    return result


def _round(x: Tensor, dtype: torch.dtype, u: Tensor) -> Tensor:
    # Bit patterns of magnitudes are ordered as the magnitudes are: the neighbour above is the next pattern.
    magnitude = x.abs()
    nearest = magnitude.to(dtype)
    bits = nearest.view(torch.int16) - (nearest.float() > magnitude).to(torch.int16)
    below, above = bits.view(dtype), (bits + 1).view(dtype)
    gap = above.float() - below.float()
    rounded = torch.where(u * gap < magnitude - below.float(), above, below)
    return torch.where(x.signbit(), -rounded, rounded)
