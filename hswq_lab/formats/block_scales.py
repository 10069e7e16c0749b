"""How the E4M3 scale of an NVFP4 block is chosen: plainly, by the 4/6 rule, or by a sweep of codes.

The definition; fp32 throughout, every operation rounded to nearest even, nothing fused. For a block x_0 ..
x_15 and the tensor scale s: ``a = max|x|`` (NaN if any value is), ``b = a / 6``, ``r = min(b / s, 448)``,
but ``r = 0`` where b is 0 (so a tensor of zeros with its own s = 0 has scales 0). The plain code is
``c = E4M3(r)``, NaN (0x7F) for a NaN.

The other methods try several codes. The error of one, in units of s squared, with ``t = s * c`` and v_k the
nearest E2M1 value of x_k / t (0 unless t > 0)::

    d_k = v_k * c - x_k / s
    e_k = d_k * d_k                     or, with an importance h: h_k * (d_k * d_k)
    error = e_0 + ... + e_15            by halves: e_k + e_{k+8} for k < 8, of these k and k+4, k+2, k+1

The candidates are tried from the lowest code up, starting with the
plain code at error infinity; one replaces the best so far if its error is strictly less. So the lower code
wins a tie, and the plain code stays where no error is finite. A NaN code stays NaN.

* ``sweep``: the codes from plain - 7 to plain + 7, within 0 .. 126.
* ``four_six``: E4M3(r), which puts the block's maximum at 6, and ``E4M3(min(1.5 * (b / s), 448))``, which
  puts it at 4 (0 where b is 0). For weights s = amax / 1536 leaves room for the second (Cook et al., "Four
  Over Six", 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from hswq_lab.errors import HswqError
from hswq_lab.formats.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1
from hswq_lab.formats.e4m3 import MAX_CODE, decode_e4m3, encode_e4m3

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Method = Literal["rtn", "four_six", "sweep"]
METHODS: tuple[Method, ...] = ("rtn", "four_six", "sweep")
SWEEP_RADIUS = 7


def choose_codes(blocks: Tensor, s: Tensor, method: Method, h: Tensor | None = None) -> Tensor:
    """E4M3 codes of the blocks' scales.

    Args:
        blocks: fp32 [rows, n, 16].
        s: fp32 scalar, the tensor scale.
        method: "rtn" (plain), "four_six" or "sweep".
        h: fp32 [n, 16], importance of the columns, or None; "rtn" has no use for it.

    Returns:
        uint8 [rows, n].

    Raises:
        HswqError: the method is unknown.
    """
    if method == "rtn":
        return plain_codes(blocks, s)
    if method == "four_six":
        return _least_error(blocks, s, _four_six_candidates(blocks, s), h)
    if method == "sweep":
        return _least_error(blocks, s, _sweep_candidates(blocks, s), h)
    raise HswqError("unknown way to choose block scales", found=method, expected=" | ".join(METHODS))


def plain_codes(blocks: Tensor, s: Tensor) -> Tensor:
    """The plain codes (uint8 [rows, n]) of fp32 blocks [rows, n, 16]."""
    b = _amax_over_6(blocks)
    return _encode(b / s, b)


def encode_blocks(blocks: Tensor, t: Tensor, u: Tensor | None = None) -> Tensor:
    """E2M1 codes, uint8 [rows, n, 16], of fp32 blocks for t = s * c, fp32 [rows, n, 1]; 0 unless t > 0."""
    return encode_e2m1(blocks / t, u) * (t > 0)


def _amax_over_6(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(dim=2) / E2M1_MAX


def _encode(r: Tensor, b: Tensor) -> Tensor:
    # b is 0 in the one case where r may be 0/0.
    return encode_e4m3(torch.where(b == 0, b, r)).view(torch.uint8)


def _four_six_candidates(blocks: Tensor, s: Tensor) -> Iterator[Tensor]:
    b = _amax_over_6(blocks)
    yield _encode(b / s, b)
    yield _encode(1.5 * (b / s), b)


def _sweep_candidates(blocks: Tensor, s: Tensor) -> Iterator[Tensor]:
    plain = plain_codes(blocks, s).short()
    for step in range(-SWEEP_RADIUS, SWEEP_RADIUS + 1):
        yield (plain + step).clamp(0, MAX_CODE).to(torch.uint8)


def _least_error(blocks: Tensor, s: Tensor, candidates: Iterator[Tensor], h: Tensor | None) -> Tensor:
    best = plain_codes(blocks, s)
    least = torch.full_like(best, torch.inf, dtype=torch.float32)
    scaled = blocks / s
    for codes in candidates:
        error = _error(blocks, scaled, s, decode_e4m3(codes).unsqueeze(2), h)
        better = error < least
        best = torch.where(better, codes, best)
        least = torch.where(better, error, least)
    return best


def _error(blocks: Tensor, scaled: Tensor, s: Tensor, c: Tensor, h: Tensor | None) -> Tensor:
    """The error of the module's docstring, fp32 [rows, n], for the scales c, fp32 [rows, n, 1]."""
    d = decode_e2m1(encode_blocks(blocks, s * c)) * c - scaled
    e = d * d if h is None else h * (d * d)
    for half in (8, 4, 2, 1):
        e = e[..., :half] + e[..., half:]
    return e.squeeze(-1)
