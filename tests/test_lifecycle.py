"""Random lives of models: after every step their numbers are those of a new process with the same declared state.

HSWQ_FUZZ=500 makes a campaign of it; in the suite the sequences are always the same ones.
"""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_state import Declared, fingerprints, fingerprints_made_anew
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab import assembly
from hswq_lab.loading import MODEL_KEY

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
BOTH = st.sampled_from([0, 1])
STRENGTHS = st.sampled_from([1.0, 0.5, -1.0, 0.0])
LORAS = ("one.safetensors", "two.safetensors", "bias.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tensors):
    """A 16-bit model, a calibrated hybrid of it, three LoRAs that overlap, and one for another model."""
    place = tmp_path_factory.mktemp("lives")
    metadata = {MODEL_KEY: "mini-zimage"}  # lends it a text encoder and small pictures
    hl.Checkpoint.from_mapping(tiny_tensors, metadata).save(place / "source.safetensors")
    model = hl.load(place / "source.safetensors")
    plan = hl.Plan({"*": "int8_tensorwise", "layers.*": "nvfp4", "cap_embedder.*": "16-bit"})
    caption = torch.ones(3, 512)
    pack = hl.calibrate(hl.pack(model, plan, scales="rtn"), prompts=caption, seeds=[1], steps=1)
    hl.save(pack, place / "pack.safetensors")
    generator = torch.Generator().manual_seed(5)

    def factors(layer: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {
            f"diffusion_model.{layer}.lora_A.weight": torch.randn(4, columns, generator=generator),
            f"diffusion_model.{layer}.lora_B.weight": torch.randn(rows, 4, generator=generator) * 0.1,
        }

    one = factors("layers.0.feed_forward.w1", 128, 64) | factors("layers.0.attention.qkv", 192, 64)
    two = factors("layers.0.feed_forward.w1", 128, 64) | factors("noise_refiner.0.attention.out", 64, 64)
    bias = factors("layers.1.feed_forward.w2", 64, 128)
    bias["diffusion_model.final_layer.linear.diff_b"] = torch.ones(
        tiny_tensors["final_layer.linear.bias"].shape
    )
    for name, tensors in zip(LORAS, (one, two, bias), strict=True):
        save_file(tensors, place / name)
    save_file(factors("double_blocks.0.img_attn.proj", 64, 64), place / "foreign.safetensors")
    return place


@pytest.fixture(scope="module")
def elsewhere():
    """Another process; it keeps nothing between two questions."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def global_state() -> tuple[object, ...]:
    """What a library must not change behind the user's back."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_rng_state().numpy().tobytes(),
        torch.backends.cuda.matmul.allow_tf32,
        dict(os.environ),
        [str(entry) for entry in warnings.filters],
    )


class Interrupted(BaseException):
    """Comes from outside in the middle of things, as Ctrl-C does."""


class Lives(RuleBasedStateMachine):
    """Two models of one file, and everything that a notebook may do to them."""

    folder: Path
    elsewhere: ProcessPoolExecutor

    @initialize()
    def open(self) -> None:
        self.globals = global_state()
        self.numbers = count()
        self.scratch = tempfile.TemporaryDirectory()
        self.source = hl.load(self.folder / "source.safetensors")
        self.loras = {name: hl.load_lora(self.folder / name) for name in LORAS}
        self.declared = [Declared(str(self.folder / "pack.safetensors"))] * 2
        self.models = [hl.load(declared.file, "cpu") for declared in self.declared]
        self.baked_file = [False, False]

    def teardown(self) -> None:
        self.scratch.cleanup()

    def put(self, i: int, **changes: object) -> None:
        self.declared[i] = replace(self.declared[i], **changes)

    def refusal(self, i: int, name: str, how: str) -> bool:
        ways = {way for _, _, way in self.declared[i].loras if way != "branch"}
        attached = any(path.endswith(name) for path, _, _ in self.declared[i].loras)
        baking = how != "branch"
        return attached or (baking and (self.baked_file[i] or bool(ways - {how})))

    @rule(
        i=BOTH,
        name=st.sampled_from(LORAS),
        how=st.sampled_from(["branch", "bake", "bake_from_source"]),
        by=STRENGTHS,
    )
    def attach(self, i: int, name: str, how: str, by: float) -> None:
        if self.refusal(i, name, how):
            with pytest.raises(hl.HswqError):
                self.models[i].attach(self.loras[name], by, how, source=self.source)
        else:
            self.models[i].attach(self.loras[name], by, how, source=self.source)
            self.put(i, loras=(*self.declared[i].loras, (str(self.folder / name), by, how)))

    @rule(i=BOTH)
    def attach_another_models_lora(self, i: int) -> None:
        with pytest.raises(hl.HswqError):
            self.models[i].attach(hl.load_lora(self.folder / "foreign.safetensors"), 1.0, "bake")

    @rule(i=BOTH, name=st.sampled_from(LORAS))
    def detach(self, i: int, name: str) -> None:
        kept = tuple(entry for entry in self.declared[i].loras if not entry[0].endswith(name))
        if kept == self.declared[i].loras:
            with pytest.raises(hl.HswqError, match="not attached"):
                self.models[i].detach(self.loras[name])
        else:
            self.models[i].detach(self.loras[name])
            self.put(i, loras=kept)

    @precondition(lambda self: any(declared.loras for declared in self.declared))
    @rule(place=st.integers(0, 5), by=STRENGTHS)
    def change_strength(self, place: int, by: float) -> None:
        held = [(i, entry) for i in (0, 1) for entry in self.declared[i].loras]
        i, (path, old, how) = held[place % len(held)]
        self.models[i].set_strength(self.loras[Path(path).name], by)
        changed = [
            (path, by, how) if entry == (path, old, how) else entry for entry in self.declared[i].loras
        ]
        self.put(i, loras=tuple(changed))

    @rule(i=BOTH, mode=st.sampled_from(["auto", "parity", "tc", "tc8"]))
    def change_mode(self, i: int, mode: str) -> None:
        self.models[i] = self.models[i].in_mode(mode)
        self.put(i, mode=mode)

    @rule(i=BOTH, device=st.sampled_from(DEVICES), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def move(self, i: int, device: str, dtype: torch.dtype) -> None:
        self.models[i] = self.models[i].on(device, dtype)
        self.put(i, device=device, dtype=dtype)

    @rule(i=BOTH)
    def unload(self, i: int) -> None:
        self.models[i].unload()

    @rule()
    def purge(self) -> None:
        hl.purge(*self.models)

    @rule(i=BOTH)
    def save_and_open_again(self, i: int) -> None:
        target = Path(self.scratch.name) / f"{next(self.numbers)}.safetensors"
        ways = [how for _, _, how in self.declared[i].loras]
        if "branch" in ways:
            with pytest.raises(hl.HswqError, match="branch"):
                hl.save(self.models[i], target)
            assert not target.exists()
            return
        hl.save(self.models[i], target)
        now = self.declared[i]
        self.models[i] = hl.load(target, now.device, now.dtype, mode=now.mode)
        self.put(i, file=str(target), loras=())
        self.baked_file[i] = self.baked_file[i] or bool(ways)

    @rule(i=BOTH, after=st.integers(0, 1))
    def stop_in_the_middle_of_a_picture(self, i: int, after: int) -> None:
        def stop(step: object) -> None:
            if step.index == after:
                raise Interrupted

        with pytest.raises(Interrupted):
            self.models[i].generate(torch.ones(3, 512), steps=2, cfg=2.0, size=(16, 16), callback=stop)

    @rule(
        i=BOTH,
        name=st.sampled_from(LORAS),
        how=st.sampled_from(["branch", "bake"]),
        after=st.integers(0, 12),
    )
    def stop_in_the_middle_of_an_attachment(self, i: int, name: str, how: str, after: int) -> None:
        if self.refusal(i, name, how):
            return
        self.models[i].network()
        left = [after]

        def make(*args: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Interrupted
            return make_linear(*args)

        make_linear = assembly.make_linear
        with patch.object(assembly, "make_linear", make), pytest.raises(Interrupted):
            self.models[i].attach(self.loras[name], 1.0, how)

    @invariant()
    def equals_a_model_made_anew(self) -> None:
        asked = [
            self.elsewhere.submit(fingerprints_made_anew, declared, str(self.folder / "source.safetensors"))
            for declared in self.declared
        ]
        for model, declared, anew in zip(self.models, self.declared, asked, strict=True):
            assert fingerprints(model) == anew.result(), declared

    @invariant()
    def nothing_global_changes(self) -> None:
        assert global_state() == self.globals


def test_numbers_follow_from_files_and_declared_state_alone(folder, elsewhere):
    run_state_machine_as_test(
        type("TheseLives", (Lives,), {"folder": folder, "elsewhere": elsewhere}),
        settings=settings(
            max_examples=int(os.environ.get("HSWQ_FUZZ", "10")),
            stateful_step_count=12,
            deadline=None,
            derandomize="HSWQ_FUZZ" not in os.environ,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # shrinking a sequence of new processes' answers takes minutes
        ),
    )


def one_cycle(model: hl.Model, lora, how: str) -> None:
    model.attach(lora, 0.7, how)
    model.generate(torch.ones(3, 512), steps=1, cfg=2.0, size=(16, 16))
    model.set_strength(lora, -0.2)
    view = model.in_mode("parity")
    view.generate(torch.ones(3, 512), steps=1, cfg=1.0, size=(16, 16))
    with pytest.raises(hl.HswqError):
        model.attach(lora)
    model.detach(lora)
    model.unload()


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("device", DEVICES)
def test_fifty_cycles_leave_no_trace_in_memory(folder, device):
    model = hl.load(folder / "pack.safetensors", device, torch.float32)
    loras = [hl.load_lora(folder / name) for name in LORAS]
    counts, bytes_on_card = [], []
    for cycle in range(50):
        one_cycle(model, loras[cycle % 3], ("bake", "branch")[cycle % 2])
        if cycle % 6 == 5:
            hl.purge(model)
            counts.append(live_tensors())
            bytes_on_card.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert len(set(counts)) == 1, counts
    assert len(set(bytes_on_card)) == 1, bytes_on_card


def test_no_cycle_of_references_keeps_weights_after_a_failed_cell(folder):
    model = hl.load(folder / "pack.safetensors", "cpu")

    def fail(step: object) -> None:
        raise RuntimeError(step)

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError):
            model.generate(torch.ones(3, 512), steps=1, size=(16, 16), callback=fail)
        kept = weakref.ref(next(iter(model.linears().values())))
        model.unload()
        assert kept() is None, "the collector was off: only a cycle can hold it"
    finally:
        gc.enable()
