"""The native kernels against the definition in formats/, bit for bit, on every instruction set this machine has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hswq_lab import formats, ops
from hswq_lab._backends import native
from hswq_lab.errors import HswqError

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")

LEVELS = ["baseline", "avx2", "avx512", "amx"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 16), (33, 48), (17, 20), (130, 80), (5, 256), (16, 272), (3, 768), (7, 1), (0, 64)]


@pytest.fixture(params=LEVELS)
def isa(request):
    """Runs a test once on each instruction set; those that the machine lacks are skipped by name."""
    best = LEVELS.index(native.hardware_isa())
    if LEVELS.index(request.param) > best:
        pytest.skip(f"this machine has no {request.param}")
    native.limit_isa(request.param)
    yield request.param
    native.limit_isa("")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(width), b.contiguous().view(width))
    )


def gaussian(rows: int, cols: int, dtype=torch.float32, seed=0, spread=0.0) -> torch.Tensor:
    """Normal values; with a spread, blocks of 16 columns differ by that many orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g)
    if spread:
        blocks = -(-cols // 16)
        x *= (10 ** (spread * (torch.rand(rows, blocks, generator=g) - 0.5))).repeat_interleave(16, 1)[
            :, :cols
        ]
    return x.to(dtype)


def awkward() -> dict[str, torch.Tensor]:
    """Inputs where a careless kernel differs: each [40, 272], fp32."""
    g = torch.Generator().manual_seed(1)
    base = torch.randn(40, 272, generator=g)
    steps = torch.randint(-60, 60, (40, 272), generator=g)
    zeros = base.clone()
    zeros[:, 32:64] = 0
    zeros[3] = -0.0
    zeros[:, 100:116] = -0.0
    zeros[5, 7] = -0.0
    outliers = base.clone()
    outliers[7, 33] = 3e4
    outliers[8, 200] = -3e38
    holes = base.clone()
    holes[2, 5], holes[9, 100], holes[11, 270] = torch.nan, torch.inf, -torch.inf
    return {
        "ties": steps / 8,
        "eighths": steps.float() / 4,
        "zeros": zeros,
        "all_zero": torch.zeros(40, 272),
        "minus_zero": torch.full((40, 272), -0.0),
        "subnormal": base * 1e-41,
        "around_subnormal": base * 1e-37,
        "tiny": base * 1e-35,
        "huge": base * 5e37,
        "constant": torch.ones(40, 272),
        "outliers": outliers,
        "mixed": base * 10.0 ** torch.randint(-38, 30, (40, 272), generator=g).float(),
        "nonfinite": holes,
    }


AWKWARD = awkward()


def quantizers(x: torch.Tensor, s: torch.Tensor) -> dict:
    h = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(3)) + 0.01
    return {
        "rtn": lambda: ops.quantize_nvfp4(x, s),
        "stochastic": lambda: ops.quantize_nvfp4(x, s, seed=2**64 - 5),
        "four_six": lambda: ops.quantize_nvfp4(x, s, "four_six"),
        "sweep": lambda: ops.quantize_nvfp4(x, s, "sweep"),
        "sweep_h": lambda: ops.quantize_nvfp4(x, s, "sweep", h, seed=11),
        "four_six_h": lambda: ops.quantize_nvfp4(x, s, "four_six", h),
    }


def both(call):
    """What the kernel says, and what the definition says."""
    mine = call()
    with ops.use_backend("reference"):
        return mine, call()


def assert_same(call) -> None:
    mine, theirs = both(call)
    if isinstance(mine, torch.Tensor):
        mine, theirs = (mine,), (theirs,)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert same_bits(a, b), f"result {i}: {(a.float() != b.float()).sum()} of {a.numel()} differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_equals_the_definition(isa, shape, dtype):
    x = gaussian(*shape, dtype, spread=2.0)
    s = ops.tensor_scale(x)
    for call in quantizers(x, s).values():
        assert_same(call)


@pytest.mark.parametrize("case", AWKWARD)
def test_quantize_awkward_values(isa, case):
    x = AWKWARD[case].float()
    scales = [torch.tensor(1.0), torch.tensor(1e-3), torch.tensor(0.0)]
    if torch.isfinite(x).all():
        scales.append(ops.tensor_scale(x))
    for s in scales:
        for call in quantizers(x, s).values():
            assert_same(call)


@pytest.mark.parametrize("case", [c for c in AWKWARD if c != "nonfinite"])
@pytest.mark.parametrize("group", [4, 16])
def test_rotation_awkward_values(isa, case, group):
    x = AWKWARD[case].float()
    assert_same(lambda: ops.rotate(x, group))
    assert_same(lambda: ops.rotate_quantize_nvfp4_counted(x, torch.tensor(0.01), group))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [None, 4, 16, 64, 256])
