"""The CUDA kernels against the definition in formats/ on a CPU: bit for bit, or as near as a kernel promises."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import DEVICE, NEEDS_CARD, assert_same, both, on, poisoned  # noqa: F401 - a fixture
from kernel_cases import AWKWARD, DTYPES, SHAPES, gaussian, quantizers, same_bits

from hswq_lab import formats, ops

pytestmark = NEEDS_CARD
WIDE_SHAPES = [*SHAPES, (1, 256), (130, 512), (257, 768), (128, 1280), (300, 3840)]


def assert_nearly_same(x, s, group) -> None:
    """Codes as the definition's but for a few whose quotient lies on a boundary's other side, by one step.

    That is what `rotate_quantize` allows itself for 16-bit x and groups of 256: csrc/cuda/groups.cuh.
    """
    (codes, scales, clipped), theirs = both(ops.rotate_quantize_nvfp4_counted, x, s, group)
    bytes_of = [(v.view(torch.uint8) if v.dtype != torch.int64 else v) for v in (scales, theirs[1])]
    assert (bytes_of[0] != bytes_of[1]).sum() <= 1e-5 * scales.numel()
    assert int(clipped) == int(theirs[2])
    steps = (unpacked(codes) - unpacked(theirs[0])).abs()
    assert (steps > 0).sum() <= 1e-5 * steps.numel(), f"{(steps > 0).sum()} of {steps.numel()} codes differ"
    if torch.equal(*bytes_of):
        assert steps.max() <= 1


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes as whole numbers, -7 to 7, so that a step is 1."""
    nibbles = torch.stack([codes >> 4, codes & 15], -1).int()
    return torch.where(nibbles >= 8, -(nibbles & 7), nibbles)


def assert_quantizers_agree(x, s) -> None:
    for (name, mine), call in zip(
        quantizers(x.to(DEVICE), s.to(DEVICE)).items(), quantizers(x, s).values(), strict=True
    ):
        with ops.use_backend("reference"):
            theirs = call()
        for a, b in zip(on("cpu", mine()), theirs, strict=True):
            assert same_bits(a, b), f"{name}, s = {float(s)}: {(a.float() != b.float()).sum()} differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
def test_quantize_equals_the_definition(shape, dtype):
    x = gaussian(*shape, dtype, spread=2.0)
    s = ops.tensor_scale(x)
    assert_quantizers_agree(x, s)


@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_values(case):
    x = AWKWARD[case].float()
    scales = [torch.tensor(1.0), torch.tensor(1e-3), torch.tensor(0.0), torch.tensor(1e-30)]
    if torch.isfinite(x).all():
        scales.append(ops.tensor_scale(x))
    for s in scales:
        assert_quantizers_agree(x, s)
    assert_same(ops.quantize_int8, x, None)
    assert_same(ops.quantize_int8, x, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [None, 4, 16, 64, 256])
