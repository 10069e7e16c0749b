"""Scales that can be misread: block-diagonal merges, one alpha over many ranks, full LoKr, settings."""

from __future__ import annotations

import json

import pytest
import torch
from lora_dialects import DIALECTS, LAYERS, D, dense, logical

from hswq_lab.errors import HswqError
from hswq_lab.lora import lora_from_tensors

QKV = "layers.0.attention.qkv"


def _block_diagonal(modules, alpha: float):
    """One fused module of rank 3r, written as kohya's merge does, with the given alpha."""
    r = modules[0].rank
    up = torch.zeros(3 * D, 3 * r)
    for index, module in enumerate(modules):
        up[index * D : (index + 1) * D, index * r : (index + 1) * r] = module.up
    name = "lora_unet_layers_0_attention_qkv"
    return {
        f"{name}.lora_down.weight": torch.cat([module.down for module in modules]),
        f"{name}.lora_up.weight": up,
        f"{name}.alpha": torch.tensor(alpha),
    }


@pytest.mark.parametrize("alpha", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("with_others", [False, True])
def test_block_diagonal_merge_with_and_without_tripled_alpha(alpha, with_others):
    modules = logical([QKV], lambda _: 8, lambda _: alpha)
    truth = dense(modules)[QKV]
    others = {}
    if with_others:
        others, _ = DIALECTS["5 kohya split"](
            logical(["layers.0.attention.out"], lambda _: 8, lambda _: alpha)
        )
    tripled = lora_from_tensors(_block_diagonal(modules, 3 * alpha) | others)
    torch.testing.assert_close(tripled.dense_deltas(LAYERS)[QKV], truth, rtol=1e-6, atol=1e-6)
    plain = lora_from_tensors(_block_diagonal(modules, alpha) | others)
    torch.testing.assert_close(plain.dense_deltas(LAYERS)[QKV], truth / 3, rtol=1e-6, atol=1e-6)
    (warning,) = plain.warnings
    assert "third" in warning
    assert "lora_unet_layers_0_attention_qkv" in warning
    # Alone, alpha 3 for blocks of rank 8 could be either; beside other modules there is no doubt.
    if with_others or 3 * alpha > 8:
        assert not tripled.warnings


def test_a_shared_down_factor_is_no_block_diagonal_merge():
    name = "lora_unet_layers_0_attention_qkv"
    tensors = {f"{name}.lora_down.weight": torch.randn(6, D), f"{name}.lora_up.weight": torch.randn(3 * D, 6)}
    assert not lora_from_tensors(tensors | {f"{name}.alpha": torch.tensor(2.0)}).warnings


def test_one_alpha_over_very_different_ranks_is_warned_about_with_the_scales():
    ranks = {
        "layers.0.attention.to_out.0": 1,
        "layers.1.attention.to_out.0": 32,
        "layers.2.attention.to_out.0": 64,
    }
    layers = [f"layers.{i}.attention.out" for i in range(3)]
    lora = lora_from_tensors(*DIALECTS["5 kohya split"](logical(layers, ranks.__getitem__, lambda _: 181.0)))
    (warning,) = lora.warnings
    for text in ("181 (rank 1)", "5.65625 (rank 32)", "2.82812 (rank 64)", "layers_0_attention_to_out_0"):
        assert text in warning
    assert [entry.scale.value for entry in lora.entries] == [181.0, 181 / 32, 181 / 64]


def test_moderately_different_ranks_are_not_warned_about():
    lora = lora_from_tensors(
        *DIALECTS["5 kohya split"](
            logical([QKV], {"layers.0.attention.to_q": 8}.get, lambda _: 8.0, parts="q")
        )
    )
    assert not lora.warnings


def _full_lokr():
    name = "lycoris_layers_0_attention_to_out_0"
    return {
        f"{name}.lokr_w1": torch.randn(4, 4),
        f"{name}.lokr_w2": torch.randn(D // 4, D // 4),
        f"{name}.alpha": torch.tensor(1.0),
    }


@pytest.mark.parametrize("metadata", [{"ss_network_dim": "32"}, {"rank": "32.0"}])
def test_full_lokr_has_scale_one_the_other_reading_is_shown_and_can_be_chosen(metadata):
    tensors = _full_lokr()
    truth = torch.kron(*list(tensors.values())[:2])
    lora = lora_from_tensors(tensors, metadata)
    torch.testing.assert_close(lora.dense_deltas(LAYERS)["layers.0.attention.out"], truth)
    (row,) = lora.report(LAYERS).rows
    assert row.scale == 1.0
    assert row.alternative == 1 / 32
    assert "0.03125" in lora.warnings[0]
    chosen = lora_from_tensors(tensors, metadata, full_lokr_scale="alpha/dim")
    torch.testing.assert_close(chosen.dense_deltas(LAYERS)["layers.0.attention.out"], truth / 32)
    assert chosen.report(LAYERS).rows[0].alternative == 1.0
    assert chosen.sha256 != lora.sha256, "views share baked weights by it"


def test_full_lokr_without_a_known_dim_has_no_other_reading():
    assert lora_from_tensors(_full_lokr()).entries[0].scale.alternative is None
    with pytest.raises(HswqError, match="cannot be computed"):
        lora_from_tensors(_full_lokr(), full_lokr_scale="alpha/dim")
    with pytest.raises(HswqError, match="unknown full_lokr_scale"):
        lora_from_tensors(_full_lokr(), full_lokr_scale="both")  # type: ignore[arg-type]


def test_settings_that_say_dora_without_magnitudes_are_refused():
    tensors, _ = DIALECTS["2 diffusers"](logical([QKV], lambda _: 2, lambda _: 2.0))
    with pytest.raises(HswqError, match="magnitude is missing"):
        lora_from_tensors(tensors, {"lora_adapter_metadata": json.dumps({"transformer.use_dora": True})})


def test_patterns_match_whole_parts_of_names_only():
    tensors, _ = DIALECTS["2 diffusers"](
        logical(["layers.1.attention.out", "layers.11.attention.out"], lambda _: 2, lambda _: 2.0)
    )
    config = {"lora_alpha": 2, "alpha_pattern": {"1.attention.to_out.0": 8}}
    lora = lora_from_tensors(tensors, {"lora_adapter_metadata": json.dumps(config)})
    assert [entry.scale.value for entry in lora.entries] == [4.0, 1.0]
