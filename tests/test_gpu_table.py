"""benchmarks/gpu_table.py: the table of benchmarks/README.md is that of the stored run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def gpu_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_table as module  # noqa: PLC0415 - found by the line before

    return module


def test_the_readme_shows_the_stored_run(gpu_table):
    stored = json.loads((BENCHMARKS / "results" / "gpu_kernels_nvidia_h200.json").read_text(encoding="utf-8"))
    begin, end = gpu_table.MARKS
    shown = (BENCHMARKS / "README.md").read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert shown.strip() == gpu_table.table(stored).strip()


def test_only_what_reaches_its_target_is_bold(gpu_table):
    sizes = [(4096, 10240, 0.71), (16384, 3840, 0.69), (4096, 3840, 0.6)]
    rows = [
        {"kernel": "rotate_quantize", "rows": m, "cols": k, "group": 256, "us": 1.0, "of_copy": share}
        for m, k, share in sizes
    ]
    lines = gpu_table.kernel_lines(rows)[2:]
    assert ["**" in line for line in lines] == [True, False, True]
    assert all("not measured" in line for line in lines), "no peer was there"
