"""What is left of a faster product once rotation, quantisation and the rest of a picture are paid for."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean
from typing import Final

import pandas as pd

from hswq_lab import ops
from hswq_lab.bench.gemm import ALONE, TORCH, WHOLE, GemmBench
from hswq_lab.bench.model import ModelBench

OP_OF_MODE: Final = {"parity": "w4a16", "tc": "w4a4", "tc8": "w4a8"}
"""The product that the NVFP4 layers of a model in this mode are made of."""


def gains(products: GemmBench, pictures: ModelBench | None = None, m: int | None = None) -> pd.DataFrame:
    """Speed-ups from the inside out: the product alone, the whole Linear, the whole picture.

    Args:
        products: their speed-up is against torch's own product in the same dtype.
        pictures: their speed-up is against the benchmark's first model; None: not measured.
        m: rows of x; default: the largest that was measured, where a product matters most.

    Returns:
        A row an operation and back end: op, backend, M, product alone, whole Linear, mode, whole picture. Speed-ups
        are geometric means over the shapes; NaN where nothing was measured.
    """
    size = max(row.m for row in products.rows) if m is None else m
    rows = [row for row in products.rows if row.m == size and row.backend != TORCH]
    seen = _pictures(pictures)
    ours = set(
        ops.backends()
    )  # whole pictures were made with these; other packages' products have no mode here
    modes = {(op, backend): mode for mode, op in OP_OF_MODE.items() for backend in ours}

    def mean(op: str, backend: str, stage: str) -> float:
        found = [r.speedup for r in rows if (r.op, r.backend, r.stage) == (op, backend, stage)]
        return geometric_mean(found) if found else float("nan")

    return pd.DataFrame(
        [
            {
                "op": op,
                "backend": backend,
                "M": size,
                "product alone": mean(op, backend, ALONE),
                "whole Linear": mean(op, backend, WHOLE),
                "mode": modes.get((op, backend), ""),
                "whole picture": seen.get(modes.get((op, backend), ""), float("nan")),
            }
            for op, backend in dict.fromkeys((row.op, row.backend) for row in rows)
        ]
    )


def _pictures(pictures: ModelBench | None) -> dict[str, float]:
    return {} if pictures is None else {row.mode: row.speedup for row in pictures.rows}


def side_by_side(results: Mapping[str, GemmBench]) -> pd.DataFrame:
    """Several machines in one table: speed-ups over each machine's own torch, since absolute times have no common bar.

    Args:
        results: name → its benchmark.

    Returns:
        A row a result, M and way to multiply: result, machine, M, op, stage, backend, speedup (geometric mean over
        the shapes), best TFLOP/s, best of roofline, fallbacks (missing where nobody counted them).
    """
    rows = []
    for name, result in results.items():
        ways = dict.fromkeys((row.m, row.op, row.stage, row.backend) for row in result.rows)
        for m, op, stage, backend in ways:
            mine = [r for r in result.rows if (r.m, r.op, r.stage, r.backend) == (m, op, stage, backend)]
            rows.append(
                {
                    "result": name,
                    "machine": result.machine["name"],
                    "M": m,
                    "op": op,
                    "stage": stage,
                    "backend": backend,
                    "speedup": geometric_mean([row.speedup for row in mine]),
                    "best TFLOP/s": max(row.tflops for row in mine),
                    "best of roofline": max(row.of_roofline for row in mine),
                    "fallbacks": sum(row.fallbacks for row in mine) if result.repeats else pd.NA,
                }
            )
    return pd.DataFrame(rows).astype({"fallbacks": "Int64"} if rows else {})
