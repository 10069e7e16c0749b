"""Packing, dequantising and baking in place: bases, errors, kept scales, and what is refused."""

from __future__ import annotations

import zlib

import pytest
import torch

from hswq_lab import HswqError, packing
from hswq_lab.formats import (
    Nvfp4Weight,
    decode_e4m3,
    dequantize_nvfp4,
    quantize_int8,
    quantize_nvfp4,
    rotate_fp32,
    tensor_scale,
    tensor_scale_four_six,
    unswizzle,
)

WAYS = [
    ("nvfp4", 64),
    ("nvfp4", None),
    ("int8_tensorwise", 64),
    ("int8_tensorwise", None),
    ("float8_e4m3fn", None),
    ("float8_e5m2", None),
    ("mxfp8", None),
]
# Largest relative error of a Gaussian weight.
ERRORS = {"nvfp4": 0.11, "int8_tensorwise": 0.02, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06, "mxfp8": 0.03}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("form", "group"), WAYS)
class TestEveryFormat:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_round_trip_in_the_unrotated_basis(self, form, group, dtype):
        w = (noise(48, 128) * 0.02).to(dtype)
        w[:, 7] *= 8
        packed = packing.pack_weight(w, form, group)
        packed.validate()
        assert packed.format == form
        assert packed.group == group
        assert packed.shape == (48, 128)
        back = packing.dequantize(packed)
        assert back.dtype == torch.float32
        assert error(back, w.float()) < ERRORS[form]

    def test_deterministic(self, form, group):
        w = noise(20, 64)
        assert packing.pack_weight(w, form, group).same_bits(packing.pack_weight(w.clone(), form, group))

    def test_unchanged_values_keep_their_scales_and_codes(self, form, group):
        packed = packing.pack_weight(noise(48, 128), form, group)
        values = packing.dequantize(packed)
        again = packing.requantize(packed, values, 1)
        again.validate()
        before, after = packed.disk_tensors(), again.disk_tensors()
        for name in before.keys() - {"weight"}:
            assert torch.equal(before[name].float(), after[name].float())
        # Rotating there and back leaves fp32 noise, which the random rounding follows once in a great while.
        assert error(packing.dequantize(again), values) < 2e-3

    def test_a_delta_arrives(self, form, group):
        packed = packing.pack_weight(noise(128, 256), form, group)
        before = packing.dequantize(packed)
        delta = 0.01 * noise(128, 256, seed=1)
        after = packing.dequantize(packing.requantize(packed, before + delta, 1))
        share = ((after - before) * delta).sum() / delta.square().sum()
        assert 0.7 < share < 1.3

    def test_seed_decides(self, form, group):
        packed = packing.pack_weight(noise(48, 128), form, group)
        w = packing.dequantize(packed) + 0.01 * noise(48, 128, seed=1)
        first = packing.requantize(packed, w, 5)
        assert first.same_bits(packing.requantize(packed, w, 5))
        assert not first.same_bits(packing.requantize(packed, w, 6))

    def test_larger_values_fit_again(self, form, group):
        packed = packing.pack_weight(noise(48, 128), form, group)
        w = 5 * packing.dequantize(packed)
        again = packing.requantize(packed, w, 1)
        again.validate()
        assert again.group == group
        assert error(packing.dequantize(again), w) < 3 * ERRORS[form]

    def test_a_weight_of_zeros_can_change(self, form, group):
        packed = packing.pack_weight(torch.zeros(16, 64), form, group)
        packed.validate()
        assert not packing.dequantize(packed).any()
        w = noise(16, 64)
        again = packing.requantize(packed, w, 1)
        again.validate()
        assert error(packing.dequantize(again), w) < 3 * ERRORS[form]

    def test_tiny_weights(self, form, group):
        for dtype, size in ((torch.float16, 1e-6), (torch.bfloat16, 1e-6), (torch.float32, 1e-35)):
            w = (noise(16, 64) * size).to(dtype)
            back = packing.dequantize(packing.pack_weight(w, form, group))
            assert back.isfinite().all()
            if form == "nvfp4":
                assert error(back.double(), w.double()) < 0.12

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_not_finite_is_refused(self, form, group, bad):
        w = noise(16, 64)
        packed = packing.pack_weight(w, form, group)
        w[3, 5] = bad
        with pytest.raises(HswqError, match="found: 1 NaN or infinite") as caught:
            packing.pack_weight(w, form, group, name="layers.3.w2.weight")
        assert caught.value.tensor == "layers.3.w2.weight"
        with pytest.raises(HswqError, match="not finite"):
            packing.requantize(packed, w, 1, name="layers.3.w2.weight")

    def test_packing_a_packed_weight_is_refused(self, form, group):
        packed = packing.pack_weight(noise(16, 64), form, group)
        with pytest.raises(HswqError, match="packed already"):
            packing.pack_weight(packed, "nvfp4", None)

    def test_bytes_are_no_values(self, form, group):
        for codes in (torch.zeros(16, 64, dtype=torch.uint8), torch.zeros(16, 64).to(torch.float8_e4m3fn)):
            with pytest.raises(HswqError, match="need their scales"):
                packing.pack_weight(codes, form, group)

    def test_another_shape_is_refused(self, form, group):
        packed = packing.pack_weight(noise(16, 64), form, group)
        with pytest.raises(HswqError, match="another shape"):
            packing.requantize(packed, noise(17, 64), 1)


