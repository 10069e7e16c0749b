"""Sensitivity: the true impact of a layer, however computed; resumed, elsewhere, with a planted fault."""

from __future__ import annotations

import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.formats import Nvfp4Weight
from hswq_lab.model import Model
from hswq_lab.models.mini import encode_text
from hswq_lab.quantize import (
    ImpactReport,
    LayerImpact,
    Plan,
    greedy,
    impact_of_pack,
    observe_for,
    pack,
    pareto,
    sensitivity,
    with_input_scales,
)
from hswq_lab.quantize.replay import Replay
from hswq_lab.quantize.trial import Trial, TrialSettings

PAIRS = (("a thing", 1), ("another", 2))
RUN = {"prompts": ["a thing", "another"], "seeds": [1, 2], "steps": 3}
SETTINGS = TrialSettings(PAIRS, 3, 2.5, 1.5, (16, 16), "sweep")
LOST = "reference itself comes to NaN or infinity.*tensor: sick, seed 1; found: in step 0 of 3"
FEW = ["layers.0.*", "final_layer.linear", "cap_embedder.1", "x_embedder", "t_embedder.mlp.0"]


@pytest.fixture
def trial(tiny_model):
    return Trial(tiny_model, SETTINGS)


def relative_error(model, other, prompt: str, seed: int) -> float:
    a = model.generate(prompt, seed, steps=3).final.double()
    b = other.generate(prompt, seed, steps=3).final.double()
    return float((b - a).square().sum() / a.square().sum())


@pytest.mark.parametrize("form", ["nvfp4", "int8_tensorwise", "nvfp4-unrotated"])
def test_impact_is_what_pack_calibrate_and_generate_give(tiny_model, form):
    layer = "layers.0.feed_forward.w2"
    row = sensitivity(tiny_model, **RUN, formats=[form], layers=[layer]).of(layer, form)
    packed = pack(tiny_model, Plan({layer: form}))
    if form.startswith("nvfp4"):
        packed = with_input_scales(packed, observe_for(packed, tiny_model, **RUN)).in_mode("tc")
    for sample, (prompt, seed) in zip(row.samples, PAIRS, strict=True):
        # The batch has another size than `generate`'s, so fp32 sums differ, and with them some codes.
        assert sample == pytest.approx(relative_error(tiny_model, packed, prompt, seed), rel=0.05)


def test_an_unchanged_network_gives_the_references_bits(trial):
    assert torch.equal(trial.run({}), trial.reference)
    assert trial.errors(trial.reference) == [0.0, 0.0]
    assert trial.cosines(trial.reference) == pytest.approx([1.0, 1.0])


def test_the_reference_is_the_models_own_picture(tiny_model, trial):
    for latent, (prompt, seed) in zip(trial.reference, PAIRS, strict=True):
        assert torch.allclose(latent, tiny_model.generate(prompt, seed, steps=3).final, atol=1e-4)


def test_replay_changes_no_bit(tiny_model, trial, monkeypatch):
    plain = Trial(tiny_model, SETTINGS)
    monkeypatch.setattr(plain._replay, "_limit", 0)
    monkeypatch.setattr(plain._replay, "fetch", lambda name, compute: compute())
    for layer in tiny_model.layers():
        weight = trial.packed(layer, "nvfp4")
        changed = trial.run({layer: weight})
        assert torch.equal(changed, plain.run({layer: weight})), layer
        assert not torch.equal(changed, trial.reference), layer


def test_replay_of_several_changes_at_once(tiny_model, trial, monkeypatch):
    plain = Trial(tiny_model, SETTINGS)
    monkeypatch.setattr(plain._replay, "fetch", lambda name, compute: compute())
    layers = ["layers.1.attention.qkv", "noise_refiner.0.feed_forward.w1", "context_refiner.0.attention.out"]
    weights = {layer: trial.packed(layer, "nvfp4") for layer in layers}
    assert torch.equal(trial.run(weights), plain.run(weights))


