"""Exact scalar arithmetic that torch does not offer: one rounding from fp64, and powers of two that fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def round_once(y: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 values in ``dtype`` (fp64, fp32, bf16 or fp16), rounded to nearest even, once.

    Torch's own cast to 16 bits goes through fp32 and rounds twice. Here the value is first rounded TO ODD in
    fp32 (of the two neighbours of an inexact value, the one whose last bit is odd), which keeps all that the
    second rounding has to know (Boldo, Melquiond, "When double rounding is odd", 2005).
    """
    if dtype in {torch.float64, torch.float32}:
        return y.to(dtype)
    nearest = y.to(torch.float32)
    residual = y - nearest.double()
    even = (nearest.view(torch.int32) & 1) == 0
    toward = torch.where(residual > 0, torch.inf, -torch.inf).to(torch.float32)
    odd = torch.where((residual != 0) & even, torch.nextafter(nearest, toward), nearest)
    return odd.to(dtype)


def least_exponent(amax: Tensor, limit: float) -> Tensor:
    """The least e (int32) with ``amax / 2^e <= limit``, exact for any finite fp32 amax > 0, subnormals too.

    With amax = m * 2^x and limit = l * 2^y, both m and l in [0.5, 1): x - y where m <= l, else x - y + 1.
    """
    limit_mantissa, limit_exponent = math.frexp(limit)
    mantissa, exponent = torch.frexp(amax)
    return exponent - limit_exponent + (mantissa > limit_mantissa).int()
