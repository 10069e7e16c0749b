"""The native kernels against the definition in formats/, bit for bit, on every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import AWKWARD, DTYPES, SHAPES, assert_same, gaussian, quantizers, same_bits

from hswq_lab import formats, ops
from hswq_lab._backends import native
from hswq_lab.errors import HswqError

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")


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
