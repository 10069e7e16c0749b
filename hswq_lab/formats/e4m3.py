"""E4M3 (the "fn" variant: no infinity, NaN = 0x7F and 0xFF): block scales of NVFP4, and an 8-bit weight format."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
NAN_CODE = 0x7F
MAX_CODE = 0x7E


def encode_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn nearest to fp32 ``x``, ties to even, subnormals included, beyond +-448 saturated; NaN stays NaN.

    The clamp is explicit: older torch and device code turn 465 and more into NaN, newer CPU code hides its absence.
    """
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e4m3(codes: Tensor) -> Tensor:
    """fp32 values of E4M3 codes, given as float8_e4m3fn or as their uint8 bit patterns."""
    return codes.view(torch.float8_e4m3fn).float()
