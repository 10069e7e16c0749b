"""E2M1, the 4-bit float: code = sign << 3 | magnitude, magnitudes 0 .5 1 1.5 2 3 4 6; two codes a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError

E2M1_MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# From each magnitude to the next. Above 6 there is none: infinity makes the fraction of the way 0.
_GAPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, float("inf"))


def encode_e2m1(y: Tensor, u: Tensor | None = None) -> Tensor:
    """Codes 0 to 15 (uint8) of fp32 values, to the nearest or stochastically.

    The sign bit is kept, so -0.0 and small negative values have code 8. NaN has no code: callers do not
    pass it.

    Args:
        y: fp32, any shape.
        u: fp32 in [0, 1) that broadcasts against y: rounds as `round_e2m1_stochastic`; None as `round_e2m1`.
    """
    magnitude = y.abs()
    code = round_e2m1(magnitude) if u is None else round_e2m1_stochastic(magnitude, u)
    return code | (torch.signbit(y).to(torch.uint8) << 3)


def round_e2m1(magnitude: Tensor) -> Tensor:
    """The code (uint8, 0 to 7) nearest to an fp32 magnitude >= 0, ties to the even code, above 6 saturated.

    The midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 belong to codes 0, 2, 2, 4, 4, 6, 6.
    """
    code = (magnitude > 0.25).to(torch.uint8)
    for boundary in (1.25, 2.5, 5.0):
        code += magnitude > boundary
    for boundary in (0.75, 1.75, 3.5):
        code += magnitude >= boundary
    return code


def round_e2m1_stochastic(magnitude: Tensor, u: Tensor) -> Tensor:
    """One of the two codes around an fp32 magnitude >= 0, the upper one where ``u < fraction``; 6 saturates.

    ``fraction = (magnitude - lower value) / (upper value - lower value)``, exact in fp32. So a
    representable magnitude always keeps its code, and the mean over u uniform in [0, 1) is the magnitude
    itself.
    """
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for value in MAGNITUDES[1:]:
        code += magnitude >= value
    index = code.int()
    fraction = (magnitude.clamp(max=E2M1_MAX) - _look_up(MAGNITUDES, index)) / _look_up(_GAPS, index)
    return code + (u < fraction)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of codes 0 to 15 (uint8, any shape); code 8 is -0.0."""
    return _look_up(MAGNITUDES + tuple(-m for m in MAGNITUDES), codes.int())


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
    """The same codes with the even column in the LOW nibble, as other producers have it; its own inverse."""
    return (packed << 4) | (packed >> 4)


def _look_up(values: tuple[float, ...], index: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=index.device)[index]
