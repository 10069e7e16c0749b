"""The famous failure as a test: generate, purge everything, generate again; the picture and its evidence stay."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from model_state import weight_bytes

import hswq_lab as hl
from hswq_lab import spec
from hswq_lab.formats import group_for
from hswq_lab.lora import lora_from_tensors
from hswq_lab.model import Model
from hswq_lab.packing import pack_weight

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from synth_zimage import TOY, tensors

STEPS = 2
NVFP4 = 86  # of the 180 layers that a LoRA for Z-Image touches, as in the pack of the reference system


def touched_layers(layers: list[str]) -> list[str]:
    """The six Linears of each of the 30 main blocks: attention, feed-forward and modulation."""
    return [layer for layer in layers if layer.startswith("layers.")]


@pytest.fixture(scope="module")
def toy_pack(tmp_path_factory) -> Path:
    """The real list of 208 Linears at width 64: 86 NVFP4, 94 INT8 and 28 16-bit ones, in a file."""
    values = dict(tensors(TOY))
    model = Model(hl.Checkpoint.from_mapping(values), name="toy")
    layers = list(model.layers())
    assert len(layers) == 208
    touched = touched_layers(layers)
    assert len(touched) == 180
    for place, layer in enumerate(touched):
        name = f"{layer}.weight"
        # The NVFP4 layers are spread evenly over the list.
        nvfp4 = (place + 1) * NVFP4 // 180 > place * NVFP4 // 180
        group = group_for(values[name].shape[1])
        values[name] = pack_weight(values[name], "nvfp4" if nvfp4 else "int8_tensorwise", group, name=name)
    path = tmp_path_factory.mktemp("toy") / "toy_hybrid.safetensors"
    return hl.Checkpoint.from_mapping(values).save(path)


@pytest.fixture(scope="module")
def toy_lora(toy_pack: Path):
    """A rank-4 LoRA on the 180 layers, ‖ΔW‖ about 8 % of ‖W‖."""
    layers = hl.load(toy_pack).layers()
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for layer in touched_layers(list(layers)):
        n, k = layers[layer]
        factors[f"diffusion_model.{layer}.lora_A.weight"] = torch.randn(4, k, generator=generator) / k**0.5
        factors[f"diffusion_model.{layer}.lora_B.weight"] = torch.randn(n, 4, generator=generator) * 0.03
    return lora_from_tensors(factors, name="style")


def toy_picture(model: Model) -> torch.Tensor:
    caption = torch.ones(3, TOY.cap_dim)
    return model.generate(caption, seed=7, steps=STEPS, cfg=1.0, size=(32, 32)).latents


def test_86_nvfp4_and_94_int8_layers_twice_with_a_purge_between(toy_pack, toy_lora) -> None:
    pack = hl.load(toy_pack)
    plain = toy_picture(pack)
    report = pack.attach(toy_lora, 0.8, "bake")
    line = "nvfp4_baked=86 int8_baked=94 other_qt_baked=0 patches_left=0"
    assert report.log_line == line
    for kind, count in (("nvfp4", 86), ("int8", 94)):
        counts = report.kind(kind)
        assert (counts.unrotated, counts.rerotated, counts.rotated) == (count, count, count)
        assert counts.verdict == "OK"
    first, baked = toy_picture(pack), weight_bytes(pack)
    assert not torch.equal(first, plain)

    cached = pack.spec()  # what a sweep over seeds would keep in this process
    unsaved = weakref.ref(cached.model())
    networks = weakref.ref(pack.network())
    hl.purge(pack)
    assert networks() is None
    assert unsaved() is None
    assert not spec._models

    second = pack.bake_report()
    assert second.log_line == line
    assert second.to_dict() == report.to_dict()
    assert torch.equal(toy_picture(pack), first)
    assert weight_bytes(pack) == baked
    assert torch.equal(toy_picture(cached.model()), first), "a worker's model, built anew from files, too"
    hl.purge(pack)


@pytest.mark.parametrize("how", ["branch", "bake", "bake_from_source"])
def test_the_mini_model_twice_with_a_purge_between(how: str, tmp_path: Path) -> None:
    model = hl.load("mini-zimage", device="cpu")
    plan = hl.Plan({"*": "int8_tensorwise", "layers.*": "nvfp4"})
    path = hl.save(hl.pack(model, plan, scales="rtn"), tmp_path / "pack.safetensors")
    pack = hl.load(path, device="cpu")
    lora = hl.load_lora(model.companion.loras["outline"])
    prompt = model.prompts[0]
    plain = pack.generate(prompt, steps=STEPS).latents
    report = pack.attach(lora, 1.0, how, source=model.checkpoint)
    assert report.kind("nvfp4").layers > 0
    assert report.kind("int8").layers > 0
    assert report.verdict == "OK"
    first = pack.generate(prompt, steps=STEPS).latents
    assert not torch.equal(first, plain)
    hl.purge(pack, model)
    assert torch.equal(pack.generate(prompt, steps=STEPS).latents, first)
    assert pack.bake_report().to_dict() == report.to_dict()
    pack.detach(lora)
    hl.purge(pack)
    assert torch.equal(pack.generate(prompt, steps=STEPS).latents, plain)


def live_tensors() -> tuple[int, int]:
    """Number and bytes of all tensors in the process."""
    gc.collect()
    # Only strided ones: other tests of the process may have left sparse or nested tensors, which have no nbytes.
    tensors = (item for item in gc.get_objects() if type(item) is torch.Tensor)
    live = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return len(live), sum(tensor.nbytes for tensor in live)


@pytest.mark.parametrize("how", ["branch", "bake"])
def test_100_cycles_leave_no_trace_in_bytes_or_in_memory(tiny_pack: Model, how: str) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = "layers.0.feed_forward.w1"
    factors = {
        f"diffusion_model.{layer}.lora_A.weight": torch.randn(4, 64, generator=generator),
        f"diffusion_model.{layer}.lora_B.weight": torch.randn(128, 4, generator=generator) * 0.1,
    }
    lora = lora_from_tensors(factors, name="style")
    tiny_pack.network()
    pristine = weight_bytes(tiny_pack)
    early = 0, 0
    for cycle in range(100):
        tiny_pack.attach(lora, 0.5 + cycle / 100, how)
        if cycle % 25 == 0:
            assert weight_bytes(tiny_pack)[layer] != pristine[layer]
        tiny_pack.detach(lora)
        if cycle == 9:
            early = live_tensors()
    count, size = live_tensors()
    assert count <= early[0]
    assert size <= early[1]
    assert weight_bytes(tiny_pack) == pristine
    assert tiny_pack.loras == []
