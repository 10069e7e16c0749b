"""The formulas of every kind of delta against fp64 restatements and against PEFT itself."""

from __future__ import annotations

import pytest
import torch
from lora_dialects import DIALECTS, LAYERS, D, F, dense, logical

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.lora import load_lora, lora_from_tensors

OUT, W1, QKV = "layers.0.attention.out", "layers.0.feed_forward.w1", "layers.0.attention.qkv"


class OneLayer:
    """The least that counts as a model: some layers and their weights."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.checkpoint = Checkpoint.from_mapping(
            {f"{name}.weight": value for name, value in weights.items()}
        )

    def layers(self):
        return {name.removesuffix(".weight"): tuple(value.shape) for name, value in self.checkpoint.items()}


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("w1", ["full", "factored"])
@pytest.mark.parametrize("w2", ["full", "factored"])
def test_lokr(w1, w2, random):
    name = "lycoris_layers_0_feed_forward_w1"
    shapes = {"w1": (6, 4), "w2": (F // 6, D // 4)}
    tensors = {f"{name}.alpha": torch.tensor(3.0)}
    full, rank = {}, None
    for (factor, (rows, columns)), how in zip(shapes.items(), (w1, w2), strict=True):
        if how == "full":
            tensors[f"{name}.lokr_{factor}"] = full[factor] = random(rows, columns)
        else:
            rank = {"w1": 2, "w2": 5}[factor]
            a, b = random(rows, rank), random(rank, columns)
            tensors |= {f"{name}.lokr_{factor}_a": a, f"{name}.lokr_{factor}_b": b}
            full[factor] = a @ b
    scale = 1.0 if rank is None else 3.0 / rank
    truth = torch.zeros(F, D, dtype=torch.float64)
    for i in range(F):
        for j in range(D):
            truth[i, j] = scale * full["w1"][i // 8, j // 8].double() * full["w2"][i % 8, j % 8].double()
    found = lora_from_tensors(tensors).dense_deltas(LAYERS)[W1]
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_loha(random):
    name = "diffusion_model.layers.0.feed_forward.w1"
    a1, b1, a2, b2 = random(F, 3), random(3, D), random(F, 2), random(2, D)
    tensors = {
        f"{name}.hada_w1_a": a1,
        f"{name}.hada_w1_b": b1,
        f"{name}.hada_w2_a": a2,
        f"{name}.hada_w2_b": b2,
    }
    tensors[f"{name}.alpha"] = torch.tensor(6.0)
    found = lora_from_tensors(tensors).dense_deltas(LAYERS)[W1]
    torch.testing.assert_close(
        found.double(), 2.0 * (a1.double() @ b1.double()) * (a2.double() @ b2.double()), rtol=1e-5, atol=1e-5
    )


def _dora(weight, delta, magnitude, axis):
    """W' by the definition, in fp64."""
    direction = weight.double() + delta.double()
    return magnitude.double() * direction / direction.norm(dim=axis, keepdim=True)


@pytest.mark.parametrize(
    "key",
    [
        "dora_scale",
        *(f"lora_magnitude_vector{end}" for end in ("", ".weight", ".default", ".default.weight")),
    ],
)
@pytest.mark.parametrize(("shape", "axis"), [((D,), 1), ((D, 1), 1), ((1, D), 0)])
def test_dora_takes_its_axis_from_the_magnitudes_shape_on_a_square_layer(key, shape, axis, random):
    modules = logical([OUT], lambda _: 4, lambda _: 2.0)
    weight, magnitude = random(D, D), random(D).abs() + 0.1
    tensors, _ = DIALECTS["alpha beside A/B"](modules)
    tensors[f"diffusion_model.layers.0.attention.to_out.0.{key}"] = magnitude.reshape(shape)
    lora = lora_from_tensors(tensors)
    model = OneLayer({OUT: weight})
    truth = _dora(weight, modules[0].delta, magnitude.reshape(shape if len(shape) == 2 else (D, 1)), axis)
    found = lora.dense_deltas(model)[OUT]
    torch.testing.assert_close(weight.double() + found.double(), truth, rtol=1e-5, atol=1e-5)
    assert lora.report(LAYERS).rows[0].kind == "DoRA of LoRA"
    assert lora.report(LAYERS).rows[0].norm is None
    assert lora.report(model).rows[0].norm == pytest.approx(float(found.norm()), rel=1e-5)


@pytest.mark.parametrize(("shape", "dim"), [((D,), 1), ((D, 1), 1), ((1, D), 0)])
def test_dora_with_a_zero_delta_and_the_weights_own_norm_is_the_identity(shape, dim, random):
    weight = random(D, D)
    tensors = {"diffusion_model.layers.0.attention.out.lora_A.weight": random(2, D)}
    tensors["diffusion_model.layers.0.attention.out.lora_B.weight"] = torch.zeros(D, 2)
    tensors["diffusion_model.layers.0.attention.out.dora_scale"] = weight.norm(dim=dim).reshape(shape)
    found = lora_from_tensors(tensors).dense_deltas(OneLayer({OUT: weight}))[OUT]
    assert float(found.abs().max()) <= 1e-6 * float(weight.abs().max())


def test_dora_on_a_part_of_qkv_uses_the_norms_of_its_own_rows(random):
    modules = logical([QKV], lambda _: 4, lambda _: 2.0, parts="k")
    weight, magnitude = random(3 * D, D), random(1, D).abs()
    tensors, _ = DIALECTS["5 kohya split"](modules)
    tensors["lora_unet_layers_0_attention_to_k.dora_scale"] = magnitude
    found = lora_from_tensors(tensors).dense_deltas(OneLayer({QKV: weight}))[QKV]
    rows = slice(D, 2 * D)
    truth = _dora(weight[rows], modules[0].delta, magnitude, 0) - weight[rows].double()
    torch.testing.assert_close(found[rows].double(), truth, rtol=1e-5, atol=1e-5)
    assert not found[:D].any()
    assert not found[2 * D :].any()


