"""Files of other producers come in right, ours go out as a stock ComfyUI needs them, and the cost is said."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
import torch
from checkpoint_files import int8, marker, metadata, nvfp4, parts, random_matrix, save
from test_checkpoint_reports import as_modelopt, structured

from hswq_lab import packing
from hswq_lab.checkpoint import PRODUCERS, Checkpoint, convert
from hswq_lab.errors import HswqError


def as_compressed_tensors(packed, input_scale=None):
    tensors = as_modelopt(packed)
    named = {
        "weight_packed": tensors["weight"],
        "weight_scale": tensors["weight_scale"],
        "weight_global_scale": tensors["weight_scale_2"].reciprocal().reshape(1),
    }
    return named if input_scale is None else named | {"input_global_scale": torch.tensor([1 / input_scale])}


def file_of(path, tensors, header=None):
    return save(path, {f"a.{key}": value for key, value in tensors.items()}, header)


@pytest.mark.parametrize("shape", [(256, 256), (130, 96), (48, 64)])
def test_compressed_tensors_is_known_by_its_names(tmp_path, shape):
    packed = nvfp4(structured(*shape))
    file = file_of(tmp_path / "ct.safetensors", as_compressed_tensors(packed, 0.25))
    read = Checkpoint.open(file)["a.weight"]
    assert torch.equal(read.codes, packed.codes)
    assert torch.equal(read.scales.view(torch.uint8), packed.scales.view(torch.uint8))
    assert float(read.scale) == pytest.approx(float(packed.scale), rel=1e-6)
    assert float(read.input_scale) == 0.25
    report = convert(file, tmp_path / "ours.safetensors")
    again = Checkpoint.open(report.path)
    assert again["a.weight"].same_bits(read)
    assert again.entry("a.weight").format == "nvfp4"
    assert json.loads(again.metadata["hswq.convert"])["to"] == "hswq"


def test_a_divisor_of_3584_is_a_scale_of_its_inverse(tmp_path):
    tensors = as_compressed_tensors(nvfp4(structured(32, 64)))
    tensors["weight_global_scale"] = torch.tensor([3584.0])
    weight = Checkpoint.open(file_of(tmp_path / "x.safetensors", tensors))["a.weight"]
    assert float(weight.scale) == pytest.approx(1 / 3584, rel=1e-7)


@pytest.mark.parametrize("value", [0.0, float("inf"), -3584.0, float("nan"), 1e-45])
@pytest.mark.parametrize("key", ["weight_global_scale", "input_global_scale"])
def test_a_divisor_that_cannot_be_is_refused(tmp_path, key, value):
    tensors = as_compressed_tensors(nvfp4(structured(32, 64)), 0.25)
    tensors[key] = torch.tensor([value])
    with pytest.raises(HswqError, match="impossible value") as refusal:
        Checkpoint.open(file_of(tmp_path / "x.safetensors", tensors))["a.weight"]
    assert refusal.value.tensor == f"a.{key}"


@pytest.mark.parametrize("known", ["producer", "config", "hf_quant_config", "header", "source"])
def test_modelopt_is_read_right_where_the_producer_is_known(tmp_path, known):
    w = structured(256, 256)
    packed = nvfp4(w, None, torch.tensor(0.25))
    header = {"quantization_config": '{"quant_method": "modelopt"}'} if known == "header" else None
    file = file_of(tmp_path / "model.safetensors", as_modelopt(packed), header)
    if known == "config":
        (tmp_path / "config.json").write_text('{"quantization_config": {"producer": {"name": "modelopt"}}}')
    if known == "hf_quant_config":
        (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "ModelOpt"}}')
    report = convert(
        file,
        tmp_path / "ours.safetensors",
        producer="modelopt" if known == "producer" else None,
        source=Checkpoint.from_mapping({"a.weight": w}) if known == "source" else None,
    )
    assert Checkpoint.open(report.path)["a.weight"].same_bits(packed)
    if known in ("config", "hf_quant_config", "header"):
        assert Checkpoint.open(file)["a.weight"].same_bits(packed)


def test_bytes_that_are_read_in_another_way_have_another_digest(tmp_path):
    file = file_of(tmp_path / "model.safetensors", as_modelopt(nvfp4(structured(256, 256))))
    plain = Checkpoint.open(file)
    assert plain.sha256 == sha256(file.read_bytes()).hexdigest()
    assert Checkpoint.open(file, reading=PRODUCERS["comfy"]).sha256 == plain.sha256
    other = Checkpoint.open(file, reading=PRODUCERS["modelopt"])
    assert other.sha256 != plain.sha256
    assert Checkpoint.open(file, shapes={"a": (256, 250)}).sha256 != plain.sha256
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt"}}')
    assert Checkpoint.open(file).sha256 == other.sha256


@pytest.mark.parametrize("where", ["tensor", "header"])
def test_a_marker_is_believed_before_a_configuration(tmp_path, where):
    packed = nvfp4(structured(256, 256))
    tensors = packed.disk_tensors()
    if where == "tensor":
        tensors |= {"comfy_quant": marker(packed.marker())}
    file = file_of(
        tmp_path / "model.safetensors", tensors, metadata(a="nvfp4") if where == "header" else None
    )
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt"}}')
    assert Checkpoint.open(file)["a.weight"].same_bits(packed)


def test_a_layout_that_cannot_be_told_is_not_guessed(tmp_path):
    file = file_of(tmp_path / "x.safetensors", as_modelopt(nvfp4(structured(256, 256))))
    with pytest.raises(HswqError, match="cannot be told completely"):
        convert(file, tmp_path / "ours.safetensors")
    assert not (tmp_path / "ours.safetensors").exists()


def test_a_hidden_rotation_is_written_into_the_marker(tmp_path):
    w = structured(256, 256)
    packed = nvfp4(w, 256)
    file = file_of(
        tmp_path / "x.safetensors", packed.disk_tensors() | {"comfy_quant": marker({"format": "nvfp4"})}
    )
    report = convert(file, tmp_path / "ours.safetensors", source=Checkpoint.from_mapping({"a.weight": w}))
    assert report.rows[0].action == "basis corrected"
    assert Checkpoint.open(report.path)["a.weight"].same_bits(packed)


def test_awq_scales_are_folded_into_the_weight(tmp_path):
    w = structured(128, 256)
    scale = torch.rand(256, generator=torch.Generator().manual_seed(0)) + 0.5
    packed = nvfp4((w.float() / scale).bfloat16(), None, torch.tensor(0.25))
    file = file_of(tmp_path / "x.safetensors", as_modelopt(packed) | {"pre_quant_scale": scale.bfloat16()})
    checkpoint = Checkpoint.open(convert(file, tmp_path / "ours.safetensors", producer="modelopt").path)
    read = checkpoint["a.weight"]
    error = (packing.dequantize(read) - w.float()).norm() / w.float().norm()
    assert error < 0.14
    assert read.input_scale is None
    assert set(checkpoint) == {"a.weight"}
    assert "pre_quant_scale" in Checkpoint.open(file).warnings[-1]
    with pytest.raises(HswqError, match="pre_quant_scale does not fit"):
        Checkpoint.open(
            file_of(tmp_path / "y.safetensors", as_modelopt(packed) | {"pre_quant_scale": scale[:9].clone()})
        )


@pytest.mark.parametrize("split", [False, True])
def test_awq_of_an_unknown_producer_is_told_by_its_source_and_refused_without(tmp_path, split):
    """Folding hides what is stored: nothing but the stored parts can tell the layout."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.0.attention.to_{p}": structured(128, 256, i) for i, p in enumerate("qkv")}
    weights = weights if split else {"a": structured(128, 256)}
    tensors = {}
    for layer, w in weights.items():
        scale = torch.rand(256, generator=generator) + 0.5
        stored = as_modelopt(nvfp4((w.float() / scale).bfloat16())) | {"pre_quant_scale": scale}
        tensors |= {f"{layer}.{key}": value for key, value in stored.items()}
    file = save(tmp_path / "x.safetensors", tensors)
    with pytest.raises(HswqError, match="cannot be told completely"):
        convert(file, tmp_path / "ours.safetensors")
    name = "layers.0.attention.qkv.weight" if split else "a.weight"
    source = Checkpoint.from_mapping({name: torch.cat(list(weights.values()))})
    by_source = convert(file, tmp_path / "by_source.safetensors", source=source)
    by_name = convert(file, tmp_path / "by_name.safetensors", producer="modelopt")
    assert by_source.rows[0].source_after_db > 15
    assert Checkpoint.open(by_source.path)[name].same_bits(Checkpoint.open(by_name.path)[name])


