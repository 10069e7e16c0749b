"""What each layer's quantisation costs, and what the measured plans reach for their size."""

from __future__ import annotations

import math
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Literal, TypeAlias

import plotly.graph_objects as go

from hswq_lab.plots import style
from hswq_lab.plots.pack import place_of
from hswq_lab.quantize.plan import KEPT, Plan
from hswq_lab.trajectory.trace import SAME_IMAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hswq_lab.quantize.impact import ImpactReport, LayerImpact
    from hswq_lab.quantize.pareto import ParetoPoint, ParetoReport

_OTHERS = "others"  # the group of layers outside the numbered blocks
_FLOOR = 1e-8  # 1 − cosine where a plan cannot be told from its source
Order: TypeAlias = Literal["impact", "block", "kind"]


def impact_figure(
    report: ImpactReport, plan: Plan | None = None, form: str = "nvfp4", order: Order = "impact"
) -> go.Figure:
    """Impact of every layer in one format, on a log axis; with 95 % intervals where there are several seeds.

    Args:
        report: from `hl.sensitivity`.
        plan: colours each bar by the format that this plan gives the layer; without it, by `form`.
        form: the measured format whose impact is shown.
        order: the least sensitive first, or block by block in network order, or kind by kind (all qkv, …).
    """
    layers = _ordered(report, form, order)
    rows = [report.of(layer, form) for layer in layers]
    chosen = {layer: (plan.form_of(layer) or KEPT) if plan is not None else form for layer in layers}
    figure = style.new_figure(
        f"Impact of each layer in {style.format_name(form)}",
        "‖x − x_ref‖² / ‖x_ref‖² of the final latent with only this layer quantised; "
        f"{style.count(len(report.seeds), 'seed')}, {style.count(report.steps, 'step')}"
        + (", 95 % interval of the mean" if len(report.seeds) > 1 else ": no interval from a single sample"),
        height=520 if len(layers) <= style.MOST_LABELS else 440,
    )
    for kind in dict.fromkeys(chosen.values()):
        mine = [row for row in rows if chosen[row.layer] == kind]
        figure.add_trace(_bars(mine, kind, planned=plan is not None))
    figure.update_xaxes(categoryorder="array", categoryarray=style.texts(layers), tickangle=-90)
    figure.update_xaxes(showticklabels=len(layers) <= style.MOST_LABELS, tickfont={"size": 9}, title="")
    if order != "impact":
        _name_groups(figure, layers, order)
    figure.update_yaxes(style.DECADES, title="impact")
    style.legend_above(figure)
    figure.update_layout(showlegend=plan is not None)  # a plan of one format as well
    return figure


def _ordered(report: ImpactReport, form: str, order: Order) -> list[str]:
    ranking = report.ranking(form)
    if order == "impact":
        return ranking
    network = [layer for layer in report.layers if layer in set(ranking)]
    if order == "block":
        return network
    kinds = list(dict.fromkeys(_group(layer, order) for layer in network))
    return sorted(
        network, key=lambda layer: (_group(layer, order) == _OTHERS, kinds.index(_group(layer, order)))
    )


def _group(layer: str, order: Order) -> str:
    place = place_of(layer)
    if not place.block:
        return _OTHERS
    return place.block if order == "block" else place.kind


def _name_groups(figure: go.Figure, layers: Sequence[str], order: Order) -> None:
    """Names and parts the groups in which the bars stand; a bar's own name is in its hover text."""
    runs = [(name, len(list(run))) for name, run in groupby(layers, lambda layer: _group(layer, order))]
    ends = list(accumulate(length for _, length in runs))
    centres = [end - (length + 1) / 2 for end, (_, length) in zip(ends, runs, strict=True)]
    names = [name for name, _ in runs]
    figure.update_xaxes(
        tickvals=centres, ticktext=style.texts(names), showticklabels=True, tickfont={"size": 11}
    )
    for end in ends[:-1]:
        figure.add_vline(x=end - 0.5, line={"color": style.GRID, "width": 1}, layer="below")


def _bars(rows: Sequence[LayerImpact], kind: str, *, planned: bool) -> go.Bar:
    impacts = [row.impact for row in rows]
    spans = [_span(row) for row in rows]
    count = "layer" if len(rows) == 1 else "layers"
    return go.Bar(
        name=f"{style.format_name(kind)}: {len(rows)} {count}" + (" of the plan" if planned else ""),
        x=style.texts(row.layer for row in rows),
        y=style.positive(impacts),
        marker={"color": style.format_color(kind)},
        error_y={
            "type": "data",
            "visible": not all(math.isnan(high) for _, high in spans),  # gaps would be drawn as caps
            "symmetric": False,
            "array": style.numbers(high - row.impact for row, (_, high) in zip(rows, spans, strict=True)),
            "arrayminus": style.numbers(row.impact - low for row, (low, _) in zip(rows, spans, strict=True)),
            "color": style.SOFT,
            "thickness": 1,
            "width": 2,
        },
        customdata=[[row.n, row.k, _bounds(span)] for row, span in zip(rows, spans, strict=True)],
        hovertemplate=(
            "%{x}<br>impact %{y:.2e}, %{customdata[2]}"
            "<br>N × K = %{customdata[0]} × %{customdata[1]}<extra></extra>"
        ),
    )


