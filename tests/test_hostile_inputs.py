"""Hostile LoRAs, plans, impact reports, benchmarks, captions and metadata: our own error or a right result, soon.

HSWQ_FUZZ=20000 makes a campaign of it; in the suite the examples are always the same ones. Checkpoints:
test_checkpoint_fuzz.py.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_dialects import LAYERS, logical
from safetensors.torch import load_file, save, save_file

import hswq_lab as hl
from hswq_lab.bench import read_bench
from hswq_lab.captions import load_captions
from hswq_lab.checkpoint.baked import LORAS_KEY
from hswq_lab.checkpoint.provenance import SCALES_KEY
from hswq_lab.checkpoint.smoothed import SMOOTH_KEY
from hswq_lab.loading import MODEL_KEY, SEEDS_KEY
from hswq_lab.quantize.impact import ImpactReport

FUZZ = settings(
    max_examples=int(os.environ.get("HSWQ_FUZZ", "60")),
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize="HSWQ_FUZZ" not in os.environ,
    database=None,
)
NUMBERS = st.integers(-3, 70) | st.sampled_from([2**31, 2**63, 10**400, -1]) | st.floats() | st.booleans()
JSON = st.recursive(
    st.none() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DEEP = "[" * 100_000 + "]" * 100_000
READERS = {
    "plan": hl.Plan.load,
    "impact": ImpactReport.load,
    "bench": read_bench,
    "captions": load_captions,
    "lora": hl.load_lora,
    "checkpoint": hl.Checkpoint.open,
}


def use_lora(path) -> None:
    """All that reading a LoRA can come to; only our own error may come out."""
    with suppress(hl.HswqError):
        lora = hl.load_lora(path)
        str(lora.report(LAYERS))
        for layer, delta in lora.deltas(LAYERS, allow_unmatched=True).items():
            assert torch.isfinite(delta.dense(torch.zeros(LAYERS[layer]))).all()


def damaged(data, content: bytes) -> bytes:
    """Bytes with up to four flips, cuts and insertions, half of them where the header is."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(
            st.integers(0, max(0, min(data.draw(st.sampled_from([8, 900, len(content)])), len(content)) - 1))
        )
        match data.draw(st.sampled_from(["flip", "cut", "add", "digit"])):
            case "flip" if content:
                content[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[at + 1 :]
            case "add":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=12))
            case "digit" if content:
                content[at] = data.draw(st.sampled_from(b'0123456789"[]{},:'))
    return bytes(content)


@pytest.fixture(scope="module")
def lora_bytes() -> bytes:
    tensors = {}
    for module in logical(["layers.0.attention.qkv", "layers.1.feed_forward.w1"], lambda _: 2, lambda _: 2.0):
        name = f"transformer.{module.name}"
        tensors |= {f"{name}.lora_A.weight": module.down, f"{name}.lora_B.weight": module.up}
        tensors[f"{name}.alpha"] = torch.tensor(module.alpha)
    return save(tensors, {"format": "pt", "lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 2.0})})


@FUZZ
@given(data=st.data())
def test_damaged_loras(tmp_path, lora_bytes, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(damaged(data, lora_bytes))
    use_lora(path)


PREFIXES = (
    "",
    "diffusion_model.",
    "transformer.",
    "lora_unet_",
    "lycoris_",
    "base_model.model.",
    "lora_te1_",
)
MODULES = (
    "layers.0.attention.qkv",
    "layers.0.attention.to_q",
    "layers_0_feed_forward_w1",
    "layers.99.x",
    "..",
    "",
)
PARTS = (
    "lora_A.weight", "lora_B.weight", "lora_up.weight", "lora_down.weight", "lora_A.default.weight", "alpha",
    "dora_scale", "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b",
    "diff", "diff_b", "set_weight", "lora_B.bias", "oft_blocks", "a1.weight", "lora_magnitude_vector", "scale",
)  # fmt: skip
SHAPES = (
    (),
    (1,),
    (2,),
    (32,),
    (2, 32),
    (96, 2),
    (32, 2),
    (48, 2),
    (1, 32),
    (96, 32),
    (0, 32),
    (2, 2, 1, 1),
    (4, 4),
)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
)
VALUES = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")])


@FUZZ
@given(
    keys=st.dictionaries(
        st.tuples(st.sampled_from(PREFIXES), st.sampled_from(MODULES), st.sampled_from(PARTS)),
        st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), VALUES),
        max_size=6,
    ),
    metadata=st.dictionaries(
        st.sampled_from(["lora_adapter_metadata", "ss_network_dim", "ss_network_args"]),
        JSON.map(json.dumps),
        max_size=2,
    ),
)
def test_random_loras(tmp_path, keys, metadata):
    """Parts of LoRAs of every kind in every combination of shape, dtype and value."""
    tensors = {}
    for (prefix, module, part), (shape, dtype, value) in keys.items():
        known = value if dtype.is_floating_point else 1
        tensors[f"{prefix}{module}.{part}"] = torch.full(shape, known, dtype=torch.float32).to(dtype)
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata)
    use_lora(path)


