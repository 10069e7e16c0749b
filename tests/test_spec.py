"""ModelSpec: small, picklable, the same model anywhere; spilled files go away, changed ones are refused."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hswq_lab import ops, spec
from hswq_lab.captions import CaptionTable
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.lora import lora_from_tensors
from hswq_lab.model import Model


def run_of(model):
    return model.generate("a thing", seed=5, steps=3).latents


def rebuilt(model):
    """The model as a fresh process would build it."""
    spec.forget_models()
    return pickle.loads(pickle.dumps(model.spec())).model()  # noqa: S301  # our own bytes


@pytest.fixture
def lora():
    generator = torch.Generator().manual_seed(3)
    return lora_from_tensors(
        {
            "diffusion_model.layers.0.attention.out.lora_A.weight": torch.randn(4, 64, generator=generator),
            "diffusion_model.layers.0.attention.out.lora_B.weight": torch.randn(64, 4, generator=generator),
        },
        name="noise",
    )


@pytest.mark.parametrize("mode", ["parity", "tc", "tc8"])
def test_the_rebuilt_model_gives_the_same_bits(tiny_pack, mode):
    model = tiny_pack.in_mode(mode)
    again = rebuilt(model)
    assert again is not model
    assert again.request == model.request
    assert torch.equal(run_of(again), run_of(model))


def test_dtype_device_and_name_travel(tiny_model):
    model = tiny_model.on("cpu", torch.bfloat16)
    again = rebuilt(model)
    assert (again.dtype, again.device, again.name) == (torch.bfloat16, model.device, "tiny")
    assert torch.equal(run_of(again), run_of(model))


def test_a_spec_is_small(tiny_pack):
    assert len(pickle.dumps(tiny_pack.spec())) < 20_000


@pytest.mark.parametrize("how", ["branch", "bake", "bake_from_source"])
def test_loras_travel(tiny_model, tiny_pack, lora, how):
    source = tiny_model.checkpoint if how == "bake_from_source" else None
    plain = run_of(tiny_pack)
    tiny_pack.attach(lora, 0.7, how, source)
    again = rebuilt(tiny_pack)
    assert [(item.strength, item.how) for item in again.loras] == [(0.7, how)]
    assert torch.equal(run_of(again), run_of(tiny_pack))
    assert not torch.equal(run_of(again), plain)


def test_an_unsaved_checkpoint_spills_once_and_goes_away_with_the_model(tiny_tensors, tiny_companion):
    model = Model(Checkpoint.from_mapping(tiny_tensors, {}), name="unsaved", companion=tiny_companion)
    file = Path(model.spec().file.path)
    assert file.is_file()
    view = model.in_mode("parity")
    assert view.spec().file == model.spec().file
    del model
    gc.collect()
    assert file.is_file(), "a view still needs it"
    del view
    gc.collect()
    assert not file.exists()
    assert not file.parent.exists()


def test_a_saved_checkpoint_is_named_not_copied(tiny_model, tiny_companion, tmp_path):
    path = tiny_model.checkpoint.save(tmp_path / "tiny.safetensors")
    model = Model(Checkpoint.open(path), name="saved", companion=tiny_companion)
    assert model.spec().file.path == str(path.resolve())
    assert torch.equal(run_of(rebuilt(model)), run_of(tiny_model))


def test_a_changed_or_missing_file_is_refused(tiny_model, tiny_companion, tmp_path):
    path = tiny_model.checkpoint.save(tmp_path / "tiny.safetensors")
    made = Model(Checkpoint.open(path), name="saved", companion=tiny_companion).spec()
    gc.collect()
    Checkpoint.from_mapping(dict(tiny_model.checkpoint), {"changed": "yes"}).save(path)
    with pytest.raises(HswqError, match="holds something else") as caught:
        made.model()
    assert caught.value.file == str(path.resolve())
    assert caught.value.expected == made.file.sha256
    path.unlink()
    with pytest.raises(HswqError):
        made.model()


def test_the_cache_keeps_the_last_few(tiny_pack):
    made = tiny_pack.in_mode("tc").spec()
    first = made.model()
    assert made.model() is first
    assert pickle.loads(pickle.dumps(made)).model() is first  # noqa: S301  # our own bytes
    for dtype in (torch.float32, torch.bfloat16):
        for mode in ("parity", "tc8"):
            tiny_pack.on("cpu", dtype).in_mode(mode).spec().model()
    assert len(spec._models) == spec.CACHED_MODELS
    assert made.model() is not first, "the oldest went"


def test_models_of_one_file_share_its_weights(tiny_pack):
    parity, tc = (rebuilt(tiny_pack.in_mode(mode)) for mode in ("parity", "tc"))
    weights = [model.linears()["layers.0.attention.qkv"].weight for model in (parity, tc)]
    assert weights[0] is weights[1]


def test_threads_of_the_caller_are_those_of_the_worker(tiny_model):
    made = tiny_model.spec()
    assert made.threads == torch.get_num_threads() == 1

    def work():
        torch.set_num_threads(2)
        made.model()
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == 1
    torch.set_num_threads(1)


def test_the_back_end_that_was_asked_for_travels(tiny_model):
    with ops.use_backend("reference"):
        made = tiny_model.spec()
    assert made.backend == "reference"
    assert ops.asked_backend() is None
    with made.asked():
        assert ops.asked_backend() == "reference"
    assert tiny_model.spec().backend is None
    with tiny_model.spec().asked():
        assert ops.asked_backend() is None


def test_another_reading_of_a_lokr_in_memory_travels(tiny_pack):
    stem = "layers.0.attention.out"
    tensors = {f"{stem}.lokr_w1": torch.ones(4, 4), f"{stem}.lokr_w2": torch.ones(16, 16)}
    tensors[f"{stem}.alpha"] = torch.tensor(1.0)
    lora = lora_from_tensors(tensors, {"ss_network_dim": "32"}, full_lokr_scale="alpha/dim")
    tiny_pack.attach(lora, 0.1, "bake")
    assert rebuilt(tiny_pack).loras[0].lora.entries[0].scale.value == 1 / 32


def test_models_of_other_captions_are_other_models(tiny_checkpoint, tiny_companion):
    def made(values):
        table = CaptionTable("captions.safetensors", {"a fox": values})
        companion = replace(tiny_companion, encode=table)
        return Model(tiny_checkpoint, name="tiny", companion=companion).spec()

    first, same, other = made(torch.zeros(3, 4)), made(torch.zeros(3, 4)), made(torch.ones(3, 4))
    assert first == same
    assert pickle.loads(pickle.dumps(first)) == first  # noqa: S301  # our own bytes
    assert first != other
    assert torch.equal(other.model().encode("a fox"), torch.ones(3, 4))


def test_a_companion_that_no_other_process_can_know_is_itself(tiny_companion):
    one, two = (replace(tiny_companion, encode=lambda prompt: torch.zeros(1, 4)) for _ in range(2))
    assert one.identity == one.identity != two.identity
