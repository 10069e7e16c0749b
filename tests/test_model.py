"""Model: declared state, networks rebuilt from it, LoRAs put on and taken off without a trace."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from hswq_lab import loading, packing
from hswq_lab.attachments import Attachments
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.declared import Attachment
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight, PackedWeight, group_for
from hswq_lab.lora import lora_from_tensors
from hswq_lab.model import Model

STEPS = 3


def packed_checkpoint(checkpoint: Checkpoint, layers, *, calibrated: bool = True) -> Checkpoint:
    """Every third layer INT8, the rest NVFP4, all rotated."""
    values = {}
    for index, layer in enumerate(layers):
        weight = checkpoint[f"{layer}.weight"]
        form = "int8_tensorwise" if index % 3 == 0 else "nvfp4"
        packed = packing.pack_weight(weight.float(), form, group_for(weight.shape[1]))
        if isinstance(packed, Nvfp4Weight) and calibrated:
            packed = packed.with_input_scale(torch.tensor(6.0 / 2688))
        values[f"{layer}.weight"] = packed
    return checkpoint.with_values(values)


@pytest.fixture
def pack(tiny_model: Model) -> Model:
    return tiny_model.with_checkpoint(packed_checkpoint(tiny_model.checkpoint, tiny_model.layers()), "pack")


@pytest.fixture
def lora():
    return make_lora(seed=5)


def make_lora(seed: int, strength: float = 0.3):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for block in range(2):
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            stem = f"transformer.layers.{block}.attention.{part}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, 64, generator=generator) / 8
            tensors[f"{stem}.lora_B.weight"] = torch.randn(64, 4, generator=generator) * strength / 2
    return lora_from_tensors(tensors, name=f"lora{seed}")


def picture(model: Model) -> torch.Tensor:
    return model.generate("a thing", seed=7, steps=STEPS).latents


def stored(model: Model) -> dict[str, PackedWeight | torch.Tensor]:
    return {name: layer.weight for name, layer in model.linears().items()}


def same_weights(a, b) -> bool:
    def same(x, y) -> bool:
        return x.same_bits(y) if isinstance(x, PackedWeight) else torch.equal(x, y)

    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def test_same_seed_same_bits_and_another_seed_not(tiny_model: Model) -> None:
    assert torch.equal(picture(tiny_model), picture(tiny_model))
    assert not torch.equal(picture(tiny_model), tiny_model.generate("a thing", seed=8, steps=STEPS).latents)


def test_same_bits_in_another_process(pack: Model, tmp_path: Path) -> None:
    path = loading.save(pack, tmp_path / "pack.safetensors")
    script = (
        "import sys, torch; torch.set_num_threads(1); import hswq_lab as hl\n"
        "run = hl.load(sys.argv[1]).generate(torch.ones(5, 512), seed=7, steps=3, size=(16, 16), cfg=1.0)\n"
        "torch.save(run.latents, sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", script, str(path), str(tmp_path / "out.pt")], check=True)
    # Opened from the file there is no companion, so sizes are in the real model's cells of 8 pixels.
    here = loading.load(path).generate(torch.ones(5, 512), seed=7, steps=3, size=(16, 16), cfg=1.0)
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True), here.latents)


def test_prompt_seed_and_guidance_matter(tiny_model: Model) -> None:
    base = picture(tiny_model)
    assert not torch.equal(base, tiny_model.generate("another thing", seed=7, steps=STEPS).latents)
    assert not torch.equal(base, tiny_model.generate("a thing", seed=7, steps=STEPS, cfg=1.0).latents)


def test_second_generation_after_unload_equals_the_first(pack: Model, lora) -> None:
    for how in ("branch", "bake"):
        report = pack.attach(lora, 0.8, how)
        first, weights, evidence = picture(pack), stored(pack), report.to_dict()
        network = weakref.ref(pack.network())
        pack.unload()
        gc.collect()
        assert network() is None, "the purge must really drop the network"
        assert torch.equal(picture(pack), first)
        assert same_weights(stored(pack), weights)
        assert pack.bake_report().to_dict() == evidence
        pack.detach(lora)


@pytest.mark.parametrize("how", ["branch", "bake"])
def test_attach_and_detach_leave_no_trace(pack: Model, lora, how: str) -> None:
    pristine, weights = picture(pack), stored(pack)
    for strength in (0.5, 1.0, -0.7):
        pack.attach(lora, strength, how)
        assert not torch.equal(picture(pack), pristine)
        pack.detach(lora)
    assert torch.equal(picture(pack), pristine)
    assert same_weights(stored(pack), weights)
    assert pack.loras == []


def test_a_second_bake_starts_from_the_pristine_weights(pack: Model, lora) -> None:
    pack.attach(lora, 1.0, "bake")
    once = stored(pack)
    pack.detach(lora)
    pack.attach(lora, 0.4, "bake")
    pack.set_strength(lora, 1.0)
    assert same_weights(stored(pack), once)


def test_two_bakes_are_one_requantisation_of_their_sum(pack: Model, lora) -> None:
    other = make_lora(seed=6)
    pack.attach(lora, 1.0, "bake")
    pack.attach(other, 1.0, "bake")
    both = stored(pack)
    pack.detach(lora)
    pack.detach(other)
    pack.attach(other, 1.0, "bake")
    pack.attach(lora, 1.0, "bake")
    reversed_order = stored(pack)
    name = "layers.0.attention.out"
    a, b = packing.dequantize(both[name]), packing.dequantize(reversed_order[name])
    assert (a != b).float().mean() < 0.01  # fp32 sums in another order may cross a rounding boundary


def test_what_is_done_to_a_network_never_reaches_the_checkpoint_in_memory_unnoticed(
    tiny_model: Model, tiny_tensors
) -> None:
    kept = {name: value.float().clone() for name, value in tiny_tensors.items()}
    model = tiny_model.with_checkpoint(Checkpoint.from_mapping(kept))
    first = picture(model)
    for parameter in model.network().parameters():
        parameter.data.mul_(2)
    biased = next(layer for layer in model.linears().values() if layer.bias is not None)
    biased.bias.add_(1)
    assert not torch.equal(picture(model), first)
    model.unload()
    assert torch.equal(picture(model), first), "what is small is the network's own"
    name = "layers.1.attention.out"
    assert model.linears()[name].weight.data_ptr() == kept[f"{name}.weight"].data_ptr(), (
        "what is large is shared"
    )
    model.linears()[name].weight.mul_(2)
    model.unload()
    with pytest.raises(HswqError, match=rf"changed in place.*{name}\.weight"):
        picture(model)
    pack_weight = packing.pack_weight(kept["layers.0.attention.out.weight"], "nvfp4", 64, "rtn")
    packed = Checkpoint.from_mapping({"a.weight": pack_weight})
    packed["a.weight"].codes[0, 0] += 1
    with pytest.raises(HswqError, match="changed in place"):
        packed["a.weight"]


def test_tensors_of_inference_mode_make_a_checkpoint() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    assert torch.equal(Checkpoint.from_mapping({"a": made})["a"], torch.ones(3))


def test_branch_strength_changes_without_a_rebuild(pack: Model, lora) -> None:
    pack.attach(lora, 1.0)
    network = pack.network()
    pack.set_strength(lora, 0.25)
    assert pack.network() is network
    changed = picture(pack)
    pack.detach(lora)
    pack.attach(lora, 0.25)
    assert torch.equal(picture(pack), changed)
    assert pack.loras[0].strength == 0.25


def test_a_view_in_another_mode_shares_weights_and_changes_nothing(pack: Model) -> None:
    before = picture(pack)
    view = pack.in_mode("tc")
    assert not torch.equal(picture(view), before)
    assert torch.equal(picture(pack), before)
    mine, theirs = pack.linears(), view.linears()
    assert all(mine[name].weight is theirs[name].weight for name in mine)
    assert {row.mode for row in view.report().layers} == {"tc", "int8"}
    assert {row.mode for row in pack.report().layers} == {"parity", "int8"}


def test_tc_without_input_scale_is_refused_by_name_unless_asked(tiny_model: Model) -> None:
    bare = packed_checkpoint(tiny_model.checkpoint, tiny_model.layers(), calibrated=False)
    pack = tiny_model.with_checkpoint(bare)
    with pytest.raises(HswqError, match="no input_scale") as refusal:
        pack.in_mode("tc")
    assert refusal.value.tensor in pack.layers()
    pictures = [picture(pack.in_mode("tc", uncalibrated)) for uncalibrated in ("dynamic", "unit")]
    assert not torch.equal(*pictures)
    assert "no input_scale" in pack.in_mode("tc", "unit").report().layers[1].why


def test_a_lora_that_does_not_fit_changes_nothing(pack: Model) -> None:
    wrong = lora_from_tensors(
        {
            "transformer.layers.9.attention.to_q.lora_A.weight": torch.ones(2, 64),
            "transformer.layers.9.attention.to_q.lora_B.weight": torch.ones(64, 2),
        },
        name="wrong",
    )
    before = picture(pack)
    with pytest.raises(HswqError, match="match no layer"):
        pack.attach(wrong)
    assert pack.loras == []
    assert torch.equal(picture(pack), before)


def test_attaching_twice_and_detaching_a_stranger_are_refused(pack: Model, lora) -> None:
    pack.attach(lora)
    with pytest.raises(HswqError, match="attached already"):
        pack.attach(lora, 0.5)
    with pytest.raises(HswqError, match="not attached"):
        pack.detach(make_lora(seed=9))
    assert len(pack.loras) == 1


def test_bake_from_source_needs_a_source_and_is_not_mixed_with_bake(
    pack: Model, tiny_model: Model, lora
) -> None:
    with pytest.raises(HswqError, match="needs the 16-bit checkpoint"):
        pack.attach(lora, how="bake_from_source")
    pack.attach(lora, how="bake")
    with pytest.raises(HswqError, match="cannot be on one model"):
        pack.attach(make_lora(seed=6), how="bake_from_source", source=tiny_model.checkpoint)


def test_all_loras_of_a_model_have_one_source(pack: Model, tiny_model: Model, lora) -> None:
    source = tiny_model.checkpoint
    name = "layers.0.attention.out.weight"
    same, other = source.with_values({}), source.with_values({name: source[name] * 0.5})
    pack.attach(lora, how="bake_from_source", source=source)
    with pytest.raises(HswqError, match="different sources"):
        pack.attach(make_lora(seed=6), how="bake_from_source", source=other)
    pack.attach(make_lora(seed=6), how="bake_from_source", source=same)
    assert len(pack.loras) == 2


def test_a_source_counts_in_the_key_of_every_baked_layer(tiny_model: Model) -> None:
    layers = ("layers.0.attention.out", "layers.1.attention.out")
    first, second = (
        lora_from_tensors({f"{layer}.diff": torch.ones(64, 64) / 8}, name=layer) for layer in layers
    )
    found = [
        Attachments(
            tiny_model.checkpoint,
            tiny_model.layers(),
            [Attachment(first, 1.0, "bake", source), Attachment(second, 1.0, "bake")],
        ).bake_key(layers[1])
        for source in (None, tiny_model.checkpoint, tiny_model.checkpoint.with_values({}))
    ]
    assert found[0] != found[1]
    assert found[1] == found[2]


def test_saving_a_bake_and_opening_it_gives_the_same_weights(pack: Model, lora, tmp_path: Path) -> None:
    pack.attach(lora, 0.8, "bake")
    opened = loading.load(loading.save(pack, tmp_path / "baked.safetensors"))
    assert same_weights(stored(opened), stored(pack))
    assert lora.sha256 in opened.checkpoint.metadata[loading.LORAS_KEY]
    assert opened.checkpoint.metadata["made_by"] == "tests"


def test_a_branch_cannot_be_saved(pack: Model, lora, tmp_path: Path) -> None:
    pack.attach(lora)
    with pytest.raises(HswqError, match="branch cannot be saved"):
        loading.save(pack, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_report_counts_calls_rows_and_clipped_blocks(pack: Model) -> None:
    view = pack.in_mode("tc")
    assert sum(row.calls for row in view.report().layers) == 0
    picture(view)
    row = next(r for r in view.report().layers if r.mode == "tc" and r.layer.endswith("feed_forward.w1"))
    assert row.calls == STEPS
    assert row.blocks == row.rows * row.k // 16
    work = {kind.arithmetic: kind for kind in view.report().work()}
    assert set(work) == {"W4A4 emulated", "INT8"}
    emulated = work["W4A4 emulated"]
    assert (emulated.fallbacks, work["INT8"].fallbacks) == (emulated.calls, 0)
    assert sum(kind.flop for kind in work.values()) == sum(r.flop for r in view.report().layers) > 0
    assert "W4A4 emulated" in str(view.report())
    assert "no FP4 tensor cores" in str(view.report())
    tiny_scale = {
        f"{name}.weight": layer.weight.with_input_scale(torch.tensor(1e-5))
        for name, layer in view.linears().items()
        if isinstance(layer.weight, Nvfp4Weight)
    }
    clipping = pack.with_checkpoint(pack.checkpoint.with_values(tiny_scale)).in_mode("tc")
    picture(clipping)
    assert all(r.clipped > 0 for r in clipping.report().layers if r.mode == "tc")


@pytest.mark.parametrize(
    "lost", ["layers.0.feed_forward.w2.weight", "layers.1.ffn_norm1.weight", "x_embedder.bias"]
)
def test_a_missing_tensor_is_named(tiny_tensors, tiny_companion, lost: str) -> None:
    tensors = {name: value for name, value in tiny_tensors.items() if name != lost}
    with pytest.raises(HswqError) as refusal:
        Model(Checkpoint.from_mapping(tensors), name="m", companion=tiny_companion).network()
    assert refusal.value.tensor == lost


def test_load_refuses_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HswqError, match="no such model"):
        loading.load(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("size", [(15, 16), (0, 16), (12, 16)])
def test_a_size_that_does_not_fit_is_refused(tiny_model: Model, size) -> None:
    with pytest.raises(HswqError, match="multiples of 8"):
        tiny_model.generate("a thing", size=size)


def test_a_model_is_a_source_and_what_is_no_lora_is_refused(pack: Model, tiny_model: Model, lora) -> None:
    with pytest.raises(HswqError, match="no loaded LoRA"):
        pack.attach("style.safetensors")  # type: ignore[arg-type]
    with pytest.raises(HswqError, match="no source"):
        pack.attach(lora, how="bake_from_source", source="mini-zimage")  # type: ignore[arg-type]
    assert pack.loras == []
    assert pack.attach(lora, how="bake_from_source", source=tiny_model).verdict == "OK"


def test_a_damaged_block_scale_is_refused_when_the_file_is_opened(pack: Model, tmp_path: Path) -> None:
    path = loading.save(pack, tmp_path / "pack.safetensors")
    name, value = next((k, v) for k, v in pack.checkpoint.items() if isinstance(v, Nvfp4Weight))
    content = bytearray(path.read_bytes())
    scales = value.scales.view(torch.uint8).numpy().tobytes()
    place = content.index(scales)
    content[place] = 0x7F  # NaN in E4M3
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    with pytest.raises(HswqError) as refusal:
        loading.load(damaged)
    assert str(damaged) == refusal.value.file
    assert name.removesuffix(".weight") in (refusal.value.tensor or "")


def test_a_model_is_saved_in_parts(pack: Model, tmp_path: Path) -> None:
    index = loading.save(pack, tmp_path / "x.safetensors", max_shard_bytes=100_000)
    assert index.name == "x.safetensors.index.json"
    assert len(list(tmp_path.glob("x-*.safetensors"))) > 1
    for path in (index, tmp_path):
        read = loading.load(path).checkpoint
        assert read.shapes() == pack.checkpoint.shapes()
        assert all(
            read[name].same_bits(value) if isinstance(value, PackedWeight) else torch.equal(read[name], value)
            for name, value in pack.checkpoint.items()
        )


def test_guidance_must_be_finite_and_a_model_is_saved_as_safetensors(pack: Model, tmp_path: Path) -> None:
    with pytest.raises(HswqError, match="finite"):
        pack.generate("a thing", cfg=float("nan"))
    with pytest.raises(HswqError, match="safetensors"):
        loading.save(pack, tmp_path / "pack.pt")


def test_evidence_of_a_bake_beside_a_branch_counts_each_layer_once(pack: Model, lora) -> None:
    pack.attach(lora, 0.8, "bake")
    layers = pack.bake_report().kind("nvfp4").layers
    noted = [note for note in pack.bake_report().notes if "input_scale" in note]
    pack.attach(make_lora(seed=9), 0.8)
    report = pack.bake_report()
    nvfp4 = report.kind("nvfp4")
    assert (nvfp4.layers, nvfp4.baked, nvfp4.branched, nvfp4.missing) == (layers, layers, layers, 0)
    assert [note for note in report.notes if "input_scale" in note] == noted
    assert f"of {layers} touched layers" in noted[0]
    assert "without --model" in noted[0]


@pytest.mark.parametrize("how", ["branch", "bake"])
def test_a_lora_of_no_strength_moves_no_inputs(pack: Model, lora, how: str) -> None:
    report = pack.attach(lora, 0.0, how)
    assert (report.verdict, report.notes, report.patches_left) == ("N/A", [], 0)


def test_the_report_lists_loras_with_strength_way_and_verdict(pack: Model, lora) -> None:
    assert "LoRA" not in str(pack.report())
    pack.attach(lora, 0.5, "bake")
    (line,) = pack.report().loras
    assert line.startswith(f"{lora.name} ×0.5 (bake) on ")
    assert line.endswith("layers: OK")
    assert f"LoRA {line}" in str(pack.report())
    assert line in pack.in_mode("parity").report().loras
    pack.set_strength(lora, 0.25)
    assert "×0.25 (bake)" in pack.report().loras[0]
    assert "not measured yet" in pack.report().loras[0]
    assert pack.report().to_dict()["loras"] == pack.report().loras
