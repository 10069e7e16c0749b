"""FP4 GEMM and linears: exact sums, one rounding, rotation inside, shapes, and what they refuse."""

from __future__ import annotations

from fractions import Fraction

import formats_oracle as oracle
import numpy as np
import pytest
import torch

from hswq_lab import HswqError
from hswq_lab.formats import _rows as chunking
from hswq_lab.formats import (
    decode_e4m3,
    dequantize_int8,
    dequantize_nvfp4,
    fp4_gemm,
    fp8_weight,
    linear_int8,
    linear_w4a4,
    linear_w4a8,
    linear_w4a16,
    quantize_int8,
    quantize_nvfp4,
    rotate_fp32,
    tensor_scale,
    unpack_nibbles,
    unswizzle,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: (23, -126), torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(x):
    s = tensor_scale(x)
    return *quantize_nvfp4(x, s), s


def uneven(rows, cols, seed):
    """Blocks that differ by orders of magnitude, along rows and along columns."""
    sizes = 10.0 ** torch.randint(-7, 1, (rows, cols // 16), generator=torch.Generator().manual_seed(seed))
    return noise(rows, cols, seed=seed) * sizes.repeat_interleave(16, dim=1)


def exact_gemm(x, w, alpha, bias, dtype):
    """Sums of fractions; then two fp64 operations and one rounding, as defined."""
    x_values, w_values = (
        oracle.values(
            codes.numpy(),
            unswizzle(scales, codes.shape[0], codes.shape[1] // 8).view(torch.uint8).numpy(),
        )
        for codes, scales in (x, w)
    )
    out = []
    for x_row in x_values:
        for n, w_row in enumerate(w_values):
            total = sum((a * b for a, b in zip(x_row, w_row, strict=True)), Fraction(0))
            assert Fraction(float(total)) == total
            y = float(total) * float(alpha) + (0.0 if bias is None else float(bias[n]))
            out.append(oracle.round_to(Fraction(y), *ROUNDING[dtype]))
    return out


class TestFp4Gemm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("make", [noise, uneven])
    def test_exact(self, dtype, with_bias, make):
        x_codes, x_scales, x_s = packed(make(16, 96, seed=1))
        w_codes, w_scales, w_s = packed(make(16, 96, seed=2))
        bias = noise(16, seed=3).to(dtype) if with_bias else None
        alpha = x_s * w_s
        y = fp4_gemm(x_codes, x_scales, w_codes, w_scales, alpha, (16, 16), bias, dtype)
        expected = exact_gemm((x_codes, x_scales), (w_codes, w_scales), alpha, bias, dtype)
        assert [Fraction(float(v)) for v in y.flatten()] == expected

    def test_one_rounding(self):
        # 1 + 2^-8 is a tie in bf16, which a bias of 2^-40 decides; by way of fp32 it would be lost.
        codes = torch.zeros(16, 16, dtype=torch.uint8)
        codes[0, ::8] = 0x20  # 1.0 at the start of both blocks
        one, both = torch.zeros(128, 4, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
        one[0, :2] = 0x38  # 1
        both[0, :2] = torch.tensor([0x38, 0x02])  # 1, 2^-8
        x_scales, w_scales = (scales.view(torch.float8_e4m3fn) for scales in (one, both))
        args = (codes, x_scales, codes, w_scales, torch.tensor(1.0), (1, 1))
        assert float(fp4_gemm(*args, torch.tensor([2.0**-40]))) == 1 + 2**-7
        assert float(fp4_gemm(*args, torch.tensor([-(2.0**-40)]))) == 1
        assert float(fp4_gemm(*args)) == 1

    def test_padding_does_not_show(self):
        x, w = noise(5, 40, seed=1), noise(3, 40, seed=2)
        (x_codes, x_scales, x_s), (w_codes, w_scales, w_s) = packed(x), packed(w)
        y = fp4_gemm(x_codes, x_scales, w_codes, w_scales, x_s * w_s, (5, 3), None, torch.float32)
        x_back = dequantize_nvfp4(x_codes, x_scales, x_s, (5, 40), torch.float64)
        w_back = dequantize_nvfp4(w_codes, w_scales, w_s, (3, 40), torch.float64)
        torch.testing.assert_close(y.double(), x_back @ w_back.T, rtol=1e-6, atol=1e-7)

    def test_chunks_change_nothing(self, monkeypatch):
        (x_codes, x_scales, _), (w_codes, w_scales, _) = packed(noise(20, 64)), packed(noise(24, 64, seed=1))
        args = (x_codes, x_scales, w_codes, w_scales, torch.tensor(1.0), (20, 24), noise(24), torch.float32)
        whole = fp4_gemm(*args)
        monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", 64 * 7)
        assert torch.equal(fp4_gemm(*args), whole)

    def test_a_nan_block_spoils_its_row_only(self):
        x = noise(4, 32)
        x_s = tensor_scale(x)
        x[1, 20] = torch.nan
        w_codes, w_scales, w_s = packed(noise(8, 32, seed=1))
        y = fp4_gemm(*quantize_nvfp4(x, x_s), w_codes, w_scales, x_s * w_s, (4, 8))
        assert y[1].isnan().all()
        assert y[[0, 2, 3]].isfinite().all()

    def test_different_k_is_refused(self):
        (x_codes, x_scales, _), (w_codes, w_scales, _) = packed(noise(4, 32)), packed(noise(4, 48))
        with pytest.raises(HswqError, match="K of x and of w"):
            fp4_gemm(x_codes, x_scales, w_codes, w_scales, torch.tensor(1.0), (4, 4))

    def test_wrong_shape_is_refused(self):
        x_codes, x_scales, _ = packed(noise(4, 32))
        with pytest.raises(HswqError, match="do not belong"):
            fp4_gemm(x_codes, x_scales, x_codes, x_scales, torch.tensor(1.0), (4, 17))


class Layer:
    """A rotated NVFP4 weight [24, 64], its activations' scale and a bias."""

    group = 64

    def __init__(self, dtype):
        self.x = noise(10, 64, seed=1).to(dtype)
        self.bias = noise(24, seed=3).to(dtype)
        rotated = rotate_fp32(noise(24, 64, seed=2), self.group)
        self.codes, self.scales, self.scale = packed(rotated)
        self.x_rotated = rotate_fp32(self.x, self.group)
        self.input_scale = tensor_scale(self.x_rotated)
        self.w_rotated = dequantize_nvfp4(self.codes, self.scales, self.scale, (24, 64), torch.float64)
        self.exact = self.x_rotated.double() @ self.w_rotated.T + self.bias.double()

    def w4a4(self, x=None, **changed):
        x = self.x if x is None else x
        args = {"input_scale": self.input_scale, "group": self.group, "n": 24, "bias": self.bias} | changed
        return linear_w4a4(x, self.codes, self.scales, self.scale, **args)

    def w4a8(self, x=None, **changed):
        x = self.x if x is None else x
        args = {"input_scale": self.input_scale, "group": self.group, "n": 24, "bias": self.bias} | changed
        return linear_w4a8(x, self.codes, self.scales, self.scale, **args)

    def w4a16(self, x=None, **changed):
        x = self.x if x is None else x
        args = {"group": self.group, "n": 24, "bias": self.bias} | changed
        return linear_w4a16(x, self.codes, self.scales, self.scale, **args)


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", DTYPES)
class TestNvfp4Linears:
    def test_w4a4_is_its_parts(self, dtype):
        layer = Layer(dtype)
        x_codes, x_scales = quantize_nvfp4(layer.x_rotated, layer.input_scale)
        alpha = layer.input_scale * layer.scale
        expected = fp4_gemm(x_codes, x_scales, layer.codes, layer.scales, alpha, (10, 24), layer.bias, dtype)
        assert torch.equal(layer.w4a4(), expected)
        assert 0.01 < error(expected, layer.exact) < 0.2

    def test_w4a16_differs_by_16_bit_rounding_only(self, dtype):
        layer = Layer(dtype)
        y = layer.w4a16()
        assert y.dtype == dtype
        assert error(y, layer.exact) < {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]

    def test_w4a8_lies_between(self, dtype):
        layer = Layer(dtype)
        assert (
            error(layer.w4a16(), layer.exact)
            < error(layer.w4a8(), layer.exact)
            < error(layer.w4a4(), layer.exact)
        )

    def test_w4a8_is_its_parts(self, dtype):
        layer = Layer(dtype)
        s8 = 6 * layer.input_scale
        x8 = (layer.x_rotated / s8).clamp(-448, 448).to(torch.float8_e4m3fn).double() * s8.double()
        w8, row_scale = fp8_weight(layer.codes, layer.scales, (24, 64))
        w = w8.double() * row_scale.double() * layer.scale.double()
        exact = x8 @ w.T + layer.bias.double()
        assert (
            error(layer.w4a8(), exact)
            < {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}[dtype]
        )

    @pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (33, 64), (0, 64)])
    @pytest.mark.parametrize("name", ["w4a4", "w4a8", "w4a16"])
    def test_leading_dimensions(self, dtype, shape, name):
        layer = Layer(dtype)
        x = noise(*shape).to(dtype)
        y = getattr(layer, name)(x)
        assert y.shape == (*shape[:-1], 24)
        assert y.dtype == dtype
        if name == "w4a4":
            assert torch.equal(y.reshape(-1, 24), layer.w4a4(x.reshape(-1, 64)))

    @pytest.mark.parametrize("name", ["w4a4", "w4a8", "w4a16"])
    def test_the_weights_own_group_matters(self, dtype, name):
        layer = Layer(dtype)
        run = getattr(layer, name)
        good, unrotated, other = (error(run(group=group), layer.exact) for group in (64, None, 16))
        assert good < 0.2 < min(unrotated, other)

    @pytest.mark.parametrize("name", ["w4a4", "w4a8"])
    def test_zeros_with_a_scale_of_zero(self, dtype, name):
        layer = Layer(dtype)
        y = getattr(layer, name)(torch.zeros(2, 64, dtype=dtype), input_scale=torch.tensor(0.0))
        assert torch.equal(y, layer.bias.expand(2, 24))

    @pytest.mark.parametrize("name", ["w4a4", "w4a8", "w4a16"])
    def test_no_bias(self, dtype, name):
        layer = Layer(dtype)
        run = getattr(layer, name)
        difference = run().double() - run(bias=None).double()
        assert (difference - layer.bias.double()).abs().max() < 0.3


class TestFp8Weight:
    def test_powers_of_two_and_exact_halves(self):
        w = noise(16, 64) * 10.0 ** torch.arange(-8, 8).div(4).unsqueeze(1)
        w[5] = 0
        codes, scales, _ = packed(w)
        w8, row_scale = fp8_weight(codes, scales, (16, 64))
        mantissa, _ = torch.frexp(row_scale)
        assert (mantissa == 0.5).all()
        block_scales = decode_e4m3(unswizzle(scales, 16, 4)).repeat_interleave(16, 1)
        exact = dequantize_nvfp4(codes, scales, torch.tensor(1.0), (16, 64), torch.float32)
        largest = exact.abs().amax(1, keepdim=True)
        assert (largest / row_scale <= 448).all()
        assert (largest / (row_scale / 2) > 448)[largest > 0].all()
        assert row_scale[5] == 1
        back = w8.float() * row_scale
        simple = torch.isin(unpack_nibbles(codes) & 7, torch.tensor([0, 1, 2, 4, 6], dtype=torch.uint8))
        reachable = block_scales / row_scale >= 2.0**-5  # below, E4M3 itself has fewer bits
        assert torch.equal(back[simple & reachable], exact[simple & reachable])
        assert (back - exact).norm() < 0.03 * exact.norm()

    def test_largest_value_at_the_edge(self):
        # 448 = 7 * 64 exactly: the row scale is 1, not 2.
        codes = torch.zeros(16, 8, dtype=torch.uint8)
        codes[0, 0] = 0x20  # 1.0
        scales = torch.zeros(128, 4, dtype=torch.uint8)
        scales[0, 0] = 0x7E
        w8, row_scale = fp8_weight(codes, scales.view(torch.float8_e4m3fn), (1, 16))
        assert row_scale.item() == 1
        assert w8[0, 0].float() == 448


class TestInt8Linear:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("group", [None, 4, 64])
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_bits(self, dtype, group, with_bias):
        x = (noise(6, 64, seed=1) * 10.0 ** torch.arange(-3, 3).unsqueeze(1)).to(dtype)
        q, s = quantize_int8(noise(9, 64, seed=2), group)
        bias = noise(9, seed=3).to(dtype) if with_bias else None
        xq, xs = quantize_int8(x, group)
        sums = (xq.numpy().astype(np.int64) @ q.numpy().astype(np.int64).T).astype(np.float32)
        expected = sums * (xs.numpy() * s.numpy().T)
        if bias is not None:
            expected = expected + bias.float().numpy()
        assert torch.equal(linear_int8(x, q, s, group, bias), torch.from_numpy(expected).to(dtype))

    def test_close_to_the_dequantised_weight(self):
        x, w = noise(16, 256), noise(32, 256, seed=1)
        q, s = quantize_int8(w, 256)
        exact = x.double() @ dequantize_int8(q, s, 256).double().T
        assert error(linear_int8(x, q, s, 256), exact) < 0.01

    def test_one_scale_for_all(self):
        x, q = noise(3, 32), torch.randint(-127, 128, (5, 32), dtype=torch.int8)
        rows = linear_int8(x, q, torch.full((5, 1), 0.02), None)
        assert torch.equal(linear_int8(x, q, torch.tensor(0.02), None), rows)

    @pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (0, 40)])
    def test_leading_dimensions(self, shape):
        q, s = quantize_int8(noise(5, 40), 4)
        y = linear_int8(noise(*shape).to(torch.bfloat16), q, s, 4)
        assert y.shape == (*shape[:-1], 5)
        assert y.dtype == torch.bfloat16

    def test_sums_beyond_fp32(self):
        # 26-bit sums: exact before their one conversion to fp32.
        x = torch.full((1, 4096), 1.0)
        q = torch.randint(90, 128, (32, 4096), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
        y = linear_int8(x, q, torch.ones(32, 1), None)
        sums = (127 * q.numpy().astype(np.int64).sum(1)).astype(np.float32)
        assert np.array_equal(y[0].numpy(), sums * (np.float32(1) / np.float32(127)))

    def test_zero_rows(self):
        q, s = quantize_int8(noise(5, 16), None)
        assert not linear_int8(torch.zeros(2, 16), q, s, None).any()

    def test_different_k_is_refused(self):
        with pytest.raises(HswqError, match="K of x and of w"):
            linear_int8(noise(2, 32), torch.zeros(4, 16, dtype=torch.int8), torch.ones(4, 1), None)


def test_wrong_k_is_refused_by_every_nvfp4_linear():
    layer = Layer(torch.float32)
    for run in (layer.w4a4, layer.w4a8, layer.w4a16):
        with pytest.raises(HswqError):
            run(noise(2, 128))
