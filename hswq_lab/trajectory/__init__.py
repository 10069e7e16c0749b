"""Trajectories: whether a variant of a model still walks the reference's way from noise to picture."""

from __future__ import annotations

from hswq_lab.trajectory.compare import compare
from hswq_lab.trajectory.gate import VariantVerdict, Verdict
from hswq_lab.trajectory.report import TrajectoryReport
from hswq_lab.trajectory.seeds import SEEDS_20
from hswq_lab.trajectory.trace import SeedTrace

__all__ = ["SEEDS_20", "SeedTrace", "TrajectoryReport", "VariantVerdict", "Verdict", "compare"]
