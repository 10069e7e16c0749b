"""Reading packs: what is there is told right, what is damaged is refused, nothing is guessed quietly."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from checkpoint_files import COMFY, fp8, int8, marker, metadata, mxfp8, nvfp4, parts, random_matrix, save

from hswq_lab.checkpoint import Checkpoint, header
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight, dequantize_nvfp4


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pack.safetensors"


def with_marker(layer, packed):
    return parts(layer, packed) | {f"{layer}.comfy_quant": marker(packed.marker())}


KINDS = {
    "nvfp4 rotated": lambda: nvfp4(random_matrix(48, 256), 256),
    "nvfp4 plain": lambda: nvfp4(random_matrix(48, 256)),
    "nvfp4 calibrated": lambda: nvfp4(random_matrix(48, 256), 256, torch.tensor(0.25)),
    "nvfp4 odd shape": lambda: nvfp4(random_matrix(130, 40), 4),
    "mxfp8": lambda: mxfp8(random_matrix(64, 96)),
    "mxfp8 odd shape": lambda: mxfp8(random_matrix(33, 40)),
    "int8 rows": lambda: int8(random_matrix(48, 256), 256),
    "fp8": lambda: fp8(random_matrix(48, 64), input_scale=torch.tensor(0.5)),
    "fp8 e5m2": lambda: fp8(random_matrix(48, 64), torch.float8_e5m2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_back_bit_for_bit(file, kind):
    packed = KINDS[kind]()
    checkpoint = Checkpoint.open(save(file, with_marker(f"{COMFY}a", packed)))
    assert list(checkpoint) == ["a.weight"]
    assert checkpoint["a.weight"].same_bits(packed)
    entry = checkpoint.entry("a.weight")
    assert (entry.format, entry.shape, entry.group) == (packed.format, packed.shape, packed.group)
    assert entry.nbytes == packed.nbytes
    assert entry.calibrated == ("input_scale" in packed.disk_tensors())
    assert checkpoint.warnings == []


def test_nvfp4_without_marker_is_inferred_with_a_warning(file):
    packed = nvfp4(random_matrix(512, 256))
    assert parts("a", packed)["a.weight"].shape == (512, 128)
    checkpoint = Checkpoint.open(save(file, parts("a", packed)))
    assert checkpoint["a.weight"].same_bits(packed)
    rotation, layout = checkpoint.warnings
    assert "no marker" in rotation
    assert "read as nvfp4" in rotation
    assert "nothing says in which layout" in layout


@pytest.mark.parametrize("missing", ["weight_scale", "weight_scale_2", "both"])
@pytest.mark.parametrize("marked", [False, True])
def test_a_missing_scale_is_named(file, missing, marked):
    tensors = (with_marker if marked else parts)("a", nvfp4(random_matrix(512, 256)))
    for suffix in ("weight_scale", "weight_scale_2") if missing == "both" else (missing,):
        del tensors[f"a.{suffix}"]
    with pytest.raises(HswqError) as caught:
        Checkpoint.open(save(file, tensors))
    wanted = "weight_scale" if missing == "both" else missing
    assert f"a.{wanted}" in str(caught.value)


def test_int8_without_its_scale_is_refused(file):
    with pytest.raises(HswqError, match="without its scale"):
        Checkpoint.open(save(file, {"a.weight": torch.zeros(16, 16, dtype=torch.int8)}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_in_another_dtype_are_promoted_with_one_warning_each_kind(file, dtype):
    tensors = {}
    for i in range(3):
        tensors |= with_marker(f"n{i}", nvfp4(random_matrix(32, 64, i), 64, torch.tensor(0.5)))
        tensors |= with_marker(f"i{i}", int8(random_matrix(32, 64, i), 64))
    for name in tensors:
        if name.endswith(("weight_scale_2", "input_scale")) or (name.startswith("i") and "scale" in name):
            tensors[name] = (tensors[name] * 1000 if dtype == torch.float16 else tensors[name]).to(dtype)
    checkpoint = Checkpoint.open(save(file, tensors))
    for name in checkpoint:
        packed = checkpoint[name]
        for suffix, tensor in packed.disk_tensors().items():
            if suffix in ("weight_scale_2", "input_scale") or (
                packed.format == "int8_tensorwise" and "scale" in suffix
            ):
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, tensors[f"{name.removesuffix('weight')}{suffix}"].float())
    assert len(checkpoint.warnings) == 3
    assert all("promoted to fp32" in text for text in checkpoint.warnings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_scales_survive_a_blanket_cast(file, dtype):
    packed = nvfp4(random_matrix(48, 256), 256)
    tensors = with_marker("a", packed)
    tensors["a.weight_scale"] = tensors["a.weight_scale"].to(dtype)
    checkpoint = Checkpoint.open(save(file, tensors))
    assert checkpoint["a.weight"].same_bits(packed)
    assert "taken back to E4M3" in checkpoint.warnings[0]
    tensors["a.weight_scale"] = tensors["a.weight_scale"] * 1.01
    with pytest.raises(HswqError, match="no E4M3 numbers"):
        Checkpoint.open(save(file, tensors))["a.weight"]


def test_block_scales_as_bytes_are_the_same(file):
    packed = nvfp4(random_matrix(48, 256), 256)
    tensors = with_marker("a", packed)
    tensors["a.weight_scale"] = tensors["a.weight_scale"].view(torch.uint8)
    assert Checkpoint.open(save(file, tensors))["a.weight"].same_bits(packed)


def test_the_logical_shape_comes_from_marker_model_or_bias(file):
    packed = nvfp4(random_matrix(130, 40))
    plain = parts("a", packed) | {"a.comfy_quant": marker({"format": "nvfp4"})}
    assert Checkpoint.open(save(file, plain)).entry("a.weight").shape == (144, 48)
    assert Checkpoint.open(file, shapes={"a": (130, 40)})["a.weight"].same_bits(packed)
    assert Checkpoint.open(save(file, plain | {"a.bias": torch.zeros(130)})).entry("a.weight").shape == (
        130,
        48,
    )
    plain["a.comfy_quant"] = marker({"format": "nvfp4", "in_features": 40, "out_features": 130})
    assert Checkpoint.open(save(file, plain))["a.weight"].same_bits(packed)
    for wrong in ((128, 40), (130, 32), (145, 40), (130, 49)):
        plain["a.comfy_quant"] = marker({"format": "nvfp4", "orig_shape": list(wrong)})
        with pytest.raises(HswqError, match="does not fit"):
            Checkpoint.open(save(file, plain))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_an_impossible_input_scale_is_refused(file, value):
    tensors = with_marker("a", nvfp4(random_matrix(32, 64), None, torch.tensor(value)))
    with pytest.raises(HswqError, match="impossible value") as caught:
        Checkpoint.open(save(file, tensors))
    assert caught.value.tensor == "a.input_scale"


def test_a_missing_input_scale_is_neither_0_nor_1(file):
    checkpoint = Checkpoint.open(save(file, with_marker("a", nvfp4(random_matrix(32, 64)))))
    assert checkpoint["a.weight"].input_scale is None
    assert not checkpoint.entry("a.weight").calibrated


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB0])
def test_a_nan_or_negative_block_scale_is_refused(file, byte):
    tensors = with_marker("a", nvfp4(random_matrix(32, 64)))
    tensors["a.weight_scale"].view(torch.uint8)[3, 1] = byte
    checkpoint = Checkpoint.open(save(file, tensors))
    for read in (lambda: checkpoint["a.weight"], checkpoint.verify):
        with pytest.raises(HswqError, match="block scales are") as caught:
            read()
        assert caught.value.tensor == "a.weight_scale"
        assert caught.value.file == str(file)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_impossible_weight_scales_are_refused(file, value):
    rows = with_marker("a", int8(random_matrix(32, 64), 64))
    rows["a.weight_scale"][5] = value
    with pytest.raises(HswqError, match="scale cannot be used"):
        Checkpoint.open(save(file, rows))["a.weight"]
    tensors = with_marker("a", nvfp4(random_matrix(32, 64)))
    tensors["a.weight_scale_2"].fill_(value)
    with pytest.raises(HswqError, match="impossible value"):
        Checkpoint.open(save(file, tensors))


def test_an_all_zero_layer_is_fine(file):
    packed = nvfp4(torch.zeros(32, 64))
    read = Checkpoint.open(save(file, with_marker("a", packed)))["a.weight"]
    assert float(read.scale) == 0
    assert not dequantize_nvfp4(read.codes, read.scales, read.scale, read.shape).any()


def rotated(group):
    return {"format": "nvfp4", "convrot": True, "convrot_groupsize": group}


WRONG_PARTS = {
    "format of this layer is not known": {"a.comfy_quant": marker({"format": "int3_wonder"})},
    "weight is something else": {"a.weight": torch.zeros(32, 64)},
    "block scales do not fit": {"a.weight_scale": torch.zeros(32, 4).to(torch.float8_e4m3fn)},
    "block scales have the wrong dtype": {"a.weight_scale": torch.zeros(128, 4, dtype=torch.int32)},
    "scale has the wrong dtype or shape": {"a.weight_scale_2": torch.ones(2)},
    "wrong dtype or shape": {"a.weight_scale_2": torch.ones((), dtype=torch.int32)},
    "impossible rotation group": {"a.comfy_quant": marker(rotated(8))},
    "rotation group": {"a.comfy_quant": marker(rotated(256))},
    "not padded": {"a.weight": torch.zeros(30, 32, dtype=torch.uint8)},
    "never rotated": {
        "a.comfy_quant": marker({"format": "float8_e4m3fn", "convrot": True}),
        "a.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(()),
        "a.weight_scale_2": None,
    },
    "a scale that int8_tensorwise does not have": {
        "a.comfy_quant": marker({"format": "int8_tensorwise"}),
        "a.weight": torch.zeros(32, 64, dtype=torch.int8),
        "a.weight_scale": torch.ones(()),
    },
    "two tensors play the same part": {"a.scale_weight": torch.ones(())},
}


@pytest.mark.parametrize("problem", WRONG_PARTS)
def test_parts_that_do_not_fit_are_refused(file, problem):
    tensors = with_marker("a", nvfp4(random_matrix(32, 64)))
    tensors = {name: part for name, part in (tensors | WRONG_PARTS[problem]).items() if part is not None}
    with pytest.raises(HswqError, match=problem) as caught:
        Checkpoint.open(save(file, tensors))
    assert caught.value.tensor.startswith("a")


def test_a_rotated_layer_without_a_group_takes_the_largest_and_says_so(file):
    packed = nvfp4(random_matrix(32, 64), 64)
    tensors = parts("a", packed) | {"a.comfy_quant": marker({"format": "nvfp4", "convrot": True})}
    checkpoint = Checkpoint.open(save(file, tensors))
    assert checkpoint["a.weight"].same_bits(packed)
    assert "no rotation group" in checkpoint.warnings[0]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_int8_with_one_scale_is_read(file, shape):
    q = torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    tensors = {"a.weight": q, "a.weight_scale": torch.full(shape, 0.25)}
    checkpoint = Checkpoint.open(save(file, tensors, metadata(a="int8_tensorwise")))
    assert checkpoint["a.weight"].scale.shape == ()
    assert float(checkpoint["a.weight"].scale) == 0.25


def test_old_fp8_files_are_read(file):
    packed = fp8(random_matrix(32, 64), input_scale=torch.tensor(0.5))
    tensors = {
        f"{COMFY}scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
        f"{COMFY}a.weight": packed.data,
        f"{COMFY}a.scale_weight": packed.scale.reshape(1),
        f"{COMFY}a.scale_input": packed.input_scale,
    }
    checkpoint = Checkpoint.open(save(file, tensors))
    assert list(checkpoint) == ["a.weight"]
    assert checkpoint["a.weight"].same_bits(packed)
    assert "old fp8 layout" in checkpoint.warnings[0]


def test_fp8_without_a_scale_has_scale_1(file):
    data = random_matrix(32, 64).to(torch.float8_e4m3fn)
    weight = Checkpoint.open(save(file, {"a.weight": data}))["a.weight"]
    assert isinstance(weight, PackedWeight)
    assert float(weight.scale) == 1


def test_unpacked_tensors_keep_dtype_shape_and_name(file):
    tensors = {
        "x_pad_token": torch.ones(8).bfloat16(),
        "y_pad_token": torch.ones(1, 8).half(),
        "a.weight": random_matrix(16, 16, dtype=torch.float32),
        "steps": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "what.nobody.knows": torch.arange(5, dtype=torch.uint8),
    }
    checkpoint = Checkpoint.open(save(file, tensors, {"any": "thing"}))
    assert checkpoint.metadata == {"any": "thing"}
    assert set(checkpoint) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint[name], tensor)
        assert checkpoint[name].dtype == tensor.dtype
        assert checkpoint.entry(name).format == "16-bit"
    assert checkpoint.shapes()["x_pad_token"] == (8,)


def test_an_empty_marker_beside_an_unpacked_weight_says_nothing(file):
    tensors = {"a.weight": random_matrix(16, 16), "a.comfy_quant": torch.zeros(9, dtype=torch.uint8)}
    checkpoint = Checkpoint.open(save(file, tensors))
    assert list(checkpoint) == ["a.weight"]
    assert checkpoint.entry("a.weight").format == "16-bit"


def test_scales_that_belong_to_nothing_are_kept_and_reported(file):
    tensors = {
        "a.weight": random_matrix(16, 16),
        "a.weight_scale": torch.ones(()),
        "b.input_scale": torch.ones(()),
    }
    checkpoint = Checkpoint.open(save(file, tensors))
    assert set(checkpoint) == set(tensors)
    assert len(checkpoint.warnings) == 2


@pytest.mark.parametrize("prefix", ["model.", "net."])
def test_a_short_prefix_must_be_on_most_tensors(file, prefix):
    names = [f"{prefix}a.weight", "b.weight", "c.weight"]
    checkpoint = Checkpoint.open(save(file, {name: torch.zeros(2) for name in names}))
    assert (checkpoint.prefix, set(checkpoint)) == ("", set(names))
    names = [f"{prefix}a.weight", f"{prefix}b.weight", "c.weight"]
    checkpoint = Checkpoint.open(save(file, {name: torch.zeros(2) for name in names}))
    assert (checkpoint.prefix, set(checkpoint)) == (prefix, {"a.weight", "b.weight", "c.weight"})


def test_names_with_and_without_prefix_at_once_are_refused(file):
    with pytest.raises(HswqError, match="with and without prefix"):
        Checkpoint.open(save(file, {f"{COMFY}a.weight": torch.zeros(2), "a.weight": torch.zeros(2)}))


def test_unknown_names_are_refused_with_the_nearest_one(file):
    checkpoint = Checkpoint.open(save(file, {"layers.0.weight": torch.zeros(2)}))
    for read in (lambda: checkpoint["layers.0.wieght"], lambda: checkpoint.entry("layers.0.wieght")):
        with pytest.raises(HswqError, match=r"did you mean layers\.0\.weight"):
            read()
    assert checkpoint.get("nothing") is None
    assert "nothing" not in checkpoint


def test_opening_reads_no_tensor_data(file, monkeypatch):
    checkpoint_file = save(
        file, with_marker("a", nvfp4(random_matrix(64, 256), 256)) | {"n": torch.zeros(9000)}
    )
    read = []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: read.append(len(views[0])) or preadv(fd, views, at)
    )
    checkpoint = Checkpoint.open(checkpoint_file)
    assert checkpoint.entry("a.weight").group == 256
    assert sum(read) < 200  # the marker and one scalar


def test_a_file_that_is_replaced_keeps_serving_the_old_content_and_one_that_changes_is_refused(
    file, tmp_path
):
    checkpoint = Checkpoint.open(save(file, {"a": torch.zeros(4)}))
    save(tmp_path / "other", {"a": torch.ones(4)}).replace(file)
    assert not checkpoint["a"].any()
    checkpoint = Checkpoint.open(file)
    with file.open("r+b") as stream:
        stream.truncate(20)
    with pytest.raises(HswqError, match="changed since"):
        checkpoint["a"]


@pytest.mark.parametrize("shape", [(2, 3), (5,)], ids=["same size", "another size"])
def test_header_and_data_are_of_one_file_when_it_is_replaced_while_it_is_opened(file, monkeypatch, shape):
    save(file, {"a": torch.ones(2, 3)}, {"who": "old"})
    parse = header._parse

    def replaced(*args):
        save(file.with_name("new"), {"a": torch.zeros(shape)}, {"who": "new"}).rename(file)
        return parse(*args)

    monkeypatch.setattr(header, "_parse", replaced)
    checkpoint = Checkpoint.open(file)
    assert (checkpoint.metadata["who"], float(checkpoint["a"].sum())) == ("old", 6)


def test_a_file_that_is_written_while_it_is_opened_is_refused(file, monkeypatch):
    save(file, {"a": torch.ones(2, 3)})
    parse = header._parse

    def written(*args):
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 1)
        return parse(*args)

    monkeypatch.setattr(header, "_parse", written)
    with pytest.raises(HswqError, match="changed while it was opened"):
        Checkpoint.open(file)


def test_a_calibration_that_the_format_does_not_use_is_kept_and_reported(file):
    tensors = with_marker("a", int8(random_matrix(32, 64), 64)) | {"a.input_scale": torch.ones(())}
    checkpoint = Checkpoint.open(save(file, tensors))
    assert set(checkpoint) == {"a.weight", "a.input_scale"}
    assert "does not use" in checkpoint.warnings[0]


def test_mxfp8_and_fp8_are_told_apart_without_marker(file):
    w = random_matrix(64, 96)
    checkpoint = Checkpoint.open(save(file, parts("m", mxfp8(w)) | parts("f", fp8(w))))
    assert checkpoint.entry("m.weight").format == "mxfp8"
    assert checkpoint.entry("f.weight").format == "float8_e4m3fn"


CHANGES = {
    "other numbers": lambda value: setattr(value, "data", torch.zeros(48, 256)),
    "another shape": lambda value: setattr(value, "data", value.data[:2]),
    "in place": lambda value: value.zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_in_memory_that_was_changed_is_refused(change):
    tensor, packed = torch.ones(48, 256), int8(random_matrix(48, 256), 256)
    checkpoint = Checkpoint.from_mapping({"a": tensor, "b.weight": packed, "c": torch.ones(3)})
    assert checkpoint["a"].data_ptr() == tensor.data_ptr()
    CHANGES[change](tensor)
    CHANGES[change](packed.scale)
    for name in ("a", "b.weight"):
        with pytest.raises(HswqError, match="changed in place"):
            checkpoint[name]
    assert checkpoint["c"].all()


def test_a_copy_of_a_checkpoint_in_memory_is_one():
    changed = torch.ones(3).mul_(2)
    checkpoint = Checkpoint.from_mapping({"a": changed, "b.weight": int8(random_matrix(48, 256), 256)})
    copied = copy.deepcopy(checkpoint)
    changed.zero_()
    assert copied["a"].tolist() == [2, 2, 2]
    assert copied["b.weight"].same_bits(checkpoint["b.weight"])
