"""Headers: damaged files and files of another kind are refused by name; odd but harmless metadata is read."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import raw_file
from safetensors.torch import save_file

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.checkpoint.header import MAX_HEADER_BYTES, TensorInfo, encode_header, read_header
from hswq_lab.errors import HswqError


def entry(begin=0, end=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


BAD_HEADERS = {
    "is not a JSON object": b"{not json",
    "not valid JSON": b'{"a": 1,}',
    "occurs twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32"}}',
    "nested too deeply": b'{"a":' + b"[" * 200_000,
    "lacks dtype": {"a": {"dtype": "F32", "shape": [2]}},
    "unknown dtype": {"a": entry(dtype="F31")},
    "impossible shape": {"a": entry(shape=(-2,))},
    "impossible data_offsets": {"a": {**entry(), "data_offsets": [8, 0]}},
    "contradict each other": {"a": entry(shape=(3,))},
    "overlap": {"a": entry(), "b": entry(4, 8, shape=(1,))},
    "a hole": {"a": entry(0, 4, shape=(1,)), "b": entry(5, 8, "U8", (3,))},
    "goes on after": {"a": entry(0, 4, shape=(1,))},
    "__metadata__ is not": {"__metadata__": ["x"], "a": entry()},
}


@pytest.mark.parametrize("problem", BAD_HEADERS)
def test_a_header_that_breaks_a_rule_is_refused_and_the_rule_named(tmp_path, problem):
    file = raw_file(tmp_path / "bad.safetensors", BAD_HEADERS[problem], b"\0" * 8)
    expected = "not valid JSON" if problem == "is not a JSON object" else problem
    with pytest.raises(HswqError, match=expected) as caught:
        Checkpoint.open(file)
    assert caught.value.file == str(file)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([2**62, 2**62], "U8"),
        ([0, 2**63], "F32"),
        ([1] * 40, "U8"),
        ([True, 2], "F32"),
        ([2.0], "F32"),
        ("2", "F32"),
    ],
)
def test_absurd_shapes_never_reach_torch(tmp_path, shape, dtype):
    header = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}}
    with pytest.raises(HswqError, match="impossible shape"):
        Checkpoint.open(raw_file(tmp_path / "bad.safetensors", header, b"\0" * 8))


def test_a_truncated_file_says_what_it_wants_and_what_it_has(tmp_path):
    file = tmp_path / "cut.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(100)}, file)
    whole = file.read_bytes()
    for keep in (len(whole) - 1, len(whole) - 500, 40, 9):
        file.write_bytes(whole[:keep])
        wanted = 8 + int.from_bytes(whole[:8], "little") if keep < 100 else len(whole)
        with pytest.raises(HswqError, match=f"truncated: header wants {wanted} bytes, file has {keep}"):
            Checkpoint.open(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"abc", "too short"),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "this is an HTML page"),
        (b"  \n<HTML>login</HTML>", "this is an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "this is a Git LFS pointer"),
        (b"PK\x03\x04" + b"\0" * 100, "zip archive, probably a PyTorch pickle"),
        (b"\x80\x02}q\x00." + b"\0" * 20, "Python pickle"),
        (b"GGUF\x03\0\0\0" + b"\0" * 20, "this is a GGUF file"),
        (b'{"error": "not found"}', "this is a JSON text"),
        (b"\xff" * 64, "absurd header length"),
        (b"\x10" + b"\0" * 7 + b"x" * 32, "does not begin with"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, words):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(HswqError, match=words):
        Checkpoint.open(file)


def test_a_header_length_is_believed_only_up_to_the_limit(tmp_path):
    file = raw_file(tmp_path / "big.safetensors", b"{}", length=MAX_HEADER_BYTES + 1)
    with pytest.raises(HswqError, match="absurd header length"):
        Checkpoint.open(file)


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin"])
def test_pickles_are_refused_by_name_without_a_look_inside(tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(HswqError, match="pickles"):
        Checkpoint.open(file)


def test_missing_files_and_odd_places(tmp_path):
    with pytest.raises(HswqError, match="does not exist"):
        Checkpoint.open(tmp_path / "nothing.safetensors")
    with pytest.raises(HswqError, match="not a regular file"):
        Checkpoint.open("/dev/zero")


def test_metadata_that_is_no_text_is_read_as_text(tmp_path):
    header = {"__metadata__": {"n": 3, "nothing": None, "deep": {"a": [1]}, "text": "é"}, "a": entry()}
    checkpoint = Checkpoint.open(raw_file(tmp_path / "odd.safetensors", header, b"\0" * 8))
    assert checkpoint.metadata == {"n": "3", "nothing": "null", "deep": '{"a": [1]}', "text": "é"}
    null = raw_file(tmp_path / "null.safetensors", {"__metadata__": None, "a": entry()}, b"\0" * 8)
    assert Checkpoint.open(null).metadata == {}


def test_a_name_that_is_no_unicode_is_refused(tmp_path):
    header = json.dumps({"a\ud800": entry()}).encode()
    with pytest.raises(HswqError, match="not valid JSON"):
        Checkpoint.open(raw_file(tmp_path / "odd.safetensors", header, b"\0" * 8))


def test_encoded_headers_are_read_back_and_aligned(tmp_path):
    infos = [TensorInfo("a", "F32", (2,), 0, 8), TensorInfo("é", "U8", (3,), 8, 11)]
    for minimum in (0, 512):
        header = encode_header(infos, {"k": "v"}, minimum=minimum)
        assert len(header) % 8 == 0
        assert len(header) >= minimum
        file = tmp_path / "x.safetensors"
        file.write_bytes(header + bytes(range(11)))
        read = read_header(file)
        assert [(info.name, info.shape) for info in read.tensors.values()] == [("a", (2,)), ("é", (3,))]
        assert read.metadata == {"k": "v"}
        assert Checkpoint.open(file)["é"].tolist() == [8, 9, 10]