def test_replay_saves_work_in_front_of_the_change(tiny_model):
    trial = Trial(tiny_model, SETTINGS)
    weight = trial.packed("final_layer.linear", "nvfp4")
    before = trial._linears["layers.0.attention.qkv"].counts.calls
    trial.run({"final_layer.linear": weight})
    assert trial._linears["layers.0.attention.qkv"].counts.calls == before + SETTINGS.steps - 1
    assert trial._linears["context_refiner.0.attention.qkv"].counts.calls == 1  # the reference run's only


def test_replay_keeps_within_its_limit(tiny_model, monkeypatch):
    trial = Trial(tiny_model, SETTINGS)
    trial._replay = Replay(tiny_model.on("cpu").network(), tiny_model.config.stages(), limit=100_000)
    tight = Trial(tiny_model, SETTINGS)
    monkeypatch.setattr(tight._replay, "_limit", 100_000)
    weight = tight.packed("layers.1.feed_forward.w2", "nvfp4")
    assert sum(t.nbytes for t in tight._replay._reference.values()) <= 100_000
    roomy = Trial(tiny_model, SETTINGS)
    assert torch.equal(
        tight.run({weight and "layers.1.feed_forward.w2": weight}),
        roomy.run({"layers.1.feed_forward.w2": weight}),
    )


def test_captions_of_different_length_run_apart(tiny_model):
    torch.manual_seed(0)
    long, short = torch.randn(40, 512), torch.randn(3, 512)
    trial = Trial(tiny_model, TrialSettings(((long, 1), (short, 2)), 2, 2.5, 1.5, (16, 16), "rtn"))
    for latent, (prompt, seed) in zip(trial.reference, trial.settings.pairs, strict=True):
        assert torch.allclose(latent, tiny_model.generate(prompt, seed, steps=2).final, atol=1e-4)


def test_without_guidance(tiny_model):
    trial = Trial(tiny_model, TrialSettings(PAIRS, 2, 1.0, 1.5, (16, 16), "rtn"))
    expected = tiny_model.generate("a thing", 1, steps=2, cfg=1.0).final
    assert torch.allclose(trial.reference[0], expected, atol=1e-4)


def test_the_users_model_is_left_alone(tiny_model):
    tiny_model.network()
    sensitivity(tiny_model, **RUN, layers=["layers.0.attention.qkv"])
    assert all(row.calls == 0 for row in tiny_model.report().layers)
    assert all(not layer._forward_pre_hooks for layer in tiny_model.linears().values())


def test_a_layer_that_is_never_reached_has_no_impact(tiny_model):
    silent = torch.zeros(64, dtype=torch.bfloat16)
    model = tiny_model.with_checkpoint(
        tiny_model.checkpoint.with_values({"layers.1.attention_norm1.weight": silent})
    )
    report = sensitivity(model, **RUN, layers=["layers.1.attention.qkv"], formats=["nvfp4", "int8"])
    assert [row.samples for row in report.rows] == [[0.0, 0.0]] * 2
    assert report.of("layers.1.attention.qkv", "int8").output_error == 0.0


@pytest.mark.parametrize("form", ["nvfp4", "int8"])
def test_a_weight_of_zeros_has_no_error(tiny_model, form):
    name = "layers.1.attention.out"
    zeros = torch.zeros_like(tiny_model.checkpoint[f"{name}.weight"])
    model = tiny_model.with_checkpoint(tiny_model.checkpoint.with_values({f"{name}.weight": zeros}))
    row = sensitivity(model, **RUN, layers=[name], formats=[form]).rows[0]
    assert (row.impact, row.weight_error, row.output_error) == (0.0, 0.0, 0.0)


def test_proxies_measure_the_packed_layer(tiny_model):
    report = sensitivity(tiny_model, **RUN, formats=["nvfp4", "int8"], layers=["layers.*.w1"])
    for layer in ("layers.0.feed_forward.w1", "layers.1.feed_forward.w1"):
        fine, coarse = report.of(layer, "int8"), report.of(layer, "nvfp4")
        assert 0.004 < coarse.weight_error < 0.01  # about 22 dB by the sweep
        assert fine.weight_error < coarse.weight_error / 50
        assert coarse.weight_error < coarse.output_error < 5 * coarse.weight_error  # activations add theirs
        assert fine.impact < coarse.impact
    assert report.formats == ["nvfp4", "int8_tensorwise"]


