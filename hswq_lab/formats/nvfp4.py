"""NVFP4: E2M1 codes, an E4M3 scale for every 16 of them along K, one fp32 scale a tensor. The definition of the numbers.

Quantising x [M, K], everything in fp32, every operation rounded to nearest even, nothing fused, subnormals kept:

1. M and K are padded with zeros to multiples of 16.
2. Per block of 16 along K: ``a = max|x|``, NaN if any value is NaN; ``b = a / 6``; ``r = min(b / s, 448)``, or 0 where b is 0
   (so an all-zero tensor with its own s = 0 has scales 0); plain code ``c = E4M3(r)``. A method may choose another c (below).
3. ``t = s * c``. Where t > 0 holds (not for 0, not for NaN): ``y = x / t``, its E2M1 code, nearest with ties to even, beyond +-6
   saturated, the sign bit of x kept. Elsewhere all 16 codes are 0.
4. With a seed, step 3 rounds stochastically: `round_e2m1_stochastic` with Philox's u of the element ``row * K + column`` (K
   unpadded). A block's scale never depends on the seed.

Hence a block with a NaN gets the NaN scale 0x7F and zero codes, and dequantises to NaN; an infinity saturates to 448 * 6 * s. Nonzero
data with a given s = 0 gets c = 448 and codes 0. A negative s is the caller's error.

Methods that choose c try several codes of c for a block. The error of one, in units of s squared: ``u_k = x_k / s``; ``d_k = v_k * c - u_k``
with v_k the (nearest) E2M1 value of x_k; ``e_k = d_k * d_k``, times h_k if an importance is given (``e_k = h_k * (d_k * d_k)``); summed by halves:
``e_k + e_{k+8}`` for k < 8, then of those ``k + 4``, ``k + 2``, ``k + 1``. Candidates are tried from the lowest code up, starting from the plain code
with error infinity; one replaces the best so far if its error is strictly less. So the lower code wins a tie, and the plain one stays where errors are
not finite. Where a is NaN, c stays NaN.

* ``sweep``: the E4M3 codes from plain - 7 to plain + 7, within 0 .. 126 (0 .. 448).
* ``four_six``: E4M3(r) (block maximum at 6) and E4M3(min(1.5 * (b / s), 448)) (block maximum at 4). For weights use s = amax / 1536
  (`tensor_scale_four_six`), so that the second one fits below 448.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import ceil_to, row_chunks
from hswq_lab.formats.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from hswq_lab.formats.e4m3 import E4M3_MAX, MAX_CODE, NAN_CODE, decode_e4m3, encode_e4m3
from hswq_lab.formats.philox import uniform
from hswq_lab.formats.swizzle import swizzle, unswizzle

Method = Literal["rtn", "four_six", "sweep"]
METHODS: tuple[Method, ...] = ("rtn", "four_six", "sweep")
BLOCK = 16
SWEEP_RADIUS = 7


def tensor_scale(x: Tensor) -> Tensor:
    """The tensor's own scale, fp32 scalar ``max|x| / 2688`` (2688 = 448 * 6), computed in fp32; 0 for all-zero or empty x."""
    return _amax(x) / (E4M3_MAX * E2M1_MAX)


def tensor_scale_four_six(x: Tensor) -> Tensor:
    """fp32 scalar ``max|x| / 1536`` (1536 = 256 * 6): leaves room for the block scales that "four_six" enlarges by 1.5."""
    return _amax(x) / (256.0 * E2M1_MAX)


def tensor_scale_in_dtype(x: Tensor) -> Tensor:
    """``max|x| / 2688`` rounded to x's own dtype, then fp32: what ComfyUI stores, for comparing files bit for bit.

    For bf16 and fp16 it is coarser than `tensor_scale`, and tiny data make it 0. Our own packs never use it.
    """
    return tensor_scale(x).to(x.dtype).float()


