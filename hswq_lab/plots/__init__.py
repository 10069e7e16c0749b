"""Plotly figures made from result objects; the only place that knows both."""

from __future__ import annotations

from functools import singledispatch

import plotly.graph_objects as go

from hswq_lab.errors import HswqError
from hswq_lab.lora import BakeReport
from hswq_lab.plots.calibration import ranges_figure
from hswq_lab.plots.lora import retention_figure
from hswq_lab.plots.pack import layer_map_figure
from hswq_lab.plots.sensitivity import impact_figure, pareto_figure
from hswq_lab.plots.trajectory import divergence_figure
from hswq_lab.quantize.impact import ImpactReport
from hswq_lab.quantize.observe import CalibrationReport
from hswq_lab.quantize.pareto import ParetoReport
from hswq_lab.report import LoadReport
from hswq_lab.trajectory import TrajectoryReport

__all__ = [
    "divergence_figure",
    "figure_of",
    "impact_figure",
    "layer_map_figure",
    "pareto_figure",
    "ranges_figure",
    "retention_figure",
]


@singledispatch
def figure_of(result: object) -> go.Figure:
    """The figure of a result.

    Raises:
        HswqError: no figure is known for this kind.
    """
    raise HswqError("there is no figure for this kind of result", found=type(result).__name__)


figure_of.register(TrajectoryReport, divergence_figure)
figure_of.register(ImpactReport, impact_figure)
figure_of.register(ParetoReport, pareto_figure)
figure_of.register(CalibrationReport, ranges_figure)
figure_of.register(LoadReport, layer_map_figure)


@figure_of.register
def _(result: BakeReport) -> go.Figure:
    return retention_figure({"retained": result})
