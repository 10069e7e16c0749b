"""The native matrix products against the definition in formats/, on every instruction set this machine has."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import DTYPES, assert_same, both, gaussian

from hswq_lab import formats, ops
from hswq_lab._backends import native

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")

GEMM_SHAPES = [
    (1, 5, 16),
    (16, 16, 64),
    (33, 130, 80),
    (20, 24, 272),
    (0, 16, 32),
    (3, 0, 32),
    (50, 48, 768),
    (100, 40, 1056),
]


def packed(rows, cols, seed, spread):
    x = gaussian(rows, cols, seed=seed, spread=spread)
    s = ops.tensor_scale(x) if rows else torch.tensor(1.0)
    return *ops.quantize_nvfp4(x, s), s


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_fp4_gemm_is_exact(isa, shape, spread):
    m, n, k = shape
    xc, xs, sx = packed(m, k, 1, spread)
    wc, ws, sw = packed(n, k, 2, spread)
    alpha = sx * sw
    bias = gaussian(1, n, seed=3)[0]
    for dtype in DTYPES:
        assert_same(lambda dtype=dtype: ops.fp4_gemm(xc, xs, wc, ws, alpha, (m, n), None, dtype))
    assert_same(lambda: ops.fp4_gemm(xc, xs, wc, ws, alpha, (m, n), bias.bfloat16(), torch.bfloat16))
    assert_same(lambda: ops.fp4_gemm(xc, xs, wc, ws, alpha, (m, n), bias, torch.float32))


def test_fp4_gemm_with_scales_of_every_size(isa):
    """Block scales over E4M3's whole range: sums that no 24 bits hold, and fp64 only in the definition's order."""
    g = torch.Generator().manual_seed(0)
    k = 4096
    codes = [torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g) for n in (48, 32)]
    scales = []
    for rows in (48, 32):
        linear = torch.randint(0, 127, (rows, k // 16), dtype=torch.uint8, generator=g)
        linear[::2] = torch.where(torch.rand(linear[::2].shape, generator=g) < 0.1, 126, 1)
        scales.append(formats.swizzle(linear.view(torch.float8_e4m3fn)))
    alpha = torch.tensor(1e-6)
    for dtype in DTYPES:
        assert_same(
            lambda dtype=dtype: ops.fp4_gemm(
                codes[0], scales[0], codes[1], scales[1], alpha, (48, 32), None, dtype
            )
        )


@pytest.mark.parametrize("gap", range(0, 64, 4))
def test_fp4_gemm_on_the_edge_of_24_bits(isa, gap):
    """Blocks that add up as fast as they can beside blocks whose last bit counts, further and further below."""
    k, shape = 1024, (32, 48)
    small = (torch.arange(k // 16) % 5 == 2).expand(shape[1], -1)
    first = torch.arange(k) % 16 == 0
    values = torch.where(small.repeat_interleave(16, 1), torch.where(first, 1, 0), 7).to(torch.uint8)
    linear = torch.where(small, max(1, 119 - gap) | 1, 119).to(torch.uint8).view(torch.float8_e4m3fn)
    (xc, xs), (wc, ws) = ((formats.pack_nibbles(values[:n]), formats.swizzle(linear[:n])) for n in shape)
    # The large blocks of the second half cancel those of the first: what is left is what a rounding would have lost.
    values[:, k // 2 :] |= torch.where(values[:, k // 2 :] == 7, 8, 0).to(torch.uint8)
    wc = formats.pack_nibbles(values[: shape[1]])
    assert_same(lambda: ops.fp4_gemm(xc, xs, wc, ws, torch.tensor(1.0), shape, None, torch.float32))


def test_fp4_gemm_against_fp64_of_the_dequantized(isa):
    xc, xs, sx = packed(20, 64, 1, 1.0)
    wc, ws, sw = packed(24, 64, 2, 1.0)
    x = ops.dequantize_nvfp4(xc, xs, torch.ones(()), (20, 64), torch.float32).double()
    w = ops.dequantize_nvfp4(wc, ws, torch.ones(()), (24, 64), torch.float32).double()
    y = ops.fp4_gemm(xc, xs, wc, ws, sx * sw, (20, 24), None, torch.float32)
    assert torch.equal(y, (x @ w.T * (sx * sw).double()).float())


def inputs(k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x of two, three, one and two dimensions; the last without rows."""
    cube = gaussian(6, k, dtype).reshape(2, 3, k)
    return [gaussian(33, k, dtype), cube, gaussian(1, k, dtype)[0], gaussian(0, k, dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "group"), [(768, 256), (64, 64), (40, None), (48, 16)])
def test_linear_w4a4_and_int8_are_bit_equal(isa, dtype, k, group):
    w = gaussian(70, k, seed=2)
    s = ops.tensor_scale(w)
    wc, ws = ops.rotate_quantize_nvfp4(w, s, group)
    q, qs = ops.quantize_int8(w, group)
    bias = gaussian(1, 70, seed=3)[0].to(dtype)
    s_x = torch.tensor(0.002)
    for x in inputs(k, dtype):
        for b in (None, bias):
            assert_same(lambda x=x, b=b: ops.linear_w4a4(x, wc, ws, s, s_x, group, 70, b))
            assert_same(lambda x=x, b=b: ops.linear_int8(x, q, qs, group, b))
        assert_same(lambda x=x: ops.linear_int8(x, q, qs[0, 0], group))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "group"), [(768, 256), (64, 64), (40, None), (1056, 16)])
def test_linears_with_a_free_order_of_sums(isa, dtype, k, group):
    w = gaussian(70, k, seed=2)
    s = ops.tensor_scale(w)
    wc, ws = ops.rotate_quantize_nvfp4(w, s, group)
    bias = gaussian(1, 70, seed=3)[0].to(dtype)
    s_x = torch.tensor(0.002)
    # One rounding to the result's dtype, and what k fp32 additions in another order can move.
    tolerance = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for x in inputs(k, dtype):
        for b in (None, bias):
            for call in (
                lambda x=x, b=b: ops.linear_w4a16(x, wc, ws, s, group, 70, b),
                lambda x=x, b=b: ops.linear_w4a8(x, wc, ws, s, s_x, group, 70, b),
            ):
                mine, theirs = both(call)
                assert mine.shape == theirs.shape == (*x.shape[:-1], 70)
                assert torch.allclose(mine.float(), theirs.float(), rtol=tolerance, atol=3e-5 * math.sqrt(k))
