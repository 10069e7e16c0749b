"""Packing: by plan, in memory and streaming, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hswq_lab import packing
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight, PackedWeight
from hswq_lab.lora import lora_from_tensors
from hswq_lab.quantize import CalibrationReport, LayerActivations, Plan, pack, pack_items, pack_to_file

HYBRID = Plan(
    {"*": "int8", "layers.*": "nvfp4", "layers.0.attention.out": "nvfp4-unrotated", "t_embedder.*": "16-bit"}
)


def activations(layer: str, group: int | None, mean_square: torch.Tensor) -> CalibrationReport:
    row = LayerActivations(layer, group, 100, 5.0, 4.0, 5.0 / 2688, None)
    return CalibrationReport("m", "16-bit", [], [], 4, 2.5, [], [row], {layer: mean_square})


def test_layers_are_packed_as_planned(tiny_model):
    packed = pack(tiny_model, HYBRID)
    for layer, (form, group, _) in HYBRID.for_layers(tiny_model.layers()).items():
        entry = packed.checkpoint.entry(f"{layer}.weight")
        assert (entry.format, entry.group) == (form, group)
    assert packed.checkpoint.entry("layers.0.attention.out.weight").group is None
    assert not tiny_model.is_packed


def test_everything_else_is_untouched(tiny_model):
    packed = pack(tiny_model, HYBRID)
    assert list(packed.checkpoint) == list(tiny_model.checkpoint)
    for name, value in packed.checkpoint.items():
        if not isinstance(value, PackedWeight):
            assert torch.equal(value, tiny_model.checkpoint[name])


@pytest.mark.parametrize("scales", ["rtn", "four_six", "sweep"])
def test_weights_are_packed_by_the_method_asked_for(tiny_model, scales):
    name = "layers.1.feed_forward.w2.weight"
    weight = pack(tiny_model, Plan({"layers.1.feed_forward.w2": "nvfp4"}), scales).checkpoint[name]
    assert weight.same_bits(packing.pack_weight(tiny_model.checkpoint[name], "nvfp4", 64, scales))


def test_planned_bits_are_the_packs(tiny_model):
    plan = Plan({"*": "nvfp4"})
    packed = pack(tiny_model, plan)
    scales = 32 * len(
        tiny_model.layers()
    )  # the input_scale that a plan counts and an uncalibrated pack lacks
    weights = sum(n * k for n, k in tiny_model.layers().values())
    assert packed.report().bits_per_weight == pytest.approx(plan.bits(tiny_model.layers()) - scales / weights)


def test_provenance_and_metadata(tiny_model):
    metadata = pack(tiny_model, HYBRID, "four_six").checkpoint.metadata
    assert metadata["made_by"] == "tests"
    provenance = json.loads(metadata["hswq.pack"])
    assert provenance["scales"] == metadata["hswq.scales"] == "four_six"
    assert provenance["source_sha256"] == tiny_model.checkpoint.sha256
    assert Plan.from_dict(provenance["plan"]) == HYBRID


def test_streaming_gives_the_same_bytes_as_saving(tiny_model, tmp_path):
    tiny_model.checkpoint.save(tmp_path / "source.safetensors")
    source = Checkpoint.open(tmp_path / "source.safetensors")
    model = tiny_model.with_checkpoint(source)
    pack(model, HYBRID).checkpoint.save(tmp_path / "memory.safetensors")
    pack_to_file(model, tmp_path / "stream.safetensors", HYBRID)
    assert (tmp_path / "memory.safetensors").read_bytes() == (tmp_path / "stream.safetensors").read_bytes()
    again = Checkpoint.open(tmp_path / "stream.safetensors")
    assert again.entry("layers.0.attention.qkv.weight").format == "nvfp4"


def test_a_full_checkpoints_other_tensors_keep_their_names(tiny_model, tmp_path):
    stored = {f"model.diffusion_model.{name}": value for name, value in tiny_model.checkpoint.items()}
    save_file(stored | {"first_stage_model.decoder.w": torch.ones(3)}, tmp_path / "full.safetensors")
    model = tiny_model.with_checkpoint(Checkpoint.open(tmp_path / "full.safetensors"))
    pack(model, HYBRID).checkpoint.save(tmp_path / "memory.safetensors")
    pack_to_file(model, tmp_path / "stream.safetensors", HYBRID)
    assert "first_stage_model.decoder.w" in load_file(tmp_path / "memory.safetensors")
    assert (tmp_path / "memory.safetensors").read_bytes() == (tmp_path / "stream.safetensors").read_bytes()


def test_items_come_one_by_one(tiny_model, monkeypatch):
    made = []
    monkeypatch.setattr(packing, "pack_weight", lambda *args, **named: made.append(named["name"]))
    items = pack_items(tiny_model.checkpoint, HYBRID.for_layers(tiny_model.layers()))
    assert made == []
    while not made:
        next(items)
    assert len(made) == 1


@pytest.mark.parametrize("form", ["nvfp4", "int8_tensorwise", "float8_e4m3fn"])
def test_a_packed_layer_is_not_packed_again(tiny_model, form):
    layer = "layers.0.attention.qkv"
    once = pack(tiny_model, Plan({layer: form}))
    with pytest.raises(
        HswqError, match=rf"packed already.*{layer}\.weight.*found: {form}.*leave this layer out of the plan"
    ):
        pack(once, Plan({layer: "nvfp4"}))
    twice = pack(once, Plan({"layers.1.*": "nvfp4"}))  # what the plan does not name passes as it is
    assert twice.checkpoint[f"{layer}.weight"].same_bits(once.checkpoint[f"{layer}.weight"])


def test_loras_must_come_off_first(tiny_model):
    stem = "transformer.layers.0.attention.to_out.0"
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 64), f"{stem}.lora_B.weight": torch.randn(64, 4)}
    tiny_model.attach(lora_from_tensors(tensors, name="style"))
    with pytest.raises(HswqError, match=r"LoRAs are attached.*style"):
        pack(tiny_model, HYBRID)


def test_importance_of_channels_is_used_in_its_own_basis(tiny_model):
    layer = "layers.0.feed_forward.w1"
    plan = Plan({layer: "nvfp4"})
    mean_square = torch.ones(64)
    mean_square[::16] = 1e4
    weighted = pack(tiny_model, plan, activations=activations(layer, 64, mean_square)).checkpoint[
        f"{layer}.weight"
    ]
    plain = pack(tiny_model, plan).checkpoint[f"{layer}.weight"]
    dense = tiny_model.checkpoint[f"{layer}.weight"]
    expected = packing.pack_weight(dense, "nvfp4", 64, "sweep", mean_square)
    assert weighted.same_bits(expected)
    assert not weighted.same_bits(plain)
    with pytest.raises(
        HswqError, match=r"another basis.*found: rotation group None.*expected: rotation group 64"
    ):
        pack(tiny_model, plan, activations=activations(layer, None, mean_square))


def test_a_layer_that_was_not_observed_is_an_error(tiny_model):
    with pytest.raises(HswqError, match=r"not observed.*layers\.0\.feed_forward\.w2"):
        pack(
            tiny_model,
            Plan({"layers.0.feed_forward.w2": "nvfp4"}),
            activations=activations("other", 64, torch.ones(64)),
        )


def test_unknown_method(tiny_model):
    with pytest.raises(HswqError, match="unknown way"):
        pack(tiny_model, HYBRID, "best")


def test_progress_can_stop_it(tiny_model):
    seen = []

    def progress(done, total, label):
        seen.append((done, total, label))

    pack(tiny_model, HYBRID, progress=progress)
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == len(tiny_model.checkpoint)


def test_fused_parts_of_different_amplitude_keep_their_accuracy(tiny_model):
    # q, k, v with amplitudes 1 : .05 : .2 under one tensor scale: each as accurate as packed alone.
    torch.manual_seed(3)
    parts = [torch.randn(64, 64) * amplitude for amplitude in (1.0, 0.05, 0.2)]
    name = "layers.0.attention.qkv.weight"
    source = tiny_model.with_checkpoint(tiny_model.checkpoint.with_values({name: torch.cat(parts)}))
    fused = pack(source, Plan({"layers.0.attention.qkv": "nvfp4"})).checkpoint[name]
    assert isinstance(fused, Nvfp4Weight)
    for got, part in zip(packing.dequantize(fused).split(64), parts, strict=True):
        alone = packing.dequantize(packing.pack_weight(part, "nvfp4", 64, "sweep"))
        assert (got - part).norm() <= 1.03 * (alone - part).norm()


@pytest.mark.parametrize("plan", [{"*": "nvfp4"}, "plan.json", None])
def test_what_is_no_plan_is_refused_with_what_to_do(tiny_model, plan):
    with pytest.raises(HswqError, match=r"this is no plan.*hl\.Plan"):
        pack(tiny_model, plan)
    with pytest.raises(HswqError, match=r"no loaded model.*hl\.load\('model\.safetensors'\)"):
        pack("model.safetensors", Plan({"*": "nvfp4"}))


@pytest.mark.parametrize("what", [{"activations": "a.json"}, {"moments": 3}, {"bases": "b"}])
def test_statistics_that_are_none_are_refused_with_what_to_do(tiny_model, what):
    with pytest.raises(HswqError, match=r"did not come from.*call "):
        pack(tiny_model, Plan({"x_embedder": "nvfp4"}), **what)


@pytest.mark.parametrize(
    ("what", "match"), [({"path": None}, "named by its path"), ({"max_shard_bytes": -1}, "size of a part")]
)
def test_impossible_targets(tiny_model, tmp_path, what, match):
    path = tmp_path / "x.safetensors"
    with pytest.raises(HswqError, match=match):
        pack_to_file(tiny_model, **{"path": path, "plan": Plan({"x_embedder": "int8"}), **what})
    assert not list(tmp_path.iterdir())