class TestNvfp4:
    def test_is_the_reference_on_unrounded_fp32(self):
        w = noise(40, 128).to(torch.bfloat16)
        for method, own in (
            ("rtn", tensor_scale),
            ("sweep", tensor_scale),
            ("four_six", tensor_scale_four_six),
        ):
            rotated = rotate_fp32(w, 64)
            packed = packing.pack_weight(w, "nvfp4", 64, method)
            codes, scales = quantize_nvfp4(rotated, own(rotated), method)
            assert packed.same_bits(Nvfp4Weight(codes, scales, own(rotated), (40, 128), 64))
            stored = dequantize_nvfp4(codes, scales, packed.scale, (40, 128), torch.float32)
            torch.testing.assert_close(packing.dequantize(packed), rotate_fp32(stored, 64), rtol=0, atol=0)

    def test_odd_shapes(self):
        for shape, group in (((33, 12), 4), ((1, 40), 4), ((17, 7), None), ((130, 48), 16)):
            w = noise(*shape)
            packed = packing.pack_weight(w, "nvfp4", group, "sweep")
            packed.validate()
            assert error(packing.dequantize(packed), w) < 0.15
            packing.requantize(packed, w, 1).validate()

    def test_input_scale_survives_a_bake(self):
        packed = packing.pack_weight(noise(16, 64), "nvfp4", 64).with_input_scale(torch.tensor(0.5))
        again = packing.requantize(packed, packing.dequantize(packed), 1)
        assert again.input_scale == 0.5

    def test_tensor_scale_that_no_longer_fits_is_doubled_and_block_scales_halved(self):
        packed = packing.pack_weight(noise(64, 128), "nvfp4", None)
        w = packing.dequantize(packed)
        w[3, 5] = 3 * w.abs().max()
        again = packing.requantize(packed, w, 1)
        assert again.scale == 4 * packed.scale
        before, after = (decode_e4m3(unswizzle(p.scales, 64, 8)) for p in (packed, again))
        same = torch.ones(64, 8, dtype=torch.bool)
        same[3, 0] = False
        assert torch.equal((before / 4)[same], after[same])
        assert (packing.dequantize(again)[3, 5] / w[3, 5] - 1).abs() < 0.1
        untouched = packing.dequantize(again)
        untouched[3, :16] = w[3, :16]
        assert (untouched != w).float().mean() < 2e-3

    def test_importance(self):
        w = noise(64, 128)
        h = noise(128, seed=2).square() * 1e-30  # tiny as it is: only its shape in a block counts
        rotated = rotate_fp32(w, 64)
        found = packing.pack_weight(w, "nvfp4", 64, "sweep", h)
        plain = packing.pack_weight(w, "nvfp4", 64, "sweep")

        def weighted(packed):
            return float(
                ((rotate_fp32(packing.dequantize(packed), 64) - rotated).square() * h.double()).sum()
            )

        assert weighted(found) < 0.99 * weighted(plain)

    def test_channels_without_importance_count_evenly(self):
        w, h = noise(32, 64), noise(64, seed=2).square()
        h[16:32] = 0
        found = packing.pack_weight(w, "nvfp4", None, "sweep", h)
        plain = packing.pack_weight(w, "nvfp4", None, "sweep")
        assert torch.equal(found.codes[:, 8:16], plain.codes[:, 8:16])

    @pytest.mark.parametrize(
        ("form", "scales", "importance", "message"),
        [
            ("nvfp4", "sweep", torch.ones(63), "importance"),
            ("nvfp4", "sweep", -torch.ones(64), "importance"),
            ("nvfp4", "sweep", torch.full((64,), torch.nan), "importance"),
            ("nvfp4", "rtn", torch.ones(64), "importance"),
            ("nvfp4", "best", None, "block scales"),
            ("int8_tensorwise", "rtn", torch.ones(64), "nvfp4 weights only"),
        ],
    )
    def test_refused_choices(self, form, scales, importance, message):
        with pytest.raises(HswqError, match=message):
            packing.pack_weight(noise(16, 64), form, None, scales, importance)


def test_int8_rows_are_the_references():
    w = noise(16, 64).to(torch.bfloat16)
    packed = packing.pack_weight(w, "int8_tensorwise", 64)
    q, s = quantize_int8(w, 64)
    assert torch.equal(packed.q, q)
    assert torch.equal(packed.scale, s)


def test_too_large_to_rotate_is_refused():
    w = torch.full((4, 64), 3e38)
    with pytest.raises(HswqError, match="too large to be rotated"):
        packing.pack_weight(w, "nvfp4", 64)
    assert error(packing.dequantize(packing.pack_weight(w, "nvfp4", None)).double(), w.double()) < 1e-6


@pytest.mark.parametrize(
    ("shape", "form", "group", "message"),
    [
        ((16, 40), "nvfp4", 16, "group"),
        ((16, 64), "nvfp4", 32, "group"),
        ((16, 64), "float8_e4m3fn", 64, "not rotated"),
        ((16, 64), "mxfp8", 64, "not rotated"),
        ((16, 64), "int4", None, "unknown weight format"),
        ((64,), "nvfp4", None, "not a dense weight"),
        ((2, 3, 16), "nvfp4", None, "not a dense weight"),
        ((0, 16), "nvfp4", None, "not a dense weight"),
    ],
)
def test_refused(shape, form, group, message):
    with pytest.raises(HswqError, match=message):
        packing.pack_weight(noise(*shape), form, group)


def test_layer_seed():
    assert packing.layer_seed("layers.0.attention.qkv") == zlib.crc32(b"layers.0.attention.qkv")
    assert packing.layer_seed("123456789") == 0xCBF43926