@FUZZ
@given(
    config=JSON
    | st.dictionaries(
        st.sampled_from(["r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_dora", "use_rslora"]), JSON
    )
)
def test_random_adapter_settings(tmp_path, lora_bytes, config):
    (tmp_path / "adapter_model.safetensors").write_bytes(lora_bytes)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    use_lora(tmp_path)


FORMATS = st.sampled_from(["nvfp4", "int8", "int8_tensorwise", "16-bit", "", "nvfp4 unrotated"]) | JSON
GLOBS = st.sampled_from(["*", "layers.*", "layers.0.attention.qkv", "[", "nothing", ""]) | st.text(max_size=6)


@FUZZ
@given(
    content=JSON
    | st.dictionaries(GLOBS, FORMATS)
    | st.fixed_dictionaries({"formats": st.dictionaries(GLOBS, FORMATS)})
)
def test_random_plans(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with suppress(hl.HswqError):
        hl.Plan.load(path).for_layers(LAYERS)


@FUZZ
@given(data=st.data(), damage=JSON, row=st.booleans())
def test_random_impact_reports_and_benchmarks(tmp_path, tiny_impact, data, damage, row):
    """A stored result with one entry replaced by something else."""
    content = json.loads(tiny_impact)
    place = content["rows"][0] if row else content
    place[data.draw(st.sampled_from(sorted(place)))] = damage
    path = tmp_path / "impact.json"
    path.write_text(json.dumps(content))
    with suppress(hl.HswqError):
        report = ImpactReport.load(path)
        report.plan(bits=6.0)
        str(report)
        report.to_frame()
    with suppress(hl.HswqError):
        read_bench(path)


@pytest.fixture(scope="module")
def tiny_impact(tiny_tensors) -> str:
    model = hl.Model(hl.Checkpoint.from_mapping(tiny_tensors), name="tiny")
    captions = [torch.ones(3, 512)]
    report = hl.sensitivity(model, captions, [1], steps=1, layers=["layers.0.*"], scales="rtn", cfg=1.0)
    return json.dumps(report.to_dict())


@FUZZ
@given(
    metadata=st.dictionaries(
        st.sampled_from([LORAS_KEY, SEEDS_KEY, SMOOTH_KEY, SCALES_KEY, MODEL_KEY, "_quantization_metadata"]),
        JSON.map(json.dumps) | st.text(max_size=9),
        max_size=3,
    )
)
def test_random_metadata_of_a_pack(tmp_path, whole_pack, metadata):
    path, target = tmp_path / "pack.safetensors", tmp_path / "again.safetensors"
    save_file(load_file(whole_pack), path, metadata)
    with suppress(hl.HswqError):
        model = hl.load(path)
        str(model.report())
        lora = hl.load_lora(style(tmp_path))
        model.attach(lora, 1.0, "bake")
        hl.save(model, target)
        hl.load(target)
    assert not [left for left in tmp_path.iterdir() if left.suffix != ".safetensors"]


def style(folder):
    path = folder / "style.safetensors"
    if not path.exists():
        name = "diffusion_model.layers.0.feed_forward.w1"
        factors = {f"{name}.lora_A.weight": torch.ones(1, 64), f"{name}.lora_B.weight": torch.ones(128, 1)}
        save_file(factors, path)
    return path


@pytest.fixture(scope="module")
def whole_pack(tiny_tensors, tmp_path_factory):
    model = hl.Model(hl.Checkpoint.from_mapping(tiny_tensors), name="tiny")
    pack = hl.pack(model, hl.Plan({"*": "int8_tensorwise", "layers.*": "nvfp4"}), scales="rtn")
    return hl.save(pack, tmp_path_factory.mktemp("pack") / "pack.safetensors")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "content", [b"", b"{", DEEP.encode(), b"\xff\xfe", b"null", b"1" * 5000, b'{"a": 1e999}']
)
def test_no_reader_lets_another_error_out(tmp_path, reader, content):
    for name in ("x.json", "x.safetensors", "x.safetensors.index.json"):
        path = tmp_path / name
        path.write_bytes(content)
        with suppress(hl.HswqError):
            READERS[reader](path)
    with pytest.raises(hl.HswqError):
        READERS[reader](tmp_path / "nowhere" / "x.json")
