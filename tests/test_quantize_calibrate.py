"""Calibration: ranges in the basis of the weight, coverage, provenance, nothing left behind."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import random_tensors

from hswq_lab import ops
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.formats import rotate_fp32
from hswq_lab.layers import make_linear
from hswq_lab.loading import save
from hswq_lab.lora import lora_from_tensors
from hswq_lab.modes import ModeRequest, resolve
from hswq_lab.packing import pack_weight
from hswq_lab.quantize import (
    Plan,
    calibrate,
    impact_of_pack,
    observe,
    observe_for,
    pack,
    with_input_scales,
)
from hswq_lab.quantize.activations import Activations, observing
from hswq_lab.quantize.pairs import fresh_seeds
from hswq_lab.trajectory import SEEDS_20

RUN = {"prompts": ["a thing", "another"], "seeds": [1, 2], "steps": 2}


@pytest.fixture
def hybrid(tiny_model):
    return pack(
        tiny_model, Plan({"*": "int8", "layers.*": "nvfp4", "layers.0.attention.out": "nvfp4-unrotated"})
    )


def watched(x: torch.Tensor, group: int | None = 256, input_scale: float | None = None) -> Activations:
    statistics = Activations("layer", group, x.shape[-1], input_scale, x.device)
    statistics.add(x)
    return statistics


def input_scale(model, layer: str) -> torch.Tensor | None:
    return model.checkpoint[f"{layer}.weight"].input_scale


def test_a_constant_input_has_amax_1_after_rotation():
    # 1 for the regular Hadamard matrix, 16 for Sylvester's: this tells them apart.
    assert watched(torch.ones(3, 512)).amax == pytest.approx(1.0, abs=1e-6)


def test_one_hot_inputs_have_amax_one_sixteenth():
    assert watched(torch.eye(256)).amax == pytest.approx(1 / 16)


def test_calibration_packing_and_run_time_share_one_rotation():
    weight = pack_weight(torch.randn(64, 256), "nvfp4", 256)
    scale = watched(torch.ones(1, 256)).needed_scale
    weight = weight.with_input_scale(torch.tensor(scale))
    resolved = resolve("layer", "nvfp4", calibrated=True, request=ModeRequest("tc"), fp4_is_native=False)
    layer = make_linear("layer", weight, None, resolved)
    layer(torch.ones(5, 256))
    assert layer.counts.blocks == 5 * 16
    assert layer.counts.clipped == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_never_clips_the_largest_block_by_its_own_rounding(dtype):
    for seed in range(100):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)).to(dtype)
        scale = watched(x).needed_scale
        _, _, clipped = ops.rotate_quantize_nvfp4_counted(x, torch.tensor(scale), 256)
        assert int(clipped) == watched(x, input_scale=scale).clipped == 0
        assert scale == pytest.approx(watched(x).amax / 2688, rel=2e-7)


def test_zero_inputs_need_no_scale():
    assert watched(torch.zeros(4, 256)).needed_scale is None
    assert Activations("layer", None, 8, None, torch.device("cpu")).needed_scale is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_inputs_that_are_not_finite_are_refused(bad):
    x = torch.ones(4, 256)
    x[2, 3] = bad
    with pytest.raises(HswqError, match=r"not finite.*tensor: layer"):
        _ = watched(x).amax


def test_statistics_are_of_the_rotated_values():
    torch.manual_seed(0)
    x = torch.randn(2, 7, 128) * torch.linspace(0.1, 3, 128)
    rotated = rotate_fp32(x, 64).reshape(-1, 128)
    statistics = watched(x, 64)
    assert statistics.rows == 14
    assert statistics.amax == pytest.approx(float(rotated.abs().max()), rel=1e-6)
    assert torch.allclose(statistics.mean_square, rotated.square().mean(0), rtol=1e-5)


def test_percentile_of_rows_is_near():
    torch.manual_seed(0)
    x = torch.randn(5000, 16).exp()
    exact = float(x.amax(dim=1).quantile(0.999))
    assert watched(x, None).row_percentile(0.999) == pytest.approx(exact, rel=0.05)


def test_no_percentile_lies_above_the_largest_value():
    """Bins are 2 % wide, and the upper end of the last one lies beyond it."""
    statistics = watched(torch.full((3, 16), 1.005), None)
    assert statistics.row_percentile(0.999) == statistics.amax


def test_clipped_blocks_are_those_beyond_the_scale():
    x = torch.zeros(2, 40)
    x[0, 3], x[1, 39] = 2688.0, 2689.0
    statistics = watched(x, None, input_scale=1.0)
    assert (statistics.blocks, statistics.clipped) == (6, 1)


def test_every_nvfp4_layer_gets_amax_over_2688(tiny_model, hybrid):
    report = observe_for(hybrid, tiny_model, **RUN)
    calibrated = with_input_scales(hybrid, report)
    nvfp4 = [layer for layer in hybrid.layers() if layer.startswith("layers.")]
    assert [row.layer for row in report.rows] == nvfp4
    for row in report.rows:
        amax, scale = torch.tensor(row.amax, dtype=torch.float32), input_scale(calibrated, row.layer)
        assert scale in (amax / 2688, torch.nextafter(amax / 2688, amax))
        assert amax / 6 / scale <= 448  # else the largest block would count as clipped
        assert row.rows > 0
    assert report.of("layers.0.attention.out").group is None
    assert report.of("layers.0.attention.qkv").group == 64
    assert report.source == "16-bit"


def test_the_old_pack_and_all_other_bytes_stay(tiny_model, hybrid, tmp_path):
    before = {name: hybrid.checkpoint[name] for name in hybrid.checkpoint}
    calibrated = calibrate(hybrid, tiny_model, **RUN)
    assert all(input_scale(hybrid, layer) is None for layer in hybrid.layers() if layer.startswith("layers."))
    for name, value in calibrated.checkpoint.items():
        if hasattr(value, "with_input_scale"):
            assert value.with_input_scale(None).same_bits(before[name])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name])
    assert calibrated.checkpoint.metadata["made_by"] == "tests"
    assert calibrated.checkpoint.metadata["hswq.pack"] == hybrid.checkpoint.metadata["hswq.pack"]
    path = calibrated.checkpoint.save(tmp_path / "pack_calib.safetensors")
    again = Checkpoint.open(path)
    assert again["layers.0.attention.qkv.weight"].same_bits(
        calibrated.checkpoint["layers.0.attention.qkv.weight"]
    )


def test_provenance_says_what_was_seen(hybrid):
    calibrated = calibrate(hybrid, headroom=1.5, **RUN)
    provenance = json.loads(calibrated.checkpoint.metadata["hswq.calibration"])
    assert provenance["prompts"] == RUN["prompts"]
    assert provenance["seeds"] == [1, 2]
    assert provenance["headroom"] == 1.5
    assert provenance["activations"].endswith("(parity)")
    assert provenance["no_scale"] == []


def test_headroom_multiplies_and_must_be_positive(tiny_model, hybrid):
    report = observe_for(hybrid, tiny_model, **RUN)
    plain, wide = with_input_scales(hybrid, report), with_input_scales(hybrid, report, 2.0)
    layer = "layers.1.feed_forward.w2"
    assert torch.equal(input_scale(wide, layer), 2 * input_scale(plain, layer))
    for headroom in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(HswqError, match="headroom"):
            with_input_scales(hybrid, report, headroom)


def test_a_headroom_that_clips_what_was_seen_is_warned_about(tiny_model, hybrid):
    with pytest.warns(UserWarning, match=r"headroom of 0\.5 clips") as told:
        tight = calibrate(hybrid, **RUN, headroom=0.5)
    assert [warning.filename for warning in told] == [__file__]
    assert sum(row.clipped for row in observe(tight.in_mode("parity"), **RUN).rows) > 0
    calibrate(hybrid, **RUN, headroom=1.0)  # a warning would be an error here


@pytest.mark.parametrize("headroom", [1e-44, 1e300])
def test_a_headroom_beyond_fp32_is_refused(tiny_model, hybrid, headroom):
    report = observe_for(hybrid, tiny_model, **RUN)
    with pytest.raises(HswqError, match=r"no input_scale that fp32 can hold.*layers\.0"):
        with_input_scales(hybrid, report, headroom)


def test_a_headroom_of_numpy_is_written_as_a_number(tiny_model, hybrid):
    wide = with_input_scales(hybrid, observe_for(hybrid, tiny_model, **RUN), np.float32(1.5))
    assert json.loads(wide.checkpoint.metadata["hswq.calibration"])["headroom"] == 1.5


def test_a_layer_with_zero_inputs_gets_no_key_and_is_listed(tiny_model):
    name = "layers.1.attention_norm1.weight"
    silenced = tiny_model.checkpoint.with_values({name: torch.zeros(64, dtype=torch.bfloat16)})
    model = tiny_model.with_checkpoint(silenced)
    hybrid = pack(model, Plan({"layers.*": "nvfp4"}))
    report = observe_for(hybrid, **RUN)
    assert report.unreached == ["layers.1.attention.qkv", "layers.1.attention.out"]
    calibrated = with_input_scales(hybrid, report)
    assert input_scale(calibrated, "layers.1.attention.qkv") is None
    assert input_scale(calibrated, "layers.1.feed_forward.w1") is not None
    listed = json.loads(calibrated.checkpoint.metadata["hswq.calibration"])["no_scale"]
    assert listed == ["layers.1.attention.out", "layers.1.attention.qkv"]
    with pytest.raises(HswqError, match=r"layers\.1\.attention\.qkv"):
        calibrated.in_mode("tc")


def test_a_layer_missing_from_the_report_loses_its_old_key(tiny_model, hybrid):
    full = calibrate(hybrid, tiny_model, **RUN)
    partial = observe(tiny_model, **RUN, groups={"layers.0.attention.qkv": 64})
    again = with_input_scales(full, partial)
    assert input_scale(again, "layers.0.attention.qkv") is not None
    assert input_scale(again, "layers.1.attention.qkv") is None


def test_another_basis_is_refused(tiny_model, hybrid):
    report = observe(tiny_model, **RUN, groups={"layers.0.attention.qkv": None})
    with pytest.raises(HswqError, match=r"another basis.*layers\.0\.attention\.qkv.*None.*64"):
        with_input_scales(hybrid, report)


def test_a_model_of_other_layers_is_refused_by_the_first_of_them(tiny_model, tiny_config, hybrid):
    wider = Checkpoint.from_mapping(random_tensors(replace(tiny_config, ffn_dim=192)))
    other = tiny_model.with_checkpoint(wider, "wider")  # as many layers, of the same names
    first = r"tensor: noise_refiner\.0\.feed_forward\.w1; found: \(192, 64\); expected: \(128, 64\)"
    with pytest.raises(HswqError, match=rf"other layers than the pack.*{first}"):
        calibrate(hybrid, other, **RUN)
    with pytest.raises(HswqError, match=r"other layers than the model.*noise_refiner\.0\.feed_forward\.w1"):
        impact_of_pack(other, hybrid, **RUN)


def test_nothing_to_calibrate(tiny_model):
    with pytest.raises(HswqError, match="no layer of this model is NVFP4"):
        calibrate(tiny_model, **RUN)


def test_unknown_layer_to_observe(tiny_model):
    with pytest.raises(HswqError, match=r"layers\.9\.attention\.qkv"):
        observe(tiny_model, **RUN, groups={"layers.9.attention.qkv": 64})


def test_observing_leaves_no_hooks_and_no_counts(tiny_model):
    tiny_model.network()

    def stop(done, total, label):
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        observe(tiny_model, **RUN, progress=stop)
    observe(tiny_model, **RUN)
    assert all(not layer._forward_pre_hooks for layer in tiny_model.linears().values())
    assert all(row.calls == 0 for row in tiny_model.report().layers)


def test_hooks_go_even_when_the_work_fails(tiny_model):
    linears = tiny_model.linears()

    def fail():
        with observing(linears, dict.fromkeys(linears, 16), {}):
            assert all(layer._forward_pre_hooks for layer in linears.values())
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - ours, from four lines above
        fail()
    assert all(not layer._forward_pre_hooks for layer in linears.values())


def test_observing_changes_no_picture(tiny_model):
    before = tiny_model.generate("a thing", seed=1, steps=2).final
    with observing(tiny_model.linears(), dict.fromkeys(tiny_model.layers(), 16), {}):
        during = tiny_model.generate("a thing", seed=1, steps=2).final
    assert torch.equal(before, during)


def test_a_lora_that_exceeds_the_scale_is_named(tiny_model, hybrid):
    calibrated = calibrate(hybrid, **RUN).in_mode("parity")
    stem = "transformer.layers.0.feed_forward.w3"
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 64), f"{stem}.lora_B.weight": 3 * torch.randn(128, 4)}
    calibrated.attach(lora_from_tensors(tensors, name="loud"))
    report = observe(calibrated, **RUN)
    row = report.of("layers.0.feed_forward.w2")
    assert "layers.0.feed_forward.w2" in report.exceeding
    assert row.exceeds > 1
    assert row.clipped > 0
    assert report.loras == ["loud ×1 (branch)"]
    assert "layers.0.feed_forward.w1" not in report.exceeding
    assert report.to_frame().set_index("layer").loc["layers.0.feed_forward.w2", "exceeds"] == row.exceeds


@pytest.mark.parametrize("how", ["branch", "bake", "in the file"])
def test_ranges_of_a_model_without_the_packs_loras_are_warned_about(tiny_model, hybrid, how, tmp_path):
    stem = "transformer.layers.0.feed_forward.w3"
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 64), f"{stem}.lora_B.weight": 3 * torch.randn(128, 4)}
    lora = lora_from_tensors(tensors, name="loud")
    styled = hybrid.on("cpu")
    styled.attach(lora, 0.5, "branch" if how == "branch" else "bake")
    if how == "in the file":
        styled = hybrid.with_checkpoint(Checkpoint.open(save(styled, tmp_path / "baked.safetensors")))
    (warning,) = observe_for(styled, tiny_model, **RUN).warnings
    assert "loud ×0.5" in warning
    assert "no --model" in warning
    with pytest.warns(UserWarning, match="does not have the LoRAs"):
        calibrate(styled, tiny_model, **RUN)
    own = observe_for(styled, **RUN)
    assert own.warnings == []
    assert own.loras == [f"loud ×0.5 ({'branch' if how == 'branch' else 'bake'})"]
    tiny_model.attach(lora, 0.5)
    assert observe_for(styled, tiny_model, **RUN).warnings == []
    assert observe_for(hybrid, **RUN).warnings == []


def test_the_same_prompts_do_not_exceed(hybrid):
    calibrated = calibrate(hybrid, **RUN).in_mode("parity")
    report = observe(calibrated, **RUN)
    assert report.exceeding == []
    assert all(row.clipped == 0 and row.exceeds == 1.0 for row in report.rows if row.input_scale is not None)


def test_the_judges_seeds_are_not_used_by_default(tiny_model):
    assert not set(fresh_seeds(200)) & set(SEEDS_20)
    report = observe(tiny_model, steps=1, groups={"x_embedder": 64})
    assert report.prompts == tiny_model.prompts
    assert report.seeds == fresh_seeds(20)


def test_report_can_be_saved(hybrid, tmp_path):
    path = observe_for(hybrid, **RUN).save(tmp_path / "calibration.json")
    content = json.loads(path.read_text())
    assert "mean_squares" not in content
    assert content["rows"][0]["layer"] == "layers.0.attention.qkv"
