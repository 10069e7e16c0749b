"""LoRA files: every dialect gives the same ΔW, and what cannot be meant is refused with the key's name."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_dialects import DIALECTS, LAYERS, D, Module, dense, logical
from safetensors.torch import save_file

from hswq_lab.errors import HswqError
from hswq_lab.lora import load_lora, lora_from_tensors

SOME = [
    "layers.0.attention.qkv",
    "layers.11.attention.out",
    "layers.1.feed_forward.w2",
    "layers.3.adaLN_modulation.0",
    "noise_refiner.0.attention.qkv",
    "context_refiner.1.attention.qkv",
    "context_refiner.1.feed_forward.w1",
    "x_embedder",
    "cap_embedder.1",
    "t_embedder.mlp.2",
    "final_layer.linear",
]
RANKS = {"to_q": 4, "to_k": 2, "to_v": 3}
ALPHAS = {"to_q": 2.0, "to_k": 7.0, "to_v": 0.0}


def _last(table, default):
    return lambda name: table.get(name.rsplit(".", 1)[-1], default)


def relative_error(found, truth) -> float:
    assert set(found) == set(truth)
    lost = sum(float((found[layer] - truth[layer]).double().square().sum()) for layer in truth)
    total = sum(float(value.double().square().sum()) for value in truth.values())
    return (lost / total) ** 0.5


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_gives_the_same_dense_delta(dialect, tmp_path):
    modules = logical(SOME, _last(RANKS, 5), _last(ALPHAS, 3.0))
    tensors, metadata = DIALECTS[dialect](modules)
    path = tmp_path / "style.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)
    lora = load_lora(path)
    assert relative_error(lora.dense_deltas(LAYERS), dense(modules)) <= 1e-6
    assert lora.name == "style"
    assert not lora.report(LAYERS).unmatched


@settings(max_examples=25, deadline=None)
@given(
    dialect=st.sampled_from(sorted(DIALECTS)),
    ranks=st.tuples(*[st.integers(1, 9)] * 4),
    alphas=st.tuples(*[st.floats(-16, 16, width=32)] * 4),
    parts=st.sampled_from(["q", "k", "v", "qk", "qv", "kv", "qkv"]),
    seed=st.integers(0, 99),
)
def test_ranks_alphas_and_missing_parts(dialect, ranks, alphas, parts, seed):
    names = ("to_q", "to_k", "to_v", "0")
    modules = logical(
        ["layers.1.attention.qkv", "layers.11.attention.out"],
        _last(dict(zip(names, ranks, strict=True)), 1),
        _last(dict(zip(names, alphas, strict=True)), 1.0),
        seed,
        parts,
    )
    truth = dense(modules)
    lora = lora_from_tensors(*DIALECTS[dialect](modules))
    found = lora.dense_deltas(LAYERS)
    scale = max(float(value.abs().max()) for value in truth.values())
    for layer, value in truth.items():
        torch.testing.assert_close(found[layer], value, rtol=0, atol=2e-6 * scale + 1e-30)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_factors_in_any_storage_are_used_at_their_stored_values(dtype):
    modules = logical(SOME, _last({}, 4), _last({}, 2.0))
    tensors, metadata = DIALECTS["5 kohya split"](modules)
    stored = {key: value if key.endswith("alpha") else value.to(dtype) for key, value in tensors.items()}
    rounded = [
        Module(m.name, m.layer, m.start, m.down.to(dtype).float(), m.up.to(dtype).float(), 2.0)
        for m in modules
    ]
    assert relative_error(lora_from_tensors(stored, metadata).dense_deltas(LAYERS), dense(rounded)) <= 1e-6


@pytest.mark.parametrize(
    ("alpha", "scale"),
    [
        (None, 1.0),
        (torch.tensor(2.0), 0.5),
        (torch.tensor([2.0]), 0.5),
        (torch.tensor(2.0, dtype=torch.bfloat16), 0.5),
        (torch.tensor(0.0), 0.0),
        (torch.tensor(-4.0), -1.0),
    ],
)
def test_alpha_in_any_shape_or_dtype_and_zero_is_legitimate(alpha, scale):
    modules = logical(["layers.0.attention.out"], lambda _: 4, lambda _: 4.0)
    tensors, _ = DIALECTS["alpha beside A/B"](modules)
    key = next(key for key in tensors if key.endswith(".alpha"))
    if alpha is None:
        del tensors[key]
    else:
        tensors[key] = alpha
    found = lora_from_tensors(tensors).dense_deltas(LAYERS)["layers.0.attention.out"]
    torch.testing.assert_close(found, modules[0].delta * scale)


def _write(path, tensors, metadata=None):
    save_file(tensors, path, metadata)
    return path


def test_alpha_from_adapter_config_beside_the_file(tmp_path):
    modules = logical(["layers.0.attention.qkv"], lambda _: 4, lambda _: 6.0)
    tensors, _ = DIALECTS["2 peft"](modules)
    _write(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6}))
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        assert relative_error(load_lora(path).dense_deltas(LAYERS), dense(modules)) <= 1e-6


def test_a_lora_in_memory_keeps_the_values_it_was_given():
    tensors, metadata = DIALECTS["2 peft"](logical(["layers.0.attention.out"], lambda _: 4, lambda _: 4.0))
    lora = lora_from_tensors(tensors, metadata)
    before = lora.dense_deltas(LAYERS)["layers.0.attention.out"].clone()
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(lora.dense_deltas(LAYERS)["layers.0.attention.out"], before)


def test_another_adapter_config_makes_another_lora(tmp_path):
    tensors, _ = DIALECTS["2 peft"](logical(["layers.0.attention.out"], lambda _: 4, lambda _: 4.0))
    path = _write(tmp_path / "adapter_model.safetensors", tensors)
    plain = load_lora(path).sha256
    assert plain == hashlib.sha256(path.read_bytes()).hexdigest()
    found = []
    for alpha in (4, 32, 4):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
        found.append(load_lora(tmp_path).sha256)
    assert found[0] == found[2]
    assert len({plain, *found}) == 3


def test_adapter_config_of_another_file_is_not_used_and_said_so(tmp_path):
    tensors, _ = DIALECTS["2 peft"](logical(["layers.0.attention.out"], lambda _: 4, lambda _: 4.0))
    _write(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 400}))
    lora = load_lora(_write(tmp_path / "other.safetensors", tensors))
    assert lora.entries[0].scale.value == 1.0
    assert "adapter_config.json" in lora.warnings[0]


def test_two_files_on_one_layer_add_up():
    first, second = (
        logical(["layers.0.attention.qkv"], lambda _: 4, lambda _: 4.0, seed, "qv") for seed in (1, 2)
    )
    truth = dense(first + second)["layers.0.attention.qkv"]
    one, two = (
        lora_from_tensors(*DIALECTS["5 kohya split"](m)).dense_deltas(LAYERS) for m in (first, second)
    )
    torch.testing.assert_close(one["layers.0.attention.qkv"] + two["layers.0.attention.qkv"], truth)


def test_names_are_matched_as_wholes_not_by_replacing_separators():
    modules = logical(["layers.1.attention.out", "layers.11.attention.out"], lambda _: 2, lambda _: 2.0)
    found = lora_from_tensors(*DIALECTS["5 kohya split"](modules)).dense_deltas(LAYERS)
    assert relative_error(found, dense(modules)) <= 1e-6
    tensors = {"diffusion_model.layers.1.1.attention.out.lora_A.weight": torch.ones(2, D)}
    tensors["diffusion_model.layers.1.1.attention.out.lora_B.weight"] = torch.ones(D, 2)
    with pytest.raises(HswqError, match="match no layer"):
        lora_from_tensors(tensors).deltas(LAYERS)


def test_unmatched_keys_name_the_nearest_layer_and_are_an_error_unless_allowed():
    modules = logical(["layers.0.attention.out"], lambda _: 2, lambda _: 2.0)
    tensors, _ = DIALECTS["5 kohya split"](modules)
    tensors["lora_unet_layers_0_atention_out.lora_down.weight"] = torch.ones(2, D)
    tensors["lora_unet_layers_0_atention_out.lora_up.weight"] = torch.ones(D, 2)
    lora = lora_from_tensors(tensors)
    (row,) = lora.report(LAYERS).unmatched
    assert row.nearest == "layers.0.attention.out"
    with pytest.raises(
        HswqError, match=r"lora_unet_layers_0_atention_out.*nearest layer: layers\.0\.attention\.out"
    ):
        lora.deltas(LAYERS)
    assert list(lora.deltas(LAYERS, allow_unmatched=True)) == ["layers.0.attention.out"]


def test_nothing_matched_is_an_error_even_if_unmatched_keys_are_allowed():
    tensors = {
        "diffusion_model.blocky.lora_A.weight": torch.ones(2, D),
        "diffusion_model.blocky.lora_B.weight": torch.ones(D, 2),
    }
    with pytest.raises(HswqError, match="1 of 1 modules"):
        lora_from_tensors(tensors).deltas(LAYERS, allow_unmatched=True)


def test_a_lora_for_a_text_encoder_alone_is_refused():
    tensors = {"text_encoders.qwen3_4b.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 8)}
    tensors["text_encoders.qwen3_4b.model.layers.0.mlp.up_proj.lora_B.weight"] = torch.ones(8, 2)
    with pytest.raises(HswqError):
        lora_from_tensors(tensors).deltas(LAYERS, allow_unmatched=True)


def test_text_encoder_keys_are_reported_and_do_not_fail():
    tensors, _ = DIALECTS["5 kohya split"](logical(["layers.0.attention.out"], lambda _: 2, lambda _: 2.0))
    tensors["lora_te_layers_0_self_attn_q_proj.lora_down.weight"] = torch.ones(2, 8)
    tensors["text_encoders.qwen3_4b.model.layers.0.mlp.up_proj.lora_A.weight"] = torch.ones(2, 8)
    lora = lora_from_tensors(tensors)
    assert len(lora.deltas(LAYERS)) == 1
    rows = [row for row in lora.report(LAYERS).rows if row.status == "text encoder"]
    assert len(rows) == 2
    assert "2 keys are for a text encoder" in lora.warnings[0]


def test_report_lists_layer_kind_rank_scale_and_norm_of_every_module():
    modules = logical(SOME, _last(RANKS, 5), _last(ALPHAS, 3.0))
    report = lora_from_tensors(*DIALECTS["8 OneTrainer"](modules)).report(LAYERS)
    frame = report.to_frame()
    assert list(frame["layer"]) == [m.layer for m in modules]
    assert list(frame["rank"]) == [m.rank for m in modules]
    for row, module in zip(report.rows, modules, strict=True):
        assert row.scale == pytest.approx(module.alpha / module.rank)
        assert row.norm == pytest.approx(float(module.delta.double().norm()), rel=1e-6)
        assert row.rows == f"{module.start}:{module.start + module.up.shape[0]}"
    keys = {key for row in report.rows for key in row.keys}
    assert len(keys) == 3 * len(modules)


def test_report_without_a_model_reads_the_file_alone():
    modules = logical(SOME, _last(RANKS, 5), _last(ALPHAS, 3.0))
    tensors, _ = DIALECTS["8 OneTrainer"](modules)
    tensors["lora_te_layers_0_self_attn_q_proj.lora_down.weight"] = torch.ones(2, 8)
    *rows, text_encoder = lora_from_tensors(tensors).report().rows
    assert [row.status for row in rows] == ["read"] * len(modules)
    assert [row.norm for row in rows] == pytest.approx([float(m.delta.double().norm()) for m in modules])
    assert text_encoder.status == "text encoder"
    assert text_encoder.scale is None


# -- refusals -------------------------------------------------------------------------------------------


def _pair(module: str, down=(2, D), up=(D, 2)) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(down), f"{module}.lora_B.weight": torch.ones(up)}


OUT = "diffusion_model.layers.0.attention.out"


@pytest.mark.parametrize(
    ("tensors", "key"),
    [
        ({f"{OUT}.lora_A.weight": torch.ones(2, D)}, f"{OUT}.lora_A.weight"),
        ({f"{OUT}.lora_B.weight": torch.ones(D, 2)}, f"{OUT}.lora_B.weight"),
        (_pair(OUT, up=(D, 3)), f"{OUT}.lora_A.weight"),
        (_pair(OUT) | {f"{OUT}.alpha": torch.ones(2)}, f"{OUT}.alpha"),
        (_pair(OUT) | {f"{OUT}.dora_scale": torch.ones(D + 1)}, f"{OUT}.dora_scale"),
        (_pair(OUT) | {f"{OUT}.lora_magnitude_vector": torch.ones(2, D)}, f"{OUT}.lora_magnitude_vector"),
        (_pair(OUT) | {f"{OUT}.diff": torch.ones(D, D)}, f"{OUT}.lora_A.weight"),
        (_pair(OUT) | {f"{OUT}.lora_B.bias": torch.ones(D + 1)}, f"{OUT}.lora_B.bias"),
        (_pair(OUT) | {f"{OUT}.lora_A.default.weight": torch.ones(2, D)}, f"{OUT}.lora_A.default.weight"),
        ({f"{OUT}.lokr_w1": torch.ones(2, 2)}, f"{OUT}.lokr_w1"),
        ({f"{OUT}.lokr_w1": torch.ones(2, 2), f"{OUT}.lokr_w2_a": torch.ones(2, 2)}, f"{OUT}.lokr_w1"),
        ({f"{OUT}.hada_w1_a": torch.ones(2, 2)}, f"{OUT}.hada_w1_a"),
        ({f"{OUT}.dora_scale": torch.ones(D)}, f"{OUT}.dora_scale"),
        ({f"{OUT}.lora_A.weight": torch.ones(2, D, dtype=torch.int8)}, f"{OUT}.lora_A.weight"),
        (_pair(OUT, down=(0, D), up=(D, 0)), f"{OUT}.lora_A.weight"),
    ],
)  # fmt: skip
def test_a_broken_module_is_refused_with_its_key(tensors, key):
    with pytest.raises(HswqError) as caught:
        lora_from_tensors(tensors)
    assert caught.value.tensor == key


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_nan_and_infinity_are_refused_with_the_key(bad, dtype, tmp_path):
    tensors = _pair(OUT)
    tensors[f"{OUT}.lora_B.weight"][3, 1] = bad
    path = _write(tmp_path / "x.safetensors", {key: value.to(dtype) for key, value in tensors.items()})
    with pytest.raises(HswqError, match="damaged") as caught:
        load_lora(path)
    assert caught.value.tensor == f"{OUT}.lora_B.weight"
    assert caught.value.file == str(path)


def test_wrong_shape_is_refused_with_the_model_it_looks_made_for():
    tensors = _pair(OUT, down=(2, 3840), up=(3840, 2))
    lora = lora_from_tensors(tensors)
    assert lora.report(LAYERS).rows[0].status == "wrong shape"
    with pytest.raises(HswqError, match=r"wrong shape: .*made for Z-Image \(width 3840\)") as caught:
        lora.deltas(LAYERS)
    assert caught.value.tensor == f"{OUT}.lora_A.weight"
    with pytest.raises(HswqError, match="wrong shape"):
        lora.deltas(LAYERS, allow_unmatched=True)


@pytest.mark.parametrize(
    ("fused", "split"),
    [
        ("diffusion_model.layers.0.attention.qkv", "diffusion_model.layers.0.attention.to_k"),
        ("lora_unet_layers_0_attention_qkv", "lora_unet_layers_0_attention_to_v"),
    ],
)
def test_fused_and_split_in_one_file_are_refused(fused, split):
    tensors = _pair(fused, up=(3 * D, 2)) | _pair(split)
    with pytest.raises(HswqError, match="fused and a split"):
        lora_from_tensors(tensors)


def test_fused_and_split_in_two_spellings_are_refused_when_matched():
    split = _pair("diffusion_model.layers.0.attention.to_k")
    tensors = _pair("lora_unet_layers_0_attention_qkv", up=(3 * D, 2)) | split
    with pytest.raises(HswqError, match=r"conflict: .*layers\.0\.attention\.to_k and lora_unet_layers_0"):
        lora_from_tensors(tensors).deltas(LAYERS)


@pytest.mark.parametrize(
    ("key", "model"),
    [
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "Flux"),
        ("transformer.single_transformer_blocks.3.attn.to_q.lora_A.weight", "Flux"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k.lora_down.weight", "SDXL"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight", "SDXL"),
        ("lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight", "Stable Diffusion"),
        ("diffusion_model.joint_blocks.0.x_block.attn.qkv.lora_A.weight", "Stable Diffusion 3"),
        ("diffusion_model.blocks.0.self_attn.q.lora_A.weight", "Wan"),
        ("transformer.transformer_blocks.0.img_mlp.net.2.lora_A.weight", "Qwen-Image"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "a language model"),
    ],
)
def test_loras_of_other_models_are_refused_by_name(key, model):
    with pytest.raises(HswqError, match=f"this LoRA is for {model}") as caught:
        lora_from_tensors({key: torch.ones(2, 2)})
    assert caught.value.tensor == key


@pytest.mark.parametrize(
    ("ending", "method"),
    [
        ("oft_blocks", "OFT"),
        ("oft_R.weight", "OFT"),
        ("boft_R", "BOFT"),
        ("a1.weight", "GLoRA"),
        ("b2.weight", "GLoRA"),
        ("on_input", "IA3"),
        ("lokr_t2", "Tucker"),
        ("hada_t1", "Tucker"),
        ("vera_lambda_b", "VeRA"),
    ],
)
def test_methods_that_add_no_constant_are_refused_by_name(ending, method):
    with pytest.raises(HswqError, match=method):
        lora_from_tensors(_pair(OUT) | {f"{OUT}.{ending}": torch.ones(2, 2)})


def test_a_checkpoint_is_no_lora():
    with pytest.raises(HswqError, match="not a LoRA file"):
        lora_from_tensors({"layers.0.attention.qkv.weight": torch.ones(3, 3)})
    packed = {
        "layers.0.attention.qkv.weight": torch.ones(3, 3, dtype=torch.int8),
        "layers.0.attention.qkv.weight_scale": torch.ones(3, 1),
    }
    with pytest.raises(HswqError, match=r"not a LoRA file.*hl\.load"):
        lora_from_tensors(packed)


@pytest.mark.parametrize(
    "content", [b"", b"<html>no</html>", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", b"version https://git-lfs"]
)
def test_what_is_no_safetensors_file_raises_our_error_only(content, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(HswqError):
        load_lora(path)
    with pytest.raises(HswqError):
        load_lora(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    "settings_text",
    ["{", "[1]", '{"lora_alpha": "x"}', '{"alpha_pattern": 3}', '{"alpha_pattern": {"(": 1}}'],
)
def test_broken_settings_raise_our_error_only(settings_text):
    with pytest.raises(HswqError):
        lora_from_tensors(_pair(OUT), {"lora_adapter_metadata": settings_text})
