"""INT8 by rows, FP8 and MXFP8: rounding, scales, stochastic rounding, baking in place."""

from __future__ import annotations

from fractions import Fraction

import formats_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hswq_lab import HswqError
from hswq_lab.formats import _rows as chunking
from hswq_lab.formats import (
    dequantize_fp8,
    dequantize_int8,
    dequantize_mxfp8,
    fp8_scale,
    quantize_fp8,
    quantize_int8,
    quantize_mxfp8,
    requantize_fp8,
    requantize_int8,
    requantize_mxfp8,
    rotate_fp32,
    unswizzle,
)

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NUMPY = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(t):
    return t.view(torch.uint8)


class TestInt8:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("group", [None, 4, 64])
    def test_against_numpy(self, dtype, group):
        w = noise(6, 64) * 10.0 ** torch.arange(-4, 2).unsqueeze(1)
        w[0] = 0
        w[1, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -0.0, 63.5])  # ties, amax 127: s = 1
        w = w.to(dtype)
        q, s = quantize_int8(w, group)
        rotated = rotate_fp32(w, group).numpy()
        expected_s = np.maximum(np.abs(rotated).max(1, keepdims=True), np.float32(1e-6)) / np.float32(127)
        assert np.array_equal(s.numpy(), expected_s)
        assert np.array_equal(q.numpy(), np.clip(np.rint(rotated / expected_s), -127, 127).astype(np.int8))
        if group is None:
            assert q[1, :8].tolist() == [127, 0, 2, 2, 0, -2, 0, 64]

    @pytest.mark.parametrize("group", [None, 64])
    def test_round_trip_is_unrotated(self, group):
        w = noise(8, 128)
        q, s = quantize_int8(w, group)
        back = dequantize_int8(q, s, group)
        assert back.dtype == torch.float32
        assert (back - w).abs().max() <= 1.01 * float(s.max()) * (1 if group is None else 4)
        assert dequantize_int8(q, s, group, torch.bfloat16).equal(back.to(torch.bfloat16))
        half = dequantize_int8(q, torch.tensor(0.5), group)
        assert torch.equal(half, rotate_fp32(q.float() * 0.5, group))

    def test_shapes(self, monkeypatch):
        w = noise(37, 40)
        whole = quantize_int8(w, 4, seed=3), quantize_int8(noise(0, 40), 4)
        assert whole[1][0].shape == (0, 40)
        back = dequantize_int8(*whole[0], 4)
        monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", 100)
        pieces = quantize_int8(w, 4, seed=3)
        assert torch.equal(pieces[0], whole[0][0])
        assert torch.equal(pieces[1], whole[0][1])
        assert torch.equal(dequantize_int8(*pieces, 4), back)

    def test_not_finite_shows(self):
        w = noise(3, 16)
        w[0, 2], w[1, 3] = torch.nan, torch.inf
        values = dequantize_int8(*quantize_int8(w, None), None)
        assert values[:2].isnan().all()
        assert values[2].isfinite().all()

    def test_stochastic_bits(self):
        w = noise(3, 20) * 3
        q, s = quantize_int8(w, None, seed=11)
        nearest, same = quantize_int8(w, None)
        assert torch.equal(s, same)
        assert not torch.equal(q, nearest)
        for row in range(3):
            for col in range(20):
                v = np.float32(w[row, col]) / np.float32(s[row, 0])
                low = int(abs(v))
                up = oracle.uniform(11, row * 20 + col) < Fraction(abs(float(v))) - low
                assert q[row, col] == np.sign(v) * (low + up)

    def test_stochastic_keeps_integers_and_is_unbiased(self):
        w = torch.linspace(-126.7, 126.7, 64).expand(3000, 64).clone()
        w[:, 0] = -127
        w[:, 1:4] = torch.tensor([100.0, -3.0, 0.0])
        q, s = quantize_int8(w, None, seed=5)
        assert (s == 1).all()
        assert (q[:, :4] == torch.tensor([-127, 100, -3, 0])).all()
        spread = q.float().std(0) / 3000**0.5
        assert ((q.float().mean(0) - w[0]).abs() <= 4.5 * spread + 1e-4).all()

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8))
    def test_any_row(self, values):
        w = torch.tensor([values])
        q, s = quantize_int8(w, None)
        assert s.isfinite().all()
        assert int(q.abs().max()) <= 127
        assert torch.equal(quantize_int8(w.double(), None)[0], q)

    @pytest.mark.parametrize("bad", [torch.ones(4), torch.ones(2, 4, dtype=torch.int8)])
    def test_refused(self, bad):
        with pytest.raises(HswqError, match="matrices"):
            quantize_int8(bad, None)