def test_dora_of_a_zero_row_is_zero_not_nan(random):
    weight = random(D, D)
    weight[3] = 0
    modules = logical([OUT], lambda _: 4, lambda _: 0.0)
    tensors, _ = DIALECTS["alpha beside A/B"](modules)
    tensors["diffusion_model.layers.0.attention.to_out.0.dora_scale"] = torch.ones(D)
    found = lora_from_tensors(tensors).dense_deltas(OneLayer({OUT: weight}))[OUT]
    assert torch.isfinite(found).all()
    assert not found[3].any()


def test_dora_without_weights_says_what_to_give():
    tensors, _ = DIALECTS["alpha beside A/B"](logical([OUT], lambda _: 4, lambda _: 2.0))
    tensors["diffusion_model.layers.0.attention.to_out.0.dora_scale"] = torch.ones(D)
    with pytest.raises(HswqError, match="depends on the layer's weight"):
        lora_from_tensors(tensors).dense_deltas(LAYERS)[OUT]


def test_norms_of_the_source_are_used_where_it_is_given(random):
    modules = logical([OUT], lambda _: 4, lambda _: 2.0)
    tensors, _ = DIALECTS["alpha beside A/B"](modules)
    source = random(D, D)
    tensors["diffusion_model.layers.0.attention.to_out.0.dora_scale"] = magnitude = random(D, 1).abs()
    pack = source + 0.1 * random(D, D)
    delta = lora_from_tensors(tensors).deltas(LAYERS)[OUT]
    gain = magnitude / (source + modules[0].delta).norm(dim=1, keepdim=True)
    torch.testing.assert_close(pack + delta.dense(pack, source), gain * (pack + modules[0].delta))


def test_set_weight_replaces_the_weight(random):
    weight, value = random(D, D), random(D, D)
    lora = lora_from_tensors({"diffusion_model.layers.0.attention.out.set_weight": value})
    torch.testing.assert_close(weight + lora.dense_deltas(OneLayer({OUT: weight}))[OUT], value)


def test_bias_deltas_go_to_their_rows(random):
    tensors, _ = DIALECTS["alpha beside A/B"](logical([QKV], lambda _: 4, lambda _: 2.0, parts="kv"))
    tensors["diffusion_model.layers.0.attention.to_k.lora_B.bias"] = up_bias = random(D)
    tensors["diffusion_model.layers.0.attention.to_v.diff_b"] = diff = random(D)
    tensors["diffusion_model.layers.0.attention.out.diff_b"] = alone = random(D)
    deltas = lora_from_tensors(tensors).deltas(LAYERS)
    torch.testing.assert_close(deltas[QKV].bias(), torch.cat([torch.zeros(D), up_bias * 0.5, diff]))
    torch.testing.assert_close(deltas[OUT].bias(), alone)
    assert not deltas[OUT].dense().any()
    assert deltas[OUT].kind == "bias"


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 4, "lora_alpha": 6, "rank_pattern": {"to_q": 2}, "alpha_pattern": {"attention.to_v": 9}},
        {"r": 4, "lora_alpha": 6, "use_dora": True},
    ],
)
def test_files_written_by_peft_mean_what_peft_does_with_them(settings, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**settings, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    truth, weight = _peft_round_trip(peft, config, tmp_path)
    found = load_lora(tmp_path).dense_deltas(OneLayer({QKV: weight}))[QKV]
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoHaConfig", {"r": 4, "alpha": 6}),
        ("LoKrConfig", {"r": 2, "alpha": 6}),
        ("LoKrConfig", {"r": 64, "alpha": 6}),  # both factors full: PEFT divides by r all the same
        ("LoKrConfig", {"r": 2, "alpha": 6, "decompose_both": True, "decompose_factor": 4}),
    ],
)
def test_loha_and_lokr_written_by_peft(kind, settings, tmp_path):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(**settings, target_modules=["to_q", "to_k", "to_v"], init_weights=False)
    truth, weight = _peft_round_trip(peft, config, tmp_path)
    found = load_lora(tmp_path).dense_deltas(OneLayer({QKV: weight}))[QKV]
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


def _peft_round_trip(peft, config, folder):
    """A tiny attention block with PEFT on it: saved and merged; (what merging changed, the weight before)."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].attention = torch.nn.ModuleDict(
        {n: torch.nn.Linear(D, D, bias=False) for n in ("to_q", "to_k", "to_v")}
    )
    parts = [model.layers[0].attention[name] for name in ("to_q", "to_k", "to_v")]
    before = torch.cat([part.weight.detach().clone() for part in parts])
    wrapped = peft.get_peft_model(model, config)
    for name, value in wrapped.named_parameters():
        if "magnitude" in name:
            value.data.mul_(1.5)
    wrapped.save_pretrained(folder)
    merged = wrapped.merge_and_unload()
    after = torch.cat([merged.layers[0].attention[name].weight.detach() for name in ("to_q", "to_k", "to_v")])
    return after - before, before


def test_dense_deltas_are_computed_when_asked_for():
    modules = logical([OUT, W1], lambda _: 4, lambda _: 2.0)
    found = lora_from_tensors(*DIALECTS["5 kohya split"](modules)).dense_deltas(LAYERS)
    assert list(found) == [OUT, W1]
    assert found[OUT] is not found[OUT]
    torch.testing.assert_close(found[W1], dense(modules)[W1])
    with pytest.raises(KeyError):
        found["layers.9.attention.out"]
