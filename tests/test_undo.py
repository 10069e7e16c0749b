"""Taking LoRAs off, whatever happens to the file; bakes into baked files; biases; errors that name the layer."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from hashlib import sha256

import pytest
import torch
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab import attachments, ops
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.loading import SEEDS_KEY
from hswq_lab.lora import bake, lora_from_tensors
from hswq_lab.model import Model
from hswq_lab.packing import layer_seed

LAYER = "layers.0.feed_forward.w1"


def make_lora(seed: int = 1, layer: str = LAYER, **more: torch.Tensor):
    generator = torch.Generator().manual_seed(seed)
    factors = {
        f"diffusion_model.{layer}.lora_A.weight": torch.randn(4, 64, generator=generator),
        f"diffusion_model.{layer}.lora_B.weight": torch.randn(128, 4, generator=generator) * 0.2,
    }
    return lora_from_tensors(factors | more, name=f"style{seed}")


@pytest.fixture
def pack_file(tiny_pack: Model, tmp_path):
    return hl.save(tiny_pack, tmp_path / "pack.safetensors")


def picture(model: Model) -> torch.Tensor:
    caption = torch.ones(3, 512)
    return model.generate(caption, seed=7, steps=1, cfg=1.0, size=(16, 16)).latents


@pytest.mark.parametrize("keep", ["file", "memory"])
def test_detaching_restores_the_pack_from_either_place(pack_file, keep) -> None:
    pack = hl.load(pack_file, keep=keep)
    pristine = picture(pack)
    lora = make_lora()
    pack.attach(lora, 1.0, "bake")
    assert not torch.equal(picture(pack), pristine)
    pack.detach(lora)
    assert torch.equal(picture(pack), pristine)
    again = hl.load(pack_file)
    assert hl.diff(pack.checkpoint, again.checkpoint).same
    assert pack.checkpoint.metadata == again.checkpoint.metadata


@pytest.mark.parametrize("how", ["bake", "branch"])
def test_what_a_network_holds_is_not_read_from_the_file_again(pack_file, monkeypatch, how) -> None:
    pack, other = hl.load(pack_file), hl.load(pack_file)
    picture(pack)
    read, get = [], hl.Checkpoint.__getitem__
    monkeypatch.setattr(hl.Checkpoint, "__getitem__", lambda self, name: read.append(name) or get(self, name))
    report = pack.attach(make_lora(), 1.0, how)
    assert f"{LAYER}.weight" not in read
    assert other.attach(make_lora(), 1.0, how).to_dict() == report.to_dict()
    assert f"{LAYER}.weight" in read
    assert torch.equal(picture(pack), picture(other))


def overwrite(path, at: int = 100) -> None:
    """Changes bytes in place, as a tool does that writes into the open file."""
    with path.open("r+b") as stream:
        stream.seek(-at, os.SEEK_END)
        stream.write(b"\x11" * 16)
    os.utime(path, (1, 1))


def test_a_file_that_was_changed_meanwhile_is_refused_and_the_lora_stays(pack_file) -> None:
    pack = hl.load(pack_file)
    lora = make_lora()
    pack.attach(lora, 1.0, "bake")
    baked = picture(pack)
    overwrite(pack_file)
    with pytest.raises(HswqError, match="changed since it was opened") as refusal:
        pack.detach(lora)
    assert str(pack_file) in str(refusal.value)
    assert [item.lora for item in pack.loras] == [lora], "the model is as it was"
    assert torch.equal(picture(pack), baked)
    pack.unload()
    with pytest.raises(HswqError, match="changed since it was opened"):
        picture(pack)


def test_in_memory_nothing_that_happens_to_the_file_matters(pack_file) -> None:
    pack = hl.load(pack_file, keep="memory")
    pristine = picture(pack)
    lora = make_lora()
    pack.attach(lora, 1.0, "bake")
    overwrite(pack_file)
    pack_file.unlink()
    hl.purge(pack)
    pack.detach(lora)
    assert torch.equal(picture(pack), pristine)


def test_a_file_that_is_replaced_keeps_serving_what_was_opened(pack_file, tmp_path) -> None:
    pack = hl.load(pack_file)
    pristine = picture(pack)
    pack.attach(make_lora(), 1.0, "bake")
    other = hl.save(pack, tmp_path / "other.safetensors")
    pack.detach(pack.loras[0].lora)
    shutil.move(other, pack_file)
    pack.unload()
    assert torch.equal(picture(pack), pristine)


def test_a_lora_file_that_was_changed_is_refused(pack_file, tmp_path) -> None:
    file = tmp_path / "style.safetensors"
    save_file(dict(make_lora().tensors), file)
    lora = hl.load_lora(file)
    overwrite(file)
    with pytest.raises(HswqError, match="changed since it was opened"):
        hl.load(pack_file).attach(lora, 1.0, "bake")


def test_an_unknown_place_is_refused(pack_file) -> None:
    with pytest.raises(HswqError, match="unknown place"):
        hl.load(pack_file, keep="disk")


# -- files that have LoRAs in them --------------------------------------------------------------------------


def test_a_baked_file_takes_branches_but_no_further_bake_unless_told(pack_file, tmp_path) -> None:
    pack = hl.load(pack_file)
    pack.attach(make_lora(), 0.8, "bake")
    baked = hl.load(hl.save(pack, tmp_path / "baked.safetensors"))
    with pytest.raises(HswqError, match="baked into this file already") as refusal:
        baked.attach(make_lora(2), 1.0, "bake")
    assert "style1 ×0.8 (bake)" in str(refusal.value)
    assert baked.loras == []
    other = make_lora(2)
    baked.attach(other, 1.0)
    baked.detach(other)
    assert baked.attach(other, 0.5, "bake", allow_baked=True).verdict == "OK"
    metadata = hl.load(hl.save(baked, tmp_path / "twice.safetensors")).checkpoint.metadata
    assert [item["name"] for item in json.loads(metadata["hswq.loras"])] == ["style1", "style2"]
    assert json.loads(metadata[SEEDS_KEY]) == {LAYER: layer_seed(LAYER)}
    with pytest.raises(HswqError, match="baked into this file already"):
        baked.without_loras().attach(other, how="bake_from_source", source=pack.checkpoint, allow_baked=True)


def test_a_file_with_loras_in_it_says_so(pack_file, tmp_path) -> None:
    pack = hl.load(pack_file)
    pack.attach(make_lora(), 0.8, "bake")
    baked = hl.load(hl.save(pack, tmp_path / "baked.safetensors"))
    told = "style1 ×0.8 (bake)"
    assert f"{told} in the file" in repr(baked)
    assert f"LoRA {told}, baked into the file" in str(baked.report())
    assert f"LoRA {told}, baked into the weights" in str(hl.inspect(baked))
    assert baked.report().baked == hl.inspect(baked).loras == [told]


@pytest.mark.parametrize("how", ["branch", "bake"])
def test_a_lora_that_is_in_the_file_applies_twice_only_if_told(pack_file, tmp_path, how) -> None:
    pack, lora = hl.load(pack_file), make_lora()
    pack.attach(lora, 0.8, "bake")
    path = hl.save(pack, tmp_path / "baked.safetensors")
    baked = hl.load(path)
    with pytest.raises(HswqError, match="would apply twice") as refusal:
        baked.attach(lora, 0.5, how)
    assert str(path) in str(refusal.value)
    assert "style1 ×0.8 (bake)" in str(refusal.value)
    assert "--allow-baked" in str(refusal.value)
    assert baked.attach(lora, 0.5, how, allow_baked=True).verdict == "OK"


def test_a_pack_that_was_baked_before_adapter_configs_counted_knows_its_lora(pack_file, tmp_path) -> None:
    folder = tmp_path / "peft"
    folder.mkdir()
    save_file(dict(make_lora().tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4}')
    lora = hl.load_lora(folder)
    alone = sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert (lora.file_sha256, lora.sha256 != alone) == (alone, True)
    pack = hl.load(pack_file)
    told = json.dumps([{"name": "style", "sha256": alone, "strength": 0.8, "how": "bake"}])
    older = pack.with_checkpoint(pack.checkpoint.with_values({}, {"hswq.loras": told}))
    with pytest.raises(HswqError, match="would apply twice"):
        older.attach(lora)


def test_a_list_of_baked_loras_that_cannot_be_read_is_no_licence(tiny_pack) -> None:
    odd = tiny_pack.with_checkpoint(tiny_pack.checkpoint.with_values({}, {"hswq.loras": "[7]"}))
    assert "hswq.loras cannot be read" in repr(odd)
    assert "hswq.loras cannot be read" in str(odd.report())
    with pytest.raises(HswqError, match="list of baked LoRAs"):
        odd.attach(make_lora(), 1.0, "bake")


# -- biases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["branch", "bake"])
@pytest.mark.parametrize("layer", ["x_embedder", LAYER])
def test_a_delta_of_the_bias_alone_has_evidence(tiny_pack: Model, how, layer) -> None:
    n = tiny_pack.layers()[layer][0]
    small = torch.full((n,), 3e-4)
    lora = lora_from_tensors({f"diffusion_model.{layer}.diff_b": small}, name="bias")
    before = tiny_pack.linears()[layer].bias
    report = tiny_pack.attach(lora, 2.0, how)
    (row,) = report.rows
    assert (row.layer, row.kind, row.way, row.verdict) == (layer, "bias", how, "OK")
    assert row.delta_norm == pytest.approx(6e-4 * n**0.5, rel=1e-5)
    assert abs(row.retained - 1) <= 4 * row.retained_se + 1e-3
    assert report.kind("bias").verdict == report.verdict == "OK"
    assert report.patches_left == 0
    if how == "bake":
        old = torch.zeros(n) if before is None else before
        change = tiny_pack.linears()[layer].bias - old
        assert float(change.mean()) == pytest.approx(6e-4, rel=0.5), "rounding to nearest would lose it"
    tiny_pack.detach(lora)
    assert tiny_pack.linears()[layer].bias is before or torch.equal(tiny_pack.linears()[layer].bias, before)


def test_a_bias_that_did_not_arrive_is_missing(tiny_pack: Model, monkeypatch) -> None:
    monkeypatch.setattr(attachments, "bake_bias", lambda bias, *_: bias)
    lora = lora_from_tensors({"diffusion_model.x_embedder.diff_b": torch.ones(64)}, name="bias")
    report = tiny_pack.attach(lora, 1.0, "bake")
    assert report.verdict == "MISSING"
    assert report.patches_left == 1


def test_weight_and_bias_of_one_layer_are_two_rows(tiny_pack: Model) -> None:
    more = {f"diffusion_model.{LAYER}.diff_b": torch.ones(128)}
    report = tiny_pack.attach(make_lora(**more), 1.0, "bake")
    assert [row.kind for row in report.rows] == ["int8" if report.rows[0].kind == "int8" else "nvfp4", "bias"]


# -- errors -------------------------------------------------------------------------------------------------


def test_an_error_inside_a_bake_names_file_and_layer(pack_file, monkeypatch) -> None:
    def fail(*_args: object) -> None:
        raise HswqError("the weight is not finite")

    pack = hl.load(pack_file)
    monkeypatch.setattr(attachments, "put_in_place", fail)
    with pytest.raises(HswqError, match="not finite") as refusal:
        pack.attach(make_lora(), 1.0, "bake")
    assert refusal.value.tensor in pack.layers()
    assert refusal.value.file == str(pack_file)
    assert pack.loras == []
    assert isinstance(pack.checkpoint[f"{LAYER}.weight"], PackedWeight)


@pytest.mark.parametrize("how", ["branch", "bake"])
@pytest.mark.parametrize("kind", ["LoRA", "diff", "LoHa", "LoKr", "DoRA", "set_weight", "bias"])
def test_a_strength_of_which_no_picture_can_come_is_refused_before_anything_changes(
    pack_file, how, kind
) -> None:
    pack = hl.load(pack_file)
    if how == "branch" and kind in ("diff", "LoHa", "set_weight"):
        return
    lora = _one_layer(kind)
    before = pack.linears()[LAYER].weight
    for strength in (1e30, -1e30, 3e38, 1e6):
        with pytest.raises(HswqError, match=f"strength {strength:g}".replace("+", r"\+")) as refusal:
            pack.attach(lora, strength, how)
        assert refusal.value.tensor == LAYER
    assert pack.loras == []
    pack.attach(lora, 0.5, how)
    with pytest.raises(HswqError, match="so much larger than the weights"):
        pack.set_strength(lora, 1e30)
    assert [item.strength for item in pack.loras] == [0.5]
    pack.detach(lora)
    assert pack.linears()[LAYER].weight.same_bits(before)
    assert pack.linears()[LAYER].branches is None


def _one_layer(kind: str):
    """A LoRA of one kind on LAYER [128, 64], with a delta of ordinary size."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    tensors = {
        "LoRA": {"lora_A.weight": normal(4, 64) / 8, "lora_B.weight": normal(128, 4) / 8},
        "diff": {"diff": normal(128, 64) / 50},
        "LoHa": {
            "hada_w1_a": normal(128, 2) / 4,
            "hada_w1_b": normal(2, 64) / 4,
            "hada_w2_a": normal(128, 2) / 4,
            "hada_w2_b": normal(2, 64) / 4,
        },
        "LoKr": {"lokr_w1": normal(8, 8) / 8, "lokr_w2": normal(16, 8) / 8},
        "bias": {"diff_b": normal(128) / 8},
        "set_weight": {"set_weight": normal(128, 64) / 8},
    }
    tensors["DoRA"] = {**tensors["LoRA"], "lora_magnitude_vector": torch.ones(128)}
    return lora_from_tensors(
        {f"diffusion_model.{LAYER}.{key}": value for key, value in tensors[kind].items()}
    )


