"""Writing: every byte survives, the same input gives the same file, and a target is whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os

import pytest
import torch
from checkpoint_files import COMFY, fp8, int8, marker, nvfp4, random_matrix, save
from safetensors.torch import load_file

from hswq_lab.checkpoint import Checkpoint, data_file, write
from hswq_lab.checkpoint.raw import raw_bytes
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.formats import PackedWeight


def same(a, b):
    if isinstance(a, PackedWeight):
        return a.same_bits(b)
    return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)


def pack():
    return {
        "a.weight": nvfp4(random_matrix(48, 256), 256, torch.tensor(0.25)),
        "a.bias": random_matrix(1, 48)[0],
        "b.weight": int8(random_matrix(40, 256, 1), 256),
        "c.weight": fp8(random_matrix(24, 64, 2), input_scale=torch.tensor(0.5)),
        "d.weight": random_matrix(7, 3, 3),
        "norm.weight": random_matrix(1, 5, 4)[0],
        "odd.weight": nvfp4(random_matrix(33, 40, 5), 4),
        "x_pad_token": random_matrix(1, 8, 6),
        "hswq.note": torch.arange(3, dtype=torch.uint8),
    }


METADATA = {"format": "pt", "hswq.method": "sweep", "who": '{"deep": "é"}'}


def test_load_save_load_keeps_every_byte_marker_and_metadata_key(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    write(first, pack().items(), METADATA)
    checkpoint = Checkpoint.open(first)
    assert all(same(checkpoint[name], value) for name, value in pack().items())
    assert METADATA.items() <= checkpoint.metadata.items()
    checkpoint.save(second)
    assert first.read_bytes() == second.read_bytes()


def test_a_foreign_file_survives_tensor_by_tensor(tmp_path):
    packed = nvfp4(random_matrix(48, 256), 256)
    raw = marker(
        json.dumps({"format": "nvfp4", "params": {"convrot": True, "convrot_groupsize": 256}, "by": "x"})
        + "\0\0"
    )
    tensors = {f"{COMFY}a.{suffix}": tensor for suffix, tensor in packed.disk_tensors().items()}
    tensors |= {
        f"{COMFY}a.comfy_quant": raw,
        f"{COMFY}b.weight": random_matrix(4, 4),
        f"{COMFY}b.comfy_quant": torch.zeros(8, dtype=torch.uint8),
        f"{COMFY}a.hswq.svd": random_matrix(4, 4, 1),
        "vae.decoder.conv.weight": random_matrix(3, 3, 2),
        "text_encoders.x.weight": random_matrix(3, 3, 3),
    }
    source = save(tmp_path / "in.safetensors", tensors, {"workflow": "{}"})
    target = Checkpoint.open(source).save(tmp_path / "out.safetensors")
    written = load_file(target)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(written[name], tensor), name
    metadata = Checkpoint.open(target).metadata
    assert metadata["workflow"] == "{}"
    layers = json.loads(metadata["_quantization_metadata"])["layers"]
    assert layers == {f"{COMFY}a": {"format": "nvfp4", "by": "x", "convrot": True, "convrot_groupsize": 256}}


def test_further_fields_of_the_header_list_are_kept(tmp_path):
    packed = int8(random_matrix(8, 16))
    tensors = {f"a.{suffix}": tensor for suffix, tensor in packed.disk_tensors().items()}
    listed = {"format_version": "1.1", "tool": "x", "layers": {"a": {"format": "int8_tensorwise", "why": 7}}}
    source = save(tmp_path / "in.safetensors", tensors, {"_quantization_metadata": json.dumps(listed)})
    target = Checkpoint.open(source).save(tmp_path / "out.safetensors")
    assert json.loads(Checkpoint.open(target).metadata["_quantization_metadata"]) == listed
    assert json.loads(bytes(load_file(target)["a.comfy_quant"].numpy())) == listed["layers"]["a"]


def test_a_marker_that_no_longer_holds_is_not_kept(tmp_path):
    first = tmp_path / "first.safetensors"
    write(first, {"a.weight": nvfp4(random_matrix(16, 64), 64)}.items())
    changed = Checkpoint.open(first).with_values({"a.weight": int8(random_matrix(16, 64), 16)})
    second = Checkpoint.open(changed.save(tmp_path / "second.safetensors"))
    assert (second.entry("a.weight").format, second.entry("a.weight").group) == ("int8_tensorwise", 16)


@pytest.mark.parametrize("prefix", ["", COMFY, "net."])
def test_markers_and_header_use_the_tensors_own_prefix(tmp_path, prefix):
    file = tmp_path / "x.safetensors"
    write(file, {"a.weight": int8(random_matrix(8, 16))}.items(), {}, prefix)
    assert set(load_file(file)) == {f"{prefix}a.{s}" for s in ("weight", "weight_scale", "comfy_quant")}
    checkpoint = Checkpoint.open(file)
    assert list(json.loads(checkpoint.metadata["_quantization_metadata"])["layers"]) == [f"{prefix}a"]
    assert checkpoint.prefix == prefix
    again = Checkpoint.open(checkpoint.save(tmp_path / "y.safetensors"))
    assert again.prefix == prefix


def test_the_bytes_of_a_file_are_pinned(tmp_path):
    """A change of the written layout must be meant: packs are compared by their hashes."""
    codes = torch.arange(16 * 8, dtype=torch.uint8).reshape(16, 8)
    scales = torch.arange(128 * 4, dtype=torch.int64).remainder(127).to(torch.uint8).reshape(128, 4)
    packed = nvfp4(torch.ones(16, 16))
    packed = type(packed)(
        codes, scales.view(torch.float8_e4m3fn), torch.tensor(0.5), (16, 16), 16, torch.tensor(2.0)
    )
    file = tmp_path / "golden.safetensors"
    write(file, [("a.weight", packed), ("a.bias", torch.arange(3, dtype=torch.bfloat16))], {"by": "test"})
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {
            "by": "test",
            "_quantization_metadata": '{"format_version":"1.0","layers":{"model.diffusion_model.a":'
            '{"format":"nvfp4","convrot":true,"convrot_groupsize":16}}}',
        },
        f"{COMFY}a.weight": {"dtype": "U8", "shape": [16, 8], "data_offsets": [0, 128]},
        f"{COMFY}a.weight_scale": {"dtype": "F8_E4M3", "shape": [128, 4], "data_offsets": [128, 640]},
        f"{COMFY}a.input_scale": {"dtype": "F32", "shape": [], "data_offsets": [640, 644]},
        f"{COMFY}a.weight_scale_2": {"dtype": "F32", "shape": [], "data_offsets": [644, 648]},
        f"{COMFY}a.bias": {"dtype": "BF16", "shape": [3], "data_offsets": [648, 654]},
        f"{COMFY}a.comfy_quant": {"dtype": "U8", "shape": [56], "data_offsets": [654, 710]},
    }
    assert (
        hashlib.sha256(content).hexdigest()
        == "35d17e488e8e00ff0857e145cc506dda9353425d0b91e578fa551d19cbc89c2e"
    )


def test_a_streamed_file_differs_from_a_held_one_only_by_spaces(tmp_path, monkeypatch):
    held, streamed = tmp_path / "held.safetensors", tmp_path / "streamed.safetensors"
    write(held, pack().items(), METADATA)
    monkeypatch.setattr(data_file, "HOLD_BYTES", 10_000)
    monkeypatch.setattr(data_file, "RESERVED_BYTES", 8192)
    write(streamed, pack().items(), METADATA)
    headers = [file.read_bytes()[8:].partition(b"}}")[0] for file in (held, streamed)]
    assert headers[0].rstrip() == headers[1].rstrip()
    assert held.stat().st_size < streamed.stat().st_size
    a, b = load_file(held), load_file(streamed)
    assert all(same(a[name], b[name]) for name in a)


def test_a_header_that_outgrows_its_room_gets_more(tmp_path, monkeypatch):
    held, streamed = tmp_path / "held.safetensors", tmp_path / "streamed.safetensors"
    write(held, pack().items(), METADATA)
    monkeypatch.setattr(data_file, "HOLD_BYTES", 0)
    monkeypatch.setattr(data_file, "RESERVED_BYTES", 64)
    monkeypatch.setattr("hswq_lab.partial._CHUNK", 100)
    write(streamed, pack().items(), METADATA)
    assert held.read_bytes() == streamed.read_bytes()


def test_data_is_aligned_for_readers_that_view_it(tmp_path):
    file = tmp_path / "x.safetensors"
    write(file, pack().items())
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    sizes = {"F32": 4, "BF16": 2}
    assert length % 8 == 0
    assert all(r["data_offsets"][0] % sizes.get(r["dtype"], 1) == 0 for r in header.values())


def test_metadata_that_is_no_text_is_written_as_text(tmp_path):
    file = tmp_path / "x.safetensors"
    write(file, [("a", torch.zeros(2))], {"n": 3, "d": {"k": [1]}, "none": None})
    assert Checkpoint.open(file).metadata == {"n": "3", "d": '{"k": [1]}', "none": "null"}


def test_a_shape_that_only_the_caller_knew_gets_into_the_marker(tmp_path):
    packed = nvfp4(random_matrix(130, 40))
    tensors = {f"a.{suffix}": tensor for suffix, tensor in packed.disk_tensors().items()}
    source = save(tmp_path / "in.safetensors", tensors | {"a.comfy_quant": marker({"format": "nvfp4"})})
    target = Checkpoint.open(source, shapes={"a": (130, 40)}).save(tmp_path / "out.safetensors")
    assert Checkpoint.open(target)["a.weight"].same_bits(packed)


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    real = save(tmp_path / "real.safetensors", {"old": torch.zeros(1)})
    link, dangling = tmp_path / "link.safetensors", tmp_path / "dangling.safetensors"
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "nothing.safetensors")
    for target in (link, dangling):
        write(target, [("new", torch.zeros(1))])
        assert not target.is_symlink()
        assert list(Checkpoint.open(target)) == ["new"]
    assert list(Checkpoint.open(real)) == ["old"]
    assert not (tmp_path / "nothing.safetensors").exists()


def test_a_folder_that_is_a_link_is_written_into(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link" / "x.safetensors", [("new", torch.zeros(1))])
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["x.safetensors"]


def test_the_file_that_is_read_from_is_never_overwritten(tmp_path):
    file = tmp_path / "x.safetensors"
    write(file, pack().items())
    before = file.read_bytes()
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    for target in (file, link):
        with pytest.raises(HswqError, match="being read"):
            Checkpoint.open(file).save(target)
    assert file.read_bytes() == before
    checkpoint = Checkpoint.open(file)
    write(file, checkpoint.items(), checkpoint.metadata)  # the source is not known here: safe all the same
    assert all(same(checkpoint[name], Checkpoint.open(file)[name]) for name in checkpoint)


def interrupted(error):
    yield "a", torch.zeros(100_000)
    yield "b", torch.zeros(100_000)
    raise error


@pytest.mark.parametrize("error", [HswqError("x"), KeyboardInterrupt(), Cancelled("stop"), ValueError()])
@pytest.mark.parametrize("hold", [0, 10**9])
def test_an_interrupted_write_leaves_nothing_and_an_old_target_as_it_was(tmp_path, monkeypatch, error, hold):
    monkeypatch.setattr(data_file, "HOLD_BYTES", hold)
    for max_shard_bytes in (None, 1000):
        with pytest.raises(type(error)):
            write(tmp_path / "x.safetensors", interrupted(error), max_shard_bytes=max_shard_bytes)
        assert list(tmp_path.iterdir()) == []
    old = save(tmp_path / "x.safetensors", {"old": torch.ones(2)})
    before = old.read_bytes()
    with pytest.raises(type(error)):
        write(old, interrupted(error))
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    assert old.read_bytes() == before


def test_progress_is_called_before_each_item_and_can_cancel(tmp_path):
    seen = []
    write(tmp_path / "x.safetensors", pack().items(), progress=lambda *step: seen.append(step))
    assert [step[0] for step in seen] == list(range(len(pack()) + 1))
    assert {step[1] for step in seen} == {len(pack())}

    def stop(done, total, label):
        if done == 3:
            raise Cancelled("stop")

    with pytest.raises(Cancelled):
        write(tmp_path / "y.safetensors", pack().items(), progress=stop)
    assert not (tmp_path / "y.safetensors").exists()


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    calls = []

    def full(handle, data, offset):
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(handle, data[:10], offset)

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(HswqError, match="the disk is full"):
        write(tmp_path / "x.safetensors", pack().items())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_refuses_at_the_end_leaves_nothing(tmp_path, monkeypatch, call):
    def refuse(*args):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(*((os, "fsync", refuse) if call == "fsync" else ("pathlib.Path.replace", refuse)))
    with pytest.raises(HswqError, match="cannot be written"):
        write(tmp_path / "x.safetensors", pack().items())
    assert list(tmp_path.iterdir()) == []


def test_targets_that_cannot_be(tmp_path):
    with pytest.raises(HswqError, match="is a folder"):
        write(tmp_path, pack().items())
    with pytest.raises(HswqError, match="folder does not exist"):
        write(tmp_path / "no" / "x.safetensors", pack().items())


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "claim the same"),
        ([("a.weight", int8(random_matrix(8, 16))), ("a.weight_scale", torch.zeros(2))], "claim the same"),
        ([("a", int8(random_matrix(8, 16)))], "does not end in .weight"),
        ([("a", torch.zeros(2, device="meta"))], "cannot be stored"),
        ([("a", torch.zeros(2, dtype=torch.complex128))], "cannot be stored"),
        ([("a", torch.eye(2).to_sparse())], "cannot be stored"),
        ([], None),
    ],
)
def test_items_that_cannot_be_written(tmp_path, items, words):
    if words is None:
        write(tmp_path / "x.safetensors", items)
        assert len(Checkpoint.open(tmp_path / "x.safetensors")) == 0
        return
    with pytest.raises(HswqError, match=words):
        write(tmp_path / "x.safetensors", items)


def test_views_are_written_as_they_look(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "t": base.t(),
        "slice": base[1:3, 2:4],
        "flipped": base.flip(0),
        "expanded": base[:1].expand(4, 6),
    }
    write(tmp_path / "x.safetensors", views.items())
    checkpoint = Checkpoint.open(tmp_path / "x.safetensors")
    assert all(torch.equal(checkpoint[name], view) for name, view in views.items())


def test_hashes_tell_content_apart(tmp_path):
    checkpoint = Checkpoint.from_mapping(pack())
    assert checkpoint.sha256 == Checkpoint.from_mapping(dict(reversed(pack().items()))).sha256
    assert checkpoint.sha256 != checkpoint.with_values({"a.bias": torch.zeros(48).bfloat16()}).sha256
    assert checkpoint.sha256 != checkpoint.with_values({"a.weight": nvfp4(random_matrix(48, 256), 64)}).sha256
    file = checkpoint.save(tmp_path / "x.safetensors")
    assert Checkpoint.open(file).sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_an_overlay_leaves_the_original_alone():
    checkpoint = Checkpoint.from_mapping(pack(), {"k": "v"})
    over = checkpoint.with_values({"a.bias": torch.zeros(48), "new": torch.ones(1)}, {"k": "w"})
    assert (checkpoint.metadata["k"], over.metadata["k"]) == ("v", "w")
    assert "new" in over
    assert "new" not in checkpoint
    assert not same(checkpoint["a.bias"], over["a.bias"])
    assert list(over)[: len(checkpoint)] == list(checkpoint)