def test_rotate_quantize_in_one_pass(isa, group, dtype):
    x = gaussian(37, 768, dtype)
    x[3, :] = -0.0
    s = ops.tensor_scale(x) / 2
    assert_same(lambda: ops.rotate(x, group))
    assert_same(lambda: ops.rotate_quantize_nvfp4_counted(x, s, group))
    codes, scales, clipped = ops.rotate_quantize_nvfp4_counted(x, s, group)
    two_steps = ops.quantize_nvfp4(formats.rotate_fp32(x, group), s)
    assert same_bits(codes, two_steps[0])
    assert same_bits(scales, two_steps[1])
    assert clipped > 0 or group is not None


def test_rotating_twice_gives_the_input_back(isa):
    x = gaussian(5, 512)
    assert torch.allclose(ops.rotate(ops.rotate(x, 256), 256), x, atol=2e-6)
    ones = torch.ones(2, 256)
    assert torch.equal(ops.rotate(ones, 256), ones)  # a Sylvester matrix would give 16 and zeros


def test_rotate_takes_any_number_of_dimensions(isa):
    x = gaussian(6, 64)
    whole = ops.rotate(x, 64)
    assert torch.equal(ops.rotate(x[0], 64), whole[0])
    assert torch.equal(ops.rotate(x.reshape(2, 3, 64), 64), whole.reshape(2, 3, 64))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("group", [None, 16])
def test_dequantize_equals_the_definition(isa, dtype, group):
    x = gaussian(130, 80, spread=3.0)
    s = ops.tensor_scale(x)
    codes, scales = ops.quantize_nvfp4(x, s)
    assert_same(lambda: ops.dequantize_nvfp4(codes, scales, s, (130, 80), dtype, group))


def test_every_code_and_scale_dequantizes(isa):
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)[:, :128].contiguous()
    codes[1::2] += 128
    scales = torch.arange(0, 512, dtype=torch.int64).remainder(127).to(torch.uint8).repeat(4).reshape(128, 16)
    scales = scales.view(torch.float8_e4m3fn)
    for dtype in DTYPES:
        for s in (1.0, 1e-3, 1e-40, 3e30):
            assert_same(
                lambda s=s, dtype=dtype: ops.dequantize_nvfp4(
                    codes, scales, torch.tensor(s), (16, 256), dtype
                )
            )


@pytest.mark.parametrize("group", [None, 16])
def test_requantize_keeps_what_fits(isa, group):
    x = gaussian(33, 48)
    s = ops.tensor_scale(x)
    _, scales = ops.quantize_nvfp4(formats.rotate_fp32(x, group), s)
    changed = x + 0.3 * gaussian(33, 48, seed=5)
    assert_same(lambda: ops.requantize_nvfp4(changed, s, scales, 9, group))
    _, same_scales = ops.requantize_nvfp4(x * 0.9, s, scales, 9, group)
    assert same_bits(same_scales, scales)


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (130, 5), (576, 44), (256, 128)])
def test_swizzle_and_back(isa, shape):
    linear = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert_same(lambda: ops.swizzle(linear))
    swizzled = ops.swizzle(linear)
    assert_same(lambda: ops.unswizzle(swizzled, *shape))
    assert torch.equal(ops.unswizzle(swizzled, *shape), linear)


