"""hswq-lab pack on files: the plan file, parts, a terminal, and runs that are killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.cli import main

# The command itself, made slow enough to be met in the middle, and writing from the first tensor on.
SLOW = """
import signal, sys, time
from hswq_lab import packing
from hswq_lab.checkpoint import data_file
from hswq_lab.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
data_file.HOLD_BYTES = 0
pack_weight = packing.pack_weight
def slow(*args, **named):
    print("packing", flush=True)
    time.sleep(0.5)
    return pack_weight(*args, **named)
packing.pack_weight = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory, tiny_tensors):
    return write(tmp_path_factory.mktemp("model") / "big.safetensors", tiny_tensors.items())


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps({"formats": {"*": "int8", "layers.*": "nvfp4"}}))
    return path


def command(model_file, plan_file, target):
    return ["pack", str(model_file), "-o", str(target), "--plan", str(plan_file), "--scales", "rtn"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_no_target_and_a_second_run_starts_clean(
    model_file, plan_file, tmp_path, stop, capfd
):
    target = tmp_path / "out.safetensors"
    arguments = command(model_file, plan_file, target)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        for _ in range(3):
            assert process.stdout.readline() == b"packing\n"
        assert [path.name for path in tmp_path.iterdir()] == [".out.safetensors.hswq-partial"]
        assert next(tmp_path.iterdir()).stat().st_size > 0, "it is in the middle"
        process.send_signal(stop)
        told = process.stderr.read()
    left = [path.name for path in tmp_path.iterdir()]
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert b"stopped; nothing half-done" in told
        assert left == []
    else:
        assert process.returncode == -signal.SIGKILL
        assert target.name not in left
    assert main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    once = tmp_path.parent / "once"
    once.mkdir(exist_ok=True)
    assert main([*command(model_file, plan_file, once / target.name), "--force"]) == 0
    assert target.read_bytes() == (once / target.name).read_bytes()


def test_a_terminal_sees_a_bar(model_file, plan_file, tmp_path):
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 100))
    code = "import sys; from hswq_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = command(model_file, plan_file, tmp_path / "out.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=writer, check=True
    )
    os.close(writer)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal without a writer ends
        while piece := os.read(reader, 100_000):
            shown += piece
    os.close(reader)
    assert b"packing" in shown
    assert b"100%" in shown
    assert b"written: " in done.stdout


def test_the_report_is_of_the_file(model_file, plan_file, tmp_path, capsys):
    target, report = tmp_path / "out.safetensors", tmp_path / "report.json"
    assert main([*command(model_file, plan_file, target), "--json", str(report)]) == 0
    assert f"written: {target} ({target.stat().st_size:,} bytes)" in capsys.readouterr().out
    rows = {row["layer"]: row["format"] for row in json.loads(report.read_text())["layers"]}
    assert rows["layers.0.attention.qkv"] == "nvfp4"
    assert rows["x_embedder"] == "int8_tensorwise"


def test_parts_in_and_parts_out(model_file, plan_file, tmp_path, capsys):
    target = tmp_path / "out.safetensors"
    arguments = [*command(model_file, plan_file, target), "--shard-bytes", "100000"]
    assert main(arguments) == 0
    index = tmp_path / "out.safetensors.index.json"
    parts = sorted(tmp_path.glob("out-*.safetensors"))
    assert len(parts) > 1
    assert f"written: {index}" in capsys.readouterr().out
    assert main(arguments) == 2, "it is there already"
    assert "exists already" in capsys.readouterr().err
    whole = tmp_path / "whole.safetensors"
    assert main(command(model_file, plan_file, whole)) == 0
    together, split = Checkpoint.open(whole), Checkpoint.open(index)
    assert list(split) == list(together)
    assert main(["diff", str(index), str(whole)]) == 0
    assert main(["convert", str(index), "-o", str(tmp_path / "again.safetensors")]) == 0
    parts[0].write_bytes(parts[0].read_bytes()[:-1])
    assert main(["convert", str(index), "-o", str(tmp_path / "third.safetensors")]) == 2
    told = capsys.readouterr().err
    assert "truncated" in told
    assert parts[0].name in told
    assert not (tmp_path / "third.safetensors").exists()
    assert main(["check", str(index)]) == 1
    assert f"{parts[0].name}: truncated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere/out.safetensors", "folder does not exist"),
        ("out.gguf", "ends in .safetensors"),
        ("there.safetensors", "exists already"),
    ],
)
def test_a_target_that_cannot_be_is_refused_before_any_work(
    model_file, plan_file, target, words, monkeypatch, capsys
):
    def load(*arguments):
        pytest.fail("the model was opened")

    (model_file.parent / "there.safetensors").touch()
    monkeypatch.setattr("hswq_lab.cli.quantize.load", load)
    assert main(command(model_file, plan_file, model_file.parent / target)) == 2
    assert words in capsys.readouterr().err


def test_the_source_is_not_overwritten_even_by_force(model_file, plan_file, capsys):
    before = model_file.read_bytes()
    assert main([*command(model_file, plan_file, model_file), "--force"]) == 2
    assert "being read" in capsys.readouterr().err
    assert model_file.read_bytes() == before


def test_other_parts_take_the_place_of_the_old_ones(model_file, plan_file, tmp_path):
    target = tmp_path / "out.safetensors"
    for size in ("60000", "300000"):
        assert main([*command(model_file, plan_file, target), "--shard-bytes", size, "--force"]) == 0
    (tmp_path / "out-of-this.safetensors").write_bytes(b"")
    named = set(json.loads((tmp_path / "out.safetensors.index.json").read_text())["weight_map"].values())
    assert {path.name for path in tmp_path.glob("out-0*")} == named


def test_an_impact_of_few_layers_says_so_and_that_of_another_model_is_refused(model_file, tmp_path, capsys):
    impact, target = tmp_path / "impact.json", tmp_path / "out.safetensors"
    few = ["--layers", "layers.0.*", "--steps", "1", "--seeds", "1", "--scales", "rtn"]
    assert main(["sensitivity", "mini-zimage", *few, "--json", str(impact)]) == 0
    by_impact = ["pack", "mini-zimage", "-o", str(target), "--scales", "rtn", "--impact", str(impact)]
    assert main([*by_impact, "--bits", "5.5"]) == 2
    assert "no plan is that small" in capsys.readouterr().err
    assert main([*by_impact, "--nvfp4", "2", "--keep", "layers.1.*=int8"]) == 0
    assert "59 layers were not measured; 53 of them stay 16-bit" in capsys.readouterr().out
    by_impact[1] = str(model_file)
    assert main([*by_impact, "--nvfp4", "2", "--force"]) == 2
    assert "measured on a model of other layers" in capsys.readouterr().err
