"""Work that is killed in the middle, and disks that are full: the sources stay, no half file, a rerun is clean.

`pack` has a file of its own: test_cli_pack.py.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hswq_lab.checkpoint import write
from hswq_lab.cli import main
from hswq_lab.loading import MODEL_KEY

# The command itself; each pass through a network and each baked weight says so and takes its time.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run that was started with & has it ignored
from hswq_lab import packing
from hswq_lab.cli import main
from hswq_lab.models.zimage import ZImage
def slow(function):
    def called(*args, **named):
        print("working", flush=True)
        time.sleep(0.3)
        return function(*args, **named)
    return called
ZImage.denoise = slow(ZImage.denoise)
packing.requantize = slow(packing.requantize)
sys.exit(main(sys.argv[1:]))
"""
PLAIN = "import sys; from hswq_lab.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def sources(tmp_path_factory, tiny_tensors) -> Path:
    """A folder with a 16-bit model, a pack of it and a LoRA, that nothing may change."""
    folder = tmp_path_factory.mktemp("sources")
    write(folder / "model.safetensors", tiny_tensors.items(), {MODEL_KEY: "mini-zimage"})
    arguments = ["--all", "nvfp4", "--keep", "final_layer*=int8", "--scales", "rtn"]
    assert (
        main(["pack", str(folder / "model.safetensors"), "-o", str(folder / "pack.safetensors"), *arguments])
        == 0
    )
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for layer in ("layers.0.feed_forward.w1", "layers.1.feed_forward.w1"):
        factors[f"diffusion_model.{layer}.lora_A.weight"] = torch.randn(2, 64, generator=generator)
        factors[f"diffusion_model.{layer}.lora_B.weight"] = torch.randn(128, 2, generator=generator) * 0.3
    save_file(factors, folder / "style.safetensors")
    return folder


def command(verb: str, sources: Path, out: Path) -> list[str]:
    model, pack, style = (str(sources / f"{name}.safetensors") for name in ("model", "pack", "style"))
    return {
        "calibrate": ["calibrate", pack, "-o", str(out / "out.safetensors"), "--model", model, "--steps", "1"],
        "bake": ["bake", pack, style, "-o", str(out / "out.safetensors")],
        "sensitivity": ["sensitivity", model, "--steps", "1", "--seeds", "1", "--scales", "rtn", "--layers",
                        "layers.0.*", "--resume", str(out / "out.json")],
        "compare": ["compare", model, pack, "--modes", "parity", "--steps", "1", "--seeds", "2",
                    "--json", str(out / "out.json")],
    }[verb]  # fmt: skip


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def results(folder: Path) -> dict[str, object]:
    """What is in the folder; times and machines left out."""
    found: dict[str, object] = contents(folder)
    for path in folder.glob("*.json"):
        found[path.name] = {
            k: v for k, v in json.loads(path.read_text()).items() if k not in ("seconds", "made")
        }
    return found


VERBS = ("calibrate", "bake", "sensitivity", "compare")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_no_half_file_and_a_second_run_ends_as_if_it_were_the_first(
    sources, tmp_path, verb, stop
):
    before = contents(sources)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *command(verb, sources, killed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        for _ in range(2):
            assert process.stdout.readline() == b"working\n"
        process.send_signal(stop)
        process.stderr.read()
    assert process.returncode == (-signal.SIGKILL if stop == signal.SIGKILL else 130)
    left = [path.name for path in killed.iterdir() if not path.name.startswith(".")]
    assert left in ([], ["out.json"] if verb == "sensitivity" else []), (
        "a partial report is whole JSON, and is resumed"
    )
    assert main(command(verb, sources, killed)) in (0, 1)
    assert main(command(verb, sources, whole)) in (0, 1)
    assert results(killed) == results(whole)
    assert contents(sources) == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_is_one_message_and_leaves_nothing(sources, tmp_path, verb):
    before = contents(sources)

    def full() -> None:  # what writes more than this gets an OSError, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))

    done = subprocess.run(
        [sys.executable, "-B", "-c", PLAIN, *command(verb, sources, tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=full,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tmp_path) == {}
    assert contents(sources) == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_place_that_cannot_be_written_is_one_message(sources, verb, capsys):
    assert main(command(verb, sources, Path("/proc/nowhere"))) == 2
    told = capsys.readouterr().err
    assert "/proc/nowhere" in told
    assert "Traceback" not in told
