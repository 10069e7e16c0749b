"""E2M1, the 4-bit float of NVFP4: code = sign << 3 | magnitude, magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; two codes a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError

E2M1_MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_e2m1(magnitude: Tensor) -> Tensor:
    """The magnitude code (uint8, 0 to 7) nearest to an fp32 magnitude >= 0; ties go to the even code, above 6 saturates.

    The midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 belong to codes 0, 2, 2, 4, 4, 6, 6.
    """
    code = (magnitude > 0.25).to(torch.uint8)
    for boundary in (1.25, 2.5, 5.0):
        code += magnitude > boundary
    for boundary in (0.75, 1.75, 3.5):
        code += magnitude >= boundary
    return code


def round_e2m1_stochastic(magnitude: Tensor, u: Tensor) -> Tensor:
    """One of the two magnitude codes around an fp32 magnitude >= 0, the upper one where ``u < fraction``.

    fraction = (magnitude - lower value) / (upper value - lower value), exact in fp32; so a representable magnitude always
    keeps its code, and the mean over ``u`` uniform in [0, 1) is the magnitude itself. Above 6 saturates.
    """
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for value in MAGNITUDES[1:]:
        code += magnitude >= value
    values = torch.tensor(MAGNITUDES, dtype=torch.float32, device=magnitude.device)
    # The gap above 6 is never entered: infinity makes its fraction 0.
    gaps = torch.tensor(
        (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, torch.inf), dtype=torch.float32, device=magnitude.device
    )
    index = code.int()
    fraction = (magnitude.clamp(max=E2M1_MAX) - values[index]) / gaps[index]
    return code + (u < fraction)


def encode_e2m1(y: Tensor, u: Tensor | None = None) -> Tensor:
    """Codes (uint8, 0 to 15) of fp32 values: nearest, or stochastic by ``u`` (see `round_e2m1_stochastic`).

    The sign bit is kept, so -0.0 and small negative values give code 8. NaN has no code: callers must not pass it.
    """
    magnitude = y.abs()
    code = round_e2m1(magnitude) if u is None else round_e2m1_stochastic(magnitude, u)
    return code | (torch.signbit(y).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of codes 0 to 15 (uint8, any shape); code 8 is -0.0."""
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte, uint8 [R, K] -> [R, K/2]: the even column in the HIGH nibble.

    Raises:
        HswqError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise HswqError(
            "two codes share a byte", found=f"{codes.shape[-1]} columns", expected="an even number"
        )
    return (codes[..., 0::2] << 4) | codes[..., 1::2]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes of `pack_nibbles`, uint8 [R, K/2] -> [R, K]."""
    return torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten(-2)


def swap_nibbles(packed: Tensor) -> Tensor:
    """The same codes with the even column in the LOW nibble, as other producers store them; its own inverse."""
    return (packed << 4) | (packed >> 4)
