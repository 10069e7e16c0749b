"""Small statistics: the confidence interval of a mean, ranks and their correlation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t for 1 … 10 degrees of freedom.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z_95 = 1.959964


def mean_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean, by Student's t; (-inf, inf) for one sample, or an infinite one."""
    values = np.asarray(samples, dtype=np.float64)
    degrees = len(values) - 1
    if degrees < 1 or not np.isfinite(values).all():
        return -math.inf, math.inf
    half = t_95(degrees) * float(values.std(ddof=1)) / math.sqrt(len(values))
    centre = float(values.mean())
    return centre - half, centre + half


def t_95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t; an expansion from 11 on (Abramowitz, Stegun 26.7.5)."""
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    z, v = _Z_95, float(degrees)
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, mean ranks for ties; NaN where a side is constant or shorter than two."""
    if len(a) < 2:
        return math.nan
    ranks = np.stack([_ranks(a), _ranks(b)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    scale = math.sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / scale if scale else math.nan


def _ranks(values: Sequence[float]) -> np.ndarray:
    data = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(data, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse])
