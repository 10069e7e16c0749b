"""NVFP4: E2M1 codes, an E4M3 scale for every 16 along K, one fp32 scale: the definition of the numbers.

Quantising x [M, K]; fp32 throughout, every operation rounded to nearest even, nothing fused, subnormals kept:

1. M and K are padded with zeros to multiples of 16.
2. Each block of 16 along K gets an E4M3 scale c: see `block_scales`.
3. ``t = s * c``. Where t > 0 (neither 0 nor NaN): ``y = x / t``, its nearest E2M1 code, ties to even,
   beyond +-6 saturated, the sign bit of x kept. Elsewhere all 16 codes are 0.
4. With a seed the codes of step 3 are rounded stochastically: `round_e2m1_stochastic` with Philox's u of
   the element ``row * K + column``, K unpadded. The choice of c does not depend on the seed.
5. Two codes a byte, the even column in the high nibble; block scales in 128x4 order.

So the ops are defined for every input: a block with a NaN has the NaN scale 0x7F and codes 0, and
dequantises to NaN; an infinity saturates at 448 * 6 * s; nonzero data with a given s = 0 get c = 448 and
codes 0. A negative s is the caller's error. Packing (`hswq_lab.packing`) refuses all of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._checks import check_matrix
from hswq_lab.formats._rows import ceil_to, row_chunks
from hswq_lab.formats.block_scales import Method, choose_codes, encode_blocks, plain_codes
from hswq_lab.formats.e2m1 import E2M1_MAX, decode_e2m1, pack_nibbles, unpack_nibbles
from hswq_lab.formats.e4m3 import E4M3_MAX, decode_e4m3
from hswq_lab.formats.philox import uniform
from hswq_lab.formats.swizzle import swizzle, unswizzle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 16


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of any tensor, fp32 scalar: 0 if it is empty, NaN if a value is."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # Two reductions in x's dtype instead of |x| in full size; abs() turns the -0.0 of an all-zero x around.
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).abs().float()


def tensor_scale(x: Tensor) -> Tensor:
    """The tensor's own scale: fp32 scalar ``max|x| / 2688`` (448 * 6); 0 for an all-zero or empty x."""
    return amax(x) / (E4M3_MAX * E2M1_MAX)


def tensor_scale_four_six(x: Tensor) -> Tensor:
    """fp32 scalar ``max|x| / 1536`` (256 * 6): leaves room for scales that "four_six" enlarges by 1.5."""
    return amax(x) / (256.0 * E2M1_MAX)