def test_a_layout_that_nothing_states_is_not_taken_for_ours(tmp_path):
    """On noise no statistic speaks against any order: silence is no consent."""
    w = random_matrix(256, 256)
    file = file_of(tmp_path / "x.safetensors", as_modelopt(nvfp4(w)))
    assert any("nothing says in which layout" in text for text in Checkpoint.open(file).warnings)
    with pytest.raises(HswqError, match="cannot be told completely"):
        convert(file, tmp_path / "ours.safetensors")
    ours = file_of(tmp_path / "y.safetensors", nvfp4(w).disk_tensors())
    report = convert(ours, tmp_path / "ours.safetensors", producer="comfy")
    assert Checkpoint.open(report.path)["a.weight"].same_bits(nvfp4(w))


def pack_with_rotation(w):
    return {
        "n.weight": nvfp4(w, 256, torch.tensor(0.25)),
        "p.weight": nvfp4(w, None, torch.tensor(0.25)),
        "i.weight": int8(w, 256),
        "d.weight": w,
    }


@pytest.mark.parametrize("with_source", [False, True])
def test_comfy_gets_unrotated_nvfp4_and_the_cost_is_stated(tmp_path, with_source):
    w = structured(256, 256)
    values = pack_with_rotation(w)
    file = Checkpoint.from_mapping(values).save(tmp_path / "pack.safetensors")
    source = Checkpoint.from_mapping(dict.fromkeys(values, w)) if with_source else None
    report = convert(file, tmp_path / "comfy.safetensors", to="comfy", source=source)
    written = Checkpoint.open(report.path)
    assert written.entry("n.weight").group is None
    assert not written.entry("n.weight").calibrated
    for name in ("p.weight", "i.weight"):
        assert written[name].same_bits(values[name])
    rows = {row.layer: row for row in report.rows}
    assert set(rows) == {"n.weight", "p.weight", "i.weight"}
    assert (rows["n.weight"].action, rows["n.weight"].lost) == ("unrotated", "input_scale")
    assert (rows["p.weight"].action, rows["p.weight"].sqnr_db) == ("kept", float("inf"))
    old = packing.dequantize(values["n.weight"])
    new = packing.dequantize(written["n.weight"])
    stated = 10 * torch.log10(old.square().sum() / (new - old).square().sum())
    assert rows["n.weight"].sqnr_db == pytest.approx(float(stated), abs=1e-3)
    if with_source:
        fresh = packing.pack_weight(w, "nvfp4", None, "sweep")
        assert written["n.weight"].same_bits(fresh)
        assert rows["n.weight"].source_after_db > 18
    assert "lost their input_scale" in str(report)
    assert ("SQNR to the source: mean" in str(report)) == with_source
    assert len(report.to_frame()) == 3


def test_a_nonsense_request_is_refused(tmp_path):
    file = file_of(tmp_path / "x.safetensors", {"weight": random_matrix(4, 4)})
    with pytest.raises(HswqError, match="unknown layout"):
        convert(file, tmp_path / "y.safetensors", to="gguf")
    with pytest.raises(HswqError, match="unknown producer"):
        convert(file, tmp_path / "y.safetensors", producer="me")
    with pytest.raises(HswqError, match="being read"):
        convert(file, file)


def test_an_old_fp8_file_comes_out_in_the_new_layout(tmp_path):
    tensors = {
        "scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn),
        "a.weight": structured(32, 64).to(torch.float8_e4m3fn),
        "a.scale_weight": torch.tensor([0.5]),
    }
    report = convert(save(tmp_path / "old.safetensors", tensors), tmp_path / "new.safetensors")
    new = Checkpoint.open(report.path)
    assert new.warnings == []
    assert float(new["a.weight"].scale) == 0.5
    assert parts("a", new["a.weight"]).keys() == {"a.weight", "a.weight_scale"}
