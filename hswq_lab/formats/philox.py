"""Philox4x32-10: random bits that depend on a seed and an element's index only, never on threads or order.

The definition: the key is the 64-bit seed as words (low, high); the counter is the element's index as words
(low, high, 0, 0); ten rounds of Philox4x32 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC'11). Of the four words that come out the first is used: ``u = (word0 >> 8) * 2^-24``, 24
bits, 0 <= u < 1.

The element index of a matrix is ``row * K + column`` of its logical, unpadded shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_PIECE = 1 << 15  # elements whose int64 words stay in a core's cache through the ten rounds
_CARD_PIECE = 1 << 23  # a card has no use for that, and each piece costs a hundred launches


def philox4x32_10(key: int, counter: Tensor) -> Words:
    """Four words of 32 random bits for each counter.

    Args:
        key: the seed; its lowest 64 bits count (a negative one is taken modulo 2^64).
        counter: int64, any shape: the lower half of the 128-bit counter, whose upper half is 0.

    Returns:
        Four int64 tensors of the counter's shape, each value in 0 .. 2^32 - 1.
    """
    zero = torch.zeros_like(counter)
    return philox_rounds((counter & _MASK, (counter >> 32) & _MASK, zero, zero), key)


def philox_rounds(counter: Words, key: int) -> Words:
    """The ten rounds on a full 128-bit counter: four int64 tensors of 32-bit words, the lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # The 64-bit products wrap around in int64, which leaves them the bits of the unsigned products.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & _MASK) ^ c1 ^ k0, ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, rows: slice, cols: int, device: torch.device | None = None) -> Tensor:
    """The u of these rows of a matrix: fp32 [rows, cols], multiples of 2^-24 in [0, 1)."""
    out = torch.empty((rows.stop - rows.start) * cols, dtype=torch.float32, device=device)
    size = _PIECE if out.device.type == "cpu" else _CARD_PIECE
    for start in range(0, out.numel(), size):
        piece = out[start : start + size]
        first = rows.start * cols + start
        index = torch.arange(first, first + piece.numel(), dtype=torch.int64, device=device)
        piece.copy_((philox4x32_10(seed, index)[0] >> 8).float() * 2.0**-24)
    return out.reshape(rows.stop - rows.start, cols)
