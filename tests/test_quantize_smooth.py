"""Smoothing: the same function, channels in better balance, and no LoRA put on by mistake."""

from __future__ import annotations

import pytest
import torch

from hswq_lab.checkpoint import check
from hswq_lab.errors import HswqError
from hswq_lab.loading import save
from hswq_lab.lora import lora_from_tensors
from hswq_lab.models.zimage import linear_layers
from hswq_lab.quantize import Plan, observe, pack, smooth

RUN = {"prompts": ["a thing", "another"], "seeds": [1, 2], "steps": 2}


@pytest.fixture
def uneven(tiny_model):
    """A model with channels of very different power in front of every kind of site."""
    spread = torch.logspace(-1, 1, 64, base=4.0)[
        torch.randperm(64, generator=torch.Generator().manual_seed(0))
    ]
    values = {}
    for name, value in tiny_model.checkpoint.items():
        if name.endswith(("attention_norm1.weight", "ffn_norm1.weight")):
            values[name] = (value.float() * spread).bfloat16()
        elif name.endswith("w3.weight"):
            values[name] = (value.float() * spread.repeat(2)[:, None]).bfloat16()
    return tiny_model.with_checkpoint(tiny_model.checkpoint.with_values(values))


@pytest.fixture
def unrotated(uneven):
    return observe(uneven, **RUN, groups=dict.fromkeys(uneven.layers()))


def test_the_function_is_the_same(uneven, unrotated):
    smoothed = smooth(uneven, unrotated)
    before = uneven.generate("a third", 3, steps=3).final
    after = smoothed.generate("a third", 3, steps=3).final
    assert torch.allclose(before, after, atol=1e-4)


def test_something_changes_at_every_kind_of_site(uneven, unrotated):
    smoothed = smooth(uneven, unrotated)
    changed = {
        name for name, value in smoothed.checkpoint.items() if not torch.equal(value, uneven.checkpoint[name])
    }
    for site in uneven.config.sites():
        if site.linears[0].startswith("layers."):
            assert site.source in changed, site
            assert {f"{layer}.weight" for layer in site.linears} <= changed, site
    assert not any("norm2" in name or "q_norm" in name for name in changed)


def test_sites_name_layers_of_the_network(tiny_model):
    layers = set(linear_layers(tiny_model.config))
    named = [layer for site in tiny_model.config.sites() for layer in site.linears]
    assert set(named) <= layers
    assert len(named) == len(set(named))
    assert len(layers - set(named)) == 7  # x_embedder, two of the time embedder, four of adaLN
    assert all(site.source in tiny_model.checkpoint for site in tiny_model.config.sites())


def test_factors_are_powers_of_two(uneven, unrotated):
    smoothed = smooth(uneven, unrotated)
    name = "layers.1.feed_forward.w1.weight"
    ratio = (smoothed.checkpoint[name].float() / uneven.checkpoint[name].float())[0]
    exponent = torch.log2(ratio)
    assert torch.equal(exponent, exponent.round())
    assert exponent.abs().max() >= 1


def test_products_are_better_balanced(uneven, unrotated):
    smoothed = smooth(uneven, unrotated)
    after = observe(smoothed, **RUN, groups=dict.fromkeys(uneven.layers()))

    def cost(model, report, layer):
        w = model.checkpoint[f"{layer}.weight"].float().square().sum(0)
        return float(report.mean_squares[layer].sum() * w.sum())

    for layer in ("layers.0.attention.qkv", "layers.1.feed_forward.w2", "layers.1.feed_forward.w1"):
        assert cost(smoothed, after, layer) < 0.7 * cost(uneven, unrotated, layer), layer


def test_a_lora_of_the_original_is_refused(uneven, unrotated):
    packed = pack(smooth(uneven, unrotated), Plan({"layers.*": "nvfp4"}))
    assert "hswq.smooth" in packed.checkpoint.metadata
    stem = "transformer.layers.0.attention.to_out.0"
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 64), f"{stem}.lora_B.weight": torch.randn(64, 4)}
    with pytest.raises(HswqError, match=r"other units.*style"):
        packed.attach(lora_from_tensors(tensors, name="style"))


def test_a_smoothed_pack_is_checked_against_the_original_up_to_its_channels(uneven, unrotated, tmp_path):
    smoothed = smooth(uneven, unrotated)
    packed = save(pack(smoothed, Plan({"layers.*": "nvfp4"})), tmp_path / "pack.safetensors")
    report = check(packed, uneven)
    assert report.ok, str(report)
    assert {layer.name: layer.cosine for layer in report.layers if not layer.cosine > 0.98} == {}
    assert [finding.rule for finding in report.findings if "smooth()" in finding.problem] == ["smooth"]
    assert all(found.how == "source" for found in report.layout.layers)
    assert check(packed, smoothed).ok
    faults = {
        "layers.0.attention.qkv.weight": lambda value: value.roll(1, 0),
        "layers.0.attention_norm1.weight": lambda value: value * 1.5,  # smoothed, but not by a power of two
        "layers.0.attention_norm2.weight": lambda value: value * 2,
    }
    for name, fault in faults.items():
        other = uneven.checkpoint.with_values({name: fault(uneven.checkpoint[name])})
        wrong = [finding.tensor for finding in check(packed, other).findings if finding.severity == "error"]
        assert wrong == [name]


def test_rotated_statistics_are_refused(uneven):
    with pytest.raises(HswqError, match=r"unrotated channels.*cap_embedder\.1.*group 256"):
        smooth(uneven, observe(uneven, **RUN))


def test_what_is_no_report_is_refused(tiny_model):
    with pytest.raises(HswqError, match=r"no activations.*observe\(model"):
        smooth(tiny_model, None)


def test_packed_models_are_refused(uneven, unrotated):
    with pytest.raises(HswqError, match="only a 16-bit model"):
        smooth(pack(uneven, Plan({"layers.*": "nvfp4"})), unrotated)


def test_channels_that_are_always_zero_are_left_alone(tiny_model):
    norm = tiny_model.checkpoint["layers.0.attention_norm1.weight"].clone()
    norm[5] = 0
    values = {"layers.0.attention_norm1.weight": norm}
    model = tiny_model.with_checkpoint(tiny_model.checkpoint.with_values(values))
    smoothed = smooth(model, observe(model, **RUN, groups=dict.fromkeys(model.layers())))
    name = "layers.0.attention.qkv.weight"
    q_and_k = slice(0, 128)  # the rows of v belong to another site
    assert torch.equal(smoothed.checkpoint[name][q_and_k, 5], model.checkpoint[name][q_and_k, 5])
    assert all(torch.isfinite(value.float()).all() for value in smoothed.checkpoint.values())
