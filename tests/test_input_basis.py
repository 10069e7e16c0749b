"""Input bases and activation scales: what the layer computes, in files, under LoRAs, in plans and in sensitivity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import hswq_lab as hl
from hswq_lab import formats, packing
from hswq_lab.checkpoint import convert
from hswq_lab.errors import HswqError
from hswq_lab.layers import make_linear
from hswq_lab.lora import lora_from_tensors
from hswq_lab.modes import ModeRequest, resolve
from hswq_lab.quantize import (
    Plan,
    gather_bases,
    gather_moments,
    impact_of_pack,
    observe,
    observe_for,
    pack,
    sensitivity,
    with_input_scales,
)
from hswq_lab.quantize.activations import Activations
from hswq_lab.quantize.bases import SecondMoment
from hswq_lab.quantize.trial import Trial, TrialSettings

N, K, RANK = 48, 64, 4
RUN = {"prompts": ["a thing", "another"], "seeds": [1, 2], "steps": 2}
RANKED = Plan({"*": "nvfp4+r4", "layers.0.*": "int8", "final_layer.linear": "nvfp4"})


@pytest.fixture
def inputs():
    """64 rows most of whose energy lies in 4 directions, and those directions as a basis."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, K, generator=generator) * 0.2
    x += 3 * torch.randn(64, RANK, generator=generator) @ torch.randn(RANK, K, generator=generator)
    moment = SecondMoment(K, torch.device("cpu"))
    moment.add(x)
    return x, moment.basis(RANK)


def weight(basis=None, activation_scales="rtn"):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 0.1
    packed = packing.pack_weight(w, "nvfp4", 64, "sweep")
    scale = torch.tensor(60 / 2688)
    return replace(packed, input_scale=scale, basis=basis, activation_scales=activation_scales)


def layer(packed, mode="tc"):
    resolved = resolve("x", "nvfp4", ModeRequest(mode), calibrated=True, fp4_is_native=False)
    return make_linear("x", packed, None, resolved)


def rounded(x, packed):
    """What NVFP4 makes of activations, unrotated, by the definition."""
    codes, scales = formats.quantize_nvfp4(
        formats.rotate_fp32(x, 64), packed.input_scale, packed.activation_scales
    )
    values = formats.dequantize_nvfp4(codes, scales, packed.input_scale, tuple(x.shape), torch.float32)
    return formats.rotate_fp32(values, 64)