class TestInt8Bake:
    @pytest.mark.parametrize("group", [None, 64])
    def test_unchanged_weights_keep_scales_and_almost_all_codes(self, group):
        q, s = quantize_int8(noise(32, 128), group)
        again, kept = requantize_int8(dequantize_int8(q, s, group), s, group, 1)
        assert torch.equal(kept, s)
        assert (again != q).float().mean() < 1e-3

    def test_only_rows_that_no_longer_fit_are_raised(self):
        w = noise(8, 64)
        q, s = quantize_int8(w, None)
        changed = dequantize_int8(q, s, None)
        changed[3] *= 2
        changed[5] *= 0.1
        changed[6] *= 127.4 / 127
        again, kept = requantize_int8(changed, s, None, 1)
        assert (kept != s).flatten().tolist() == [row == 3 for row in range(8)]
        assert float(kept[3]) == float(changed[3].abs().max() / 127)
        assert int(again[6].abs().max()) == 127

    def test_scalar_scale(self):
        q = torch.randint(-127, 128, (4, 16), dtype=torch.int8)
        q[0, 0] = 127
        s = torch.tensor(0.01)
        kept = requantize_int8(dequantize_int8(q, s, None), s, None, 1)
        assert torch.equal(kept[1], s)
        raised = requantize_int8(dequantize_int8(q, s, None) * 3, s, None, 1)
        assert raised[1].shape == ()
        torch.testing.assert_close(raised[1], 3 * s)

    def test_a_small_delta_arrives(self):
        w = noise(256, 512)
        q, s = quantize_int8(w, 256)
        before = dequantize_int8(q, s, 256)
        delta = noise(256, 512, seed=1) * 0.003
        after = dequantize_int8(*requantize_int8(before + delta, s, 256, 1), 256)
        share = ((after - before) * delta).sum() / delta.square().sum()
        assert 0.85 < share < 1.15
        nearest = dequantize_int8(*quantize_int8(before + delta, 256), 256)
        # Plain rounding would have dropped it.
        assert ((nearest - before) * delta).sum() / delta.square().sum() < 0.5


@pytest.mark.parametrize("dtype", FP8)
class TestFp8:
    def test_against_ml_dtypes(self, dtype):
        x = torch.cat([noise(4, 64), noise(4, 64) * 1e-4, torch.zeros(1, 64), torch.full((1, 64), -0.0)])
        data, s = quantize_fp8(x, dtype)
        largest = np.float32(torch.finfo(dtype).max)
        assert float(s) == float(np.abs(x.numpy()).max() / largest)
        y = np.clip(x.numpy() / np.float32(s), -largest, largest)
        assert np.array_equal(bits(data).numpy(), y.astype(NUMPY[dtype]).view(np.uint8))
        assert torch.equal(dequantize_fp8(data, s), data.float() * s)
        assert torch.equal(dequantize_fp8(data, s, torch.bfloat16), (data.float() * s).to(torch.bfloat16))

    def test_scale_is_never_zero(self, dtype):
        for x in (torch.zeros(2, 4), torch.full((2, 4), 1e-45), torch.ones(0, 4)):
            assert fp8_scale(x, dtype) > 0
            data, s = quantize_fp8(x, dtype)
            assert dequantize_fp8(data, s).isfinite().all()

    def test_given_scale_saturates(self, dtype):
        data, _ = quantize_fp8(torch.tensor([[1e9, -1e9, torch.inf]]), dtype, torch.tensor(1.0))
        assert data.float().tolist() == [
            [torch.finfo(dtype).max, -torch.finfo(dtype).max, torch.finfo(dtype).max]
        ]

    def test_stochastic_bits(self, dtype):
        x = noise(4, 16) * 2.0 ** torch.arange(-24, 8, 8).unsqueeze(1)
        one = torch.tensor(1.0)
        data = quantize_fp8(x, dtype, one, seed=9)[0].float()
        values = bits(torch.arange(127, dtype=torch.uint8)).view(dtype).float()
        values = values[values.isfinite()].double()
        for row in range(4):
            for col in range(16):
                magnitude = float(x[row, col].abs())
                low = float(values[values <= magnitude].max())
                high = float(values[values > magnitude].min())
                up = oracle.uniform(9, row * 16 + col) < (Fraction(magnitude) - Fraction(low)) / Fraction(
                    high - low
                )
                assert float(data[row, col].abs()) == (high if up else low)
        assert torch.equal(data.signbit(), x.signbit())

    def test_stochastic_keeps_representable_values(self, dtype):
        data = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        x = data[data.isfinite()].reshape(1, -1)
        for seed in range(3):
            assert torch.equal(quantize_fp8(x, dtype, torch.tensor(1.0), seed)[0].float(), x)

    def test_bake_in_place(self, dtype):
        data, s = quantize_fp8(noise(64, 128), dtype)
        before = dequantize_fp8(data, s)
        again, kept = requantize_fp8(before, dtype, s, 1)
        assert torch.equal(kept, s)
        assert torch.equal(bits(again), bits(data))
        delta = noise(64, 128, seed=1) * 0.003
        after = dequantize_fp8(*requantize_fp8(before + delta, dtype, s, 1))
        assert 0.5 < ((after - before) * delta).sum() / delta.square().sum() < 1.5
        barely = before * (
            1 + 0.3 * torch.finfo(dtype).eps / 1.75
        )  # its largest value still rounds to the format's
        assert requantize_fp8(barely, dtype, s, 1)[1] == s
        grown, raised = requantize_fp8(before * 1.5, dtype, s, 1)
        assert raised == fp8_scale(before * 1.5, dtype)
        assert float(grown.float().abs().max()) == torch.finfo(dtype).max

    def test_chunks_change_nothing(self, dtype, monkeypatch):
        x = noise(20, 30)
        whole = quantize_fp8(x, dtype, seed=1)[0]
        monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", 100)
        assert torch.equal(bits(quantize_fp8(x, dtype, seed=1)[0]), bits(whole))


