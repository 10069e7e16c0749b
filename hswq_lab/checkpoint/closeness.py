"""How close two versions of one weight are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hswq_lab import packing
from hswq_lab.formats import PackedWeight

if TYPE_CHECKING:
    from hswq_lab.checkpoint.slots import Value

_CHUNK = 2**16  # three fp64 chunks stay in a core's cache: 6 times faster than passes over memory


@dataclass(frozen=True)
class Closeness:
    """Measured in fp64 over all values, in the unrotated basis.

    Attributes:
        sqnr_db: 10·log10(Σ reference² / Σ (value − reference)²); infinite where they are equal.
        cosine: of the two as vectors; NaN if exactly one of them is zero, 1 if both are.
        gain: factor that fits the value to the reference best; far from 1 says that a scale is wrong.
    """

    sqnr_db: float
    cosine: float
    gain: float


def dense(value: Value) -> Tensor:
    """A value's unrotated numbers: packed weights dequantised, tensors as they are."""
    return packing.dequantize(value) if isinstance(value, PackedWeight) else value


def closeness(value: Tensor, reference: Tensor) -> Closeness:
    """Compare a value with its reference, of the same number of elements."""
    square = cross = power = error = 0.0
    flat, wanted = value.reshape(-1), reference.reshape(-1)
    for begin in range(0, max(flat.numel(), 1), _CHUNK):
        a, b = flat[begin : begin + _CHUNK].double(), wanted[begin : begin + _CHUNK].double()
        square += float(a @ a)
        cross += float(a @ b)
        power += float(b @ b)
        error += float((a - b) @ (a - b))
    if error == 0:
        return Closeness(math.inf, 1.0, 1.0)
    if not all(map(math.isfinite, (square, cross, power, error))) or power == 0 or square == 0:
        return Closeness(_decibels(power / error), math.nan, math.nan)
    return Closeness(_decibels(power / error), cross / math.sqrt(power * square), cross / square)


def _decibels(ratio: float) -> float:
    """10·log10 of a ratio of powers; −∞ of 0: nothing beside an error, or anything beside an infinite one."""
    return 10 * math.log10(ratio) if ratio != 0 else -math.inf
