"""Plotly figures made from result objects; the only place that knows both."""

from __future__ import annotations

from functools import singledispatch

import plotly.graph_objects as go

from hswq_lab.bench import GemmBench, ModelBench
from hswq_lab.checkpoint import DiffReport, InspectReport
from hswq_lab.detail import LayerDetail
from hswq_lab.effect import EffectReport
from hswq_lab.errors import HswqError
from hswq_lab.lora import BakeReport, LoraReport
from hswq_lab.plots.bench import gemm_figure, pictures_figure
from hswq_lab.plots.calibration import ranges_figure
from hswq_lab.plots.detail import detail_figure
from hswq_lab.plots.files import difference_figure, lora_figure
from hswq_lab.plots.lora import effect_figure, retention_figure
from hswq_lab.plots.pack import contents_figure, layer_map_figure
from hswq_lab.plots.roofline import roofline_figure
from hswq_lab.plots.sensitivity import impact_figure, pareto_figure, plans_figure
from hswq_lab.plots.trajectory import divergence_figure
from hswq_lab.quantize.impact import ImpactReport
from hswq_lab.quantize.observe import CalibrationReport
from hswq_lab.quantize.pareto import ParetoReport
from hswq_lab.report import LoadReport
from hswq_lab.results import Result
from hswq_lab.trajectory import TrajectoryReport

__all__ = [
    "contents_figure",
    "detail_figure",
    "difference_figure",
    "divergence_figure",
    "effect_figure",
    "figure_of",
    "gemm_figure",
    "has_figure",
    "impact_figure",
    "layer_map_figure",
    "lora_figure",
    "pareto_figure",
    "pictures_figure",
    "plans_figure",
    "ranges_figure",
    "retention_figure",
    "roofline_figure",
]


@singledispatch
def figure_of(result: object) -> go.Figure:
    """The figure of a result.

    Raises:
        HswqError: no figure is known for this kind.
    """
    raise HswqError(
        "there is no figure for this kind of result",
        found=type(result).__name__,
        fix="save it as .html, .csv or .json",
    )


def has_figure(result: object) -> bool:
    """Whether a result has a figure, known here or its own; some are tables only."""
    known = figure_of.dispatch(type(result)) is not figure_of.dispatch(object)
    return known or (isinstance(result, Result) and type(result).figure is not Result.figure)


figure_of.register(TrajectoryReport, divergence_figure)
figure_of.register(ImpactReport, impact_figure)
figure_of.register(ParetoReport, pareto_figure)
figure_of.register(CalibrationReport, ranges_figure)
figure_of.register(LoadReport, layer_map_figure)
figure_of.register(InspectReport, contents_figure)
figure_of.register(LayerDetail, detail_figure)
figure_of.register(DiffReport, difference_figure)
figure_of.register(LoraReport, lora_figure)
figure_of.register(EffectReport, effect_figure)
figure_of.register(GemmBench, gemm_figure)
figure_of.register(ModelBench, pictures_figure)


@figure_of.register
def _(result: BakeReport) -> go.Figure:
    ways = dict.fromkeys(row.way for row in result.rows)
    return retention_figure({" and ".join(ways) or "nothing": result})