def quantize_nvfp4(
    x: Tensor,
    tensor_scale: Tensor,
    method: Method = "rtn",
    importance: Tensor | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises x by the rules of this module.

    Args:
        x: [M, K], fp32, bf16 or fp16, in the basis to be stored.
        tensor_scale: fp32 scalar s >= 0.
        method: how block scales are chosen: "rtn" (plainly), "four_six" or "sweep".
        importance: [K], weights of the columns' squared errors, such as mean squares of the input channels;
            for "sweep" and "four_six".
        seed: rounds the codes stochastically; None rounds them to nearest.

    Returns:
        codes, uint8 [ceil16(M), ceil16(K)/2]; scales, float8_e4m3fn swizzled [ceil128(M),
        ceil4(ceil16(K)/16)].

    Raises:
        HswqError: x is not a matrix, the method is unknown, or the importance has no use or another length.
    """
    check_matrix(x)
    s = _scalar(tensor_scale, x.device)
    h = None if importance is None else _importance(importance, method, x)
    return _quantize(x, s, lambda blocks, _: choose_codes(blocks, s, method, h), seed)


def requantize_nvfp4(x: Tensor, tensor_scale: Tensor, scales: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Quantises changed values with the scales they had, stochastically: baking in place.

    A block keeps its code c while it fits, that is, while the plain code of its new values is not above c;
    else it takes that plain code. A block whose values are its dequantised ones up to rounding noise
    therefore keeps c and its codes, which "raise wherever amax > 6 * s * c" would re-roll: half of all
    blocks have such a maximum.

    Args:
        x: [M, K], fp32, bf16 or fp16, in the stored basis.
        tensor_scale: fp32 scalar s, kept.
        scales: float8_e4m3fn, swizzled, as `quantize_nvfp4` returns them for this shape.
        seed: of the stochastic rounding.

    Returns:
        codes and scales as of `quantize_nvfp4`.

    Raises:
        HswqError: x is not a matrix or the scales have another shape.
    """
    check_matrix(x)
    s = _scalar(tensor_scale, x.device)
    given = unswizzle(scales, *_block_grid(x.shape[0], x.shape[1])).view(torch.uint8)
    return _quantize(x, s, lambda blocks, rows: torch.maximum(plain_codes(blocks, s), given[rows]), seed)


def dequantize_nvfp4(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The values of packed codes, in the stored basis: ``value * (s * c)`` in fp32, then rounded to dtype.

    Args:
        codes: uint8 [ceil16(M), ceil16(K)/2].
        scales: float8_e4m3fn, swizzled.
        tensor_scale: fp32 scalar s.
        shape: the logical (M, K).
        dtype: of the result.

    Returns:
        [M, K].

    Raises:
        HswqError: the tensors do not have the shapes that belong to (M, K).
    """
    s = _scalar(tensor_scale, codes.device)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    for rows, values, c in decode_blocks(codes, scales, shape):
        out[rows] = (values * (s * c)).flatten(1)[:, : shape[1]].to(dtype)
    return out


def decode_blocks(
    codes: Tensor, scales: Tensor, shape: tuple[int, int], factor: int = 1
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Goes through packed codes in chunks of rows.

    Args:
        codes: uint8 [ceil16(M), ceil16(K)/2].
        scales: float8_e4m3fn, swizzled.
        shape: the logical (M, K).
        factor: makes the chunks so much larger than usual.

    Yields:
        The rows; their E2M1 values, fp32 [r, K16/16, 16]; their block scales, fp32 [r, K16/16, 1]. Padding
        columns included.

    Raises:
        HswqError: the tensors do not have the shapes that belong to ``shape``.
    """
    rows16, blocks = _block_grid(*shape)
    if tuple(codes.shape) != (rows16, 8 * blocks):
        raise HswqError(
            f"the codes do not belong to shape {tuple(shape)}",
            found=list(codes.shape),
            expected=[rows16, 8 * blocks],
        )
    linear = unswizzle(scales, rows16, blocks)
    for rows in row_chunks(shape[0], BLOCK * blocks, factor):
        values = _in_blocks(decode_e2m1(unpack_nibbles(codes[rows])))
        yield rows, values, decode_e4m3(linear[rows]).unsqueeze(2)


def _quantize(
    x: Tensor, s: Tensor, choose: Callable[[Tensor, slice], Tensor], seed: int | None
) -> tuple[Tensor, Tensor]:
    """Chunks of rows: pad, choose scale codes, encode, pack; swizzles the scales at the end."""
    m, k = x.shape
    rows16, blocks = _block_grid(m, k)
    padding = (0, BLOCK * blocks - k)
    codes = torch.zeros((rows16, 8 * blocks), dtype=torch.uint8, device=x.device)
    scales = torch.zeros((rows16, blocks), dtype=torch.uint8, device=x.device)
    for rows in row_chunks(m, BLOCK * blocks):
        values = _in_blocks(F.pad(x[rows].float(), padding))
        u = None if seed is None else _in_blocks(F.pad(uniform(seed, rows, k, x.device), padding))
        scales[rows] = choose(values, rows)
        t = s * decode_e4m3(scales[rows]).unsqueeze(2)
        codes[rows] = pack_nibbles(encode_blocks(values, t, u).flatten(1))
    return codes, swizzle(scales.view(torch.float8_e4m3fn))


def _block_grid(rows: int, cols: int) -> tuple[int, int]:
    """Padded rows, and blocks of 16 in a padded row."""
    return ceil_to(rows, BLOCK), ceil_to(cols, BLOCK) // BLOCK


def _in_blocks(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)


def _scalar(value: Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())


def _importance(importance: Tensor, method: Method, x: Tensor) -> Tensor:
    """The importance in blocks, fp32 [K16/16, 16]."""
    if method == "rtn":
        raise HswqError(
            "rtn chooses no scales: an importance would be ignored", fix='use "sweep" or "four_six"'
        )
    k = x.shape[1]
    if tuple(importance.shape) != (k,):
        raise HswqError("importance is one number a column", found=list(importance.shape), expected=[k])
    padded = F.pad(importance.to(x.device, torch.float32), (0, ceil_to(k, BLOCK) - k))
    return padded.reshape(-1, BLOCK)
