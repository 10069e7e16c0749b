"""E4M3 ("fn": no infinity, NaN = 0x7F and 0xFF): the block scales of NVFP4, and an 8-bit format."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
NAN_CODE = 0x7F
MAX_CODE = 0x7E


def encode_e4m3(x: Tensor) -> Tensor:
    """The nearest float8_e4m3fn: ties to even, subnormals kept, beyond +-448 saturated; NaN stays NaN.

    The clamp is explicit: older torch and device code make NaN of 465 and more, newer CPU code hides its
    absence.
    """
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e4m3(codes: Tensor) -> Tensor:
    """fp32 values of E4M3 codes, given as float8_e4m3fn or as their uint8 bit patterns."""
    return codes.view(torch.float8_e4m3fn).float()
