"""Panels for notebooks; they hold no logic that a script could not call."""

from __future__ import annotations

from hswq_lab.widgets.bake_check import BakeCheck
from hswq_lab.widgets.gemm_bench import GemmBench
from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.pack_explorer import PackExplorer
from hswq_lab.widgets.panel import Panel
from hswq_lab.widgets.sensitivity_explorer import SensitivityExplorer
from hswq_lab.widgets.strength import StrengthSlider
from hswq_lab.widgets.trajectory_viewer import TrajectoryViewer

__all__ = [
    "BakeCheck",
    "GemmBench",
    "LiveFigure",
    "PackExplorer",
    "Panel",
    "SensitivityExplorer",
    "StrengthSlider",
    "TrajectoryViewer",
]
