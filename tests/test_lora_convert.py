"""Converting is exact, merging states its error truthfully, what a dialect cannot say is refused."""

from __future__ import annotations

import pytest
import torch
from lora_dialects import DIALECTS, LAYERS, D, dense, logical
from test_lora_reading import relative_error

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.lora import convert_lora, load_lora, lora_from_tensors, merge_loras, save_lora

SOME = [
    "layers.0.attention.qkv",
    "layers.11.attention.out",
    "context_refiner.1.attention.qkv",
    "final_layer.linear",
]
QKV, OUT = SOME[:2]
LOW_RANK = [name for name in DIALECTS if not name.startswith(("10", "11", "13"))]


def _modules(seed: int = 0, parts: str = "qkv", alpha: float = 3.0):
    ranks = {"to_q": 4, "to_k": 2, "to_v": 3}
    return logical(SOME, lambda name: ranks.get(name.rsplit(".", 1)[-1], 5), lambda _: alpha, seed, parts)


@pytest.mark.parametrize("to", ["peft", "kohya", "native"])
@pytest.mark.parametrize("dialect", LOW_RANK)
def test_every_low_rank_dialect_converts_exactly(dialect, to, tmp_path):
    modules = _modules(parts="qv")
    lora = lora_from_tensors(*DIALECTS[dialect](modules), name="style")
    path = save_lora(tmp_path / "converted.safetensors", *convert_lora(lora, LAYERS, to))
    converted = load_lora(path)
    assert relative_error(converted.dense_deltas(LAYERS), dense(modules)) <= 1e-6
    assert "style" in converted.metadata["hswq.converted_from"]
    key = next(iter(converted.tensors))
    assert key.startswith({"peft": "transformer.", "kohya": "lora_unet_", "native": "diffusion_model."}[to])
    assert any("qkv" in key for key in converted.tensors) == (to == "native")


def test_a_block_diagonal_module_falls_apart_into_its_own_ranks_and_factors():
    modules = _modules()
    there, metadata = convert_lora(lora_from_tensors(*DIALECTS["5 kohya split"](modules)), LAYERS, "native")
    back, _ = convert_lora(lora_from_tensors(there, metadata), LAYERS, "kohya")
    for module in modules:
        name = f"lora_unet_{module.name.replace('.', '_')}"
        assert torch.equal(back[f"{name}.lora_down.weight"], module.down)


