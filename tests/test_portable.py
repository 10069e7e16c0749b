"""The portable kernels: compiled for aarch64 they give the bits of this machine (run under qemu where it is there)."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "csrc" / "cpu" / f"{name}.cpp" for name in ("api", "isa", "parallel", "kernels_baseline")]
FLAGS = [
    "-std=c++17",
    "-O2",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Werror",
]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.skipif(not SOURCES[0].is_file(), reason="not run from a checkout"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares aarch64 with an x86-64 machine"),
    pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS} (Debian: g++-aarch64-linux-gnu)"),
]


def built(compiler: str, folder: Path, *more: str) -> Path:
    """The program that prints a hash of every kernel's results."""
    program = folder / compiler
    sources = [*SOURCES, ROOT / "tests" / "portable" / "numbers.cpp"]
    subprocess.run(
        [compiler, *FLAGS, *more, f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program), "-lpthread"],
        check=True,
    )
    return program


def test_aarch64_gives_the_same_bits(tmp_path):
    there = built(CROSS, tmp_path, "-static")
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"compiled, not run: no {EMULATOR} (Debian: qemu-user)")
    emulated = subprocess.run([EMULATOR, str(there)], capture_output=True, text=True, check=True).stdout
    here = subprocess.run([str(built("g++", tmp_path))], capture_output=True, text=True, check=True).stdout
    assert len(here.splitlines()) > 15
    assert emulated == here
