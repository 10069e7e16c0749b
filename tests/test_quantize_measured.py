"""What was measured on another model than the one at hand is taken with a warning, never without a word."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch

from hswq_lab.cli import main
from hswq_lab.errors import HswqError
from hswq_lab.loading import load, save
from hswq_lab.quantize import (
    ImpactReport,
    LayerImpact,
    Plan,
    calibrate,
    greedy,
    impact_of_pack,
    observe_for,
    pack,
    pack_to_file,
    pareto,
)
from hswq_lab.quantize.measured import MeasuredOn

RUN = {"prompts": ["a thing"], "seeds": [1], "steps": 1}
LAYER = "layers.1.attention.out"


@pytest.fixture
def twin(tiny_model):
    """The same layers with other weights."""
    name = "layers.0.attention.qkv.weight"
    values = {name: 2 * tiny_model.checkpoint[name]}
    return tiny_model.with_checkpoint(tiny_model.checkpoint.with_values(values), "twin")


@pytest.fixture
def impact(tiny_model):
    rows = [LayerImpact(name, "nvfp4", n, k, [1e-3]) for name, (n, k) in tiny_model.layers().items()]
    return ImpactReport(
        tiny_model.name, tiny_model.checkpoint.sha256, ["a thing"], [1], 1, 2.5, 1.5, (32, 32), "rtn", rows
    )


@pytest.fixture
def hybrid(tiny_model):
    return pack(tiny_model, Plan({LAYER: "nvfp4"}), "rtn", name="hybrid")


def both(tiny_model, twin):
    """The digests of both, in the order in which a warning about `twin` tells them."""
    first, second = (model.checkpoint.sha256[:12] for model in (tiny_model, twin))
    return rf"SHA-256 {first}.*twin \(in memory, SHA-256 {second}\)"


def test_calibrating_with_another_model_is_warned_about(tiny_model, twin, hybrid):
    with pytest.warns(UserWarning, match=rf"hybrid was made from .*{both(tiny_model, twin)}") as told:
        calibrate(hybrid, twin, **RUN)
    assert [warning.filename for warning in told] == [__file__]
    calibrate(hybrid, tiny_model, **RUN)  # a warning would be an error here
    calibrate(hybrid, **RUN)


def test_a_pack_that_names_no_source_is_taken_at_its_word(twin, hybrid):
    nameless = {key: text for key, text in hybrid.checkpoint.metadata.items() if key != "hswq.pack"}
    checkpoint = hybrid.checkpoint.rewritten(dict(hybrid.checkpoint.items()), nameless)
    assert observe_for(hybrid.with_checkpoint(checkpoint), twin, **RUN).warnings == []


def test_calibrating_with_a_pack_in_the_models_place_is_warned_about(hybrid):
    with pytest.warns(UserWarning, match=r"is itself a pack.*16-bit model that hybrid was made from"):
        calibrate(hybrid, hybrid.in_mode("parity"), **RUN)


def test_the_impact_of_a_pack_on_another_model_is_warned_about(tiny_model, twin, hybrid):
    with pytest.warns(UserWarning, match=rf"hybrid was made from .*{both(tiny_model, twin)}") as told:
        impact_of_pack(twin, hybrid, **RUN)
    assert [warning.filename for warning in told] == [__file__]
    impact_of_pack(tiny_model, hybrid, **RUN)


def test_packing_by_another_models_impact_is_warned_about(tiny_model, twin, impact, tmp_path):
    plan = impact.plan(nvfp4=1)
    pack(tiny_model, plan, "rtn")
    for work in (
        lambda: pack(twin, plan, "rtn"),
        lambda: pack(twin, plan.with_pins({LAYER: "int8"}), "rtn"),
        lambda: pack_to_file(twin, tmp_path / "p.safetensors", plan, "rtn"),
    ):
        with pytest.warns(UserWarning, match=rf"impact was measured on .*{both(tiny_model, twin)}") as told:
            work()
        assert [warning.filename for warning in told] == [__file__]


def test_measuring_plans_by_another_models_impact_is_warned_about(tiny_model, twin, impact):
    for measure in (
        lambda model: pareto(model, impact, [0], **RUN),
        lambda model: greedy(model, impact, bits=16, **RUN),
    ):
        with pytest.warns(UserWarning, match=rf"impact was measured on .*{both(tiny_model, twin)}") as told:
            measure(twin)
        assert [warning.filename for warning in told] == [__file__]
        found = measure(tiny_model)
    with pytest.warns(UserWarning, match="impact was measured on"):
        pack(twin, found.plan(bits=16), "rtn")


def test_an_impact_that_names_no_model_and_a_plan_of_ones_own_warn_of_nothing(twin, impact):
    pack(twin, replace(impact, sha256="").plan(nvfp4=1), "rtn")
    pack(twin, Plan(dict(impact.plan(nvfp4=1))), "rtn")


def test_a_stored_plan_knows_what_it_was_measured_on(impact, tmp_path):
    plan = impact.plan(nvfp4=1)
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert again.measured_on == plan.measured_on == MeasuredOn(impact.model, impact.sha256)
    assert "measured_on" not in Plan({"*": "int8"}).to_dict()
    assert Plan.from_dict({"hswq_plan": 1, "note": "old", "formats": {"*": "int8"}}).measured_on is None
    with pytest.raises(HswqError, match=r"entry is missing.*sha256"):
        Plan.from_dict({"formats": {"*": "int8"}, "measured_on": {"model": "m"}})


def test_the_command_line_says_it_in_a_line(tiny_model, twin, impact, tmp_path, capsys):
    plan, source = impact.plan(nvfp4=1).save(tmp_path / "plan.json"), tmp_path / "twin.safetensors"
    save(twin, source)
    target = tmp_path / "out.safetensors"
    assert main(["pack", str(source), "-o", str(target), "--plan", str(plan), "--scales", "rtn"]) == 0
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "warning" in text]
    assert line.startswith("hswq-lab: warning: the impact was measured on")
    assert tiny_model.checkpoint.sha256[:12] in line
    assert load(source).checkpoint.sha256[:12] in line
    assert json.loads(load(target).checkpoint.metadata["hswq.pack"])["plan"]["measured_on"]
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="as before"):
        warnings.warn("as before", stacklevel=1)


def test_layers_without_a_scale_are_warned_about(tiny_model):
    name = "layers.1.attention_norm1.weight"
    silenced = tiny_model.checkpoint.with_values({name: torch.zeros(64, dtype=torch.bfloat16)})
    model = tiny_model.with_checkpoint(silenced)
    hybrid = pack(model, Plan({"layers.1.*": "nvfp4"}), "rtn")
    with pytest.warns(UserWarning, match=r"2 of 6 layers got no input_scale.*layers\.1\.attention\.qkv"):
        calibrate(hybrid, model, **RUN)


def test_every_k_is_measured_once(tiny_model, impact):
    assert [point.label for point in pareto(tiny_model, impact, [2, 1, 2], **RUN).points] == ["nv2", "nv1"]
