"""The command line: exit codes, messages, what is written and what is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import hswq_lab as hl
from hswq_lab import cli, session
from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.cli import common, files, main
from hswq_lab.errors import Cancelled, HswqError

VERBS = [
    "inspect",
    "check",
    "sensitivity",
    "pack",
    "calibrate",
    "bake",
    "compare",
    "bench",
    "convert",
    "diff",
]
VERBS += ["doctor", "demo", "embed", "lab", "lora"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    assert "usage: hswq-lab" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["inspect"],
        ["pack", "a", "-o", "b"],
        ["pack", "a", "b", "--all", "int8"],
        ["demo", "--workers", "x"],
    ],
)
def test_wrong_usage_is_code_2_on_stderr(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_help_does_not_wait_for_torch():
    code = "import sys; from hswq_lab.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("verb", [["inspect"], ["diff", "x.safetensors"], ["compare", "mini-zimage"]])
def test_a_missing_file_is_one_message_and_code_2(verb, tmp_path, capsys):
    assert main([*verb, str(tmp_path / "nowhere.safetensors"), "--json", str(tmp_path / "out.json")]) == 2
    told = capsys.readouterr().err
    assert told.count("hswq-lab: ") == 1
    assert "safetensors" in told
    assert list(tmp_path.iterdir()) == []


def test_a_message_names_file_tensor_found_expected_and_fix(capsys):
    cli.complain(HswqError("it is wrong", file="f", tensor="t", found=1, expected=2, fix="mend it"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "hswq-lab: it is wrong"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "file",
        "tensor",
        "found",
        "expected",
        "to do",
    ]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Cancelled("stop")])
def test_ctrl_c_is_a_clean_end(stop, monkeypatch, capsys):
    def interrupted(_args: Namespace) -> int:
        raise stop

    monkeypatch.setattr("hswq_lab.cli.lab.doctor", interrupted)
    assert main(["doctor"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_a_reader_that_went_away_is_no_error():
    """`hswq-lab doctor | head -0`: no traceback, no complaint at exit."""
    code = "from hswq_lab.cli import main; import sys; sys.exit(main(['doctor']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (0, 1)
    assert b"Traceback" not in told
    assert b"Exception ignored" not in told


def test_inspect_tells_a_checkpoint_from_a_lora(pack_file, lora_file, model_file, tmp_path, capsys):
    assert (
        main(["inspect", pack_file, "--json", str(tmp_path / "pack.json"), "--save", str(tmp_path / "p.csv")])
        == 0
    )
    assert "nvfp4" in capsys.readouterr().out
    assert json.loads((tmp_path / "pack.json").read_text())["result"] == "InspectReport"
    assert "layers.0.attention.qkv.weight" in (tmp_path / "p.csv").read_text()
    assert main(["inspect", lora_file]) == 0
    assert "add --model" in capsys.readouterr().out
    assert main(["inspect", lora_file, "--model", model_file, "--json", str(tmp_path / "lora.json")]) == 0
    assert "matched" in capsys.readouterr().out
    assert json.loads((tmp_path / "lora.json").read_text())["rows"][0]["layer"] == "layers.0.feed_forward.w1"


def test_the_small_models_name_stands_for_its_file(capsys):
    assert main(["inspect", "mini-zimage"]) == 0
    assert main(["check", "mini-zimage", "--source", "mini-zimage"]) == 0
    assert "0 errors" in capsys.readouterr().out


def test_is_lora_reads_only_keys(pack_file, lora_file, tmp_path):
    assert files.is_lora(lora_file)
    assert not files.is_lora(pack_file)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert files.is_lora(str(tmp_path))


def test_check_fails_for_a_broken_file_and_passes_for_a_good_one(pack_file, model_file, tmp_path, capsys):
    assert main(["check", pack_file, "--source", model_file]) == 0
    broken = dict(Checkpoint.open(pack_file).items())
    path = tmp_path / "broken.safetensors"
    write(path, broken.items())
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert main(["check", str(path)]) == 1
    assert "truncated" in capsys.readouterr().out


def test_pack_calibrate_and_diff(model_file, pack_file, capsys):
    entries = {entry.name: entry for entry in Checkpoint.open(pack_file).entries()}
    assert entries["layers.0.attention.qkv.weight"].format == "nvfp4"
    assert entries["layers.0.attention.qkv.weight"].calibrated
    assert entries["final_layer.linear.weight"].format == "int8_tensorwise"
    assert main(["diff", model_file, pack_file]) == 0
    assert "other format" in capsys.readouterr().out


def test_a_headroom_that_clips_what_was_seen_is_told(pack_file, tmp_path, capsys):
    for headroom, told in (("0.5", True), ("1.5", False)):
        target = str(tmp_path / f"{headroom}.safetensors")
        assert main(["calibrate", pack_file, "-o", target, "--steps", "1", "--headroom", headroom]) == 0
        assert ("warning: a headroom of 0.5 clips" in capsys.readouterr().out) == told


def test_nothing_is_overwritten_unless_it_is_said(model_file, tmp_path, capsys):
    target = tmp_path / "there.safetensors"
    target.write_text("precious")
    assert main(["pack", model_file, "-o", str(target), "--all", "int8"]) == 2
    assert "exists" in capsys.readouterr().err
    assert target.read_text() == "precious"
    assert main(["pack", model_file, "-o", str(target), "--all", "int8", "--force"]) == 0
    assert Checkpoint.open(target).entry("x_embedder.weight").format == "int8_tensorwise"


@pytest.mark.parametrize(
    "options",
    [["--all", "int9"], ["--all", "nvfp4", "--nvfp4", "3"], ["--all", "nvfp4", "--keep", "nonsense"]],
)
def test_a_plan_that_makes_no_sense_writes_nothing(model_file, tmp_path, options, capsys):
    assert main(["pack", model_file, "-o", str(tmp_path / "x.safetensors"), *options]) == 2
    assert capsys.readouterr().err.startswith("hswq-lab: ")
    assert list(tmp_path.iterdir()) == []


def test_sensitivity_then_pack_by_its_result(model_file, tmp_path, capsys):
    impact = str(tmp_path / "impact.json")
    assert (
        main(["sensitivity", model_file, "--steps", "1", "--seeds", "1", "--scales", "rtn", "--json", impact])
        == 0
    )
    assert "most sensitive" in capsys.readouterr().out
    packed = tmp_path / "x.safetensors"
    assert (
        main(["pack", model_file, "-o", str(packed), "--impact", impact, "--nvfp4", "3", "--scales", "rtn"])
        == 0
    )
    formats = [entry.format for entry in Checkpoint.open(packed).entries()]
    assert formats.count("nvfp4") == 3


def test_compare_fails_with_the_gate_and_its_json_is_strict(model_file, pack_file, tmp_path, capsys):
    report = tmp_path / "report.json"
    arguments = ["compare", model_file, pack_file, "--modes", "parity,tc", "--seeds", "2", "--steps", "2"]
    code = main([*arguments, "--json", str(report)])
    content = json.loads(report.read_text(), parse_constant=pytest.fail)
    assert code == (0 if content["verdict"]["passed"] else 1)
    assert "parity" in capsys.readouterr().out
    assert main(["compare", model_file, model_file, "--seeds", "1", "--steps", "1"]) == 0


def test_packs_of_one_name_are_told_apart_by_their_folders(model_file, pack_file, tmp_path, capsys):
    paths = []
    for folder in ("x/a", "y/a", "x/b"):
        (tmp_path / folder).mkdir(parents=True)
        paths.append(str(shutil.copy(pack_file, tmp_path / folder / "p.safetensors")))
    report, once = tmp_path / "r.json", ["--modes", "tc", "--seeds", "1", "--steps", "1"]
    main(["compare", model_file, *paths, *once, "--json", str(report)])
    content = json.loads(report.read_text())
    assert content["variants"] == [f"{name}/p.safetensors tc" for name in ("x/a", "y/a", "b")]
    assert [content["compared"][name]["file"] for name in content["variants"]] == paths
    assert content["compared"]["b/p.safetensors tc"]["sha256"] in capsys.readouterr().out
    assert main(["compare", model_file, paths[0], paths[0], *once]) == 2
    assert "named twice" in capsys.readouterr().err


def test_ranks_and_activation_scales(model_file, tmp_path, capsys):
    impact, out = tmp_path / "impact.json", tmp_path / "pack.safetensors"
    measure = ["sensitivity", model_file, "--layers", "x_embedder", "--steps", "1", "--seeds", "1"]
    chosen = ["--activation-scales", "four_six"]
    assert main([*measure, *chosen, "--formats", "nvfp4", "nvfp4+r2", "--json", str(impact)]) == 0
    content = json.loads(impact.read_text())
    assert [row["format"] for row in content["rows"]] == ["nvfp4", "nvfp4+r2"]
    assert content["activation_scales"] == "four_six"
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"x_embedder": "nvfp4+r2"}))
    assert main(["pack", model_file, "-o", str(out), "--plan", str(plan), *chosen]) == 0
    assert main(["inspect", str(out)]) == 0
    assert "input basis of rank 2, activations by four_six" in capsys.readouterr().out
    assert (
        main(
            [
                "pack",
                model_file,
                "-o",
                str(tmp_path / "x.safetensors"),
                "--plan",
                str(plan),
                "--activation-scales",
                "best",
            ]
        )
        == 2
    )
    assert "rtn, four_six, sweep" in capsys.readouterr().err


def test_seeds_are_a_number_of_the_twenty_or_a_list(model_file, tmp_path, capsys):
    report = tmp_path / "report.json"
    for given, expected in (("2", list(hl.SEEDS_20[:2])), ("7,", [7]), ("7,43", [7, 43])):
        compared = ["compare", model_file, model_file, "--steps", "1", "--seeds", given]
        assert main([*compared, "--json", str(report)]) == 0
        assert json.loads(report.read_text())["seeds"] == expected
    capsys.readouterr()
    for wrong in ("99", "0", "-1", "x", "1,x", ""):
        assert main(["compare", model_file, model_file, "--seeds", wrong]) == 2
        assert "1 to 20" in capsys.readouterr().err
    for wrong in ("99", "0"):
        assert main(["sensitivity", model_file, "--seeds", wrong]) == 2
        assert "1 to 20" in capsys.readouterr().err


def test_the_environment_chooses_the_mode(pack_file, monkeypatch, capsys):
    session.warn_once.cache_clear()
    monkeypatch.setenv("HSWQ_ZI_FORCE_TC", "1")
    args = Namespace(device="cpu", threads=1)
    assert common.load(pack_file, args).request.mode == "tc"
    assert "placeholder" not in capsys.readouterr().err, "every layer of this pack has an input_scale"
    monkeypatch.setenv("HSWQ_ZI_FORCE_PARITY", "1")
    model = common.load(pack_file, args)
    assert model.request.mode == "parity"
    assert "HSWQ_ZI_FORCE_PARITY=1" in model.report().requested_mode
    assert "HSWQ_ZI_FORCE_TC=1 is ignored" in capsys.readouterr().err


def test_a_placeholder_scale_is_warned_of_once(pack_file, monkeypatch, capsys):
    session.warn_once.cache_clear()
    monkeypatch.setenv("HSWQ_ZI_FORCE_TC", "1")
    uncalibrated = str(Path(pack_file).with_name("packed.safetensors"))
    for _ in range(2):
        common.load(uncalibrated, Namespace(device="cpu", threads=1))
    assert capsys.readouterr().err.count("placeholder scale of 1") == 1


def test_compare_names_a_forced_mode_and_says_when_one_is_overruled(
    model_file, pack_file, tmp_path, monkeypatch, capsys
):
    session.warn_once.cache_clear()
    monkeypatch.setenv("HSWQ_ZI_FORCE_PARITY", "1")
    report = tmp_path / "report.json"
    arguments = [
        "compare", model_file, pack_file, "--modes", "auto,tc", "--seeds", "1", "--steps", "1", "--json"
    ]  # fmt: skip
    main([*arguments, str(report)])
    assert {"parity", "tc"} <= set(json.loads(report.read_text())["variants"])
    assert "--modes tc wins over HSWQ_ZI_FORCE_PARITY=1" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_code_2(pack_file, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["inspect", pack_file, "--json", str(tmp_path / "file" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_bench_times_a_product(tmp_path, capsys):
    arguments = ["bench", "--device", "cpu", "--shape", "32", "64", "--rows", "2", "--repeats", "1"]
    assert main([*arguments, "--json", str(tmp_path / "b.json")]) == 0
    assert "TFLOP/s" in capsys.readouterr().out


def test_lab_without_a_folder_is_refused(tmp_path, capsys):
    assert main(["lab", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_lab_is_loopback_with_a_token_that_is_no_argument(tmp_path, monkeypatch):
    seen = {}

    def run(command, env, check):
        seen.update(command=command, env=env, check=check)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("hswq_lab.cli.lab.subprocess.run", run)
    monkeypatch.delenv("JUPYTER_TOKEN", raising=False)
    assert main(["lab", str(tmp_path), "--no-browser"]) == 0
    assert "--ip=127.0.0.1" in seen["command"]
    assert len(seen["env"]["JUPYTER_TOKEN"]) >= 24
    assert seen["env"]["JUPYTER_TOKEN"] not in " ".join(seen["command"])


@pytest.mark.parametrize("interval", [-1.0, float("inf")], ids=["always", "never"])
def test_a_bar_in_a_log_is_lines_and_says_how_long(interval, monkeypatch, capsys):
    # The clock decides nothing here: a busy machine may sleep longer than any interval.
    monkeypatch.setattr(session, "LOG_INTERVAL", interval)
    with common.bar("packing") as progress:
        progress(0, 2, "a")
        progress(1, 2, "b")
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == (["packing: 0 % (a)", "packing: 50 % (b)"] if interval < 0 else [])
    assert last.startswith("packing: done in ")


@pytest.mark.parametrize("verb", [["check", "{pack}"], ["diff", "{pack}", "{pack}"], ["inspect", "{pack}"]])
def test_every_verb_that_computes_takes_threads_and_one_is_the_default(verb, pack_file, monkeypatch, capsys):
    """Small tensors on several threads wait for each other: a check of a toy took six times as long."""
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    arguments = [word.format(pack=pack_file) for word in verb]
    assert main(arguments) == 0
    assert main([*arguments, "--threads", "3"]) == 0
    assert seen == [1, 3]
    with pytest.raises(SystemExit):
        main([*arguments, "--threads", "0"])
    assert "from 1 on" in capsys.readouterr().err


def test_a_reader_who_leaves_changes_neither_code_nor_results(monkeypatch):
    finished = []

    def verb(args):
        for _ in range(2):
            common.say("more than anybody reads")
            sys.stdout.flush()
        finished.append(args.file)
        return cli.GATE_FAILED

    monkeypatch.setattr(files, "check", verb)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["check", "pack.safetensors"]) == cli.GATE_FAILED
    assert len(finished) == 1


def test_a_fault_of_the_program_is_no_failed_gate(monkeypatch, capsys):
    def verb(args):
        raise ZeroDivisionError(args.function)

    monkeypatch.setattr(files, "check", verb)
    assert main(["check", "pack.safetensors"]) == cli.NOT_DONE
    assert "ZeroDivisionError: check" in capsys.readouterr().err