def test_a_bias_is_no_error(tiny_model):
    layer = "layers.0.adaLN_modulation.0"
    report = sensitivity(tiny_model, **RUN, formats=["int8"], layers=[layer])
    assert report.of(layer, "int8").output_error < 1e-3


def test_only_a_plain_16_bit_model(tiny_model):
    packed = pack(tiny_model, Plan({"layers.0.*": "nvfp4"}))
    with pytest.raises(HswqError, match=r"16-bit model without LoRAs.*packed layers"):
        sensitivity(packed, **RUN)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"layers": ["nope.*"]}, "nope"),
        ({"layers": "layers.0.*"}, "list of texts"),
        ({"layers": []}, "list of texts"),
        ({"formats": ["16-bit"]}, "no format"),
        ({"formats": "nvfp4"}, "list of texts"),
        ({"formats": None}, "list of texts"),
        ({"formats": [4]}, "list of texts"),
    ],
)
def test_unknown_layers_and_formats(tiny_model, what, match):
    with pytest.raises(HswqError, match=match):
        sensitivity(tiny_model, **RUN, **what)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"steps": 0}, "number of steps"),
        ({"steps": 1.5}, "number of steps"),
        ({"steps": True}, "number of steps"),
        ({"cfg": float("nan")}, "guidance scale"),
        ({"cfg": None}, "guidance scale"),
        ({"scales": "gptq"}, "block scales"),
        ({"scales": None}, "block scales"),
        ({"activation_scales": "best"}, "block scales"),
        ({"resume": "impact.csv"}, r"\.json file only"),
        ({"resume": 3}, "named by its path"),
    ],
)
def test_impossible_settings(tiny_model, what, match):
    with pytest.raises(HswqError, match=match):
        sensitivity(tiny_model, **{**RUN, **what}, layers=["x_embedder"])


def test_a_format_that_is_named_twice_is_measured_once(tiny_model):
    report = sensitivity(tiny_model, **RUN, layers=["x_embedder"], formats=["int8", "int8_tensorwise"])
    assert [row.format for row in report.rows] == ["int8_tensorwise"]


def test_the_report_knows_the_layers_that_were_not_measured(tiny_model, tiny_pack):
    report = sensitivity(tiny_model, **RUN, layers=["x_embedder"])
    assert report.layers | report.unmeasured == tiny_model.layers()
    assert list(report.layers) == ["x_embedder"]
    of_pack = impact_of_pack(tiny_model, tiny_pack, **RUN)
    assert of_pack.layers | of_pack.unmeasured == tiny_model.layers()


@pytest.mark.parametrize("change", [{"layer": "ghost"}, {"n": 7}])
def test_rows_of_another_model_are_not_resumed(tiny_model, tmp_path, change):
    path = tmp_path / "impact.json"
    sensitivity(tiny_model, **RUN, layers=["x_embedder"], resume=path)
    content = json.loads(path.read_text())
    content["rows"][0].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(HswqError, match="layer that this model does not have"):
        sensitivity(tiny_model, **RUN, layers=["x_embedder"], resume=path)


def test_a_killed_run_continues(tiny_model, tmp_path):
    path = tmp_path / "impact.json"
    whole = sensitivity(tiny_model, **RUN, layers=FEW)

    def stop(done, total, label):
        if done == 4:
            raise Cancelled("killed")

    with pytest.raises(Cancelled):
        sensitivity(tiny_model, **RUN, layers=FEW, resume=path, progress=stop)
    assert len(ImpactReport.load(path).rows) == 4
    seen = []
    resumed = sensitivity(
        tiny_model, **RUN, layers=FEW, resume=path, progress=lambda done, total, label: seen.append(done)
    )
    assert list(dict.fromkeys(seen)) == list(range(4, len(whole.rows) + 1))
    assert [row.samples for row in resumed.rows] == [row.samples for row in whole.rows]
    assert ImpactReport.load(path).rows == resumed.rows


