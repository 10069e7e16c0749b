"""The effect test: cosine of what LoRAs do to outputs on a pack and at 16 bits, on real activations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hswq_lab.effect import DROWNED, measure_effect
from hswq_lab.errors import HswqError
from hswq_lab.lora import lora_from_tensors
from hswq_lab.lora.targets import unpacked
from hswq_lab.model import Model

LAYERS = ("layers.0.feed_forward.w1", "layers.0.attention.out", "layers.1.feed_forward.w2")


def make_lora(model: Model, size: float, bias: bool = False):
    """Rank 4 on three layers, ‖ΔW‖ = size · ‖W‖."""
    generator = torch.Generator().manual_seed(2)
    factors = {}
    for layer in LAYERS:
        n, k = model.layers()[layer]
        down, up = torch.randn(4, k, generator=generator), torch.randn(n, 4, generator=generator)
        norm = float(unpacked(model.checkpoint[f"{layer}.weight"]).norm())
        factors[f"diffusion_model.{layer}.lora_A.weight"] = down
        factors[f"diffusion_model.{layer}.lora_B.weight"] = up * (size * norm / float((up @ down).norm()))
        if bias:
            factors[f"diffusion_model.{layer}.diff_b"] = torch.randn(n, generator=generator)
    return lora_from_tensors(factors, name="style")


@pytest.fixture
def parity(tiny_pack: Model) -> Model:
    return tiny_pack.in_mode("parity")


def test_a_branch_has_the_whole_effect(parity, tiny_model) -> None:
    parity.attach(make_lora(parity, 0.02, bias=True), 0.7)
    report = parity.effect(tiny_model, steps=2)
    assert [row.layer for row in report.rows] == sorted(LAYERS, key=list(parity.layers()).index)
    assert all(row.cosine == pytest.approx(1, abs=1e-4) for row in report.rows)
    assert all(row.gain == pytest.approx(1, abs=1e-3) for row in report.rows)
    assert report.warnings == []


def test_a_bake_has_an_error_that_falls_with_the_size_of_the_delta(parity, tiny_model) -> None:
    cosines = []
    for size in (0.003, 0.1, 1.0):
        lora = make_lora(parity, size)
        evidence = parity.attach(lora, 1.0, "bake")
        effect = parity.effect(tiny_model, steps=2)
        nvfp4 = [row for row in effect.rows if row.kind == "nvfp4"]
        assert nvfp4
        cosines.append(min(row.cosine for row in nvfp4))
        both = evidence.with_effect(effect)
        shown = dict(zip(both.to_frame()["layer"], both.to_frame()["effect_cosine"], strict=True))
        assert shown == {row.layer: row.cosine for row in effect.rows}
        assert "cosine" in repr(both)
        assert both.to_dict()["effect"]["rows"][0]["layer"] == effect.rows[0].layer
        parity.detach(lora)
    assert cosines[0] < 0.4 < cosines[1] < DROWNED < cosines[2]
    assert cosines[2] > 0.95


def test_the_numbers_are_those_of_the_definition(parity, tiny_model) -> None:
    """With x as the first layer's whole input: recomputed from weights and activations alone."""
    layer = LAYERS[0]
    lora = make_lora(parity, 0.1)
    seen = []
    clean = tiny_model.without_loras()
    handle = clean.linears()[layer].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    clean.generate("a thing", seed=5, steps=1, cfg=1.0)
    handle.remove()
    x = seen[0].reshape(-1, 64)
    parity.attach(lora, 0.5, "bake")
    report = measure_effect(parity, tiny_model, "a thing", [5], steps=1, cfg=1.0, rows=len(x))
    row = next(row for row in report.rows if row.layer == layer)
    assert row.rows == len(x)
    w16 = tiny_model.checkpoint[f"{layer}.weight"].float()
    delta = 0.5 * lora.dense_deltas(parity)[layer]
    wanted = functional.linear(x, w16 + delta) - functional.linear(x, w16)
    pristine = parity.without_loras().linears()[layer]
    change = parity.linears()[layer](x) - pristine(x)
    cosine = functional.cosine_similarity(wanted.flatten(), change.flatten(), dim=0)
    assert row.cosine == pytest.approx(float(cosine), abs=1e-4)
    assert row.change == pytest.approx(float(wanted.norm() / pristine(x).norm()), rel=1e-4)


def test_a_lora_that_did_not_arrive_has_no_effect(parity, monkeypatch) -> None:
    parity.attach(make_lora(parity, 0.1), 1.0, "bake")
    monkeypatch.setattr(Model, "without_loras", lambda self: self)  # the "pristine" pack has the LoRA too
    report = parity.effect(steps=1)
    assert all(row.cosine == 0 for row in report.rows)
    assert len(report.warnings) == len(LAYERS)


def test_it_changes_nothing(parity, tiny_model) -> None:
    lora = make_lora(parity, 0.1)
    parity.attach(lora, 1.0, "bake")
    before = parity.generate("a thing", seed=7, steps=1).latents
    calls = [row.calls for row in parity.report().layers]
    parity.effect(tiny_model, steps=1)
    assert [row.calls for row in parity.report().layers] == calls
    assert torch.equal(parity.generate("a thing", seed=7, steps=1).latents, before)
    assert tiny_model.loras == []


def test_what_cannot_be_meant_is_refused(parity) -> None:
    with pytest.raises(HswqError, match="no LoRA"):
        parity.effect()
    parity.attach(make_lora(parity, 0.1))
    with pytest.raises(HswqError, match="not 16-bit"):
        parity.effect(parity)
