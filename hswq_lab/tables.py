"""Tables for people: what several result objects say, in one frame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.lora import BakeReport
    from hswq_lab.trajectory import TrajectoryReport
    from hswq_lab.trajectory.gate import VariantVerdict


def verdict_table(report: TrajectoryReport) -> pd.DataFrame:
    """A row a variant: what the gate looked at and said, with the pictures' mean distances beside it."""
    pictures = report.summary().replace(np.inf, np.nan).groupby("variant")[["ssim", "psnr"]].mean()
    return pd.DataFrame(
        [
            {
                "variant": verdict.variant,
                "mean cos": verdict.mean,
                "95 % interval": _interval(verdict),
                "min cos": verdict.minimum,
                "worst seed": verdict.worst_seed,
                "bifurcated": _bifurcated(verdict),
                "SSIM": pictures.loc[verdict.variant, "ssim"],
                "PSNR dB": pictures.loc[verdict.variant, "psnr"],
                "same image": "all seeds" if verdict.same_image else "not all",
                "gate": "passed" if verdict.passed else "FAILED",
            }
            for verdict in report.verdict.variants
        ]
    )


def _bifurcated(verdict: VariantVerdict) -> str:
    if verdict.unknown == verdict.seeds:
        return "not known"
    return f"{len(verdict.bifurcated)} of {verdict.seeds}"


def retention_table(reports: Mapping[str, BakeReport]) -> pd.DataFrame:
    """A row a way and kind of weight: how many layers, how much of the delta arrived, and the verdict.

    Columns: way, kind, layers, retained (weighted by ‖ΔW‖²), lowest, added error (median), verdict.
    """
    rows = []
    for way, report in reports.items():
        for kind in report.kinds:
            mine = [row for row in report.rows if row.kind == kind.kind and row.retained is not None]
            if not mine:
                continue
            energy = np.array([row.delta_norm**2 for row in mine])
            retained = np.array([row.retained for row in mine], dtype=float)
            added = [row.added_error for row in mine if row.added_error is not None]
            rows.append(
                {
                    "way": way,
                    "kind": kind.kind,
                    "layers": kind.layers,
                    "retained": float((retained * energy).sum() / energy.sum()),
                    "lowest": float(retained.min()),
                    "added error": float(np.median(added)) if added else float("nan"),
                    "verdict": kind.verdict,
                }
            )
    return pd.DataFrame(rows)


def _interval(verdict: VariantVerdict) -> str:
    low, high = verdict.interval
    return "–" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
