"""What a command may write to: never over what it reads, never twice to one file, and asked before the work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.cli import main
from hswq_lab.loading import MODEL_KEY

LAYER = "diffusion_model.layers.0.feed_forward.w1"


@pytest.fixture
def files(tmp_path, tiny_tensors):
    """A model, a pack of it and a LoRA, in the folder that the test writes into."""
    model = write(tmp_path / "model.safetensors", tiny_tensors.items(), {MODEL_KEY: "mini-zimage"})
    assert (
        main(
            [
                "pack",
                str(model),
                "-o",
                str(tmp_path / "pack.safetensors"),
                "--all",
                "nvfp4",
                "--scales",
                "rtn",
            ]
        )
        == 0
    )
    generator = torch.Generator().manual_seed(3)
    factors = {
        f"{LAYER}.lora_A.weight": torch.randn(2, 64, generator=generator),
        f"{LAYER}.lora_B.weight": torch.randn(128, 2, generator=generator),
    }
    save_file(factors, tmp_path / "style.safetensors")
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "pack.safetensors", "--json", "pack.safetensors"], "no such form"),
        (
            [
                "bake",
                "pack.safetensors",
                "style.safetensors:0.5",
                "-o",
                "x.safetensors",
                "--save",
                "style.html",
            ],
            None,
        ),
        (
            ["bake", "pack.safetensors", "style.safetensors", "-o", "x.safetensors", "--save", "a.txt"],
            "no such form",
        ),
        (["sensitivity", "model.safetensors", "--save", "out.xlsx"], "no such form"),
        (["inspect", "pack.safetensors", "--json", "a.json", "--save", "a.json"], "one file"),
        (["sensitivity", "model.safetensors", "--resume", "old.json", "--json", "old.json"], "being read"),
        (["inspect", "pack.safetensors", "--json", "folder.json"], "is a folder"),
        (["inspect", "pack.safetensors", "--json", "/proc/x.json"], "cannot be written"),
        (["calibrate", "pack.safetensors", "-o", "x.safetensors", "--headroom", "0"], "positive"),
        (["calibrate", "pack.safetensors", "-o", "x.safetensors", "--headroom", "nan"], "finite"),
        (["check", "nowhere.safetensors"], "does not exist"),
        (["check", "n" * 300 + ".safetensors"], "refused"),
        (["inspect", ""], "path"),
    ],
)
def test_a_target_that_cannot_be_is_refused_and_nothing_is_changed(
    files, arguments, words, monkeypatch, capsys
):
    (files / "old.json").write_text("{}")
    (files / "folder.json").mkdir()
    before = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
    monkeypatch.chdir(files)
    if words is None:
        assert main(arguments) == 0
        return
    monkeypatch.setattr("hswq_lab.model.Model.network", lambda model: pytest.fail("work was done"))
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told
    assert {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()} == before


def test_a_page_is_html_and_nothing_else(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "model.safetensors", "pack.safetensors", "--html", "report.json"])
    assert stopped.value.code == 2
    assert "a page is a .html file, not report.json" in capsys.readouterr().err


def test_a_link_to_an_input_is_that_input(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    (files / "link.json").symlink_to("pack.safetensors")
    before = contents(files)
    assert main(["inspect", "pack.safetensors", "--json", "link.json"]) == 2
    assert "being read" in capsys.readouterr().err
    assert contents(files) == before


def test_what_is_no_ordinary_file_is_not_replaced(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    os.mkfifo("pipe.json")
    assert main(["inspect", "pack.safetensors", "--json", "pipe.json"]) == 2
    assert "no ordinary file" in capsys.readouterr().err
    assert (files / "pipe.json").is_fifo()


@pytest.mark.parametrize("length", [230, 243, 255])
def test_the_longest_names_can_be_written(files, length, monkeypatch):
    monkeypatch.chdir(files)
    name = "n" * (length - len(".safetensors")) + ".safetensors"
    assert main(["convert", "pack.safetensors", "-o", name]) == 0
    assert list(Checkpoint.open(files / name)) == list(Checkpoint.open(files / "pack.safetensors"))
    assert [path.name for path in files.iterdir() if path.name.startswith(".")] == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")  # noqa: PTH110
def test_a_reader_that_takes_nothing_more_is_one_message(files):
    code = "import sys; from hswq_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-c", code, "inspect", str(files / "pack.safetensors")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
