"""Smoothing: the same function, channels in better balance, and no LoRA put on by mistake."""

from __future__ import annotations

import pytest
import torch

from hswq_lab.checkpoint import Checkpoint, check
from hswq_lab.checkpoint.smoothed import channel_factors
from hswq_lab.errors import HswqError
from hswq_lab.loading import save
from hswq_lab.lora import lora_from_tensors
from hswq_lab.models.zimage import linear_layers
from hswq_lab.quantize import Plan, calibrate, observe, pack, smooth

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
        name for name, value in uneven.checkpoint.items() if not torch.equal(value, smoothed.checkpoint[name])
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


TARGETS = [
    "layers.0.attention.qkv",  # columns of its own, rows of v for the next
    "layers.0.attention.out",
    "layers.1.feed_forward.w1",
    "layers.1.feed_forward.w3",
    "layers.1.feed_forward.w2",
    "final_layer.adaLN_modulation.1",  # rows, and 1 + bias
    "x_embedder",  # as it was
]


def lora_of(model, kind):
    generator = torch.Generator().manual_seed(3)

    def factor(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {}
    for layer in TARGETS:
        n, k = model.layers()[layer]
        name = f"diffusion_model.{layer}"
        tensors |= {
            "LoRA": {f"{name}.lora_A.weight": factor(3, k), f"{name}.lora_B.weight": factor(n, 3)},
            "LoKr": {f"{name}.lokr_w1": factor(2, 2), f"{name}.lokr_w2": factor(n // 2, k // 2)},
            "LoHa": {
                f"{name}.hada_{which}": factor(*((n, 2) if which.endswith("a") else (2, k)))
                for which in ("w1_a", "w1_b", "w2_a", "w2_b")
            },
            "diff": {f"{name}.diff": factor(n, k) * 0.2, f"{name}.diff_b": factor(n)},
            "replaced": {f"{name}.set_weight": factor(n, k) * 0.3},
            "DoRA": {
                f"{name}.lora_A.weight": factor(3, k),
                f"{name}.lora_B.weight": factor(n, 3),
                f"{name}.dora_scale": 1 + factor(n, 1).abs(),
            },
        }[kind]  # fmt: skip
    return lora_from_tensors(tensors, name=kind)


WAYS = [("LoRA", "branch"), *((kind, how) for kind in ("LoRA", "LoKr", "LoHa", "diff", "replaced")
                              for how in ("bake", "bake_from_source"))]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_a_lora_of_the_original_does_to_the_smoothed_model_what_it_does_to_the_original(
    uneven, unrotated, kind, how
):
    # In fp32: a bias that bf16 rounds is not rounded where it became 1 + b.
    wide = {name: value.float() for name, value in uneven.checkpoint.items()}
    uneven = uneven.with_checkpoint(Checkpoint.from_mapping(wide))
    source = uneven.checkpoint if how == "bake_from_source" else None
    smoothed = smooth(uneven, unrotated)
    before = uneven.generate("a third", 3, steps=3).final
    lora = lora_of(uneven, kind)
    for model in (uneven, smoothed):
        assert model.attach(lora, 0.5, how, source=source).verdict == "OK"
    wanted = uneven.generate("a third", 3, steps=3).final
    assert not torch.allclose(wanted, before, atol=0.05)
    assert torch.allclose(smoothed.generate("a third", 3, steps=3).final, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["LoRA", "LoKr", "diff"])
def test_a_lora_arrives_in_a_smoothed_pack_whichever_of_the_two_sources_is_given(uneven, unrotated, kind):
    smoothed = smooth(uneven, unrotated)
    packed = pack(smoothed, Plan({"layers.*": "nvfp4"}))
    lora = lora_of(uneven, kind)
    found = []
    for source in (uneven, smoothed):
        report = packed.attach(lora, 0.5, "bake_from_source", source=source)
        assert report.verdict == "OK"
        assert all(abs(row.retained - 1) < 0.1 + 3 * row.retained_se for row in report.rows)
        found.append({name: layer.weight for name, layer in packed.linears().items()})
        packed.detach(lora)
    assert all(found[0][name].same_bits(found[1][name]) for name in TARGETS if name.startswith("layers."))
    packed.attach(lora, 0.5, "bake")
    assert packed.effect(smoothed, steps=1).warnings == []
    with pytest.raises(HswqError, match=r"of one of the two.*pack is smoothed, the model not smoothed"):
        packed.effect(uneven, steps=1)


def test_smoothing_twice_is_still_known(uneven, unrotated):
    once = smooth(uneven, unrotated)
    twice = smooth(
        once, observe(once, prompts=["other"], seeds=[4], steps=1, groups=dict.fromkeys(once.layers()))
    )
    for layer in uneven.layers():
        name = f"{layer}.weight"
        rows, columns = channel_factors(twice.checkpoint, layer)
        wanted = uneven.checkpoint[name].float() * rows[:, None] * columns
        assert torch.equal(twice.checkpoint[name].float(), wanted)


def test_the_delta_of_a_dora_is_that_of_the_original_and_a_smoothed_pack_refuses_it(uneven, unrotated):
    smoothed, lora = smooth(uneven, unrotated), lora_of(uneven, "DoRA")
    found, wanted = (lora.dense_deltas(model) for model in (smoothed, uneven))
    assert all(torch.equal(found[layer], wanted[layer]) for layer in TARGETS)
    for how in ("branch", "bake"):
        with pytest.raises(HswqError, match="a DoRA takes norms"):
            smoothed.attach(lora, 1.0, how)
    assert smoothed.loras == []


@pytest.mark.parametrize("how", ["branch", "bake"])
def test_a_smoothed_pack_that_does_not_say_by_how_much_refuses_loras(uneven, unrotated, how):
    smoothed = smooth(uneven, unrotated).checkpoint
    values = {name: value for name, value in smoothed.items() if ".smooth_" not in name}
    older = uneven.with_checkpoint(Checkpoint.from_mapping(values, smoothed.metadata))
    with pytest.raises(HswqError, match="but not by how much"):
        older.attach(lora_of(uneven, "LoRA"), 1.0, how)
    damaged = smoothed.with_values(
        {"layers.0.attention.qkv.smooth_columns": torch.zeros(3, dtype=torch.int8)}
    )
    with pytest.raises(HswqError, match="no exponents of channels"):
        uneven.with_checkpoint(damaged).attach(lora_of(uneven, "LoRA"), 1.0, how)


LOST = {
    "rows of w3": (["layers.0.feed_forward.w3.smooth_rows"], "but not by how much"),
    "all rows": ([".smooth_rows"], "but not by how much"),
    "columns of w2": (["layers.0.feed_forward.w2.smooth_columns"], "but not by how much"),
    "columns of all": ([".smooth_columns"], "but not by how much"),
}


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("how", ["branch", "bake"])
def test_a_smoothed_pack_that_lost_exponents_refuses_loras(uneven, unrotated, lost, how):
    names, words = LOST[lost]
    smoothed = smooth(uneven, unrotated).checkpoint
    values = {name: value for name, value in smoothed.items() if not name.endswith(tuple(names))}
    assert len(values) < len(smoothed)
    with pytest.raises(HswqError, match=words):
        uneven.with_checkpoint(smoothed.rewritten(values, smoothed.metadata)).attach(
            lora_of(uneven, "LoRA"), 1.0, how
        )


@pytest.mark.parametrize("how", ["branch", "bake"])
def test_a_smoothed_pack_that_lost_its_metadata_refuses_loras_and_is_no_good_file(
    uneven, unrotated, how, tmp_path
):
    smoothed = smooth(uneven, unrotated).checkpoint
    stripped = smoothed.rewritten(dict(smoothed), {})
    with pytest.raises(HswqError, match="lost the metadata"):
        uneven.with_checkpoint(stripped).attach(lora_of(uneven, "LoRA"), 1.0, how)
    report = check(stripped.save(tmp_path / "pack.safetensors"))
    [error] = [finding for finding in report.findings if finding.severity == "error"]
    assert "lost the metadata" in error.problem


def test_as_many_channels_rescaled_otherwise_are_other_units(uneven, unrotated):
    smoothed = smooth(uneven, unrotated)
    name = "layers.0.attention.qkv.smooth_columns"
    turned = smoothed.checkpoint.with_values({name: smoothed.checkpoint[name].roll(1)})
    other = uneven.with_checkpoint(turned)
    with pytest.raises(HswqError, match="of each in another way"):
        calibrate(pack(smoothed, Plan({"layers.*": "nvfp4"})), other, **RUN)


CHANGED = {
    "zeros": ("layers.0.attention.qkv.smooth_columns", 0, "contradict the metadata"),
    "rows alone": ("layers.0.feed_forward.w3.smooth_rows", -1, "contradict those of the layers beside"),
    "columns of one of two": ("layers.0.feed_forward.w1.smooth_columns", -1, "contradict those"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_exponents_that_contradict_the_file_are_refused(uneven, unrotated, change):
    name, factor, words = CHANGED[change]
    smoothed = smooth(uneven, unrotated).checkpoint
    changed = smoothed.with_values({name: smoothed[name] * factor})
    with pytest.raises(HswqError, match=words):
        channel_factors(changed, name.rpartition(".")[0])


def test_sources_and_references_in_other_units_are_refused(uneven, unrotated):
    smoothed = smooth(uneven, unrotated)
    plain = pack(uneven, Plan({"layers.*": "nvfp4"}))
    with pytest.raises(HswqError, match="rescaled the source's channels"):
        plain.attach(lora_of(uneven, "LoRA"), 1.0, "bake_from_source", source=smoothed)
    with pytest.raises(HswqError, match="of one of the two"):
        calibrate(pack(smoothed, Plan({"layers.*": "nvfp4"})), uneven, **RUN)


def test_a_smoothed_pack_is_checked_against_the_original_times_its_factors(uneven, unrotated, tmp_path):
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


@pytest.fixture
def otherwise(uneven):
    """The model smoothed by activations of another prompt, and with its channels in another balance before that."""
    other = observe(uneven, prompts=["other"], seeds=[4], steps=1, groups=dict.fromkeys(uneven.layers()))
    other.mean_squares.update({name: power.flip(0) for name, power in other.mean_squares.items()})
    return smooth(uneven, other)


def faulty(which, checkpoint, uneven, otherwise, plan):
    """Values that destroy a smoothed pack, all of them right in another file."""
    plain, other = (pack(model, plan).checkpoint for model in (uneven, otherwise))
    return {
        "norms of the original": {name: plain[name] for name in checkpoint if "norm1.weight" in name},
        "w2 of the unsmoothed pack": {name: plain[name] for name in checkpoint if name.endswith("w2.weight")},
        "qkv smoothed otherwise": {name: other[name] for name in checkpoint if name.endswith("qkv.weight")},
        "an adaLN bias, doubled": {
            name: checkpoint[name] * 2 for name in checkpoint if name == "final_layer.adaLN_modulation.1.bias"
        },
        "exponents of zero": {
            name: checkpoint[name] * 0 for name in checkpoint if name.endswith("qkv.smooth_columns")
        },
    }[which]


@pytest.mark.parametrize("kind", ["nvfp4", "int8_tensorwise", "float8_e4m3fn", "int8_tensorwise-unrotated"])
def test_a_right_smoothed_pack_is_right_beside_every_source(uneven, unrotated, otherwise, tmp_path, kind):
    once = smooth(uneven, unrotated)
    twice = smooth(
        once, observe(once, prompts=["third"], seeds=[5], steps=1, groups=dict.fromkeys(once.layers()))
    )
    packed = save(pack(twice, Plan({"layers.*": kind})), tmp_path / "pack.safetensors")
    for source in (uneven, once, twice, otherwise):
        report = check(packed, source)
        assert [finding for finding in report.findings if finding.severity != "info"] == [], str(report)


@pytest.mark.parametrize("kind", ["nvfp4", "int8_tensorwise"])
@pytest.mark.parametrize(
    "which",
    [
        "norms of the original",
        "w2 of the unsmoothed pack",
        "qkv smoothed otherwise",
        "an adaLN bias, doubled",
        "exponents of zero",
    ],
)
def test_a_destroyed_smoothed_pack_is_no_match_of_its_source(
    uneven, unrotated, otherwise, tmp_path, which, kind
):
    plan = Plan({"layers.*": kind})
    checkpoint = pack(smooth(uneven, unrotated), plan).checkpoint
    values = faulty(which, checkpoint, uneven, otherwise, plan)
    assert values
    file = checkpoint.with_values(values).save(tmp_path / "pack.safetensors")
    wrong = {finding.tensor for finding in check(file, uneven).findings if finding.severity == "error"}
    assert wrong
    assert wrong <= values.keys()
    if which == "exponents of zero":
        assert not check(file).ok
    else:
        assert wrong == values.keys()


def test_a_pack_smoothed_before_there_were_exponents_cannot_be_checked_and_says_so(
    uneven, unrotated, tmp_path
):
    smoothed = smooth(uneven, unrotated)
    checkpoint = pack(smoothed, Plan({"layers.*": "nvfp4"})).checkpoint
    older = {name: value for name, value in checkpoint.items() if ".smooth_" not in name}
    file = checkpoint.rewritten(older, checkpoint.metadata).save(tmp_path / "pack.safetensors")
    report = check(file, uneven)
    assert report.ok, str(report)
    [warning] = [finding for finding in report.findings if finding.severity == "warning"]
    assert "nothing says by how much" in warning.problem
    assert "layers.0.attention.qkv.weight" not in {layer.name for layer in report.layers}
    report = check(file, smoothed)
    assert report.ok
    assert "layers.0.attention.qkv.weight" in {layer.name for layer in report.layers}


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