def test_a_lokr_of_bf16_keeps_its_scale_exactly():
    generator = torch.Generator().manual_seed(0)
    name = "layers.0.attention.out"
    tensors = {
        f"{name}.lokr_w1": torch.randn(4, 4, generator=generator).bfloat16(),
        f"{name}.lokr_w2_a": torch.randn(D // 4, 3, generator=generator),
        f"{name}.lokr_w2_b": torch.randn(3, D // 4, generator=generator),
        f"{name}.alpha": torch.tensor(1.0),
    }
    lora = lora_from_tensors(tensors)
    converted = lora_from_tensors(*convert_lora(lora, LAYERS, "kohya"))
    assert relative_error(converted.dense_deltas(LAYERS), lora.dense_deltas(LAYERS)) <= 1e-6


def test_fused_factors_of_several_dtypes_lose_nothing():
    tensors, metadata = DIALECTS["5 kohya split"](logical([QKV], lambda _: 4, lambda _: 2.0))
    stored = {
        key: value if key.endswith("alpha") or ("to_q" not in key and "up" in key) else value.bfloat16()
        for key, value in tensors.items()
    }
    lora = lora_from_tensors(stored, metadata)
    fused = lora_from_tensors(*convert_lora(lora, LAYERS, "native"))
    assert relative_error(fused.dense_deltas(LAYERS), lora.dense_deltas(LAYERS)) <= 1e-6


def test_equal_scales_leave_the_factors_as_stored():
    modules = logical([QKV], lambda _: 4, lambda _: 2.0)
    tensors, _ = DIALECTS["5 kohya split"](modules)
    stored = {key: value.bfloat16() for key, value in tensors.items()}
    fused, _ = convert_lora(lora_from_tensors(stored), LAYERS, "native")
    assert fused["diffusion_model.layers.0.attention.qkv.lora_down.weight"].dtype == torch.bfloat16
    assert float(fused["diffusion_model.layers.0.attention.qkv.alpha"]) == 6.0


@pytest.mark.parametrize(
    ("dialect", "ways"),
    [("10 LoKr", ["kohya"]), ("11 LoHa", ["kohya"]), ("13 full deltas", ["kohya", "native"])],
)
def test_other_kinds_convert_where_the_dialect_has_them_and_are_refused_elsewhere(dialect, ways):
    modules = _modules()
    lora = lora_from_tensors(*DIALECTS[dialect](modules))
    for to in ("peft", "kohya", "native"):
        if to in ways:
            found = lora_from_tensors(*convert_lora(lora, LAYERS, to)).dense_deltas(LAYERS)
            assert relative_error(found, dense(modules)) <= 1e-6
        else:
            with pytest.raises(HswqError, match="merge_loras"):
                convert_lora(lora, LAYERS, to)
    with pytest.raises(HswqError, match="unknown LoRA dialect"):
        convert_lora(lora, LAYERS, "civitai")


class _Model:
    def __init__(self, weight: torch.Tensor) -> None:
        self.checkpoint = Checkpoint.from_mapping({f"{QKV}.weight": weight})

    def layers(self):
        return {QKV: (3 * D, D)}


@pytest.mark.parametrize("to", ["peft", "kohya", "native"])
def test_dora_and_biases_convert(to):
    generator = torch.Generator().manual_seed(4)
    modules = logical([QKV], lambda _: 4, lambda _: 2.0)
    tensors, _ = DIALECTS["5 kohya split"](modules)
    for part in ("to_q", "to_k", "to_v"):
        tensors[f"lora_unet_layers_0_attention_{part}.dora_scale"] = torch.rand(D, 1, generator=generator)
    bias = {"lora_unet_layers_0_attention_to_k.diff_b": torch.randn(D, generator=generator)}
    lora = lora_from_tensors(tensors | bias)
    if to == "peft":
        with pytest.raises(HswqError, match="no biases beside DoRA"):
            convert_lora(lora, LAYERS, to)
        lora = lora_from_tensors(tensors)
    model = _Model(torch.randn(3 * D, D, generator=generator))
    converted = lora_from_tensors(*convert_lora(lora, model, to))
    torch.testing.assert_close(
        converted.dense_deltas(model)[QKV], lora.dense_deltas(model)[QKV], rtol=1e-5, atol=1e-5
    )
    if to != "peft":
        torch.testing.assert_close(converted.deltas(model)[QKV].bias(), lora.deltas(model)[QKV].bias())


def test_dora_on_one_part_only_cannot_be_fused():
    tensors, _ = DIALECTS["5 kohya split"](logical([QKV], lambda _: 4, lambda _: 2.0))
    tensors["lora_unet_layers_0_attention_to_q.dora_scale"] = torch.ones(D, 1)
    with pytest.raises(HswqError, match="cannot be fused"):
        convert_lora(lora_from_tensors(tensors), LAYERS, "native")


# -- merging --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["peft", "kohya", "native"])
@pytest.mark.parametrize("rank", [1, 4, 64])
@pytest.mark.parametrize("dialect", ["5 kohya split", "6 kohya fused", "10 LoKr", "13 full deltas"])
def test_a_merge_states_its_error_and_is_the_best_of_its_rank(to, rank, dialect, tmp_path):
    first, second = _modules(1), _modules(2, "qv")
    truth = dense(first)
    for layer, value in dense(second).items():
        truth[layer] = truth[layer] * 0.5 - value * 2.0
    loras = [
        (lora_from_tensors(*DIALECTS[dialect](first)), 0.5),
        (lora_from_tensors(*DIALECTS["1 ai-toolkit"](second)), -2.0),
    ]
    merged = merge_loras(loras, LAYERS, rank, to)
    found = load_lora(save_lora(tmp_path / "merged.safetensors", merged.tensors, merged.metadata))
    error = relative_error(found.dense_deltas(LAYERS), truth)
    assert error == pytest.approx(merged.report.error, abs=1e-6)
    assert (error < 1e-6) == (rank == 64)
    if to == "native":
        lost = sum(
            float(torch.linalg.svdvals(value.double())[rank:].square().sum()) for value in truth.values()
        )
        total = sum(float(value.double().square().sum()) for value in truth.values())
        assert error == pytest.approx((lost / total) ** 0.5, abs=1e-6)
    assert "x-2" in found.metadata["hswq.merged_from"]
    assert len(merged.report.to_frame()) == len(found.entries)


@pytest.mark.parametrize("dialect", ["5 kohya split", "13 full deltas"])
@pytest.mark.parametrize("to", ["peft", "native"])
def test_loras_that_cancel_each_other_leave_nothing_and_no_noise(dialect, to):
    lora = lora_from_tensors(*DIALECTS[dialect](_modules()), name="style")
    for strengths in [(0.8, -0.8), (0.1, 0.2, -0.3)]:
        with pytest.raises(HswqError, match="cancel each other") as refusal:
            merge_loras([(lora, strength) for strength in strengths], LAYERS, 4, to)
        assert "style ×" in str(refusal.value)
    other = lora_from_tensors(*DIALECTS[dialect](_modules(2, "q")), name="other")
    halves = [(lora, 0.8), (other, 1.0), (lora, -0.8)]
    report = merge_loras(halves, LAYERS, 64, to).report
    alone = merge_loras([(other, 1.0)], LAYERS, 64, to).report
    assert [row.module for row in report.rows] == [row.module for row in alone.rows]
    assert [row.norm for row in report.rows] == pytest.approx([row.norm for row in alone.rows])
    assert all(rows.terms == pytest.approx(rows.norm) for rows in alone.rows)
    assert len(report.cancelled) == (2 * (len(SOME) - 2) if to == "peft" else 0)


def test_the_error_of_what_cancels_is_told_against_its_terms_too():
    lora = lora_from_tensors(*DIALECTS["5 kohya split"](_modules()), name="style")
    almost = merge_loras([(lora, 1.0), (lora, -0.99)], LAYERS, 1).report
    alone = merge_loras([(lora, 1.0)], LAYERS, 1).report
    assert almost.error == pytest.approx(alone.error)
    assert almost.error_of_terms == pytest.approx(alone.error * 0.01 / 1.99)
    assert f"{almost.error_of_terms:.2%}" in repr(almost)
    assert "cancel" not in repr(alone)


def test_merging_dora_needs_and_uses_the_models_weights():
    tensors, _ = DIALECTS["5 kohya split"](logical([QKV], lambda _: 4, lambda _: 2.0))
    tensors["lora_unet_layers_0_attention_to_q.dora_scale"] = torch.ones(D, 1)
    lora = lora_from_tensors(tensors)
    model = _Model(torch.randn(3 * D, D, generator=torch.Generator().manual_seed(4)))
    merged = merge_loras([(lora, 1.0)], model, 64)
    found = lora_from_tensors(merged.tensors).dense_deltas(LAYERS)[QKV]
    torch.testing.assert_close(found, lora.dense_deltas(model)[QKV], rtol=1e-4, atol=1e-5)
    with pytest.raises(HswqError, match="needs the weights"):
        merge_loras([(lora, 1.0)], LAYERS, 8)


def test_merged_biases_add_up_and_impossible_merges_are_refused():
    bias = {f"diffusion_model.{OUT}.diff_b": torch.ones(D)}
    lora = lora_from_tensors(bias)
    merged = merge_loras([(lora, 0.5), (lora, 2.0)], LAYERS, 4)
    assert torch.equal(merged.tensors[f"diffusion_model.{OUT}.diff_b"], torch.full((D,), 2.5))
    for loras, rank, message in [
        ([], 4, "needs LoRAs"),
        ([(lora, 1.0)], 0, "rank is a whole number"),
        ([(lora, 1.0)], 2.5, "rank is a whole number"),
        ([(lora, float("nan"))], 4, "strength of in memory must be a finite number"),
        ([(lora, "1")], 4, "strength of in memory must be a finite number"),
    ]:
        with pytest.raises(HswqError, match=message):
            merge_loras(loras, LAYERS, rank)
    with pytest.raises(HswqError, match="nothing to write"):
        merge_loras([(lora, 0.0)], LAYERS, 4)