def test_other_dtypes_are_refused():
    with pytest.raises(HswqError, match="FP8"):
        quantize_fp8(torch.ones(2, 2), torch.bfloat16)


class TestMxfp8:
    def test_least_power_of_two_that_fits(self):
        x = noise(40, 70) * 10.0 ** torch.randint(
            -20, 20, (40, 1), generator=torch.Generator().manual_seed(1)
        )
        x[3] = 0
        data, scales = quantize_mxfp8(x)
        assert tuple(data.shape) == (64, 96)
        exponents = bits(unswizzle(scales, 64, 3)).int()[:40] - 127
        blocks = torch.nn.functional.pad(x, (0, 26)).reshape(40, 3, 32).abs().amax(2)
        scaled = blocks.double() / 2.0 ** exponents.double()
        assert (scaled <= 448).all()
        assert (scaled > 224)[blocks > 0].all()
        assert (exponents[3] == -127).all()
        expected = (x.double() / 2.0 ** exponents.double().repeat_interleave(32, 1)[:, :70]).float()
        assert np.array_equal(
            bits(data)[:40, :70].numpy(), expected.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        )
        back = dequantize_mxfp8(data, scales, (40, 70))
        assert (back - x).norm() < 0.04 * x.norm()

    def test_exactly_448(self):
        scales = quantize_mxfp8(torch.full((1, 32), 448.0 * 2**5))[1]
        assert bits(scales)[0, 0] == 127 + 5

    def test_not_finite_and_extremes(self):
        x = torch.zeros(4, 32)
        x[0, 1], x[1, 1], x[2, 1], x[3, 1] = torch.nan, torch.inf, 3e38, 1e-44
        data, scales = quantize_mxfp8(x)
        assert bits(unswizzle(scales, 32, 1))[:4, 0].tolist() == [255, 255, 247, 0]
        values = dequantize_mxfp8(data, scales, (4, 32))
        assert values[:2].isnan().all()
        assert values[2:].isfinite().all()

    def test_bake_in_place(self):
        data, scales = quantize_mxfp8(noise(33, 64))
        before = dequantize_mxfp8(data, scales, (33, 64))
        again, kept = requantize_mxfp8(before, scales, 1)
        assert torch.equal(bits(kept), bits(scales))
        assert torch.equal(bits(again), bits(data))
        before[2, :32] *= 100
        raised = requantize_mxfp8(before, scales, 1)[1]
        changed = bits(unswizzle(raised, 64, 2)) != bits(unswizzle(scales, 64, 2))
        assert changed.nonzero().tolist() == [[2, 0]]

    def test_wrong_shape_is_refused(self):
        data, scales = quantize_mxfp8(noise(32, 64))
        with pytest.raises(HswqError, match="do not belong"):
            dequantize_mxfp8(data, scales, (33, 64))
