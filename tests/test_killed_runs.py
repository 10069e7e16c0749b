"""What a run that was killed leaves: nothing under a target's name, and nothing for ever."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from hswq_lab import owned, spec
from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.cli import main
from hswq_lab.errors import HswqError
from hswq_lab.owned import temporary_folder
from hswq_lab.partial import write_whole

VALUES = {"a.weight": torch.ones(4, 8), "a.bias": torch.zeros(4)}

WRITING = """
import sys, time, torch
from hswq_lab.checkpoint import data_file, write
data_file.HOLD_BYTES = 0
def items():
    yield "a", torch.zeros(1000)
    print("started", flush=True)
    time.sleep(60)
write(sys.argv[1], items())
"""


def test_a_killed_run_leaves_no_target_a_second_is_refused_meanwhile_and_then_starts_clean(tmp_path):
    target = tmp_path / "x.safetensors"
    process = subprocess.Popen([sys.executable, "-c", WRITING, str(target)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"started\n"
        with pytest.raises(HswqError, match="another run is writing"):
            write(target, VALUES.items())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not target.exists()
    time.sleep(0.05)
    write(target, VALUES.items())
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    assert len(Checkpoint.open(target)) == len(VALUES)


def test_what_a_killed_run_left_goes_with_the_next_whatever_its_target(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(tmp_path / "x.safetensors")], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"started\n"
        write(tmp_path / "y.safetensors", VALUES.items())
        assert len(list(tmp_path.iterdir())) == 2, "what a living run is writing stays"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert len(list(tmp_path.iterdir())) == 2
    mine = tmp_path / ".mine.partial"
    mine.write_text("not ours")
    write_whole(tmp_path / "z.json", b"{}")
    assert {file.name for file in tmp_path.iterdir()} == {"y.safetensors", "z.json", mine.name}


SPILLING = """
import time
from hswq_lab.owned import temporary_folder
folder, handle = temporary_folder()
(folder / "unsaved.safetensors").write_text("bytes")
print(folder, flush=True)
time.sleep(60)
"""


def test_what_a_killed_run_spilled_goes_with_the_next_spill_and_not_before(
    tiny_tensors, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    process = subprocess.Popen([sys.executable, "-c", SPILLING], stdout=subprocess.PIPE, text=True)
    try:
        left = Path(process.stdout.readline().strip())
        assert left.parent == tmp_path
        first = Checkpoint.from_mapping(tiny_tensors, {})
        kept = Path(spec._file_of(first).path)
        assert left.exists(), "its run is alive"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    second = Checkpoint.from_mapping(tiny_tensors, {"another": "one"})
    spilled = Path(spec._file_of(second).path)
    assert not left.exists()
    assert kept.exists()
    assert spilled.exists()


def test_any_run_removes_what_a_dead_one_left_in_the_temporary_folder(pack_file, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / "hswq-spill-dead", tmp_path / "somebody-else"
    for folder in (left, other):
        folder.mkdir()
        (folder / "unsaved.safetensors").write_text("bytes")
    mine, handle = temporary_folder()
    try:
        left.mkdir(exist_ok=True)
        assert main(["inspect", pack_file]) == 0
        assert sorted(tmp_path.iterdir()) == sorted([mine, other])
    finally:
        os.close(handle)


def refuse_to_sync_folders(monkeypatch, code):
    fsync = os.fsync

    def refused(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refused)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folders_serves(tmp_path, monkeypatch, code):
    refuse_to_sync_folders(monkeypatch, code)
    assert len(Checkpoint.open(write(tmp_path / "x.safetensors", VALUES.items()))) == len(VALUES)


def test_a_folder_that_cannot_be_synced_is_said_and_the_file_is_not_said_to_be_missing(tmp_path, monkeypatch):
    refuse_to_sync_folders(monkeypatch, errno.EIO)
    with pytest.raises(HswqError, match="is written under its name, but a power cut"):
        write_whole(tmp_path / "x.json", b"{}")
    assert (tmp_path / "x.json").read_bytes() == b"{}"


def test_a_file_system_without_locks_loses_nothing_and_serves(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(errno.EBADF, "no locks on folders here")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(owned, "lock", refuse)
    folder, handle = temporary_folder()
    assert handle is None
    again, _ = temporary_folder()
    assert folder.exists()
    assert again.exists()
