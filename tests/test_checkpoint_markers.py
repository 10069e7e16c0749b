"""Markers: every spelling in the field says the same; nonsense is refused."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import COMFY, int8, marker, metadata, nvfp4, parts, random_matrix, save

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.checkpoint.markers import MAX_MARKER_BYTES, decode, interpret
from hswq_lab.errors import HswqError

CONTENT = {"format": "nvfp4", "convrot": True, "convrot_groupsize": 256}
SPELLINGS = {
    "compact": json.dumps(CONTENT, separators=(",", ":")),
    "spaced": json.dumps(CONTENT, indent=3),
    "params": json.dumps({"format": "nvfp4", "params": {"convrot": True, "convrot_groupsize": 256}}),
    "all in params": json.dumps({"params": CONTENT}),
    "doubly encoded": json.dumps(json.dumps(CONTENT)),
    "triply encoded": json.dumps(json.dumps(json.dumps(CONTENT))),
    "trailing NULs": json.dumps(CONTENT) + "\0" * 7,
    "NULs inside the string": json.dumps(json.dumps(CONTENT) + "\0"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_understood(spelling):
    read = decode(SPELLINGS[spelling].encode(), "a.comfy_quant")
    assert (read.format, read.rotated, read.group) == ("nvfp4", True, 256)


def test_nulls_say_that_there_is_no_format():
    assert decode(b"\0" * 64, "a.comfy_quant") is None
    assert decode(b"", "a.comfy_quant") is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "names no format"),
        ('{"format": 4}', "names no format"),
        ('{"format":"nvfp4","convrot":"yes"}', "neither true nor false"),
        ('{"format":"nvfp4","convrot":true,"convrot_groupsize":256.0}', "not a positive whole number"),
        ('{"format":"nvfp4","convrot":true,"convrot_groupsize":true}', "not a positive whole number"),
        ('{"format":"nvfp4","orig_shape":[3]}', "orig_shape is not"),
        ('{"format":"nvfp4","orig_shape":[3,-1]}', "orig_shape is not"),
        ('{"format":"nvfp4","orig_shape":[3,16],"in_features":17}', "orig_shape and in_features differ"),
        ('{"format":"nvfp4","params":{"format":"int8_tensorwise"}}', "gives format twice"),
        ('{"format":"nvfp4","params":3}', "params are not an object"),
        ("[" * 50_000, "not valid JSON"),
        ('{"format":"nvfp4","convrot_groupsize":' + "9" * 5000 + "}", "not valid JSON"),
        ('{"format":"' + "x" * MAX_MARKER_BYTES + '"}', "too long"),
    ],
)
def test_nonsense_is_refused(content, words):
    with pytest.raises(HswqError, match=words) as caught:
        decode(content.encode(), "a.comfy_quant")
    assert caught.value.tensor == "a.comfy_quant"


def test_a_bare_format_name_is_a_marker():
    assert interpret("int8_tensorwise", "a").format == "int8_tensorwise"


def two_layers(tmp_path, tensor_prefix, header):
    """An NVFP4 and an INT8 layer without marker tensors, described by the header alone."""
    tensors = parts(f"{tensor_prefix}a.q", nvfp4(random_matrix(32, 256), 256))
    tensors |= parts(f"{tensor_prefix}b.k", int8(random_matrix(32, 256, 1), 256))
    return save(tmp_path / "two.safetensors", tensors, header)


ROTATED = {"convrot": True, "convrot_groupsize": 256}


def names(a, b):
    return metadata(**{a: {"format": "nvfp4", **ROTATED}, b: {"format": "int8_tensorwise", **ROTATED}})


@pytest.mark.parametrize("tensor_prefix", ["", COMFY, "diffusion_model.", "model.", "net."])
@pytest.mark.parametrize("name_prefix", ["", COMFY, "diffusion_model.", "both"])
def test_header_names_match_with_any_prefix_or_none(tmp_path, tensor_prefix, name_prefix):
    header = names(*(f"{name_prefix if name_prefix != 'both' else COMFY}{layer}" for layer in ("a.q", "b.k")))
    if name_prefix == "both":
        bare = json.loads(names("a.q", "b.k")["_quantization_metadata"])
        full = json.loads(header["_quantization_metadata"])
        header = {"_quantization_metadata": json.dumps({"layers": bare["layers"] | full["layers"]})}
    checkpoint = Checkpoint.open(two_layers(tmp_path, tensor_prefix, header))
    assert checkpoint.prefix == tensor_prefix
    assert checkpoint.entry("a.q.weight").format == "nvfp4"
    assert checkpoint.entry("b.k.weight").format == "int8_tensorwise"
    assert checkpoint.entry("a.q.weight").group == checkpoint.entry("b.k.weight").group == 256
    assert (checkpoint.index.matched, checkpoint.index.unmatched) == (2, [])
    assert checkpoint.warnings == []


def test_a_header_name_that_fits_no_layer_is_an_error(tmp_path):
    file = two_layers(tmp_path, COMFY, names("a.q", "b.kk"))
    with pytest.raises(
        HswqError, match=r"names 1 layers that the file does not have \(1 matched\)"
    ) as caught:
        Checkpoint.open(file)
    assert caught.value.tensor == "b.kk"


def test_a_bare_string_in_the_header_is_enough(tmp_path):
    tensors = parts("a", nvfp4(random_matrix(16, 64)))
    checkpoint = Checkpoint.open(save(tmp_path / "x.safetensors", tensors, metadata(a="nvfp4")))
    assert checkpoint.entry("a.weight").format == "nvfp4"
    assert checkpoint.warnings == []


def test_spellings_and_sources_that_contradict_each_other_are_refused(tmp_path):
    tensors = parts("a", nvfp4(random_matrix(16, 256), 256))
    header = metadata(**{"a": {"format": "nvfp4"}, f"{COMFY}a": {"format": "nvfp4", **ROTATED}})
    with pytest.raises(HswqError, match="two spellings"):
        Checkpoint.open(save(tmp_path / "x.safetensors", tensors, header))
    tensors["a.comfy_quant"] = marker(CONTENT)
    with pytest.raises(HswqError, match="marker tensor and the header contradict"):
        Checkpoint.open(save(tmp_path / "y.safetensors", tensors, metadata(a="nvfp4")))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 3}', '{"layers": {"a": 7}}', "{" * 9999])
def test_header_metadata_that_is_no_list_of_layers_is_refused(tmp_path, text):
    tensors = parts("a", nvfp4(random_matrix(16, 64)))
    with pytest.raises(HswqError):
        Checkpoint.open(save(tmp_path / "x.safetensors", tensors, {"_quantization_metadata": text}))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4), torch.zeros(MAX_MARKER_BYTES + 8, dtype=torch.uint8)], ids=["floats", "huge"]
)
def test_a_marker_tensor_of_the_wrong_kind_is_refused(tmp_path, tensor):
    tensors = parts("a", nvfp4(random_matrix(16, 64))) | {"a.comfy_quant": tensor}
    with pytest.raises(HswqError, match="this is no marker"):
        Checkpoint.open(save(tmp_path / "x.safetensors", tensors))
