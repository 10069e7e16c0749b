"""Benchmarks: what a layer and a whole picture cost, against torch and against what the machine can do."""

from __future__ import annotations

from hswq_lab.bench.gains import gains, side_by_side
from hswq_lab.bench.gemm import ALONE, WHOLE, GemmBench, GemmRow, bench_gemm
from hswq_lab.bench.machine import Roofline, measure_roofline
from hswq_lab.bench.model import ModelBench, ModelRow, bench_model
from hswq_lab.bench.stored import Bench, TargetRow, compiled_targets, read_bench, read_benches

__all__ = [
    "ALONE",
    "WHOLE",
    "Bench",
    "GemmBench",
    "GemmRow",
    "ModelBench",
    "ModelRow",
    "Roofline",
    "TargetRow",
    "bench_gemm",
    "bench_model",
    "compiled_targets",
    "gains",
    "measure_roofline",
    "read_bench",
    "read_benches",
    "side_by_side",
]