@pytest.mark.parametrize("rows", [1, 16, 37, 300])
def test_rotate_quantize(rows, group, dtype):
    x = gaussian(rows, 768, dtype)
    x[rows // 2, :] = -0.0
    for s in (ops.tensor_scale(x), ops.tensor_scale(x) / 8):
        if group == 256 and dtype != torch.float32:
            assert_nearly_same(x, s, group)
        else:
            assert_same(ops.rotate_quantize_nvfp4_counted, x, s, group)
    assert_same(ops.rotate, x, group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ties_round_to_even(dtype):
    """A scale of few bits makes exact ties frequent, on boundaries between codes and between block scales."""
    x = torch.randint(-12, 13, (64, 1024), generator=torch.Generator().manual_seed(4)).to(dtype)
    for s in (1.0, 0.25, 0.75, 2.0**-7):
        assert_same(ops.rotate_quantize_nvfp4_counted, x, torch.tensor(s), 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", AWKWARD)
def test_quick_way_with_awkward_values(case, dtype):
    x = torch.cat([AWKWARD[case], AWKWARD[case]], 1)[:, :512].clamp(-6e4, 6e4).to(dtype)
    x[7, 300] = torch.inf  # one infinity makes a group of them, two of different signs NaN
    x[9, 5], x[9, 6] = torch.inf, -torch.inf
    x[11, 100] = torch.nan
    for s in (0.0123, 1e-6, 1e5 / 3, 1e-30):
        assert_nearly_same(x, torch.tensor(s), 256)


@pytest.mark.parametrize("case", [c for c in AWKWARD if c != "nonfinite"])
@pytest.mark.parametrize("group", [16, 256])
def test_rotation_of_awkward_values(case, group):
    x = torch.cat([AWKWARD[case], AWKWARD[case]], 1)[:, :512].float()
    assert_same(ops.rotate, x, group)
    for s in (1.0, 0.01, 1e-30, 1e-38):
        assert_same(ops.rotate_quantize_nvfp4_counted, x, torch.tensor(s), group)


def test_a_million_codes_of_activations():
    """Real sizes, the quick way and the exact one."""
    x = gaussian(1024, 3840, torch.bfloat16, seed=7, spread=1.0)
    assert_nearly_same(x, torch.tensor(0.0123), 256)
    assert_same(ops.rotate_quantize_nvfp4_counted, x.float(), torch.tensor(0.0123), 256)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("cols", "group"), [(80, None), (80, 16), (512, 256), (7, None)])
def test_dequantize(cols, group, dtype):
    x = gaussian(130, cols, spread=3.0)
    s = ops.tensor_scale(x)
    codes, scales = ops.quantize_nvfp4(x, s)
    assert_same(ops.dequantize_nvfp4, codes, scales, s, (130, cols), dtype, group)


@pytest.mark.parametrize(("cols", "group"), [(48, None), (48, 16), (256, 256)])
def test_requantize(cols, group):
    x = gaussian(33, cols)
    s = ops.tensor_scale(x)
    _, scales = ops.quantize_nvfp4(formats.rotate_fp32(x, group), s)
    changed = x + 0.3 * gaussian(33, cols, seed=5)
    assert_same(ops.requantize_nvfp4, changed, s, scales, 9, group)


@pytest.mark.parametrize(("n", "k"), [(70, 80), (1, 16), (300, 1280), (48, 40)])
def test_fp8_weight(n, k):
    w = gaussian(n, k, spread=3.0)
    w[n // 2] = 0
    codes, scales = ops.quantize_nvfp4(w, ops.tensor_scale(w))
    assert_same(ops.fp8_weight, codes, scales, (n, k))


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (130, 5), (576, 44)])
def test_swizzle_and_back(shape):
    linear = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert_same(ops.swizzle, linear)
    assert_same(ops.unswizzle, ops.swizzle(linear), *shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(("cols", "group"), [(272, None), (272, 16), (512, 256), (7, None)])
def test_int8(cols, group, seed, dtype):
    w = gaussian(19, cols, dtype)
    w[4] = 0
    w[5, 3] = 1000
    assert_same(ops.quantize_int8, w, group, seed)
    q, s = ops.quantize_int8(w, group, seed)
    for out in DTYPES:
        assert_same(ops.dequantize_int8, q, s, group, out)
    changed = w.float() * (1 + 0.01 * gaussian(19, cols, seed=2))
    assert_same(ops.requantize_int8, changed, s, group, 3)
    assert_same(ops.requantize_int8, changed, s[3, 0], group, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_scale(dtype):
    x = gaussian(70, 300, dtype)
    for view in (x, x.t(), x[:, 5:9], x[0], x[:0], x[3, 4], x.reshape(7, 10, 300), x[:64, :256].contiguous()):
        assert_same(ops.tensor_scale, view)
    x[3, 3] = torch.nan
    assert ops.tensor_scale(x.to(DEVICE)).isnan()


@pytest.mark.parametrize("view", ["transposed", "strided_rows", "strided_columns", "offset"])
def test_views(view):
    base = gaussian(64, 128).to(DEVICE)
    x = {
        "transposed": base.t()[:, :48],
        "strided_rows": base[::3, :48],
        "strided_columns": base[:, ::2],
        "offset": base[3:, 5:69],
    }[view]
    assert_same(ops.quantize_nvfp4, x.cpu(), torch.tensor(1e-3))
    mine = ops.quantize_nvfp4(x, torch.tensor(1e-3, device=DEVICE))
    assert all(
        same_bits(a.cpu(), b)
        for a, b in zip(mine, ops.quantize_nvfp4(x.cpu(), torch.tensor(1e-3)), strict=True)
    )