def relative(y, exact):
    return float((y - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("method", ["rtn", "four_six", "sweep"])
def test_what_the_layer_computes(inputs, method):
    x, basis = inputs
    for chosen in (None, basis):
        packed = weight(chosen, method)
        w = packing.dequantize(packed)
        inside = 0 if chosen is None else x @ basis.float().T @ basis.float() / K
        expected = (rounded(x - inside, packed) + inside) @ w.T
        # Sums in another order move a few inputs over the edge between two codes.
        assert relative(layer(packed)(x), expected) < 2e-5


def test_the_basis_and_better_scales_make_the_rounding_error_smaller_and_parity_does_not_see_them(inputs):
    x, basis = inputs
    exact = x @ packing.dequantize(weight()).T
    errors = [relative(layer(weight(b, m))(x), exact) for b in (None, basis) for m in ("rtn", "sweep")]
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.1 * errors[0]
    assert errors[3] < errors[2]
    plain, with_both = (layer(weight(*own), "parity")(x) for own in ((), (basis, "sweep")))
    assert torch.equal(plain, with_both)


def test_any_basis_is_exact_but_for_rounding(inputs):
    x, _ = inputs
    w = packing.dequantize(weight())
    anything = torch.randn(3, K, generator=torch.Generator().manual_seed(5)).to(torch.float8_e4m3fn)
    assert relative(layer(weight(anything))(x), x @ w.T) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("larger", ["the input", "what the basis leaves"])
def test_a_calibrated_layer_does_not_clip_what_it_was_calibrated_on(inputs, dtype, larger):
    x, basis = inputs[0].to(dtype), inputs[1]
    if larger != "the input":
        basis = basis[:1].repeat(3, 1)  # takes a direction away three times: twice of it is left
    seen = Activations("x", 64, K, None, x.device, basis)
    seen.add(x)
    calibrated = layer(seen.calibrated(weight(basis)))
    calibrated(x)
    assert calibrated.counts.blocks == 64 * K // 16
    assert calibrated.counts.clipped == 0
    whole = Activations("x", 64, K, seen.needed_scale, x.device)
    whole.add(x)  # as mode tc8 and programs that do not know the basis round it
    assert whole.clipped == 0
    assert (whole.amax == seen.amax) == (larger == "the input")


def test_clipping_is_counted_on_what_is_rounded(inputs):
    x, basis = inputs
    scale = torch.tensor(9 / 2688)
    seen = Activations("x", 64, K, float(scale), x.device, basis)
    seen.add(x)
    run = layer(weight(basis).with_input_scale(scale))
    run(x)
    plain = Activations("x", 64, K, float(scale), x.device)
    plain.add(x)
    assert (seen.blocks, seen.clipped) == (run.counts.blocks, run.counts.clipped)
    assert seen.clipped < plain.clipped


def test_principal_directions_of_rows_of_length_one(inputs):
    x, _ = inputs
    moment = SecondMoment(K, torch.device("cpu"))
    moment.add(x[:40].reshape(2, 20, K))
    moment.add(torch.cat([x[40:], torch.zeros(1, K)]))
    basis = moment.basis().float()
    assert basis.shape == (K, K)
    assert basis.square().mean(1) == pytest.approx(torch.ones(K), abs=0.03)
    rows = x / x.norm(dim=1, keepdim=True)
    energy = (rows @ basis.T / K**0.5).square().sum(0)
    assert energy.sum() == pytest.approx(64, rel=0.01)
    assert energy[:RANK].sum() > 0.95 * 64
    for _ in range(10):
        moment.add(1e4 * torch.eye(K)[:1])
    assert abs(float(moment.basis(1)[0, 0].float())) < K**0.5 / 2  # long rows do not take over


@pytest.fixture
def ranked(tiny_model):
    packed = pack(tiny_model, RANKED, bases=gather_bases(tiny_model, **RUN), activation_scales="four_six")
    return with_input_scales(packed, observe_for(packed, tiny_model, **RUN))


def test_a_calibrated_pack_does_not_clip_its_own_captions():
    model = hl.load("mini-zimage", device="cpu")
    run = {"prompts": model.prompts[:2], "seeds": [1, 2], "steps": 3}
    packed = pack(model, Plan({"*": "nvfp4+r4"}), bases=gather_bases(model, **run))
    calibrated = with_input_scales(packed, observe_for(packed, **run)).in_mode("parity")
    report = observe(calibrated, **run)
    assert {row.rank for row in report.rows} == {4}
    assert all(row.blocks for row in report.rows)
    assert sum(row.clipped for row in report.rows) == 0
    assert report.exceeding == []
    blind = observe(calibrated, **run, bases={})  # looks at whole inputs only
    assert any(blind.of(row.layer).amax < row.amax for row in report.rows)
    with pytest.raises(HswqError, match=r"another basis.*of rank 0.*of rank 4.*observe_for"):
        with_input_scales(packed, blind)


def test_every_way_to_measure_a_ranked_layer_gives_it_one_scale(tiny_model, monkeypatch):
    name = "layers.1.feed_forward.w3"
    bases = {name: gather_bases(tiny_model, **RUN)[name][:1].repeat(3, 1)}  # leaves more than it takes
    packed = pack(tiny_model, Plan({name: "nvfp4+r3"}), bases=bases)
    needed = observe_for(packed, tiny_model, **RUN).of(name).needed
    assert needed > 1.01 * observe(tiny_model, **RUN).of(name).needed
    own = with_input_scales(packed, observe_for(packed, **RUN)).in_mode("parity")
    assert observe(own, **RUN).of(name).exceeds == 1.0  # looks with the pack's own bases
    moments = gather_moments(tiny_model, {name: 64}, **RUN, bases=bases)[name]
    assert moments.input_scale == needed
    run_with, run = {}, Trial.run

    def look(trial, weights):
        run_with.update({layer: float(weight.input_scale) for layer, weight in weights.items()})
        return run(trial, weights)

    monkeypatch.setattr(Trial, "run", look)
    impact_of_pack(tiny_model, packed, **RUN)
    # The trial runs all captions in one batch, so sums differ in their last bits.
    assert run_with == {name: pytest.approx(needed, rel=1e-4)}


def test_sensitivity_gives_a_ranked_layer_the_scale_of_what_its_basis_leaves(tiny_model):
    trial = Trial(tiny_model, TrialSettings((("a thing", 1), ("another", 2)), 2, 2.5, 1.5, (16, 16), "rtn"))
    for name in tiny_model.layers():
        weight = trial.packed(name, "nvfp4+r2")
        module = trial.module(name, weight)
        module(trial.inputs(name))
        assert module.counts.clipped == 0, name
    blind = {name: trial.activations(name, rotated=True).amax for name in tiny_model.layers()}
    seen = {name: trial.activations(name, rotated=True, rank=2).amax for name in tiny_model.layers()}
    assert all(seen[name] >= blind[name] for name in blind)
    assert any(seen[name] > blind[name] for name in blind)


def test_files_hold_it_and_reports_name_it(ranked, tiny_model, tmp_path, capsys):
    path = hl.save(ranked, tmp_path / "pack.safetensors")
    stored = load_file(path)
    name = "model.diffusion_model.layers.1.attention.qkv"
    assert stored[f"{name}.input_basis"].dtype == torch.float8_e4m3fn
    assert b'"activation_scales":"four_six"' in bytes(stored[f"{name}.comfy_quant"].tolist())
    read = hl.Checkpoint.open(path)
    assert set(read) == set(ranked.checkpoint)
    for key in ranked.layers():
        assert read[f"{key}.weight"].same_bits(ranked.checkpoint[f"{key}.weight"]), key
        assert read.entry(f"{key}.weight") == ranked.checkpoint.entry(f"{key}.weight")
    report = hl.inspect(path)
    assert "input basis of rank 4, activations by four_six" in str(report)
    assert report.bits_per_weight == pytest.approx(RANKED.bits(ranked.layers()), rel=2e-3)
    assert hl.check(path, tiny_model).ok
    again = hl.save(hl.load(path), tmp_path / "again.safetensors")
    assert again.read_bytes() == path.read_bytes()
    key = "layers.1.attention.qkv.weight"
    other = read.with_values({key: replace(read[key], activation_scales="sweep")})
    other.save(tmp_path / "other.safetensors")  # the old marker must not be kept
    assert hl.Checkpoint.open(tmp_path / "other.safetensors")[key].activation_scales == "sweep"
    done = convert(path, tmp_path / "comfy.safetensors", to="comfy")
    assert {"input_scale, input_basis"} < {row.lost for row in done.rows}
    assert not any("input_basis" in key for key in load_file(tmp_path / "comfy.safetensors"))


def test_a_wrong_basis_or_an_unknown_method_in_a_file_is_refused(ranked, tmp_path):
    path = hl.save(ranked, tmp_path / "pack.safetensors")
    stored, name = load_file(path), "model.diffusion_model.layers.1.attention.qkv"
    marker = bytes(stored[f"{name}.comfy_quant"].tolist())
    wrong = {
        r"does not fit the layer.*qkv\.input_basis.*\[4, 32\]": {
            f"{name}.input_basis": torch.zeros(4, 32).to(torch.float8_e4m3fn)
        },
        r"does not fit the layer.*BF16": {f"{name}.input_basis": torch.zeros(4, 64).bfloat16()},
        r"values are NaN.*qkv\.input_basis": {
            f"{name}.input_basis": torch.full((4, 64), torch.nan).to(torch.float8_e4m3fn)
        },
        r"activation scales that are not known.*'five'": {
            f"{name}.comfy_quant": torch.frombuffer(
                bytearray(marker.replace(b"four_six", b"five")), dtype=torch.uint8
            )
        },
    }
    for match, changed in wrong.items():
        save_file(stored | changed, tmp_path / "wrong.safetensors")
        with pytest.raises(HswqError, match=match):
            hl.load(tmp_path / "wrong.safetensors")


@pytest.mark.parametrize("how", ["branch", "bake", "bake_from_source"])
def test_a_lora_acts_on_the_whole_input_not_only_on_what_the_basis_leaves(ranked, tiny_model, how):
    name = "layers.1.attention.qkv"
    n, k = tiny_model.layers()[name]
    generator = torch.Generator().manual_seed(3)
    down = torch.randn(2, k, generator=generator)
    up = torch.randn(n, 2, generator=generator) * 0.05
    tensors = {f"diffusion_model.{name}.lora_down.weight": down, f"diffusion_model.{name}.lora_up.weight": up}
    lora = lora_from_tensors(tensors)
    pack_tc = ranked.in_mode("tc")
    basis = ranked.checkpoint[f"{name}.weight"].basis.float()
    x = torch.randn(32, RANK, generator=generator) @ basis  # lies wholly in the basis
    before = pack_tc.linears()[name](x)
    pack_tc.attach(lora, 1.0, how, source=tiny_model if how == "bake_from_source" else None)
    arrived = pack_tc.linears()[name](x) - before
    # 1 if nothing arrived; a bake in place rounds stochastically.
    assert relative(arrived, x @ down.T @ up.T) < (0.02 if how == "branch" else 0.3)
    if how != "branch":
        after = dict(pack_tc.effective_items())[f"{name}.weight"]
        old = ranked.checkpoint[f"{name}.weight"]
        assert after.basis.float().equal(old.basis.float())
        assert after.activation_scales == "four_six"
        assert after.input_scale == old.input_scale


def test_pack_finds_bases_itself_and_refuses_too_few(tiny_model):
    packed = pack(tiny_model, Plan({"layers.0.attention.qkv": "nvfp4+r2"}))
    assert packed.checkpoint.entry("layers.0.attention.qkv.weight").rank == 2
    assert (
        packed.report().bits_per_weight
        > pack(tiny_model, Plan({"layers.0.attention.qkv": "nvfp4"})).report().bits_per_weight
    )
    few = {"layers.0.attention.qkv": torch.zeros(1, 64).to(torch.float8_e4m3fn)}
    with pytest.raises(HswqError, match=r"not known.*found: rank 1.*expected: rank 2.*gather_bases"):
        pack(tiny_model, Plan({"layers.0.attention.qkv": "nvfp4+r2"}), bases=few)
    with pytest.raises(HswqError, match="unknown way to find block scales"):
        pack(tiny_model, Plan({"*": "nvfp4"}), activation_scales="best")


def test_sensitivity_and_plans_know_ranks(tiny_model):
    layers = ["layers.1.feed_forward.w2", "x_embedder"]
    report = sensitivity(
        tiny_model, **RUN, layers=layers, formats=["nvfp4", "nvfp4+r16"], activation_scales="four_six"
    )
    assert report.activation_scales == "four_six"
    for name in layers:
        assert report.of(name, "nvfp4+r16").output_error < report.of(name).output_error
    assert type(report).from_dict(report.to_dict()) == report
    assert set(report.plan(nvfp4=2).values()) == {"nvfp4"}
    plain = sensitivity(tiny_model, **RUN, layers=layers)
    assert plain.of("x_embedder").samples != report.of("x_embedder").samples


@pytest.mark.parametrize("wrong", [torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.zeros(4, 64)])
def test_a_basis_that_does_not_fit_the_layer_is_not_packed(tiny_model, wrong):
    with pytest.raises(HswqError, match=r"qkv\.weight\.input_basis"):
        pack(
            tiny_model, Plan({"layers.0.attention.qkv": "nvfp4+r4"}), bases={"layers.0.attention.qkv": wrong}
        )


def test_bases_of_unknown_layers_are_refused(tiny_model):
    with pytest.raises(HswqError, match=r"no such layer.*nope.*nearest"):
        gather_bases(tiny_model, **RUN, layers=["nope"])