@pytest.mark.parametrize("wrong", [torch.zeros(128, 4), torch.zeros(512, dtype=torch.uint8)])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_no_matrix_of_bytes_is_not_swizzled(backend, wrong):
    with ops.use_backend(backend):
        for call in (lambda: ops.swizzle(wrong), lambda: ops.unswizzle(wrong, 128, 4)):
            with pytest.raises(HswqError, match="one-byte values"):
                call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_bias_of_another_length_is_not_spread(backend, dtype):
    w = torch.randn(48, 256)
    codes, scales = ops.quantize_nvfp4(w, s := ops.tensor_scale(w))
    with ops.use_backend(backend), pytest.raises(HswqError, match="bias is one number"):
        ops.linear_w4a16(torch.randn(3, 256, dtype=dtype), codes, scales, s, 256, 48, torch.ones(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("group", [None, 16])
def test_int8_equals_the_definition(isa, dtype, seed, group):
    w = gaussian(19, 272, dtype)
    w[4] = 0
    w[5, 100] = 1000
    assert_same(lambda: ops.quantize_int8(w, group, seed))
    q, s = ops.quantize_int8(w, group, seed)
    for out in DTYPES:
        assert_same(lambda out=out: ops.dequantize_int8(q, s, group, out))
    assert_same(lambda: ops.dequantize_int8(q, s[3, 0], group))
    changed = w.float() * (1 + 0.01 * gaussian(19, 272, seed=2))
    assert_same(lambda: ops.requantize_int8(changed, s, group, 3))
    assert_same(lambda: ops.requantize_int8(changed, s[3, 0], group, 3))


@pytest.mark.parametrize("case", AWKWARD)
def test_int8_awkward_values(isa, case):
    w = AWKWARD[case].float()
    assert_same(lambda: ops.quantize_int8(w, None))
    assert_same(lambda: ops.quantize_int8(w, None, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_scale(isa, dtype):
    x = gaussian(70, 300, dtype)
    for view in (x, x.t(), x[:, 5:9], x[0], x[:0], x[3, 4], x.reshape(7, 10, 300)):
        assert_same(lambda view=view: ops.tensor_scale(view))
    x[3, 3] = torch.nan
    assert ops.tensor_scale(x).isnan()


@pytest.mark.parametrize("view", ["transposed", "strided_rows", "strided_columns", "offset"])
def test_views_are_read_as_they_are(isa, view):
    base = gaussian(64, 128)
    x = {
        "transposed": base.t()[:, :48],
        "strided_rows": base[::3, :48],
        "strided_columns": base[:, ::2],
        "offset": base[3:, 5:69],
    }[view]
    s = torch.tensor(1e-3)
    assert_same(lambda: ops.quantize_nvfp4(x, s))
    assert_same(lambda: ops.rotate(x, 4 if x.shape[1] % 16 else 16))
    assert_same(lambda: ops.quantize_int8(x, None))


# ---- matrix products --------------------------------------------------------------------------------

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


def test_threads_change_nothing():
    x = gaussian(300, 1024)
    s = ops.tensor_scale(x)
    q, qs = ops.quantize_int8(x, 256)

    def everything():
        codes, scales = ops.quantize_nvfp4(x, s, "sweep", seed=5)
        return [
            ops.tensor_scale(x), ops.rotate(x, 256), codes, scales, *ops.quantize_int8(x, 64, 3),
            ops.dequantize_nvfp4(codes, scales, s, (300, 1024), group=256), ops.dequantize_int8(q, qs, 256),
            ops.linear_w4a4(x, codes, scales, s, s, 256, 300), ops.linear_int8(x, q, qs, 256),
            ops.linear_w4a16(x.bfloat16(), codes, scales, s, 256, 300),
            ops.rotate_quantize_nvfp4_counted(x, s / 2, 16)[2],
        ]  # fmt: skip

    try:
        one = everything()
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert all(same_bits(a, b) for a, b in zip(one, everything(), strict=True))
    finally:
        torch.set_num_threads(1)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 300),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**32),
    method=st.sampled_from(["rtn", "four_six", "sweep"]),
    rounding=st.none() | st.integers(0, 2**64 - 1),
)
def test_quantize_property(rows, cols, exponent, seed, method, rounding):
    x = gaussian(rows, cols, seed=seed, spread=1.0) * 10.0**exponent
    s = ops.tensor_scale(x)
    assert_same(lambda: ops.quantize_nvfp4(x, s, method, None, rounding))
    group = formats.group_for(cols)
    assert_same(lambda: ops.rotate_quantize_nvfp4_counted(x, s / 3, group))
    assert_same(lambda: ops.quantize_int8(x, group, rounding))


def test_quantized_random_quotients_near_every_boundary(isa):
    """x / t within a few ulp of each midpoint of E2M1, for many t: a reciprocal in place of the division fails here."""
    g = torch.Generator().manual_seed(4)
    t = torch.rand(4096, 1, generator=g) + 0.5
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.zeros(4096, 16)
    x[:, :7] = t * midpoints
    x[:, 7:14] = -x[:, :7]
    bits = x[:, :14].contiguous().view(torch.int32) + torch.randint(
        -2, 3, (4096, 14), generator=g, dtype=torch.int32
    )
    x[:, :14] = bits.view(torch.float32)
    x[:, 14:15] = 6 * t
    s = torch.tensor(1.0)
    rows = x / (x[:, 14:15] / 6)  # block scales near 1: t = s * c is 1 exactly
    for values in (rows, x):
        assert_same(lambda values=values: ops.quantize_nvfp4(values.contiguous(), s))
    for scale in (0.013, 0.37, 7e-4):
        assert_same(lambda scale=scale: ops.quantize_nvfp4(x, torch.tensor(scale)))
