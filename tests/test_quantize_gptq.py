"""GPTQ: least squares against an independent solver, rounding, and what it earns on unseen inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hswq_lab import ops, packing
from hswq_lab.errors import HswqError
from hswq_lab.formats import decode_e2m1, decode_e4m3, rotate_fp32
from hswq_lab.model import Model
from hswq_lab.quantize import LayerMoments, Moments, Plan, calibrate, gather_bases, gather_moments, pack
from hswq_lab.quantize.gptq import STRENGTHS, _round_columns, best_weight, choose_strength, gptq_weight

K, N, GROUP = 64, 48, 16


def inputs(seed: int, rows: int = 400) -> torch.Tensor:
    """Correlated rows, as activations are: a few strong directions and a weak rest."""
    mixing = torch.randn(K, K, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -2, K)[:, None]
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)) @ mixing


def quantised(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = rotate_fp32(x, GROUP)
    codes, scales = ops.quantize_nvfp4(rotated, scale)
    return rotated, ops.dequantize_nvfp4(codes, scales, scale, tuple(x.shape), torch.float32)


def moments_of(*seeds: int) -> LayerMoments:
    scale = ops.tensor_scale(rotate_fp32(torch.cat([inputs(seed) for seed in seeds]), GROUP))
    folds = []
    for seed in seeds:
        x, rounded = quantised(inputs(seed), scale)
        folds.append(Moments(rounded.T @ rounded, x.T @ rounded, len(x)))
    return LayerMoments("layer", GROUP, float(scale), (folds[0], folds[-1]))


@pytest.fixture
def weight():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(2)) / 8


def output_error(weight, packed, moments, seed: int) -> float:
    x, rounded = quantised(inputs(seed), torch.tensor(moments.input_scale))
    exact = x @ rotate_fp32(weight, GROUP).T
    stored = rotate_fp32(packing.dequantize(packed), GROUP)
    return float((rounded @ stored.T - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_the_target_solves_the_regularised_least_squares(weight, strength):
    moments = moments_of(3, 4)
    x, rounded = (each.double() for each in quantised(inputs(3), torch.tensor(moments.input_scale)))
    w = weight.double()
    got = best_weight(w, moments.folds[0], [strength])[0]
    lam = strength * float((rounded.T @ rounded).diagonal().mean())
    left = torch.cat([rounded, lam**0.5 * torch.eye(K, dtype=torch.float64)])
    right = torch.cat([x @ w.T, lam**0.5 * w.T])
    expected = torch.linalg.lstsq(left, right).solution.T
    assert torch.allclose(got, expected, atol=1e-5)


def test_strong_regularisation_keeps_the_weight(weight):
    got = best_weight(weight.double(), moments_of(3, 4).folds[0], [1e9])[0]
    assert torch.allclose(got, weight.double(), atol=1e-6)


def test_gptq_beats_the_sweep_on_unseen_inputs(weight):
    moments = moments_of(3, 4)
    ours = gptq_weight(weight, moments)
    ours.validate()
    assert (ours.shape, ours.group, ours.input_scale) == ((N, K), GROUP, None)
    sweep = packing.pack_weight(weight, "nvfp4", GROUP, "sweep")
    assert output_error(weight, ours, moments, 9) < 0.8 * output_error(weight, sweep, moments, 9)


def test_rounding_passes_errors_on():
    # Two equal inputs: an error of the first weight is made up for by the second.
    x = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).expand(-1, 16).contiguous()
    exact = Moments(x.T @ x, x.T @ x, 200)
    weight = torch.full((1, 16), 1.1)
    weight[0, 0] = 6.0
    packed = gptq_weight(weight, LayerMoments("layer", None, 1.0, (exact, exact)))
    stored = packing.dequantize(packed)
    nearest = packing.dequantize(packing.pack_weight(weight, "nvfp4", None, "rtn"))
    assert abs(float((stored - weight).sum())) < 0.5 * abs(float((nearest - weight).sum()))


def test_errors_reach_later_blocks(weight):
    x = quantised(inputs(3), torch.tensor(moments_of(3, 4).input_scale))[1].double()
    hessian, scale = x.T @ x + 0.01 * torch.eye(K), ops.tensor_scale(weight)
    blocks = torch.block_diag(*[torch.ones(16, 16, dtype=torch.float64)] * (K // 16))
    errors = []
    for known in (hessian, hessian * blocks):
        codes, block_codes = _round_columns(weight.double(), known, scale)
        steps = scale * decode_e4m3(block_codes).repeat_interleave(16, dim=1)
        difference = decode_e2m1(codes).double() * steps - weight
        errors.append(float(((difference @ hessian) * difference).sum()))
    assert errors[0] < 0.7 * errors[1]


def test_few_inputs_are_fitted_less(weight):
    """Two folds of three rows each have nothing in common; two of the same kind have."""
    alike = moments_of(3, 4)
    few = []
    for seed in (5, 6):
        x, rounded = quantised(inputs(seed, rows=3), torch.tensor(alike.input_scale))
        few.append(Moments(rounded.T @ rounded, x.T @ rounded, 3))
    w = rotate_fp32(weight, GROUP).double()
    assert choose_strength(w, alike.folds) < choose_strength(w, few)
    assert choose_strength(w, few) in STRENGTHS


def test_one_fold_is_enough(weight):
    moments = moments_of(3, 4)
    empty = Moments(torch.zeros(K, K), torch.zeros(K, K), 0)
    alone = LayerMoments("layer", GROUP, moments.input_scale, (moments.folds[0], empty))
    assert output_error(weight, gptq_weight(weight, alone), moments, 9) < 0.02


@pytest.mark.parametrize(("n", "k"), [(1, 24), (130, 40), (16, 16)])
def test_any_shape(n, k):
    torch.manual_seed(0)
    x, weight = torch.randn(100, k), torch.randn(n, k)
    fold = Moments(x.T @ x, x.T @ x, 100)
    packed = gptq_weight(weight, LayerMoments("layer", 4, 1.0, (fold, fold)))
    packed.validate()
    assert (packing.dequantize(packed) - weight).norm() < 0.15 * weight.norm()


def test_a_weight_of_zeros():
    fold = Moments(torch.eye(16), torch.eye(16), 16)
    packed = gptq_weight(torch.zeros(16, 16), LayerMoments("layer", None, 1.0, (fold, fold)))
    packed.validate()
    assert not packing.dequantize(packed).any()


@pytest.mark.parametrize(("rank", "method"), [(0, "rtn"), (5, "sweep")])
def test_gathered_moments_are_sums_over_what_the_layer_sees(tiny_model, rank, method):
    layer = "layers.1.feed_forward.w2"
    run = {"prompts": ["a thing", "another"], "seeds": [1, 2], "steps": 2}
    bases = {layer: gather_bases(tiny_model, **run)[layer][:rank]} if rank else {}
    moments = gather_moments(tiny_model, {layer: 64}, **run, bases=bases, activation_scales=method)[layer]
    seen = []
    copy = tiny_model.on("cpu")
    hook = copy.linears()[layer].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].reshape(-1, 128))
    )
    copy.generate("a thing", 1, steps=2)
    even = len(seen)
    copy.generate("another", 2, steps=3)
    hook.remove()
    assert moments.folds[0].rows == sum(map(len, seen[:even]))
    assert moments.folds[1].rows == sum(map(len, seen[even:]))
    x = torch.cat(seen[:even])
    inside = x @ bases[layer].float().T @ bases[layer].float() / 128 if rank else torch.zeros_like(x)
    x, inside, rest = (rotate_fp32(each, 64) for each in (x, inside, x - inside))
    scale = torch.tensor(moments.input_scale)
    codes = ops.quantize_nvfp4(rest, scale, method)
    rounded = inside + ops.dequantize_nvfp4(*codes, scale, tuple(x.shape), torch.float32)
    assert torch.allclose(moments.folds[0].gram, rounded.T @ rounded, rtol=1e-3, atol=1e-3)
    assert torch.allclose(moments.folds[0].cross, x.T @ rounded, rtol=1e-3, atol=1e-3)


def test_pack_by_gptq_gathers_its_own_moments(tiny_checkpoint, tiny_companion):
    companion = replace(tiny_companion, prompts=["a thing", "another"])
    tiny_model = Model(tiny_checkpoint, name="tiny", companion=companion)
    plan = Plan({"layers.1.*": "nvfp4", "layers.0.*": "int8"})
    packed = pack(tiny_model, plan, "gptq")
    again = pack(tiny_model, plan, "gptq")
    name = "layers.1.feed_forward.w1.weight"
    assert packed.checkpoint[name].same_bits(again.checkpoint[name])
    assert not packed.checkpoint[name].same_bits(pack(tiny_model, plan).checkpoint[name])
    int8 = "layers.0.feed_forward.w1.weight"
    assert packed.checkpoint[int8].same_bits(pack(tiny_model, plan).checkpoint[int8])
    calibrate(packed, tiny_model, steps=2).in_mode("tc").generate("a thing", steps=1)


def test_missing_moments_and_other_bases_are_refused(tiny_model):
    layer = "layers.1.feed_forward.w1"
    run = {"prompts": ["a thing"], "seeds": [1], "steps": 1}
    moments = gather_moments(tiny_model, {layer: None}, **run)
    with pytest.raises(HswqError, match=r"another basis.*layers\.1\.feed_forward\.w1.*None.*64"):
        pack(tiny_model, Plan({layer: "nvfp4"}), "gptq", moments=moments)
    with pytest.raises(HswqError, match=r"GPTQ knows nothing.*layers\.0"):
        pack(tiny_model, Plan({"layers.0.feed_forward.w1": "nvfp4"}), "gptq", moments=moments)
