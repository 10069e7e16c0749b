"""Packed weights as values: what is on disk, markers, sizes, equality, and what validate refuses."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from hswq_lab import HswqError, packing
from hswq_lab.formats import Fp8Weight, Int8Weight, Mxfp8Weight, Nvfp4Weight, PackedWeight

WEIGHT = torch.randn((40, 64), generator=torch.Generator().manual_seed(0))


def nvfp4(n=40, k=64, group=64, **changed):
    packed = packing.pack_weight(WEIGHT[:n, :k], "nvfp4", group)
    return replace(packed, **changed)


def int8(group=64, **changed):
    return replace(packing.pack_weight(WEIGHT, "int8_tensorwise", group), **changed)


def fp8(name="float8_e4m3fn", **changed):
    return replace(packing.pack_weight(WEIGHT, name, None), **changed)


def mxfp8(**changed):
    return replace(packing.pack_weight(WEIGHT, "mxfp8", None), **changed)


KINDS = {
    "nvfp4": nvfp4,
    "nvfp4 unrotated": lambda: nvfp4(group=None),
    "nvfp4 calibrated": lambda: nvfp4().with_input_scale(torch.tensor(0.5)),
    "nvfp4 padded": lambda: nvfp4(33, 40, 4),
    "int8": int8,
    "int8 unrotated": lambda: int8(None),
    "int8 scalar": lambda: int8(None, scale=torch.tensor(0.1)),
    "fp8": fp8,
    "fp8 e5m2": lambda: fp8("float8_e5m2", input_scale=torch.tensor(2.0)),
    "mxfp8": mxfp8,
}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_valid_and_a_value(self, kind):
        packed = KINDS[kind]()
        packed.validate()
        assert isinstance(packed, PackedWeight)
        with pytest.raises(FrozenInstanceError):
            packed.shape = (1, 1)
        assert packed.device == torch.device("cpu")

    def test_same_bits_as_itself_and_as_no_other(self, kind):
        packed = KINDS[kind]()
        assert packed.same_bits(KINDS[kind]())
        assert packed.same_bits(packed.to("cpu"))
        assert not any(packed.same_bits(make()) for other, make in KINDS.items() if other != kind)
        for name, tensor in packed.disk_tensors().items():
            field = next(f.name for f in fields(packed) if getattr(packed, f.name) is tensor)
            changed = tensor.clone()
            changed.reshape(-1).view(torch.uint8)[0] ^= 1
            assert not packed.same_bits(replace(packed, **{field: changed})), name

    def test_on_another_device(self, kind):
        packed = KINDS[kind]()
        moved = packed.to("meta")
        assert type(moved) is type(packed)
        assert (moved.shape, moved.group, moved.format) == (packed.shape, packed.group, packed.format)
        assert all(value.device.type == "meta" for value in moved.disk_tensors().values())
        assert moved.nbytes == packed.nbytes

    def test_size(self, kind):
        packed = KINDS[kind]()
        assert packed.nbytes == sum(t.numel() * t.element_size() for t in packed.disk_tensors().values())
        assert packed.bits_per_weight == 8 * packed.nbytes / (packed.shape[0] * packed.shape[1])

    def test_marker_is_json(self, kind):
        packed = KINDS[kind]()
        marker = packed.marker()
        assert json.loads(json.dumps(marker)) == marker
        assert marker["format"] == packed.format
        assert marker.get("convrot", False) == (packed.group is not None)


def test_disk_names_and_dtypes():
    names = {name: list(make().disk_tensors()) for name, make in KINDS.items()}
    assert names["nvfp4"] == ["weight", "weight_scale", "weight_scale_2"]
    assert names["nvfp4 calibrated"] == ["weight", "weight_scale", "weight_scale_2", "input_scale"]
    assert names["int8"] == names["fp8"] == names["mxfp8"] == ["weight", "weight_scale"]
    assert names["fp8 e5m2"] == ["weight", "weight_scale", "input_scale"]
    tensors = nvfp4().disk_tensors()
    assert tensors["weight"].shape == (48, 32)
    assert tensors["weight"].dtype == torch.uint8
    assert tensors["weight_scale"].shape == (128, 4)
    assert tensors["weight_scale"].dtype == torch.float8_e4m3fn
    assert tensors["weight_scale_2"].shape == ()
    assert int8().disk_tensors()["weight_scale"].shape == (40, 1)


def test_markers():
    assert nvfp4(32).marker() == {"format": "nvfp4", "convrot": True, "convrot_groupsize": 64}
    assert nvfp4(32, group=None).marker() == {"format": "nvfp4"}
    assert nvfp4(33, 40, 4).marker()["orig_shape"] == [33, 40]
    assert nvfp4(40).marker()["orig_shape"] == [40, 64]
    assert int8().marker() == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    assert fp8().marker() == {"format": "float8_e4m3fn"}
    assert fp8("float8_e5m2").marker() == {"format": "float8_e5m2"}
    assert mxfp8().marker() == {"format": "mxfp8", "orig_shape": [40, 64]}


def test_bits_per_weight_of_a_real_size():
    big = torch.zeros(256, 1024)
    assert packing.pack_weight(big, "nvfp4", 256).bits_per_weight == pytest.approx(4.5, abs=1e-3)
    assert packing.pack_weight(big, "int8_tensorwise", 256).bits_per_weight == pytest.approx(8.03125)


def test_calibration_is_a_new_value():
    plain = nvfp4()
    calibrated = plain.with_input_scale(torch.tensor(0.25))
    assert plain.input_scale is None
    assert calibrated.input_scale == 0.25
    assert calibrated.codes is plain.codes
    assert calibrated.with_input_scale(None).same_bits(plain)


def scales_with(byte, padding=False):
    scales = nvfp4().scales.clone()
    scales.view(torch.uint8)[-1 if padding else 0, 0] = byte
    return scales


def row_scales_with(value):
    scale = int8().scale.clone()
    scale[3] = value
    return scale


REFUSED = {
    "NaN in a block scale": (
        lambda: nvfp4(scales=scales_with(0x7F)),
        "weight_scale",
        "NaN.*0x7F",
    ),
    "negative NaN": (lambda: nvfp4(scales=scales_with(0xFF)), "weight_scale", "NaN.*0xFF"),
    "NaN in the padding": (lambda: nvfp4(scales=scales_with(0x7F, padding=True)), "weight_scale", "NaN"),
    "negative block scale": (lambda: nvfp4(scales=scales_with(0xB8)), "weight_scale", "negative.*0xB8"),
    "NaN tensor scale": (lambda: nvfp4(scale=torch.tensor(torch.nan)), "weight_scale_2", "scale.*nan"),
    "infinite tensor scale": (lambda: nvfp4(scale=torch.tensor(torch.inf)), "weight_scale_2", "scale.*inf"),
    "negative tensor scale": (lambda: nvfp4(scale=torch.tensor(-1.0)), "weight_scale_2", "scale.*-1"),
    "bf16 tensor scale": (
        lambda: nvfp4(scale=torch.tensor(1.0).bfloat16()),
        "weight_scale_2",
        "bfloat16",
    ),
    "tensor scale [1]": (lambda: nvfp4(scale=torch.ones(1)), "weight_scale_2", r"\[1\].*float32 \[\]"),
    "linear scales": (
        lambda: nvfp4(scales=nvfp4().scales[:48, :3]),
        "weight_scale",
        r"\[48, 3\]",
    ),
    "scales as bytes": (lambda: nvfp4(scales=nvfp4().scales.view(torch.uint8)), "weight_scale", "uint8"),
    "too few rows": (lambda: nvfp4(shape=(49, 64)), "weight", r"\[48, 32\].*\[64, 32\]"),
    "K from packed bytes": (lambda: nvfp4(shape=(40, 128), group=64), "weight", r"expected.*\[48, 64\]"),
    "int8 codes": (lambda: nvfp4(codes=nvfp4().codes.view(torch.int8)), "weight", "int8"),
    "group that does not divide": (lambda: replace(nvfp4(40, 40, 4), group=16), "weight", "group.*16"),
    "group of 32": (lambda: replace(nvfp4(), group=32), "weight", "group.*32"),
    "input_scale 0": (lambda: nvfp4(input_scale=torch.tensor(0.0)), "input_scale", "scale.*0"),
    "input_scale NaN": (lambda: nvfp4(input_scale=torch.tensor(torch.nan)), "input_scale", "scale.*nan"),
    "input_scale inf": (lambda: nvfp4(input_scale=torch.tensor(torch.inf)), "input_scale", "scale.*inf"),
    "input_scale -1": (lambda: nvfp4(input_scale=torch.tensor(-1.0)), "input_scale", "scale.*-1"),
    "input_scale [1]": (lambda: nvfp4(input_scale=torch.ones(1)), "input_scale", "wrong"),
    "int8 scale 0": (lambda: int8(scale=row_scales_with(0.0)), "weight_scale", "scale.*0"),
    "int8 scale NaN": (lambda: int8(scale=row_scales_with(torch.nan)), "weight_scale", "nan"),
    "int8 one scale but rotated": (lambda: int8(scale=torch.tensor(0.1)), "weight_scale", r"\[40, 1\]"),
    "int8 scale [N]": (lambda: int8(scale=torch.ones(40)), "weight_scale", "wrong"),
    "int8 wrong shape": (lambda: int8(shape=(41, 64)), "weight", r"\[41, 64\]"),
    "fp8 scale 0": (lambda: fp8(scale=torch.tensor(0.0)), "weight_scale", "scale"),
    "fp8 input_scale -1": (lambda: fp8(input_scale=torch.tensor(-1.0)), "input_scale", "-1"),
    "fp8 of another dtype": (lambda: fp8(data=fp8().data.float()), "weight", "float32"),
    "mxfp8 NaN scale": (
        lambda: mxfp8(scales=torch.full((128, 4), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        "weight_scale",
        "NaN.*0xFF",
    ),
    "mxfp8 wrong shape": (lambda: mxfp8(shape=(70, 64)), "weight", "wrong"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    make, suffix, message = REFUSED[what]
    with pytest.raises(HswqError, match=message) as caught:
        make().validate(tensor="layers.0.attention.qkv", file="pack.safetensors")
    assert caught.value.tensor == f"layers.0.attention.qkv.{suffix}"
    assert caught.value.file == "pack.safetensors"
    assert caught.value.found is not None
    assert caught.value.expected is not None


def test_refused_without_a_name():
    with pytest.raises(HswqError, match="tensor: input_scale"):
        nvfp4(input_scale=torch.tensor(0.0)).validate()


def test_a_weight_of_zeros_is_valid():
    packed = packing.pack_weight(torch.zeros(16, 16), "nvfp4", 16)
    assert packed.scale == 0
    packed.validate()
    assert not packing.dequantize(packed).any()


def test_kinds_by_class():
    kinds = {name: type(make()) for name, make in KINDS.items()}
    assert set(kinds.values()) == {Nvfp4Weight, Int8Weight, Fp8Weight, Mxfp8Weight}
    assert fp8().group is None
    assert mxfp8().group is None
