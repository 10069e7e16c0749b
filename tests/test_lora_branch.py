"""Side paths: exact for every kind that has one, several at once, strengths changed in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lora_dialects import DIALECTS, LAYERS, D, logical

from hswq_lab.errors import HswqError
from hswq_lab.lora import BranchStack, branch_evidence, change_of, lora_from_tensors, total_delta
from hswq_lab.lora.change import Change

QKV, OUT = "layers.0.attention.qkv", "layers.0.attention.out"


@pytest.fixture
def layer():
    """A layer's weight [3D, D], bias, input [5, D] and output."""
    generator = torch.Generator().manual_seed(5)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((3 * D, D), (3 * D,), (5, D)))
    return weight, bias, x, torch.nn.functional.linear(x, weight, bias)


def _delta(dialect="5 kohya split", seed=1, parts="qkv", rank=4, extra=None):
    tensors, metadata = DIALECTS[dialect](logical([QKV], lambda _: rank, lambda _: 3.0, seed, parts))
    return lora_from_tensors(tensors | (extra or {}), metadata).deltas(LAYERS)[QKV]


def _stack(deltas, weight, bias=None, dtype=torch.float32):
    branches = {name: (delta.branch(weight), strength) for name, (delta, strength) in deltas.items()}
    return BranchStack(branches, device="cpu", dtype=dtype, bias=bias)


def _dora(prefix="lora_unet_layers_0_attention_", parts=("to_q", "to_k", "to_v")):
    generator = torch.Generator().manual_seed(9)
    return {f"{prefix}{part}.dora_scale": torch.rand(D, 1, generator=generator) + 0.5 for part in parts}


LYCORIS = "lycoris_layers_0_attention_"
KINDS = {
    "split": _delta(),
    "fused": _delta("6 kohya fused"),
    "only v": _delta(parts="v"),
    "LoKr": _delta("10 LoKr"),
    "DoRA": _delta(extra=_dora()),
    "DoRA on q, none on k and v": _delta(extra=_dora(parts=("to_q",))),
    "DoRA of LoKr": _delta("10 LoKr", extra=_dora(LYCORIS)),
    "LoRA with bias": _delta(extra={"lora_unet_layers_0_attention_to_k.diff_b": torch.arange(D) / 10}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [1.0, -0.4, 2.5])
def test_a_branch_is_exact(kind, strength, layer):
    weight, bias, x, y = layer
    delta = KINDS[kind]
    before = y.clone()
    found = _stack({"a": (delta, strength)}, weight, bias)(x, y)
    added = delta.bias() if delta.biases else torch.zeros(3 * D)
    truth = x @ (weight + strength * delta.dense(weight)).T + bias + strength * added
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=2e-5)
    assert torch.equal(y, before)


def test_several_branches_add_up_each_against_the_pristine_layer(layer):
    weight, bias, x, y = layer
    loras = {name: (delta, 0.3 + 0.2 * i) for i, (name, delta) in enumerate(KINDS.items())}
    truth = x @ (weight + total_delta(list(loras.values()), weight)).T + bias
    truth += sum(k * delta.bias() for delta, k in loras.values() if delta.biases)
    torch.testing.assert_close(_stack(loras, weight, bias)(x, y), truth, rtol=1e-5, atol=5e-5)


def test_low_rank_parts_of_all_loras_share_one_pair_of_gemms(layer):
    weight, *_ = layer
    stack = _stack(
        {"a": (KINDS["split"], 1.0), "b": (KINDS["only v"], 1.0), "c": (KINDS["DoRA"], 1.0)}, weight
    )
    assert stack.down.shape == (12 + 4 + 12, D)
    assert stack.up.shape == (3 * D, 28)


