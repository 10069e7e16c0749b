"""benchmarks/full_size.py at toy size: every section runs, and its figures are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def full_size(monkeypatch):
    pytest.importorskip("comfy_kitchen")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import full_size as script  # noqa: PLC0415 - found by the line before

    return script


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import full_size_table as module  # noqa: PLC0415 - found by the line before

    return module


def test_every_section_runs_at_toy_size(full_size, table, tmp_path, capsys):
    out = tmp_path / "found.json"
    where = ["--toy", "--folder", str(tmp_path / "files"), "--out", str(out)]
    assert full_size.main([*where, "--skip", "compiled"]) == 0  # torch.compile takes longer than all the rest
    content = json.loads(out.read_text())
    assert content["facts"]["failed"] == {"graphs": "not run: no card", "compiled": "not run: left out"}
    rows = {(row["section"], row["what"]): row for row in content["rows"]}
    assert {row["section"] for row in content["rows"]} >= {
        "machine", "source", "pack", "load", "calibrate", "step", "lora", "compare", "peers"
    }  # fmt: skip
    bits = [row["value"] for (_, what), row in rows.items() if what.endswith(("equal bits", "on the CPU"))]
    assert len(bits) == 9
    assert set(bits) == {1.0}
    weights = rows["load", "all: Linears' weights"]
    assert weights["ratio"] == pytest.approx(weights["value"] / weights["bf16"])
    assert weights["met"] == (weights["ratio"] <= 0.30)
    step = rows["step", "all tc8, cfg pair: time"]
    assert step["ratio"] == pytest.approx(step["bf16"] / step["value"])
    hits = content["facts"]["kernels"]["all tc, batch 1"]["hits"]
    assert list(hits) == ["tc"]
    assert "NOT reached" in capsys.readouterr().out or step["met"]
    text = table.table(content)
    assert "**not reached**" in text or step["met"]
    assert "Not measured: graphs: not run: no card" in text


def test_a_section_that_fails_is_told_and_the_others_go_on(full_size, tmp_path, monkeypatch):
    def broken(_bench):
        raise RuntimeError("no such luck")

    monkeypatch.setitem(full_size.SECTIONS, "pack", broken)
    skipped = [name for name in full_size.SECTIONS if name not in ("checkpoint", "pack", "load")]
    out = tmp_path / "found.json"
    where = ["--toy", "--folder", str(tmp_path / "files"), "--out", str(out)]
    assert full_size.main([*where, "--skip", *skipped]) == 1
    facts = json.loads(out.read_text())["facts"]
    assert facts["failed"]["pack"] == "RuntimeError: no such luck"
    assert facts["failed"]["load"].startswith("HswqError: there is no such model")


@pytest.mark.slow
def test_the_gate_runs_on_a_cluster_and_has_the_same_bits(tmp_path):
    pytest.importorskip("distributed")
    out = tmp_path / "gate.json"
    where = ["--toy", "--folder", str(tmp_path / "files"), "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "full_size_gate.py"), *where]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    content = json.loads(out.read_text())
    assert content["same_bits"]
    assert content["faster"] == pytest.approx(content["seconds_one"] / content["seconds_all"])


def test_kernels_are_sorted_by_their_names(full_size):
    from full_size_measure import kind_of  # noqa: PLC0415 - found by the fixture

    names = {
        "void hswq::cuda::chunk_kernel<RotateQuantize>": "rotate/quantise",
        "void hswq::cuda::(anonymous namespace)::fp8_weight_kernel": "decode weights",
        "void hswq::cuda::(anonymous namespace)::product_kernel<int, 256>": "GEMM",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "GEMM",
        "void pytorch_flash::flash_fwd_kernel": "attention",
        "void at::native::elementwise_kernel": "rest",
    }
    assert {name: kind_of(name) for name in names} == names
