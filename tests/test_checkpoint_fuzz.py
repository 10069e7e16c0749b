"""Hostile files: whatever the bytes are, the answer is right or an HswqError, soon and in little memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoint_files import fp8, int8, marker, nvfp4, parts, random_matrix, raw_file, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hswq_lab.checkpoint import Checkpoint, check, inspect
from hswq_lab.checkpoint.header import DTYPES
from hswq_lab.checkpoint.markers import decode, parse_metadata
from hswq_lab.errors import HswqError

# HSWQ_FUZZ=20000 makes a campaign of it; in the suite the examples are always the same ones.
FUZZ = settings(
    max_examples=int(os.environ.get("HSWQ_FUZZ", "100")),
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize="HSWQ_FUZZ" not in os.environ,
    database=None,
)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    VALUES | st.sampled_from([16, 64, "nvfp4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "format", "convrot", "convrot_groupsize", "orig_shape", "in_features", "out_features", "params", "layers",
)  # fmt: skip
MARKERS = st.dictionaries(
    st.sampled_from(FIELDS), JSON | st.sampled_from(["nvfp4", "int8_tensorwise"]), max_size=5
)


def read_everything(file: Path) -> None:
    """Open, look, load; only our own error may come out, and of check not even that."""
    with suppress(HswqError):
        checkpoint = Checkpoint.open(file)
        inspect(checkpoint)
        checkpoint.verify()
        for name in checkpoint:
            checkpoint[name]
    str(check(file))


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> bytes:
    values = {
        "model.diffusion_model.a": nvfp4(random_matrix(32, 64), 64, torch.tensor(0.5)),
        "model.diffusion_model.b": int8(random_matrix(8, 64), 64),
        "model.diffusion_model.c": fp8(random_matrix(8, 16)),
    }
    tensors = {"model.diffusion_model.a.bias": torch.zeros(32)}
    for name, value in values.items():
        tensors |= parts(name, value) | {f"{name}.comfy_quant": marker(value.marker())}
    layers = {name: value.marker() for name, value in values.items()}
    file = tmp_path_factory.mktemp("fuzz") / "pack.safetensors"
    return save(file, tensors, {"_quantization_metadata": json.dumps({"layers": layers})}).read_bytes()


@FUZZ
@given(data=st.data())
def test_mutated_files(tmp_path, pack, data):
    content = bytearray(pack)
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the damage goes into the header, where it hurts.
        end = data.draw(st.sampled_from([8, 2000, len(content)]))
        at = data.draw(st.integers(0, min(end, len(content) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "drop", "add", "digit"])):
            case "flip":
                content[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[at + 1 :]
            case "drop":
                del content[at : at + data.draw(st.integers(1, 16))]
            case "add":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=16))
            case "digit":
                content[at] = data.draw(st.sampled_from(b'0123456789"[]{},:'))
        content = content or bytearray(b"x")
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes(content))
    read_everything(file)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", ""]) | JSON,
        "shape": st.lists(st.integers(-1, 70) | st.sampled_from([2**40, 2**62, 10**400]), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 600), min_size=2, max_size=2) | JSON,
    }
)


@FUZZ
@given(header=st.dictionaries(st.text(max_size=12) | st.just("__metadata__"), ENTRY | JSON, max_size=5))
def test_random_headers(tmp_path, header):
    read_everything(raw_file(tmp_path / "x.safetensors", json.dumps(header).encode(), b"\1" * 512))


WHOLE_ROLES = ("weight", "weight_scale", "weight_scale_2", "input_scale", "comfy_quant")
ROLES = (*WHOLE_ROLES, "weight_packed", "weight_global_scale", "scale_weight", "pre_quant_scale", "bias")
SMALL = ("uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float32", "int64")
SHAPES = ((), (1,), (16,), (16, 8), (16, 16), (16, 32), (128, 4), (32, 32), (16, 1), (0, 16), (2, 2, 2))
PARTS = st.tuples(
    st.sampled_from([getattr(torch, name) for name in SMALL]), st.sampled_from(SHAPES), st.integers(0, 255)
)


@FUZZ
@given(
    roles=st.dictionaries(st.sampled_from(ROLES), PARTS, max_size=6),
    told=st.none() | MARKERS,
    split=st.booleans(),
)
def test_random_layers(tmp_path, roles, told, split):
    """Parts of a layer in every combination of dtype, shape and byte value."""
    tensors = {}
    for layer in ("attention.to_q", "attention.to_k", "attention.to_v") if split else ("a",):
        for role, (dtype, shape, byte) in roles.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.full((size,), byte, dtype=torch.uint8)
            tensors[f"{layer}.{role}"] = (
                raw.view(dtype).reshape(shape) if size else torch.zeros(shape).to(dtype)
            )
        if told is not None:
            tensors[f"{layer}.comfy_quant"] = marker(json.dumps(told))
    read_everything(save(tmp_path / "x.safetensors", tensors))


@FUZZ
@given(content=MARKERS | JSON, twice=st.booleans(), tail=st.sampled_from([b"", b"\0", b"\0\0 ", b"x"]))
def test_random_markers(content, twice, tail):
    text = json.dumps(content)
    raw = (json.dumps(text) if twice else text).encode() + tail
    with suppress(HswqError):
        decode(raw, "a")
    with suppress(HswqError):
        parse_metadata(raw.decode())


@FUZZ
@given(raw=st.binary(max_size=64))
def test_random_marker_bytes(raw):
    with suppress(HswqError):
        decode(raw, "a")


WEIGHT_MAPS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@FUZZ
@given(content=JSON | st.dictionaries(st.just("weight_map"), WEIGHT_MAPS))
def test_random_indexes(tmp_path, content):
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps(content))
    read_everything(index)


@pytest.mark.parametrize("claimed", [2**20, 2**30, 2**40])
def test_a_small_file_never_costs_much_memory(tmp_path, claimed):
    header = {"a": {"dtype": "U8", "shape": [claimed], "data_offsets": [0, claimed]}}
    file = raw_file(tmp_path / "x.safetensors", header, b"\0" * 64)
    tracemalloc.start()
    try:
        read_everything(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