# -- once is enough -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("built", [True, False])
def test_a_weight_is_baked_once_for_evidence_network_and_file(
    pack_file, tmp_path, monkeypatch, built
) -> None:
    pack, calls = hl.load(pack_file), []
    original = bake.bake
    monkeypatch.setattr(bake, "bake", lambda *args: calls.append(args[2]) or original(*args))
    if built:
        pack.network()
    report = pack.attach(make_lora(), 1.0, "bake")
    assert pack.bake_report().rows == report.rows
    pack.network()
    hl.save(pack, tmp_path / "baked.safetensors")
    assert calls == [LAYER]
    written = hl.load(tmp_path / "baked.safetensors").checkpoint[f"{LAYER}.weight"]
    assert pack.linears()[LAYER].weight.same_bits(written)
    # Nothing outlives a purge: the next use makes the same bits from the file.
    pack.unload()
    assert pack.linears()[LAYER].weight.same_bits(written)
    assert calls == [LAYER, LAYER]


@pytest.mark.gpu
@pytest.mark.skipif(not ops.backends()["cuda"].usable, reason="no usable card")
@pytest.mark.parametrize("how", ["branch", "bake"])
def test_on_a_card_every_way_arrives_as_on_the_cpu(pack_file, how) -> None:
    more = {f"diffusion_model.{LAYER}.lora_magnitude_vector": torch.ones(128)}
    for lora in (make_lora(), make_lora(**more)):
        here, there = hl.load(pack_file, device="cpu"), hl.load(pack_file, device="cuda")
        reports = [model.attach(lora, 0.8, how) for model in (here, there)]
        assert reports[0].verdict == reports[1].verdict == "OK"
        assert reports[0].rows[0].retained == pytest.approx(reports[1].rows[0].retained, abs=1e-4)
        assert there.linears()[LAYER].weight.to("cpu").same_bits(here.linears()[LAYER].weight)