def quantize_nvfp4(
    x: Tensor,
    tensor_scale: Tensor,
    method: Method = "rtn",
    importance: Tensor | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises x by the rules in the module's docstring.

    Args:
        x: [M, K], any float dtype, in the basis to be stored.
        tensor_scale: fp32 scalar s >= 0.
        method: how block scales are chosen.
        importance: [K], weights of the squared error a column (mean squares of the input channels), for "sweep" and "four_six".
        seed: rounds the codes stochastically; None rounds to nearest.

    Returns:
        codes: uint8 [ceil16(M), ceil16(K)/2]; scales: float8_e4m3fn, swizzled, [ceil128(M), ceil4(ceil16(K)/16)].

    Raises:
        HswqError: x is not a matrix, the method is unknown, or the importance does not fit.
    """
    _check_matrix(x)
    s = _scalar(tensor_scale, x.device)
    h = _importance_blocks(importance, method, x)

    def choose(blocks: Tensor, rows: slice) -> Tensor:
        if method == "rtn":
            return plain_scale_codes(blocks, s)
        candidates = four_six_candidates(blocks, s) if method == "four_six" else sweep_candidates(blocks, s)
        return _least_error(blocks, s, h, plain_scale_codes(blocks, s), candidates)

    return _quantize(x, s, choose, seed)


def requantize_nvfp4(x: Tensor, tensor_scale: Tensor, scales: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Quantises changed values with the scales they had, stochastically: baking in place.

    A block keeps its given code c unless the plain code for its new values is larger, that is, unless it no longer fits: then it gets
    that one. (So a block that is unchanged up to fp32 noise keeps its scale, and its codes.)

    Args:
        x: [M, K], any float dtype, in the stored basis.
        tensor_scale: fp32 scalar s, kept.
        scales: float8_e4m3fn, swizzled, as `quantize_nvfp4` returns them for this shape.
        seed: of the stochastic rounding.

    Returns:
        codes and scales as `quantize_nvfp4`.

    Raises:
        HswqError: x is not a matrix or the scales have another shape.
    """
    _check_matrix(x)
    s = _scalar(tensor_scale, x.device)
    rows16, cols16 = ceil_to(x.shape[0], 16), ceil_to(x.shape[1], 16)
    given = unswizzle(scales, rows16, cols16 // BLOCK).view(torch.uint8)
    return _quantize(
        x, s, lambda blocks, rows: torch.maximum(plain_scale_codes(blocks, s), given[rows]), seed
    )


def dequantize_nvfp4(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The values [M, K] of packed codes, in the stored basis: ``value * (s * c)``, two fp32 products, then rounded to ``dtype``.

    Args:
        codes: uint8 [ceil16(M), ceil16(K)/2].
        scales: float8_e4m3fn, swizzled.
        tensor_scale: fp32 scalar s.
        shape: the logical (M, K).
        dtype: of the result.

    Raises:
        HswqError: the tensors do not have the shapes that belong to ``shape``.
    """
    s = _scalar(tensor_scale, codes.device)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    for rows, values, c in decode_blocks(codes, scales, shape):
        out[rows] = (values * (s * c)).flatten(1)[:, : shape[1]].to(dtype)
    return out


def decode_blocks(
    codes: Tensor, scales: Tensor, shape: tuple[int, int]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunks of rows: (rows, E2M1 values fp32 [r, K16/16, 16], block scales fp32 [r, K16/16, 1]), padding columns included.

    Raises:
        HswqError: the tensors do not have the shapes that belong to ``shape``.
    """
    rows16, cols16 = ceil_to(shape[0], 16), ceil_to(shape[1], 16)
    if tuple(codes.shape) != (rows16, cols16 // 2):
        raise HswqError(
            f"the codes do not belong to shape {tuple(shape)}",
            found=list(codes.shape),
            expected=[rows16, cols16 // 2],
        )
    linear = unswizzle(scales, rows16, cols16 // BLOCK)
    for rows in row_chunks(shape[0], cols16):
        values = decode_e2m1(unpack_nibbles(codes[rows])).unflatten(1, (-1, BLOCK))
        yield rows, values, decode_e4m3(linear[rows]).unsqueeze(2)


def plain_scale_codes(blocks: Tensor, s: Tensor) -> Tensor:
    """Step 2: the plain E4M3 code (uint8 [r, n]) of fp32 blocks [r, n, 16]."""
    b = _block_amax(blocks) / E2M1_MAX
    return _scale_code(b / s, b)


def four_six_candidates(blocks: Tensor, s: Tensor) -> list[Tensor]:
    """Codes for a block maximum at 6 and at 4, uint8 [r, n] each, the lower first."""
    b = _block_amax(blocks) / E2M1_MAX
    return [_scale_code(b / s, b), _scale_code(1.5 * (b / s), b)]


def sweep_candidates(blocks: Tensor, s: Tensor) -> Iterator[Tensor]:
    """The codes around the plain one, uint8 [r, n] each, from the lowest up."""
    plain = plain_scale_codes(blocks, s).short()
    for step in range(-SWEEP_RADIUS, SWEEP_RADIUS + 1):
        yield (plain + step).clamp(0, MAX_CODE).to(torch.uint8)


def _scale_code(r: Tensor, b: Tensor) -> Tensor:
    """E4M3 code of min(r, 448), 0 for blocks of zeros, whose r may be 0/0."""
    return encode_e4m3(torch.where(b == 0, b, r)).view(torch.uint8)


def _least_error(
    blocks: Tensor, s: Tensor, h: Tensor | None, plain: Tensor, candidates: list[Tensor] | Iterator[Tensor]
) -> Tensor:
    best = plain.clone()
    least = torch.full(plain.shape, torch.inf, device=plain.device)
    scaled = blocks / s
    for codes in candidates:
        error = _block_error(blocks, scaled, s, decode_e4m3(codes).unsqueeze(2), h)
        better = error < least
        best = torch.where(better & (plain != NAN_CODE), codes, best)
        least = torch.where(better, error, least)
    return best


def _block_error(blocks: Tensor, scaled: Tensor, s: Tensor, c: Tensor, h: Tensor | None) -> Tensor:
    """The error of the module's docstring, fp32 [r, n], for the scales c [r, n, 1]."""
    d = decode_e2m1(_encode_blocks(blocks, s * c, None)) * c - scaled
    e = d * d
    if h is not None:
        e = h * e
    for half in (8, 4, 2, 1):
        e = e[..., :half] + e[..., half:]
    return e.squeeze(-1)


def _encode_blocks(blocks: Tensor, t: Tensor, u: Tensor | None) -> Tensor:
    """Step 3: codes uint8 [r, n, 16] of fp32 blocks for t [r, n, 1]."""
    return encode_e2m1(blocks / t, u) * (t > 0)


def _quantize(
    x: Tensor, s: Tensor, choose: Callable[[Tensor, slice], Tensor], seed: int | None
) -> tuple[Tensor, Tensor]:
    """Runs over chunks of rows: pad, choose scale codes, encode, pack; swizzles at the end."""
    m, k = x.shape
    rows16, cols16 = ceil_to(m, 16), ceil_to(k, 16)
    codes = torch.zeros((rows16, cols16 // 2), dtype=torch.uint8, device=x.device)
    scales = torch.zeros((rows16, cols16 // BLOCK), dtype=torch.uint8, device=x.device)
    for rows in row_chunks(m, cols16):
        blocks = F.pad(x[rows].float(), (0, cols16 - k)).unflatten(1, (-1, BLOCK))
        c = choose(blocks, rows)
        u = None
        if seed is not None:
            u = F.pad(uniform(seed, rows, k, x.device), (0, cols16 - k)).unflatten(1, (-1, BLOCK))
        scales[rows] = c
        codes[rows] = pack_nibbles(_encode_blocks(blocks, s * decode_e4m3(c).unsqueeze(2), u).flatten(1))
    return codes, swizzle(scales.view(torch.float8_e4m3fn))


def _amax(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def _block_amax(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(dim=2)


def _scalar(value: Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())


def _check_matrix(x: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] == 0 or not x.is_floating_point():
        raise HswqError(
            "only matrices of floats are quantised",
            found=f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}",
            expected="[M, K] with K > 0",
        )


def _importance_blocks(importance: Tensor | None, method: Method, x: Tensor) -> Tensor | None:
    if method not in METHODS:
        raise HswqError("unknown method of choosing block scales", found=method, expected=" | ".join(METHODS))
    if importance is None:
        return None
    if method == "rtn":
        raise HswqError(
            "rtn chooses no scales, so an importance would be ignored", fix="use sweep or four_six"
        )
    k = x.shape[1]
    if tuple(importance.shape) != (k,):
        raise HswqError("importance is one number a column", found=list(importance.shape), expected=[k])
    padded = F.pad(importance.to(x.device, torch.float32), (0, ceil_to(k, 16) - k))
    return cast(Tensor, padded.unflatten(0, (-1, BLOCK)))