def _span(row: LayerImpact) -> tuple[float, float]:
    """The interval of a mean; NaN at both ends where the samples tell of none."""
    low, high = row.interval
    return (low, high) if math.isfinite(high) else (math.nan, math.nan)


def _bounds(span: tuple[float, float]) -> str:
    low, high = span
    return "no interval" if math.isnan(high) else f"[{low:.2e}, {high:.2e}]"


def pareto_figure(report: ParetoReport) -> go.Figure:
    """Measured packs: bits a weight against 1 − final cosine, mean and worst seed, the front joined."""
    figure = style.new_figure(
        "What the measured plans reach",
        f"{report.model} in mode {report.mode}; {_rests_on(report)}. Lower and further left is better.",
    )
    _add_measured(figure, report)
    return figure


def plans_figure(
    predicted: Sequence[tuple[float, float]], chosen: int, measured: ParetoReport | None = None
) -> go.Figure:
    """What is to be had for how many bits: every cut as predicted, the chosen one, the plans measured so far.

    Args:
        predicted: bits a weight and predicted mean final cosine of each number of NVFP4 layers, from 0.
        chosen: the number of NVFP4 layers to mark.
        measured: from `hl.pareto`.
    """
    beside = "" if measured is None else f"; measured plans: {_rests_on(measured)}"
    figure = style.new_figure(
        "Bits against closeness",
        f"each dot is a cut, predicted from independent errors{beside}. Lower and further left is better.",
    )
    bits, cosines = zip(*predicted, strict=True)
    divergence = style.positive(1 - cos for cos in cosines)
    line = go.Scatter(
        name="predicted",
        mode="lines+markers",
        line={"color": style.GREY, "width": 1.5},
        marker={"size": 4},
        x=list(bits),
        y=divergence,
        customdata=[[count, f"{cos:.5f}"] for count, cos in enumerate(cosines)],
        hovertemplate="%{customdata[0]} NVFP4<br>%{x:.3f} bits, predicted %{customdata[1]}<extra></extra>",
    )
    here = go.Scatter(
        name="this cut",
        mode="markers",
        marker={"symbol": "circle-open", "size": 14, "color": style.INK, "line": {"width": 2}},
        x=[bits[chosen]],
        y=[divergence[chosen]],
        hoverinfo="skip",
    )
    figure.add_traces([line, here])
    if measured is None:
        _label_plans(figure)
    else:
        _add_measured(figure, measured)
    return figure


def _rests_on(report: ParetoReport) -> str:
    return f"{style.count(len(report.seeds), 'seed')}, {style.count(report.steps, 'step')}"


def _add_measured(figure: go.Figure, report: ParetoReport) -> None:
    front = report.front()
    joined = go.Scatter(
        name="front",
        mode="lines",
        line={"color": style.BLUE, "width": 2, "shape": "hv"},
        x=[point.bits for point in front],
        y=style.positive((1 - point.mean for point in front), _FLOOR),
        hoverinfo="skip",
    )
    figure.add_trace(joined)
    figure.add_trace(_points(report.points, "mean of the seeds", "mean", style.BLUE, "circle"))
    figure.add_trace(_points(report.points, "worst seed", "worst", style.VERMILION, "triangle-up-open"))
    _label_plans(figure)


def _label_plans(figure: go.Figure) -> None:
    figure.update_xaxes(title="bits a weight (Linears, scales included)")
    figure.update_yaxes(style.DECADES, title="1 − final cosine")
    line = {"color": style.GREY, "width": 1, "dash": "dot"}
    figure.add_hline(y=1 - SAME_IMAGE, line=line)
    name = f"same image below: cos ≥ {SAME_IMAGE}"
    figure.add_trace(go.Scatter(name=name, mode="lines", line=line, x=[None], y=[None]))
    style.legend_below(figure)


def _points(points: Sequence[ParetoPoint], name: str, measure: str, color: str, symbol: str) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="markers",
        marker={"color": color, "symbol": symbol, "size": 8},
        x=[point.bits for point in points],
        y=style.positive((1 - getattr(point, measure) for point in points), _FLOOR),
        customdata=[[style.text(point.label), f"{getattr(point, measure):.5f}"] for point in points],
        hovertemplate="%{customdata[0]}<br>%{x:.3f} bits, cos %{customdata[1]}<extra></extra>",
    )
