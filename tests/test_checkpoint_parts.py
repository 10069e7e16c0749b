"""Split saves: parts and their index, read together only where they are of one save."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import save
from safetensors.torch import load_file
from test_checkpoint_writer import METADATA, pack, same

from hswq_lab.checkpoint import Checkpoint, data_file, write
from hswq_lab.errors import HswqError

ROWS = 1000


def split(folder, number, rows=ROWS):
    """Three parts of one tensor each, all of whose values are this number."""
    items = [(f"w{part}", torch.full((rows,), float(number))) for part in range(3)]
    return write(folder / "x.safetensors", items, METADATA, max_shard_bytes=4 * ROWS)


def test_the_parts_that_are_read_from_are_never_overwritten(tmp_path):
    items = [(f"w{number}", torch.full((1000,), float(number))) for number in range(3)]
    index = write(tmp_path / "x.safetensors", items, max_shard_bytes=4000)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(files) == 4
    part = next(path for path in files if "-00002-of-" in path.name)
    for source in (index, part):
        changed = Checkpoint.open(source).with_values({"w1": torch.zeros(1000)})
        for size in (4000, 8000):  # the same parts again, and fewer: the others would be removed
            with pytest.raises(HswqError, match="being read"):
                changed.save(tmp_path / "x.safetensors", max_shard_bytes=size)
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_parts_are_written_with_an_index_and_read_back(tmp_path):
    index = write(tmp_path / "big.safetensors", pack().items(), METADATA, max_shard_bytes=8000)
    assert index.name == "big.safetensors.index.json"
    parts = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(parts) > 2
    assert parts[0] == f"big-00001-of-{len(parts):05d}.safetensors"
    for path in (index, tmp_path):
        checkpoint = Checkpoint.open(path)
        assert all(same(checkpoint[name], value) for name, value in pack().items())
        assert checkpoint.warnings == []
        assert len(json.loads(checkpoint.metadata["_quantization_metadata"])["layers"]) == 4
    total = sum(tensor.nbytes for part in parts for tensor in load_file(tmp_path / part).values())
    assert json.loads(index.read_text())["metadata"]["total_size"] == total
    whole = tmp_path / "whole"
    whole.mkdir()
    checkpoint.save(whole / "x.safetensors")
    write(whole / "y.safetensors", pack().items(), METADATA)
    assert (whole / "x.safetensors").read_bytes() == (whole / "y.safetensors").read_bytes()


@pytest.mark.parametrize("done", [1, 2, 3], ids=["one part", "two parts", "no index"])
@pytest.mark.parametrize("opened", ["index", "folder", "folder without index"])
def test_a_save_over_parts_that_was_killed_is_no_mixture_that_loads(tmp_path, monkeypatch, done, opened):
    index = split(tmp_path, 1)
    commit, committed = data_file.PartialFile.commit, []

    def killed(file):
        if len(committed) == done:
            raise KeyboardInterrupt
        committed.append(commit(file))

    with monkeypatch.context() as patched:
        patched.setattr(data_file.PartialFile, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            split(tmp_path, 2)
    if opened == "folder without index":
        index.unlink()
        if done == 3:
            assert float(Checkpoint.open(tmp_path)["w0"][0]) == 2, "all parts are new: no mixture"
            return
    with pytest.raises(HswqError, match="different saves") as refusal:
        Checkpoint.open(index if opened == "index" else tmp_path)
    assert "save it again" in str(refusal.value)
    split(tmp_path, 2)
    assert float(Checkpoint.open(tmp_path)["w2"][0]) == 2


def test_parts_of_ours_do_not_go_with_parts_of_others_and_those_of_others_go_together(tmp_path):
    index = split(tmp_path, 1)
    parts = sorted(tmp_path.glob("*.safetensors"))
    for done, part in enumerate(parts):
        save(part, load_file(part), METADATA)
        if done < 2:
            with pytest.raises(HswqError, match="different saves"):
                Checkpoint.open(index)
    with pytest.raises(HswqError, match="the index: "):
        Checkpoint.open(index)
    told = json.loads(index.read_text())
    index.write_text(json.dumps(told | {"metadata": None}))
    assert set(Checkpoint.open(index)) == {"w0", "w1", "w2"}


def test_the_digest_of_split_content_is_of_this_content_alone(tmp_path):
    folders = [tmp_path / name for name in "abcdef"]
    for folder in folders:
        folder.mkdir()
    first, again, other, longer = (
        split(folder, number, rows)
        for folder, number, rows in zip(folders, (1, 1, 2, 1), (ROWS, ROWS, ROWS, ROWS + 2), strict=False)
    )

    def digests(index):
        told = {
            Checkpoint.open(part).sources[0].header.metadata["hswq.content"]
            for part in index.parent.glob("*rs")
        }
        return told | {json.loads(index.read_text())["metadata"]["hswq.content"]}

    assert digests(first) == digests(again)
    assert len(digests(first) | digests(other) | digests(longer)) == 3
    opened = Checkpoint.open(first)
    assert opened.metadata == METADATA, "whatever is made of these values is another content"
    copied = opened.save(folders[4] / "y.safetensors", max_shard_bytes=4 * ROWS)
    assert digests(copied) == digests(first)
    changed = opened.with_values({"w1": torch.zeros(ROWS)}).save(
        folders[5] / "y.safetensors", max_shard_bytes=4 * ROWS
    )
    assert digests(changed) != digests(first)
    assert set(Checkpoint.open(changed)) == set(opened)


def test_small_parts_do_not_wait_in_memory_for_the_digest(tmp_path, monkeypatch):
    held = []
    add = data_file.DataFile.add
    files = []

    def counted(file, name, tensor, *, small=False):
        add(file, name, tensor, small=small)
        if file not in files:
            files.append(file)
        held.append(sum(len(data) for each in files for data in each._held))

    monkeypatch.setattr(data_file.DataFile, "add", counted)
    split(tmp_path, 1)
    assert max(held) == 4 * ROWS


def whole(folder, number):
    return write(folder / "x.safetensors", [("w0", torch.full((ROWS,), float(number)))], METADATA)


def test_a_save_replaces_one_of_the_same_name_whether_whole_or_split(tmp_path):
    (tmp_path / "x-lora.safetensors").write_bytes(b"of somebody else")
    for number, saved in enumerate((split, whole, split, whole)):
        saved(tmp_path, number)
        (tmp_path / "x-lora.safetensors").rename(tmp_path / "aside")
        assert float(Checkpoint.open(tmp_path)["w0"][0]) == number
        (tmp_path / "aside").rename(tmp_path / "x-lora.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-lora.safetensors", "x.safetensors"]


def test_a_folder_with_a_whole_and_a_split_save_of_one_name_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    split(tmp_path, 1)
    whole(tmp_path / "other", 2).rename(tmp_path / "x.safetensors")
    with pytest.raises(HswqError, match="twice: as a whole file and as parts"):
        Checkpoint.open(tmp_path)
    (tmp_path / "x.safetensors.index.json").unlink()  # a removal that was killed
    with pytest.raises(HswqError, match="twice: as a whole file and as parts"):
        Checkpoint.open(tmp_path)
    whole(tmp_path, 3)
    assert float(Checkpoint.open(tmp_path)["w0"][0]) == 3


def test_parts_of_others_are_not_removed_by_a_whole_save(tmp_path):
    index = split(tmp_path, 1)
    for part in tmp_path.glob("x-*"):
        save(part, load_file(part))
    told = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": told["weight_map"]}))
    before = {path.name for path in tmp_path.iterdir()}
    whole(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {*before, "x.safetensors"}
    with pytest.raises(HswqError, match="twice: as a whole file and as parts"):
        Checkpoint.open(tmp_path)


def test_the_parts_that_are_read_from_are_not_removed_by_a_whole_save(tmp_path):
    index = split(tmp_path, 1)
    with pytest.raises(HswqError, match="being read"):
        Checkpoint.open(index).save(tmp_path / "x.safetensors")
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "names",
    [
        ["m-00001-of-00002", "m-00002-of-00003"],
        ["m-00001-of-00002", "m-00002-of-00002", "m-1-of-2"],
        ["m-00001-of-00002", "m-00002-of-00002", "m-00001-of-00001"],
    ],
)
def test_parts_of_others_that_do_not_belong_together_are_refused(tmp_path, names):
    for number, name in enumerate(names):
        save(tmp_path / f"{name}.safetensors", {f"w{number}": torch.zeros(2)})
    with pytest.raises(HswqError, match="parts of more than one checkpoint"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("layout", ["links", "hub"])
def test_a_split_save_over_links_leaves_what_they_lead_to(tmp_path, layout):
    """Links of a second folder, or of a revision in a hub's cache, as their files are shared with others."""
    real, mine = tmp_path / "real", tmp_path / "mine"
    if layout == "hub":
        real, mine = tmp_path / "hub" / "snapshots" / "r1", tmp_path / "hub" / "snapshots" / "r2"
    real.mkdir(parents=True)
    mine.mkdir()
    split(real, 1)
    for path in list(real.iterdir()):
        if layout == "hub":
            blob = tmp_path / "hub" / "blobs" / f"hash of {path.name}"
            blob.parent.mkdir(exist_ok=True)
            path.rename(blob)
            path.symlink_to(blob)
        (mine / path.name).symlink_to(path.resolve())
    (mine / "x-00001.safetensors").symlink_to(real / "nothing")  # a name that parts have in the making
    split(mine, 2)
    for folder, number in ((real, 1), (mine, 2)):
        assert float(Checkpoint.open(folder / "x.safetensors.index.json")["w0"][0]) == number
    assert not any(path.is_symlink() for path in mine.glob("x-*-of-*"))
