"""One rounding from fp64 to a result's dtype: torch's own cast to 16 bits rounds twice, by way of fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def round_once(y: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 values in ``dtype`` (fp64, fp32, bf16 or fp16), rounded to nearest even, once.

    For 16 bits the value is first rounded TO ODD in fp32 (of the two neighbours of an inexact value, the
    one whose last bit is odd), which keeps all that the second rounding has to know (Boldo, Melquiond,
    "When double rounding is odd", 2005).
    """
    if dtype in {torch.float64, torch.float32}:
        return y.to(dtype)
    nearest = y.to(torch.float32)
    residual = y - nearest.double()
    even = (nearest.view(torch.int32) & 1) == 0
    toward = torch.where(residual > 0, torch.inf, -torch.inf).to(torch.float32)
    odd = torch.where((residual != 0) & even, torch.nextafter(nearest, toward), nearest)
    return odd.to(dtype)
