"""The reference against golden vectors that another implementation computed (nvfp4_golden.safetensors)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hswq_lab import formats
from hswq_lab.formats.fp8 import encode_fp8
from hswq_lab.formats.int8 import encode_int8

GOLDEN = Path(__file__).with_name("nvfp4_golden.safetensors")
# An all-zero tensor whose own scale made NaN there, and NaN inputs: what must not be copied.
HAZARDS = {"f32_all_zero_layout", "f32_nonfinite_explicit"}
# Their scale was given, not computed.
EXPLICIT = {
    "f32_elem_ties",
    "f32_scale_ties",
    "f32_saturating_scale",
    "bf16_scale_one",
    "f32_all_zero_explicit",
}


def load():
    with safe_open(GOLDEN, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


TENSORS, METADATA = load()
CASES = sorted({key.split(".")[1] for key in TENSORS if key.startswith("nvfp4.")} - HAZARDS)


def bits(t):
    return t.view(torch.uint8)


def e4m3(t):
    return t.view(torch.float8_e4m3fn)


def operands(name):
    return TENSORS[f"nvfp4.{name}.qdata"], e4m3(TENSORS[f"nvfp4.{name}.block_scale_blocked"])


def ulps_apart(a, b):
    """Largest distance in steps of the 16-bit dtype."""
    order = [
        torch.where(t.view(torch.int16) < 0, -32768 - t.view(torch.int16).int(), t.view(torch.int16))
        for t in (a, b)
    ]
    return int((order[0].int() - order[1].int()).abs().max())


def test_all_cases_are_here():
    assert len(CASES) == 24
    assert len(TENSORS) == 224


@pytest.mark.parametrize("case", CASES)
def test_nvfp4_codes_and_scales(case):
    x, scale = TENSORS[f"nvfp4.{case}.x"], TENSORS[f"nvfp4.{case}.scale"]
    codes, scales = formats.quantize_nvfp4(x, scale)
    assert torch.equal(codes, TENSORS[f"nvfp4.{case}.qdata"])
    assert torch.equal(bits(scales), TENSORS[f"nvfp4.{case}.block_scale_blocked"])
    linear = TENSORS[f"nvfp4.{case}.block_scale_linear"]
    assert torch.equal(bits(formats.unswizzle(scales, *linear.shape)), linear)
    assert torch.equal(formats.swizzle(linear), bits(scales))


@pytest.mark.parametrize("case", sorted(set(CASES) - EXPLICIT))
def test_tensor_scale_rounded_to_the_inputs_dtype(case):
    x, scale = TENSORS[f"nvfp4.{case}.x"], TENSORS[f"nvfp4.{case}.scale"]
    assert torch.equal(formats.tensor_scale(x).to(x.dtype).float(), scale)
    if x.dtype == torch.float32:
        assert torch.equal(formats.tensor_scale(x), scale)
    assert f'scale_hex": "{float(scale).hex()}' in METADATA["cases"]


@pytest.mark.parametrize("case", [case for case in CASES if f"nvfp4.{case}.dequant_f32" in TENSORS])
def test_nvfp4_dequantised_to_fp32(case):
    golden = TENSORS[f"nvfp4.{case}.dequant_f32"]
    values = formats.dequantize_nvfp4(
        *operands(case), TENSORS[f"nvfp4.{case}.scale"], tuple(golden.shape), torch.float32
    )
    assert torch.equal(values, golden)
    assert torch.equal(values.signbit(), golden.signbit())


@pytest.mark.parametrize(
    "key",
    [key for key in TENSORS if key.startswith("nvfp4.") and key.endswith(("dequant_bf16", "dequant_f16"))],
)
def test_nvfp4_dequantised_to_16_bits(key):
    case, golden = key.split(".")[1], TENSORS[key]
    scale = TENSORS[f"nvfp4.{case}.scale"]
    values = formats.dequantize_nvfp4(*operands(case), scale, tuple(golden.shape), golden.dtype)
    # The golden values were rounded three times on the way, ours once after the fp32 product.
    assert ulps_apart(values, golden) <= 2


def test_other_nibble_order():
    case = "nvfp4.bf16_16x32."
    assert torch.equal(formats.swap_nibbles(TENSORS[case + "qdata"]), TENSORS[case + "qdata_lo_first"])


def test_all_zero_tensor_with_its_own_scale_is_zero_here():
    x = TENSORS["nvfp4.f32_all_zero_layout.x"]
    codes, scales = formats.quantize_nvfp4(x, formats.tensor_scale(x))
    assert not codes.any()
    assert not bits(scales).any()


class TestGemm:
    A, B = "gemm_a_bf16_20x64", "gemm_b_bf16_24x64"

    def gemm(self, alpha, bias=None, dtype=torch.bfloat16):
        return formats.fp4_gemm(*operands(self.A), *operands(self.B), alpha, (20, 24), bias, dtype)

    def test_accumulator(self):
        y = self.gemm(torch.tensor(1.0), dtype=torch.float32)
        assert torch.equal(y, TENSORS["gemm.w4a4_unit_acc_f32"])

    def test_scaled(self):
        alpha = TENSORS[f"nvfp4.{self.A}.scale"] * TENSORS[f"nvfp4.{self.B}.scale"]
        assert torch.equal(alpha, TENSORS["gemm.alpha"])
        assert torch.equal(self.gemm(alpha, dtype=torch.float32), TENSORS["gemm.w4a4_ref_f32"])
        assert torch.equal(self.gemm(alpha), TENSORS["gemm.w4a4_ref_bf16"])

    def test_bias(self):
        y = self.gemm(TENSORS["gemm.alpha"], TENSORS["gemm.bias"])
        assert torch.equal(y, TENSORS["gemm.w4a4_bias_ref_bf16"])

    @pytest.mark.parametrize("bias", ["", "_bias"])
    def test_linears(self, bias):
        x, b = TENSORS[f"nvfp4.{self.A}.x"], TENSORS["gemm.bias"] if bias else None
        scale, input_scale = (TENSORS[f"nvfp4.{case}.scale"] for case in (self.B, self.A))
        y = formats.linear_w4a4(x, *operands(self.B), scale, input_scale, None, 24, b)
        assert torch.equal(y, TENSORS[f"gemm.w4a4{bias}_ref_bf16"])
        golden = TENSORS[f"gemm.w4a16_linear{bias}_bf16"].float()
        y = formats.linear_w4a16(x, *operands(self.B), scale, None, 24, b).float()
        assert (y - golden).abs().max() <= 1e-2 * golden.abs().max()


class TestFp8:
    @pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
    def test_codes(self, name, dtype):
        # There the quotient is a product with a bf16 reciprocal; from it on the codes are ours.
        y = TENSORS["fp8.x"] * (1 / TENSORS["fp8.scale"]).to(torch.bfloat16)
        assert torch.equal(bits(encode_fp8(y.float(), dtype)), TENSORS[f"fp8.{name}"])

    def test_dequantised(self):
        data, scale = e4m3(TENSORS["fp8.e4m3"]), TENSORS["fp8.scale"]
        assert torch.equal(
            formats.dequantize_fp8(data, scale, torch.bfloat16), TENSORS["fp8.dequant_e4m3_bf16"]
        )

    def test_mxfp8(self):
        x, golden = TENSORS["mxfp8.x"], TENSORS["mxfp8.dequant_bf16"]
        data, scales = formats.quantize_mxfp8(x)
        assert torch.equal(bits(data), TENSORS["mxfp8.qdata"])
        assert torch.equal(bits(scales), TENSORS["mxfp8.scale_blocked"])
        assert torch.equal(
            formats.dequantize_mxfp8(data, scales, tuple(golden.shape), torch.bfloat16), golden
        )


class TestInt8:
    def test_fp32_rows(self):
        q, scale = formats.quantize_int8(TENSORS["int8.f32.w"], None)
        assert torch.equal(q, TENSORS["int8.f32.rowwise_q"])
        assert torch.equal(scale, TENSORS["int8.f32.rowwise_scale"])
        values = formats.dequantize_int8(q, scale, None)
        assert torch.equal(values, TENSORS["int8.f32.rowwise_dequant_f32"])

    def test_fp32_tensorwise(self):
        w, scale = TENSORS["int8.f32.w"], TENSORS["int8.f32.tensorwise_scale"]
        assert torch.equal(encode_int8(w, scale), TENSORS["int8.f32.tensorwise_q"])

    @pytest.mark.parametrize("way", ["rowwise", "tensorwise"])
    def test_bf16_division_is_theirs_for_comparison(self, way):
        # They divide bf16 weights in bf16 and clamp at -128, we in fp32 and at -127. Scales agree.
        w, golden = TENSORS["int8.bf16.w"], TENSORS[f"int8.bf16.{way}_q"]
        amax = w.abs().amax(dim=1, keepdim=True) if way == "rowwise" else w.abs().amax()
        quotient = (w / (amax / 127)).float()
        assert torch.equal(encode_int8(quotient, torch.ones(())), golden.clamp(min=-127))
        torch.testing.assert_close(TENSORS[f"int8.bf16.{way}_scale"], amax.float() / 127, rtol=0, atol=0)
        assert torch.equal(formats.quantize_int8(w, None)[1], TENSORS["int8.bf16.rowwise_scale"])

    @pytest.mark.parametrize("group", [16, 64, 256])
    def test_fp32_rotated(self, group):
        q, scale = formats.quantize_int8(TENSORS["int8.f32.w"], group)
        golden = TENSORS[f"int8.f32.convrot{group}_q"]
        apart = (q.int() - golden.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() <= 0.01
        torch.testing.assert_close(scale, TENSORS[f"int8.f32.convrot{group}_scale"], rtol=1e-5, atol=0)

    def test_fp32_unrotated_again(self):
        q, scale = TENSORS["int8.f32.convrot256_q"], TENSORS["int8.f32.convrot256_scale"]
        values = formats.dequantize_int8(q, scale, 256)
        torch.testing.assert_close(values, TENSORS["int8.f32.convrot256_dequant_f32"], rtol=0, atol=1e-6)

    @pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("bf16", 2e-2)])
    @pytest.mark.parametrize(("way", "group"), [("tensorwise", None), ("convrot256", 256)])
    def test_linear(self, dtype, tolerance, way, group):
        key = f"int8.{dtype}."
        y = formats.linear_int8(
            TENSORS[key + "act"], TENSORS[f"{key}{way}_q"], TENSORS[f"{key}{way}_scale"], group
        )
        golden = TENSORS[f"{key}linear_{way}"]
        assert y.dtype == golden.dtype
        assert (y - golden).abs().max() <= tolerance * golden.abs().max()


class TestRotation:
    @pytest.mark.parametrize("n", [4, 16])
    def test_matrix(self, n):
        assert torch.equal(formats.hadamard(n), TENSORS[f"hadamard.h{n}"])

    def test_signs_of_256(self):
        signs = (formats.hadamard(256) * 16).to(torch.int8)
        assert torch.equal((signs[0] > 0).to(torch.uint8), TENSORS["hadamard.h256_row0_sign"])
        digest = hashlib.sha256(signs.numpy().tobytes()).hexdigest()
        assert digest == METADATA["h256_sign_int8_sha256"]

    def test_activations(self):
        rotated = formats.rotate(TENSORS["int8.f32.act"], 256)
        torch.testing.assert_close(rotated, TENSORS["int8.f32.act_rot256"], rtol=1e-6, atol=3e-6)
        assert torch.equal(formats.rotate(TENSORS["int8.bf16.act"], 256), TENSORS["int8.bf16.act_rot256"])

    def test_rotated_nvfp4(self):
        w = TENSORS["nvconvrot.w_bf16"]
        rotated = formats.rotate_fp32(w, 256)
        torch.testing.assert_close(rotated[:4], TENSORS["nvconvrot.w_rot_f32_rows0_4"], rtol=0, atol=1e-6)
        case = "nvfp4.convrot_w_bf16_16x256."
        assert torch.equal(formats.rotate(w, 256), TENSORS[case + "x"])
        values = formats.dequantize_nvfp4(
            *operands("convrot_w_bf16_16x256"), TENSORS[case + "scale"], (16, 256), torch.float32
        )
        back = formats.rotate(values, 256)
        torch.testing.assert_close(
            back[:4], TENSORS["nvconvrot.dequant_unrot_f32_rows0_4"], rtol=0, atol=1e-6
        )
        act = formats.rotate_fp32(TENSORS["nvconvrot.act_f32"], 256)
        torch.testing.assert_close(act, TENSORS["nvconvrot.act_rot_f32"], rtol=1e-6, atol=3e-6)
        torch.testing.assert_close(
            formats.tensor_scale(act), TENSORS["nvconvrot.input_scale"], rtol=1e-6, atol=0
        )
        y = formats.linear_w4a16(
            TENSORS["nvconvrot.act_f32"], *operands("convrot_w_bf16_16x256"), TENSORS[case + "scale"], 256, 16
        )
        torch.testing.assert_close(y, TENSORS["nvconvrot.y_ref_f32"], rtol=1e-5, atol=1e-5)