def test_progress_is_told_before_every_pass_so_that_cancel_works_between_steps(
    tiny_model, tiny_pack, most_passes_untold
):
    few = {**RUN, "layers": FEW[:1]}
    assert most_passes_untold(lambda progress: sensitivity(tiny_model, **few, progress=progress)) == 1
    assert most_passes_untold(lambda tell: impact_of_pack(tiny_model, tiny_pack, **RUN, progress=tell)) == 1


def test_a_cancel_in_the_middle_of_a_layer_leaves_what_was_measured(tiny_model, tmp_path):
    path, inside = tmp_path / "impact.json", []

    def stop(done, total, label):
        inside.append(done)
        if inside.count(2) == 3:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        sensitivity(tiny_model, **RUN, layers=FEW, resume=path, progress=stop)
    assert len(ImpactReport.load(path).rows) == 2
    resumed = sensitivity(tiny_model, **RUN, layers=FEW, resume=path)
    assert [row.samples for row in resumed.rows] == [
        row.samples for row in sensitivity(tiny_model, **RUN, layers=FEW).rows
    ]


@pytest.mark.parametrize(
    "other", [{"steps": 4}, {"seeds": [1, 3]}, {"prompts": ["a thing", "x"]}, {"scales": "rtn"}]
)
def test_a_file_of_other_settings_is_not_resumed(tiny_model, tmp_path, other):
    path = tmp_path / "impact.json"
    sensitivity(tiny_model, **RUN, layers=["x_embedder"], resume=path)
    with pytest.raises(HswqError, match=f"another {next(iter(other))}"):
        sensitivity(tiny_model, **{**RUN, **other}, layers=["x_embedder"], resume=path)


def test_a_file_of_another_model_is_not_resumed(tiny_model, tmp_path):
    path = tmp_path / "impact.json"
    sensitivity(tiny_model, **RUN, layers=["x_embedder"], resume=path)
    other = tiny_model.checkpoint.with_values({"x_embedder.bias": torch.ones(64, dtype=torch.bfloat16)})
    with pytest.raises(HswqError, match="another sha256"):
        sensitivity(tiny_model.with_checkpoint(other), **RUN, layers=["x_embedder"], resume=path)


def opposite(prompt):
    return -encode_text(prompt)


def with_encoder(model, encode):
    """The same model with another text encoder."""
    companion = replace(model.companion, encode=encode)
    return Model(model.checkpoint, name=model.name, companion=companion, dtype=model.dtype)


def test_a_file_of_other_captions_is_not_resumed(tiny_model, tmp_path):
    path = tmp_path / "impact.json"
    sensitivity(tiny_model, **RUN, layers=["x_embedder"], resume=path)
    other = with_encoder(tiny_model, opposite)
    with pytest.raises(HswqError, match="another captions"):
        sensitivity(other, **RUN, layers=["x_embedder"], resume=path)
    first = json.loads(path.read_text())
    del first["captions"], first["dtype"]
    path.write_text(json.dumps(first))
    sensitivity(other, **RUN, layers=["x_embedder"], resume=path)


def test_a_file_of_another_dtype_is_not_resumed(tiny_model, tmp_path):
    path = tmp_path / "impact.json"
    sensitivity(tiny_model, **RUN, layers=["x_embedder"], resume=path)
    dtype = torch.bfloat16 if tiny_model.dtype == torch.float32 else torch.float32
    other = Model(tiny_model.checkpoint, name="tiny", companion=tiny_model.companion, dtype=dtype)
    with pytest.raises(HswqError, match="another dtype"):
        sensitivity(other, **RUN, layers=["x_embedder"], resume=path)


def test_elsewhere_is_the_same_bit_for_bit(tiny_model, tmp_path):
    path = tmp_path / "impact.json"
    here = sensitivity(tiny_model, **RUN, layers=FEW)
    with ThreadPoolExecutor(2) as pool:
        there = sensitivity(tiny_model, **RUN, layers=FEW, executor=pool, resume=path)
    assert there.rows == here.rows
    assert ImpactReport.load(path).rows == here.rows


