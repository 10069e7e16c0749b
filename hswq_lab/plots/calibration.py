"""What calibration saw: the range of every layer's rotated inputs beside the range that its scale holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from hswq_lab.plots import style

if TYPE_CHECKING:
    from hswq_lab.quantize.observe import CalibrationReport

RANGE = 2688  # = 6 · 448: the largest value that NVFP4 holds at a tensor scale of 1


def ranges_figure(report: CalibrationReport) -> go.Figure:
    """Largest rotated input of every layer, its 99.9th percentile, and the limit of the present scale."""
    rows = report.rows
    names = style.texts(row.layer for row in rows)
    figure = style.new_figure(
        "Range of each layer's rotated inputs",
        f"{report.model} ({report.source}), {style.count(len(report.prompts), 'prompt')}, "
        f"{style.count(report.steps, 'step')}; "
        f"{len(report.exceeding)} layers exceed their scale, {len(report.unreached)} not reached",
        height=520 if len(rows) <= style.MOST_LABELS else 440,
    )
    figure.add_trace(_dots("largest value", names, [row.amax for row in rows], style.BLUE, "circle"))
    figure.add_trace(_dots("99.9th percentile", names, [row.p999 for row in rows], style.SKY, "circle-open"))
    limits = [None if row.input_scale is None else RANGE * row.input_scale for row in rows]
    if any(limit is not None for limit in limits):
        figure.add_trace(_dots("limit of the present scale", names, limits, style.INK, "line-ew-open"))
    over = [row for row in rows if row.exceeds is not None and row.exceeds > 1]
    if over:
        clipped = _dots(
            "clipped",
            style.texts(row.layer for row in over),
            [row.amax for row in over],
            style.VERMILION,
            "x",
        )
        figure.add_trace(clipped)
    figure.update_xaxes(categoryorder="array", categoryarray=names, tickangle=-90, tickfont={"size": 9})
    figure.update_xaxes(showticklabels=len(rows) <= style.MOST_LABELS)
    seen = [row.amax for row in rows if row.amax > 0] or [1.0]
    # Ranges often lie within a decade, where ticks at powers of ten would leave the axis bare.
    ticks = 1 if max(seen) > 100 * min(seen) else "D2"
    figure.update_yaxes(type="log", exponentformat="power", dtick=ticks, title="|x| after rotation")
    style.legend_above(figure)
    return figure


def _dots(
    name: str, x: list[str], y: list[float | None] | list[float], color: str, symbol: str
) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="markers",
        marker={"color": color, "symbol": symbol, "size": 8, "line": {"color": color, "width": 1.5}},
        x=x,
        y=style.positive(y),
        hovertemplate=f"%{{x}}<br>{name}: %{{y:.4g}}<extra></extra>",
    )
