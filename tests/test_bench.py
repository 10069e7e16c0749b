"""Benchmarks: both stages of every mode, the back end that really ran, fallbacks counted, errors shown."""

from __future__ import annotations

import json

import pytest
import torch

from hswq_lab import ops
from hswq_lab.bench import bench_gemm, bench_model, gemm, machine
from hswq_lab.bench.machine import Roofline
from hswq_lab.errors import Cancelled, HswqError


@pytest.fixture(autouse=True)
def quick_roofline(monkeypatch):
    monkeypatch.setattr(
        gemm, "measure_roofline", lambda device, dtype, _: Roofline(1e9, 1e10, str(dtype)[6:])
    )


def test_the_roofline_is_the_slower_of_the_two():
    roofline = Roofline(copy=100, matmul=1000, dtype="x")
    assert roofline.seconds(flop=1000, traffic=10) == 1
    assert roofline.seconds(flop=10, traffic=1000) == 10


def test_the_roofline_is_measured(monkeypatch):
    monkeypatch.setattr(machine, "seconds_per_call", lambda call, *_: (call(), 0.5)[1])
    found = machine.measure_roofline(torch.device("cpu"), torch.float32)
    assert found == Roofline(2 * 2**26 / 0.5, 2 * 1024**3 / 0.5, "float32")


@pytest.mark.parametrize("m", [1, 16, 40])
def test_both_stages_and_every_mode_are_there(m):
    """E5"""
    found = bench_gemm([(32, 64)], [m], repeats=2, dtype=torch.float32)
    assert [(row.op, row.stage) for row in found.rows] == [
        ("torch float32", gemm.WHOLE),
        ("w4a4", gemm.ALONE),
        ("w4a4", gemm.WHOLE),
        ("w4a8", gemm.WHOLE),
        ("w4a16", gemm.WHOLE),
        ("w4a16", gemm.ALONE),
        ("int8", gemm.WHOLE),
    ]
    peer = found.rows[0]
    assert (peer.backend, peer.speedup, peer.error) == ("torch", 1, 0)
    for row in found.rows:
        assert (row.m, row.n, row.k) == (m, 32, 64)
        assert row.tflops == pytest.approx(2 * m * 32 * 64 / row.seconds / 1e12)
        assert row.speedup == pytest.approx(peer.seconds / row.seconds)
        least = found.roofline.seconds(2 * m * 32 * 64, row.gb_per_s * 1e9 * row.seconds)
        assert row.of_roofline == pytest.approx(least / row.seconds)
    by = {(row.op, row.stage): row.error for row in found.rows}
    assert by["int8", gemm.WHOLE] < 0.03 < by["w4a16", gemm.WHOLE] < by["w4a4", gemm.WHOLE] < 0.3
    assert by["w4a16", gemm.WHOLE] == pytest.approx(by["w4a16", gemm.ALONE], rel=0.01), "rotation is exact"
    assert by["w4a4", gemm.WHOLE] == pytest.approx(by["w4a4", gemm.ALONE], rel=1e-5)


def test_the_back_end_that_ran_is_named_and_fallbacks_are_counted(monkeypatch):
    asked = bench_gemm([(32, 64)], [2], repeats=2, backends=["reference"])
    assert {row.backend for row in asked.rows[1:]} == {"reference"}
    assert sum(row.fallbacks for row in asked.rows) == 0, "asked for is no fallback"
    assert "no fallbacks" in str(asked)

    monkeypatch.setattr(ops, "backend_for", lambda device: "reference")
    monkeypatch.setattr(
        ops, "backends", lambda: {"cpu": ops.Backend("cpu", False, False, (), "", False, "no compiler")}
    )
    fallen = bench_gemm([(32, 64)], [2], repeats=2)
    assert [row.fallbacks for row in fallen.rows] == [0] + [2] * 6
    assert str(fallen).count("no compiler") == 1
    assert "12 calls fell back" in str(fallen)


