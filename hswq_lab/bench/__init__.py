"""Benchmarks: what a layer and a whole picture cost, against torch and against what the machine can do."""

from __future__ import annotations

from hswq_lab.bench.gemm import GemmBench, GemmRow, bench_gemm
from hswq_lab.bench.machine import Roofline, measure_roofline
from hswq_lab.bench.model import ModelBench, ModelRow, bench_model

__all__ = [
    "GemmBench",
    "GemmRow",
    "ModelBench",
    "ModelRow",
    "Roofline",
    "bench_gemm",
    "bench_model",
    "measure_roofline",
]
