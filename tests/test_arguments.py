"""Slips in the arguments of public functions: each is one clear sentence of our own error class."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

import hswq_lab as hl
from hswq_lab.arguments import device_of, finite, path_of, whole
from hswq_lab.lora import LoraFile, convert_lora, merge_loras, save_lora
from hswq_lab.models.mini import mini_companion

GENERATE = {
    "no prompt": ((None,), {}, "prompt"),
    "a number as prompt": ((5,), {}, "prompt"),
    "half a step": (("x",), {"steps": 1.5}, "steps"),
    "steps as text": (("x",), {"steps": "3"}, "steps"),
    "no step": (("x",), {"steps": 0}, "steps"),
    "steps yes": (("x",), {"steps": True}, "steps"),
    "half a seed": (("x",), {"seed": 1.5}, "seed"),
    "a negative seed": (("x",), {"seed": -1}, "seed"),
    "a huge seed": (("x",), {"seed": 2**63}, "seed"),
    "guidance nan": (("x",), {"cfg": float("nan")}, "guidance"),
    "guidance as text": (("x",), {"cfg": "2"}, "guidance"),
    "no shift": (("x",), {"shift": 0}, "shift"),
    "shift as text": (("x",), {"shift": "x"}, "shift"),
    "one side": (("x",), {"size": 64}, "size"),
    "broken size": (("x",), {"size": (64.0, 64)}, "size"),
    "three sides": (("x",), {"size": (64, 64, 64)}, "size"),
}


@pytest.fixture(scope="module")
def mini():
    return hl.load("mini-zimage", device="cpu")


@pytest.mark.parametrize("slip", GENERATE)
def test_generate_says_which_argument_is_wrong(mini, slip):
    args, options, word = GENERATE[slip]
    with pytest.raises(hl.HswqError, match=word):
        mini.generate(*args, **({"steps": 1} | options))


@pytest.mark.parametrize(
    "call",
    [
        lambda model: hl.load(None),
        lambda model: hl.load(5),
        lambda model: hl.load("mini-zimage", device="qpu"),
        lambda model: hl.load("mini-zimage", device="cuda:99"),
        lambda model: model.on("cuda:99"),
        lambda model: hl.load("mini-zimage", dtype=torch.int8),
        lambda model: hl.load("mini-zimage", dtype="bf16"),
        lambda model: hl.load_lora(None),
        lambda model: hl.check(None),
        lambda model: hl.inspect(None),
        lambda model: hl.save(model, None),
        lambda model: hl.save("model", "x.safetensors"),
        lambda model: model.detach("x"),
        lambda model: model.set_strength("x", 1),
        lambda model: model.attach("x.safetensors"),
        lambda model: hl.bench_gemm([(3,)], [1]),
        lambda model: hl.bench_gemm([(16, 16)], [1.5]),
        lambda model: hl.pack(model, {"a": "nvfp4"}),
        lambda model: hl.pack("x", hl.Plan({"*": "nvfp4"})),
        lambda model: hl.compare("x", {"a": model}),
        lambda model: hl.compare(model, {"a": model}, seeds=4, steps=1),
        lambda model: hl.compare(model, {"": model}, seeds=[1], steps=1),
        lambda model: hl.compare(model, {" ": model}, seeds=[1], steps=1),
        lambda model: hl.compare(model, {3: model}, seeds=[1], steps=1),
        lambda model: hl.compare(model, {"a": model}, seeds=[1], steps=1, executor=3),
        lambda model: hl.compare(model, {"a": model}, seeds=[1], steps=1, executor="dask"),
        lambda model: hl.compare(model, {"a": model}, seeds=[1], steps=1, progress=3),
        lambda model: hl.sensitivity(model, seeds=[1], steps=1, layers=["x_embedder"], executor="dask"),
        lambda model: hl.sensitivity(model, seeds=[1], steps=1, layers=["x_embedder"], progress=3),
        lambda model: hl.pack(model, hl.Plan({"*": "nvfp4"}), progress=3),
        lambda model: hl.diff(model, model, progress="bar"),
        lambda model: model.generate("x", steps=1, progress=0),
        lambda model: hl.calibrate("x"),
        lambda model: hl.sensitivity("x"),
        lambda model: hl.sensitivity(model, seeds=4),
        lambda model: hl.Plan(None),
        lambda model: hl.Plan(["nvfp4"]),
        lambda model: hl.Plan({"*": 4}),
        lambda model: hl.Plan({3: "nvfp4"}),
        lambda model: hl.purge("x"),
        lambda model: hl.purge(None),
        lambda model: hl.purge([model]),
        lambda model: model.with_checkpoint("x"),
        lambda model: model.attach(palette(), source="x"),
        lambda model: hl.save_figure(3, "x.html"),
        lambda model: hl.save_figure(go.Figure(), None),
        lambda model: hl.module_report(3),
        lambda model: hl.pack_module(3, {"*": "nvfp4"}),
        lambda model: styled(model).effect("mini-zimage"),
        lambda model: styled(model).effect(steps=0),
        lambda model: styled(model).effect(steps="2"),
        lambda model: palette().report("x"),
        lambda model: palette().deltas(None),
        lambda model: palette().deltas({"layers.0.attention.qkv": (3,)}),
        lambda model: palette().deltas({"layers.0.attention.qkv": 3}),
        lambda model: palette().deltas({"layers.0.attention.qkv": ("3", 4)}),
        lambda model: palette().deltas({3: (3, 4)}),
        lambda model: merge_loras(palette(), model, 8),
        lambda model: merge_loras([palette()], model, 8),
        lambda model: merge_loras([("style.safetensors", 1.0)], model, 8),
        lambda model: merge_loras([(palette(), 1.0)], model, 8, "foo"),
        lambda model: merge_loras([(palette(), 1.0)], "x", 8),
        lambda model: convert_lora(model, palette(), "peft"),
        lambda model: convert_lora(palette(), model, ["peft"]),
    ],
)
def test_a_slip_is_one_sentence(mini, call):
    with pytest.raises(hl.HswqError):
        call(mini)


def palette() -> LoraFile:
    return hl.load_lora(mini_companion().loras["palette"])


def styled(model: hl.Model) -> hl.Model:
    dressed = model.without_loras()
    dressed.attach(palette())
    return dressed


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("foo.bin", {"a": torch.zeros(1)}, "ends in .safetensors"),
        ("foo.safetensors", {}, "nothing to write"),
        ("foo.safetensors", [torch.zeros(1)], "nothing to write"),
    ],
)
def test_a_lora_without_tensors_or_under_another_ending_is_not_written(tmp_path, name, tensors, message):
    with pytest.raises(hl.HswqError, match=message):
        save_lora(tmp_path / name, tensors, {})
    assert list(tmp_path.iterdir()) == []


def test_a_dialect_is_asked_for_before_the_work(mini):
    with pytest.raises(hl.HswqError, match="dialect"):
        merge_loras([(palette(), 1.0)], mini, 8, "foo", progress=lambda *_: pytest.fail("work was begun"))


def test_purge_drops_nothing_where_one_is_no_model(mini):
    network = mini.network()
    with pytest.raises(hl.HswqError):
        hl.purge(mini, "x")
    assert mini.network() is network


def test_an_empty_plan_is_a_plan_but_packs_nothing(mini):
    assert len(hl.Plan({})) == 0
    with pytest.raises(hl.HswqError, match="the plan is empty"):
        hl.pack(mini, hl.Plan({}))


def test_sizes_of_numpy_are_sizes(mini):
    plain, numpy, array = (
        mini.generate("x", steps=1, size=size)
        for size in ((32, 32), (np.int64(32), np.int32(32)), [np.int64(32), 32])
    )
    assert plain.size == numpy.size == array.size == (32, 32)
    assert {type(side) for run in (plain, numpy, array) for side in run.size} == {int}
    assert torch.equal(plain.final, numpy.final)
    assert hl.compare(mini, {"same": mini}, seeds=[1], steps=1, size=(np.int64(32), 32)).size == (32, 32)


def test_numbers_of_numpy_are_numbers():
    assert whole(np.int64(3), "a count") == 3
    assert finite(np.float32(0.5), "a factor") == 0.5
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), True, "1", None, 1j])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(hl.HswqError, match="a factor must be a finite number"):
        finite(value, "a factor")


def test_a_tilde_in_a_path_is_the_home_folder_and_an_unknown_user_is_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("~/a/b.json", "a file") == tmp_path / "a" / "b.json"
    assert str(path_of("~no such user/b.json", "a file")) == "~no such user/b.json"
    plan = hl.Plan({"layers.*": "nvfp4"})
    assert plan.save("~/plan.json").parent == tmp_path
    assert hl.Plan.load("~/plan.json") == plan


def test_a_tilde_names_a_checkpoint_as_its_whole_path_does(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hl.save(tiny_model, "~/tiny.safetensors") == tmp_path / "tiny.safetensors"
    assert hl.load("~/tiny.safetensors", device="cpu").checkpoint.path == tmp_path / "tiny.safetensors"


def test_an_empty_path_is_told_as_one():
    with pytest.raises(hl.HswqError, match="a checkpoint is named by its path; found: no text"):
        hl.inspect("")