def test_back_ends_side_by_side():
    usable = [name for name in ("cpu", "reference") if ops.backends()[name].usable]
    found = bench_gemm([(32, 64)], [2], repeats=1, backends=usable)
    assert [row.backend for row in found.rows] == ["torch"] + [name for name in usable for _ in range(6)]
    with pytest.raises(HswqError, match="unknown back end"):
        bench_gemm([(32, 64)], [2], repeats=1, backends=["tpu"])


@pytest.mark.parametrize(
    ("shapes", "rows", "repeats"), [([(0, 64)], [1], 1), ([(16, 64)], [0], 1), ([(16, 64)], [1], 0)]
)
def test_impossible_sizes_are_refused(shapes, rows, repeats):
    with pytest.raises(HswqError, match="whole number"):
        bench_gemm(shapes, rows, repeats=repeats)


@pytest.mark.parametrize(("shape", "m"), [((99_999_999, 99_999_999), 1), ((32, 64), 10**30)])
def test_what_does_not_fit_into_memory_is_refused_before_anything_is_measured(shape, m):
    with pytest.raises(HswqError, match="does not fit into memory"):
        bench_gemm([shape], [m], progress=pytest.fail)


def test_a_benchmark_can_be_stopped_before_every_call():
    ticks = []

    def stop(done, total, label):
        ticks.append((done, total, label))
        if len(ticks) == 12:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        bench_gemm([(32, 64)], [1, 2], repeats=50, progress=stop)
    assert set(ticks) == {(0, 2, "1×32×64")}


def test_the_result_can_be_stored_and_compared(tmp_path):
    found = bench_gemm([(16, 64)], [1, 2], repeats=1)
    content = json.loads(found.save(tmp_path / "g.json").read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert len(content["rows"]) == len(found.to_frame()) == 14


def test_a_picture_is_timed_and_its_arithmetic_counted(tiny_model, tiny_pack):
    ticks = []
    models = {"16-bit": tiny_model, "parity": tiny_pack.in_mode("parity"), "tc": tiny_pack.in_mode("tc")}
    found = bench_model(models, steps=3, repeats=2, progress=lambda *tick: ticks.append(tick))
    first, parity, tc = found.rows
    linears = len(tiny_model.layers())
    assert first.hits == {"16-bit": 3 * linears}, "one picture alone, whatever ran before"
    assert parity.hits == {"int8": 3 * -(-linears // 2), "parity": 3 * (linears // 2)}
    assert tc.hits == {"int8": 3 * -(-linears // 2), "tc": 3 * (linears // 2)}
    assert (first.final_cos, first.ssim, first.speedup) == (pytest.approx(1), 1, 1)
    assert 1 > parity.final_cos > tc.final_cos > 0.9
    assert parity.weight_bytes == tc.weight_bytes < first.weight_bytes
    assert first.tflops > 0
    assert first.seconds <= first.slowest
    assert first.peak_bytes is None
    assert first.clipped is None
    assert 0 <= tc.clipped < 1
    assert ticks[0][:2] == (0, 9)
    assert ticks[-1][:2] == (9, 9)
    assert "parity" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["hits"] == first.hits


def test_fallbacks_of_a_model_are_counted(tiny_model, tiny_pack, monkeypatch):
    monkeypatch.setattr(
        ops, "backends", lambda: {"cpu": ops.Backend("cpu", False, False, (), "", False, "no compiler")}
    )
    monkeypatch.setattr(ops, "backend_for", lambda device: "reference")
    models = {"16-bit": tiny_model, "pack": tiny_pack.in_mode("parity")}
    first, pack = bench_model(models, steps=1, repeats=1).rows
    assert (first.fallbacks, first.why) == (0, "")
    assert (pack.fallbacks, pack.why) == (sum(pack.hits.values()), "no compiler")


def test_a_single_model_and_bad_input(tiny_model):
    assert [row.model for row in bench_model(tiny_model, "x", steps=1, repeats=1).rows] == ["tiny"]
    with pytest.raises(HswqError, match="needs a model"):
        bench_model({}, "x")
    with pytest.raises(HswqError, match="needs a model"):
        bench_model(tiny_model, "x", repeats=0)

    def stop(done, total, label):
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        bench_model(tiny_model, "x", steps=1, progress=stop)
