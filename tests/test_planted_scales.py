"""One layer's block scales × 8, which E4M3 ends at 448: the gate may pass it, everything else names the layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hswq_lab as hl
from hswq_lab.cli import main
from hswq_lab.quantize import impact_of_pack, observe_for, with_input_scales

RUN = {"prompts": ["red heart on blue"], "seeds": [1], "steps": 2}
SENSITIVE = ("t_embedder.mlp.2", "layers.3.adaLN_modulation.0", "final_layer.linear")
INSENSITIVE = ("noise_refiner.0.attention.qkv", "layers.6.feed_forward.w3", "layers.7.attention.out")
LAYERS = (*SENSITIVE, *INSENSITIVE)


@pytest.fixture(scope="module")
def model():
    return hl.load("mini-zimage", device="cpu")


@pytest.fixture(scope="module")
def sound(model):
    packed = hl.pack(model, hl.Plan({"*": "nvfp4"}), "rtn")
    return with_input_scales(packed, observe_for(packed, model, **RUN))


@pytest.fixture(scope="module")
def impacts(model, sound):
    """Of the sound pack, and of one that has the fault in all of `LAYERS`: each is measured alone."""
    return impact_of_pack(model, sound, **RUN), impact_of_pack(model, planted(sound, *LAYERS), **RUN)


def planted(pack, *layers):
    spoiled = {}
    for layer in layers:
        weight = pack.checkpoint[f"{layer}.weight"]
        larger = (8 * weight.scales.float()).clamp(max=448).to(torch.float8_e4m3fn)
        spoiled[f"{layer}.weight"] = replace(weight, scales=larger)
    return pack.with_checkpoint(pack.checkpoint.with_values(spoiled))


@pytest.mark.parametrize("layer", LAYERS)
def test_the_difference_to_the_sound_pack_and_to_the_source_names_it(model, sound, layer):
    faulty = planted(sound, layer)
    report = hl.diff(sound, faulty)
    (changed,) = (row for row in report.rows if row.status != "same")
    assert (changed.name, changed.changed_codes) == (f"{layer}.weight", 0)
    assert changed.sqnr_db < 3
    assert f"furthest apart: {layer}.weight, " in str(report)
    to_source = hl.diff(model, faulty)
    assert f"furthest apart: {layer}.weight, " in str(to_source)
    others = [
        row.sqnr_db for row in to_source.rows if row.status == "other format" and row.name != changed.name
    ]
    assert min(others) > 20


@pytest.mark.parametrize("layer", LAYERS)
def test_the_check_against_the_source_names_it_and_fails(model, sound, layer, tmp_path, capsys):
    path = hl.save(planted(sound, layer), tmp_path / "faulty.safetensors")
    assert main(["check", str(path), "--source", "mini-zimage"]) == 1
    errors = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert f"tensor: {layer}.weight" in errors[0]


def test_the_table_of_differences_begins_with_what_is_furthest_apart(sound, tmp_path, capsys):
    layer = LAYERS[-1]  # far down in the file
    path = hl.save(planted(sound, layer), tmp_path / "faulty.safetensors")
    assert main(["diff", "mini-zimage", str(path)]) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "name"
    assert first.split()[0] == f"{layer}.weight"


@pytest.mark.parametrize("layer", LAYERS)
def test_the_ranking_puts_it_first_or_far_beyond_its_forecast(impacts, layer):
    forecast, found = impacts
    alone = [row for row in found.rows if row.layer == layer or row.layer not in LAYERS]
    if layer in SENSITIVE:
        assert max(alone, key=lambda row: row.impact).layer == layer
    assert found.of(layer).impact > 3 * forecast.of(layer).impact
    # What it does to the layer's own output does not depend on how sensitive the picture is to it.
    assert max(alone, key=lambda row: row.output_error).layer == layer
    assert found.of(layer).output_error > 20 * max(row.output_error for row in forecast.rows)


def test_the_gate_alone_would_pass_it(impacts):
    _, found = impacts
    assert all((1 + found.of(layer).impact) ** -0.5 > 0.95 for layer in INSENSITIVE)