def test_strengths_change_in_place_without_touching_factors(layer):
    weight, bias, x, y = layer
    loras = {
        "a": (KINDS["DoRA of LoKr"], 0.7),
        "b": (KINDS["split"], 1.0),
        "c": (KINDS["LoRA with bias"], -1.0),
    }
    stack = _stack(loras, weight, bias)
    before = y.clone()
    first = stack(x, y)
    assert torch.equal(y, before)
    assert torch.equal(stack.add_to(x, y.clone()), first)
    buffers = {name: value.data_ptr() for name, value in stack.named_buffers()}
    stack.set_strength("a", 0.0)
    stack.set_strength("b", 0.0)
    stack.set_strength("c", 0.0)
    assert torch.equal(stack(x, y), y)
    for name, (_, strength) in loras.items():
        stack.set_strength(name, strength)
    assert torch.equal(stack(x, y), first)
    assert stack.strengths == {"a": 0.7, "b": 1.0, "c": -1.0}
    assert {name: value.data_ptr() for name, value in stack.named_buffers()} == buffers
    with pytest.raises(HswqError, match="no branch"):
        stack.set_strength("d", 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_branches_round_only_as_sixteen_bits_do(dtype, layer):
    weight, bias, x, _ = layer
    delta = KINDS["split"]
    x16 = x.to(dtype)
    found = _stack({"a": (delta, 0.8)}, weight, bias, dtype)(x16, torch.zeros(5, 3 * D, dtype=dtype))
    assert found.dtype == dtype
    truth = x16.double() @ (0.8 * delta.dense()).double().T
    error = (found.double() - truth).norm() / truth.norm()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dialect", ["11 LoHa", "13 full deltas"])
def test_what_has_no_small_side_path_says_use_bake(dialect):
    delta = _delta(dialect)
    assert delta.branch() is None
    assert "use bake" in delta.why_no_branch()


def test_column_wise_dora_has_no_branch(layer):
    delta = _delta(extra={"lora_unet_layers_0_attention_to_q.dora_scale": torch.ones(1, D)})
    assert "use bake" in delta.why_no_branch()
    assert delta.branch(layer[0]) is None


def test_stacks_refuse_branches_of_different_layers(layer):
    other = lora_from_tensors(*DIALECTS["5 kohya split"](logical([OUT], lambda _: 2, lambda _: 2.0)))
    with pytest.raises(HswqError, match="one layer"):
        _stack({"a": (KINDS["split"], 1.0), "b": (other.deltas(LAYERS)[OUT], 1.0)}, None)


def test_factors_keep_their_stored_precision():
    tensors, _ = DIALECTS["5 kohya split"](logical([QKV], lambda _: 4, lambda _: 3.0))
    stored = {key: value.bfloat16() for key, value in tensors.items()}
    branch = lora_from_tensors(stored).deltas(LAYERS)[QKV].branch()
    assert branch.down.dtype == branch.up.dtype == torch.bfloat16
    eight_bit = {key: value.to(torch.float8_e4m3fn) for key, value in tensors.items()}
    assert lora_from_tensors(eight_bit).deltas(LAYERS)[QKV].branch().up.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_of_a_branch(kind, layer):
    weight, *_ = layer
    delta = KINDS[kind]
    wanted = change_of([(delta, 0.5)], weight, lambda: weight)
    evidence = branch_evidence(QKV, weight, wanted, [(delta.branch(weight), 0.5)])
    total = total_delta([(delta, 0.5)], weight)
    assert evidence.delta_norm == pytest.approx(float(total.double().norm()), rel=1e-6)
    assert evidence.rows == int((total != 0).any(dim=1).sum())
    assert evidence.verdict == "OK"
    assert evidence.retained == pytest.approx(1, abs=1e-6)
    assert evidence.added_error < 1e-6
    assert not evidence.warning


def test_evidence_sees_a_branch_that_is_missing_or_zero(layer):
    weight, *_ = layer
    delta = KINDS["split"]
    total = total_delta([(delta, 1.0)], weight)
    for wanted in (change_of([(delta, 1.0)], weight, lambda: weight), Change(total)):
        missing = branch_evidence(QKV, weight, wanted, [(delta.branch(), 0.0)])
        assert (missing.verdict, missing.retained) == ("MISSING", 0.0)
        half = branch_evidence(QKV, weight, wanted, [(delta.branch(), 0.5)])
        assert (half.retained, half.added_error) == (pytest.approx(0.5), pytest.approx(0.5))
        assert "only 50%" in half.warning
        other = branch_evidence(QKV, weight, wanted, [(replace(delta.branch(), down=weight[:12] * 9), 1.0)])
        dense = delta.branch().up @ (weight[:12] * 9 * delta.branch().scale[:, None])
        assert other.added_error == pytest.approx(float((dense - total).norm() / total.norm()), rel=1e-5)
    nothing = change_of([(delta, 0.0)], weight, lambda: weight)
    assert branch_evidence(QKV, weight, nothing, [(delta.branch(), 0.0)]).verdict == "N/A"