def test_settings_travel_and_stay_equal():
    features = torch.randn(3, 512)
    settings = TrialSettings(((features, 1),), 3, 2.5, 1.5, (16, 16), "sweep")
    travelled = pickle.loads(pickle.dumps(settings))  # noqa: S301 - our own bytes
    assert travelled.identity == settings.identity
    assert travelled.identity != TrialSettings(((features + 1, 1),), 3, 2.5, 1.5, (16, 16), "sweep").identity


def test_a_planted_fault_is_named(tiny_model):
    # One layer's scale times 8. (Of attention.out, w2 and w3 the scale makes no difference: a norm follows.)
    fault = "layers.1.adaLN_modulation.0"
    packed = pack(tiny_model, Plan({"layers.*": "nvfp4"}))
    packed = with_input_scales(packed, observe_for(packed, tiny_model, **RUN))
    weight = packed.checkpoint[f"{fault}.weight"]
    assert isinstance(weight, Nvfp4Weight)
    spoiled = Nvfp4Weight(
        weight.codes, weight.scales, 8 * weight.scale, weight.shape, weight.group, weight.input_scale
    )
    broken = packed.with_checkpoint(packed.checkpoint.with_values({f"{fault}.weight": spoiled}))
    sound, report = (impact_of_pack(tiny_model, each, **RUN) for each in (packed, broken))
    assert report.ranking()[-1] == fault
    assert report.of(fault).impact > 20 * sound.of(fault).impact
    others = [row for row in report.rows if row.layer != fault]
    assert [row.samples for row in others] == [row.samples for row in sound.rows if row.layer != fault]


def test_impact_of_a_pack_uses_its_own_weights(tiny_model):
    packed = pack(tiny_model, Plan({"layers.0.attention.qkv": "nvfp4", "x_embedder": "int8"}), "rtn")
    report = impact_of_pack(tiny_model, packed, **RUN)
    assert {(row.layer, row.format) for row in report.rows} == {
        ("layers.0.attention.qkv", "nvfp4"),
        ("x_embedder", "int8_tensorwise"),
    }
    same = sensitivity(tiny_model, **RUN, layers=["layers.0.attention.qkv"], scales="rtn")
    assert report.of("layers.0.attention.qkv").samples == same.rows[0].samples
    with pytest.raises(HswqError, match="no layer of this model is packed"):
        impact_of_pack(tiny_model, tiny_model, **RUN)


@pytest.fixture
def sick(tiny_model):
    name = "layers.1.attention_norm1.weight"
    poisoned = tiny_model.checkpoint[name].clone()
    poisoned[3] = math.nan
    return tiny_model.with_checkpoint(tiny_model.checkpoint.with_values({name: poisoned}), "sick")


@pytest.mark.parametrize("form", ["nvfp4", "int8"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_reference_of_nan_is_no_layers_fault(sick, form, elsewhere, tmp_path):
    path = tmp_path / "impact.json"
    with ThreadPoolExecutor(1) as pool, pytest.raises(HswqError, match=LOST):
        sensitivity(
            sick,
            **RUN,
            formats=[form],
            layers=["layers.0.attention.qkv"],
            resume=path,
            executor=pool if elsewhere else None,
        )
    assert not path.exists(), "no row of a run that means nothing"


def test_a_reference_of_nan_is_not_blamed_on_a_pack_or_a_plan(tiny_model, sick):
    hybrid = pack(sick, Plan({"layers.1.*": "nvfp4"}), "rtn")
    with pytest.raises(HswqError, match=LOST):
        impact_of_pack(sick, hybrid, **RUN)
    shapes = sick.layers()
    rows = [LayerImpact(layer, "nvfp4", n, k, [1e-3]) for layer, (n, k) in shapes.items()]
    impact = ImpactReport("sick", sick.checkpoint.sha256, ["x"], [1], 1, 2.5, 1.5, (16, 16), "rtn", rows)
    with pytest.raises(HswqError, match=LOST):
        pareto(sick, impact, [1], **RUN)
    lost = replace(impact, rows=[replace(row, samples=[math.inf]) for row in rows])
    with pytest.raises(HswqError, match="not finite, so no plan can weigh it"):
        greedy(sick, lost, bits=8, **RUN)
