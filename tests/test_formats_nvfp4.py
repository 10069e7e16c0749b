"""NVFP4 against the independent oracle on all classes of input; guards, shapes, tensor scales."""

from __future__ import annotations

import formats_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hswq_lab import HswqError
from hswq_lab.formats import _rows as chunking
from hswq_lab.formats import (
    decode_e4m3,
    dequantize_nvfp4,
    pack_nibbles,
    quantize_nvfp4,
    swizzle,
    tensor_scale,
    tensor_scale_four_six,
    unpack_nibbles,
    unswizzle,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["rtn", "four_six", "sweep"]


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outliers():
    x = noise(6, 48)
    x[:, 5] *= 3000
    x[2, 40] = -1e4
    return x


def signed_zeros():
    x = noise(4, 32)
    x[0] = 0.0
    x[1] = -0.0
    x[2, :16] = -0.0
    x[3, ::3] = -0.0
    x[3, 1::3] *= 1e-5  # small negative values keep their sign
    return x


INPUTS = {
    "gaussian": noise(7, 64),
    "heavy tails": noise(5, 48) / noise(5, 48, seed=1).abs().clamp(min=0.05),
    "quarters": (noise(8, 64) * 12).round() / 4,
    "eighths of large numbers": (noise(8, 32) * 40).round() * 2,
    "constant": torch.full((3, 32), 1.0),
    "negative constant": torch.full((3, 32), -0.3),
    "zeros": torch.zeros(3, 32),
    "signed zeros": signed_zeros(),
    "outliers": outliers(),
    "rows of very different size": noise(6, 32) * 10.0 ** torch.arange(-9, 3, 2).unsqueeze(1),
    "blocks of very different size": noise(2, 96) * (10.0 ** torch.arange(-4, 2)).repeat_interleave(16),
    "tiny": noise(4, 32) * 1e-6,
    "K 12": noise(3, 12),
    "K 20": noise(17, 20),
    "K 40": noise(1, 40),
    "one element": noise(1, 1),
    "powers of two": 2.0 ** torch.arange(-24, 8).reshape(2, 16),
}
FP32_ONLY = {
    "subnormal": noise(3, 32) * 1e-39,
    "1e-35": noise(3, 32) * 1e-35,
    "mixed with subnormals": torch.cat([noise(2, 32), noise(2, 32) * 1e-42]),
    "huge": noise(3, 32).clamp(-1.2, 1.2) * 2.7e38,
}


def bits(t):
    return t.view(torch.uint8)


def linear(scales, x):
    rows, cols = (-(-n // 16) * 16 for n in x.shape)
    return bits(unswizzle(scales, rows, cols // 16))


def assert_as_oracle(x, s):
    codes, scales = quantize_nvfp4(x, s)
    expected_codes, expected_scales = oracle.quantize(x.float().numpy(), float(s))
    assert np.array_equal(linear(scales, x).numpy(), expected_scales)
    assert np.array_equal(codes.numpy(), expected_codes)
    assert np.array_equal(bits(scales).numpy(), oracle.swizzle(expected_scales))


class TestAgainstTheOracle:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", INPUTS)
    def test_own_scale(self, name, dtype):
        x = INPUTS[name].to(dtype)
        s = tensor_scale(x)
        assert s.dtype == torch.float32
        assert float(s) == float(np.float32(np.abs(x.float().numpy()).max()) / np.float32(2688))
        assert_as_oracle(x, s)

    @pytest.mark.parametrize("name", FP32_ONLY)
    def test_range_of_fp32(self, name):
        assert_as_oracle(FP32_ONLY[name], tensor_scale(FP32_ONLY[name]))

    @pytest.mark.parametrize("s", [1.0, 2.0**-10, 1e-3, 1e-30, 1e30, 0.0, 1e-45])
    def test_given_scales(self, s):
        x = torch.cat([noise(3, 32), signed_zeros(), INPUTS["quarters"][:, :32]])
        assert_as_oracle(x, torch.tensor(s))

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
        st.floats(width=32, min_value=0, allow_infinity=False),
    )
    def test_any_block_and_any_scale(self, values, s):
        assert_as_oracle(torch.tensor([values]), torch.tensor(s))

    @pytest.mark.parametrize("name", [*INPUTS, *FP32_ONLY])
    def test_dequantised(self, name):
        x = (INPUTS | FP32_ONLY)[name]
        s = tensor_scale(x)
        codes, scales = quantize_nvfp4(x, s)
        t = np.float32(s) * np.array(oracle.E4M3, np.float32)[linear(scales, x)].repeat(16, 1)
        nibbles = unpack_nibbles(codes).numpy()
        values = np.where(nibbles & 8, -1, 1) * np.array(oracle.E2M1, np.float32)[nibbles & 7]
        expected = (values.astype(np.float32) * t)[: x.shape[0], : x.shape[1]]
        found = dequantize_nvfp4(codes, scales, s, tuple(x.shape), torch.float32)
        assert np.array_equal(found.numpy(), expected)
        for dtype in (torch.bfloat16, torch.float16):
            rounded = dequantize_nvfp4(codes, scales, s, tuple(x.shape), dtype)
            assert torch.equal(rounded, torch.from_numpy(expected).to(dtype))


class TestGuards:
    def test_zeros_with_their_own_scale(self):
        x = torch.tensor([[0.0, -0.0] * 16])
        s = tensor_scale(x)
        codes, scales = quantize_nvfp4(x, s)
        assert s == 0
        assert not s.signbit()
        assert not codes.any()
        assert not bits(scales).any()
        assert not dequantize_nvfp4(codes, scales, s, (1, 32)).any()

    @pytest.mark.parametrize("mode", MODES)
    def test_a_zero_block(self, mode):
        x = noise(16, 48)
        x[:, 16:32] = 0
        x[3, 20] = -0.0
        codes, scales = quantize_nvfp4(x, tensor_scale(x), mode)
        assert not linear(scales, x)[:, 1].any()
        assert not codes[:, 8:16].any()

    def test_data_with_a_scale_of_zero(self):
        codes, scales = quantize_nvfp4(noise(1, 32), torch.tensor(0.0))
        assert not codes.any()
        assert linear(scales, torch.ones(1, 32))[0].tolist() == [0x7E, 0x7E]

    @pytest.mark.parametrize("mode", MODES)
    def test_scale_far_too_small_saturates(self, mode):
        x = noise(2, 32)
        codes, scales = quantize_nvfp4(x, tensor_scale(x) / 1e4, mode)
        assert (linear(scales, x)[:2] == 0x7E).all()
        assert ((unpack_nibbles(codes)[:2] & 7) == 7).float().mean() > 0.9

    @pytest.mark.parametrize("mode", MODES)
    def test_a_nan_spoils_its_block_and_no_other(self, mode):
        x = noise(2, 32)
        s = tensor_scale(x)
        clean = dequantize_nvfp4(*quantize_nvfp4(x, s, mode), s, (2, 32), torch.float32)
        x[0, 3] = torch.nan
        codes, scales = quantize_nvfp4(x, s, mode)
        values = dequantize_nvfp4(codes, scales, s, (2, 32), torch.float32)
        assert linear(scales, x)[0, 0] == 0x7F
        assert not codes[0, :8].any()
        assert values[0, :16].isnan().all()
        values[0, :16] = clean[0, :16]
        assert torch.equal(values, clean)

    @pytest.mark.parametrize("mode", MODES)
    def test_an_infinity_saturates(self, mode):
        x = noise(1, 16)
        x[0, 2], x[0, 5] = torch.inf, -torch.inf
        s = torch.tensor(1e-3)
        codes, scales = quantize_nvfp4(x, s, mode)
        assert linear(scales, x)[0, 0] == 0x7E
        assert unpack_nibbles(codes)[0, [2, 5]].tolist() == [7, 15]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_tiny_data_does_not_underflow(self, dtype):
        x = (noise(32, 64) * 1e-6).to(dtype)
        s = tensor_scale(x)
        assert s > 0
        values = dequantize_nvfp4(*quantize_nvfp4(x, s), s, (32, 64), torch.float32)
        assert values.isfinite().all()
        assert (values - x.float()).norm() < 0.12 * x.float().norm()
        assert s.half() == 0, "in fp16, as ComfyUI would store it, it is gone"

    def test_1e_35_in_fp32(self):
        x = noise(32, 64) * 1e-35
        s = tensor_scale(x)
        values = dequantize_nvfp4(*quantize_nvfp4(x, s), s, (32, 64), torch.float32)
        assert (values.double() - x.double()).norm() < 0.12 * x.double().norm()

    def test_codes_use_the_rounded_block_scale(self):
        # amax 7: c = E4M3(7 / 6) = 1.125, so 7 / 6 is clamped to 6 and 2.8125 = 2.5 * 1.125 is a tie, to 2.
        x = torch.zeros(1, 16)
        x[0, :4] = torch.tensor([7.0, 2.8125, 3.9375, 1.40625])
        codes, scales = quantize_nvfp4(x, torch.tensor(1.0))
        assert float(decode_e4m3(linear(scales, x)[0, 0])) == 1.125
        assert unpack_nibbles(codes)[0, :4].tolist() == [7, 4, 6, 2]


class TestShapes:
    @pytest.mark.parametrize("shape", [(0, 64), (0, 40), (1, 1), (33, 64), (16, 12), (129, 20), (2, 80)])
    def test_padding_is_zero_and_round_trip_has_the_logical_shape(self, shape):
        x = noise(*shape)
        s = tensor_scale(x)
        codes, scales = quantize_nvfp4(x, s)
        rows, cols = (-(-n // 16) * 16 for n in shape)
        assert tuple(codes.shape) == (rows, cols // 2)
        assert tuple(scales.shape) == (-(-rows // 128) * 128, -(-(cols // 16) // 4) * 4)
        assert not codes[shape[0] :].any()
        assert not unpack_nibbles(codes)[:, shape[1] :].any()
        assert not linear(scales, x)[shape[0] :].any()
        assert dequantize_nvfp4(codes, scales, s, shape).shape == shape

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("seed", [None, 3])
    def test_chunks_change_nothing(self, monkeypatch, mode, seed):
        x = noise(37, 40)
        s = tensor_scale(x)
        whole = quantize_nvfp4(x, s, mode, seed=seed)
        monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", 100)
        pieces = quantize_nvfp4(x, s, mode, seed=seed)
        assert torch.equal(whole[0], pieces[0])
        assert torch.equal(bits(whole[1]), bits(pieces[1]))
        values = dequantize_nvfp4(*whole, s, (37, 40))
        monkeypatch.undo()
        assert torch.equal(dequantize_nvfp4(*whole, s, (37, 40)), values)

    def test_strided_input(self):
        x = noise(48, 33).T
        s = tensor_scale(x)
        assert torch.equal(quantize_nvfp4(x, s)[0], quantize_nvfp4(x.contiguous(), s)[0])

    @pytest.mark.parametrize(
        "x", [torch.ones(16), torch.ones(2, 2, 16), torch.ones(2, 0), torch.ones(2, 16, dtype=torch.uint8)]
    )
    def test_what_is_no_matrix_of_floats_is_refused(self, x):
        with pytest.raises(HswqError, match="matrices"):
            quantize_nvfp4(x, torch.tensor(1.0))

    def test_fp8_bytes_are_no_values(self):
        with pytest.raises(HswqError, match="float8"):
            quantize_nvfp4(torch.ones(2, 16).to(torch.float8_e4m3fn), torch.tensor(1.0))

    def test_codes_of_another_shape_are_refused(self):
        codes, scales = quantize_nvfp4(noise(16, 32), torch.tensor(1.0))
        for shape in ((17, 32), (16, 33), (16, 16)):
            with pytest.raises(HswqError, match="do not belong"):
                dequantize_nvfp4(codes, scales, torch.tensor(1.0), shape)

    @settings(deadline=None, max_examples=30)
    @given(st.integers(0, 40), st.integers(1, 70), st.integers(0, 1000))
    def test_packed_and_unpacked_again(self, rows, cols, seed):
        x = noise(rows, cols, seed=seed)
        s = tensor_scale(x)
        codes, scales = quantize_nvfp4(x, s)
        values = dequantize_nvfp4(codes, scales, s, (rows, cols), torch.float32)
        again = quantize_nvfp4(values, s)
        assert torch.equal(dequantize_nvfp4(*again, s, (rows, cols), torch.float32), values)
        assert torch.equal(pack_nibbles(unpack_nibbles(codes)), codes)
        assert torch.equal(
            bits(swizzle(unswizzle(scales, codes.shape[0], codes.shape[1] // 8))), bits(scales)
        )


class TestTensorScale:
    def test_four_six(self):
        x = noise(4, 32).to(torch.bfloat16)
        assert tensor_scale_four_six(x) == x.abs().max().float() / 1536

    def test_not_finite_shows(self):
        x = noise(2, 16)
        x[0, 0] = torch.nan
        assert tensor_scale(x).isnan()
        x[0, 0] = -torch.inf
        assert tensor_scale(x) == torch.inf

    @pytest.mark.parametrize("zero", [0.0, -0.0])
    def test_zero_is_positive(self, zero):
        assert not tensor_scale(torch.full((2, 16), zero)).signbit()

    def test_empty(self):
        assert tensor_scale(torch.ones(0, 16)) == 0

    def test_in_fp32_whatever_the_dtype(self):
        x = torch.tensor([[3.0]], dtype=torch.bfloat16)
        assert tensor_scale(x) == torch.tensor(3.0) / 2688
        assert tensor_scale(x).dtype == torch.float32
