"""One layer under the glass: code histogram, map of block scales, tails in both bases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hswq_lab.detail import TAIL_BINS, TAIL_END
from hswq_lab.plots import style

if TYPE_CHECKING:
    from hswq_lab.detail import LayerDetail

_TAILS = "tails"  # of what, its axis says


def detail_figure(detail: LayerDetail) -> go.Figure:
    """Three panels; only the last for a 16-bit layer, which has neither codes nor scales."""
    packed = bool(detail.code_values)
    figure = make_subplots(
        rows=1,
        cols=3 if packed else 1,
        column_widths=[0.32, 0.3, 0.38] if packed else None,
        horizontal_spacing=0.17,
        subplot_titles=["codes", _scales_title(detail), _TAILS] if packed else [_TAILS],
    )
    style.dress(figure, detail.name, _subtitle(detail), height=400)
    style.name_panels(figure)
    if packed:
        _codes(figure, detail)
        _scales(figure, detail)
    _tails(figure, detail, col=3 if packed else 1)
    style.legend_below(figure)
    return figure


def _codes(figure: go.Figure, detail: LayerDetail) -> None:
    bars = go.Bar(
        x=detail.code_values,
        y=detail.code_counts,
        marker={"color": style.format_color(detail.format)},
        showlegend=False,
        hovertemplate="code %{x:g}: %{y:,}<extra></extra>",
    )
    figure.add_trace(bars, row=1, col=1)
    figure.update_xaxes(title="value before scales", row=1, col=1)


def _scales_title(detail: LayerDetail) -> str:
    """Whose scales the map shows, which its own size tells."""
    if len(detail.scales[0]) > 1:
        return "block scales"
    return "row scales" if len(detail.scales) > 1 else "tensor scale"


def _scales(figure: go.Figure, detail: LayerDetail) -> None:
    """The map, over the weight's own rows and columns: a cell may be the mean of several scales."""
    bar = {"thickness": 8, "x": 0.584, "len": 0.9, "tickfont": {"size": 9}, "exponentformat": "power"}
    heat = go.Heatmap(
        z=[style.numbers(row) for row in detail.scales],
        **_cells("x", len(detail.scales[0]), detail.shape[1]),
        **_cells("y", len(detail.scales), detail.shape[0]),
        colorscale=style.SEQUENTIAL,
        colorbar=bar,
        hovertemplate="around row %{y:.0f}, column %{x:.0f}: %{z:.3g}<extra></extra>",
    )
    figure.add_trace(heat, row=1, col=2)
    figure.update_yaxes(title="row", autorange="reversed", row=1, col=2)
    figure.update_xaxes(title="column", row=1, col=2)


def _cells(axis: str, count: int, length: int) -> dict[str, float]:
    """Where the centres of equal cells lie along a side of the weight."""
    return {f"{axis}0": length / count / 2 - 0.5, f"d{axis}": length / count}


def _tails(figure: go.Figure, detail: LayerDetail, col: int) -> None:
    for tails, color in zip(detail.tails, (style.GREY, style.VERMILION), strict=False):
        line = go.Scatter(
            name=f"{tails.basis}: largest {tails.crest:.1f}, kurtosis {tails.kurtosis:.2f}",
            mode="lines",
            line={"color": color, "width": 2, "shape": "hvh"},
            x=[(place + 0.5) * TAIL_END / TAIL_BINS for place in range(TAIL_BINS)],
            y=style.positive(tails.counts),
            hovertemplate="|w| = %{x:.2f} rms: %{y:,}<extra></extra>",
        )
        figure.add_trace(line, row=1, col=col)
    figure.update_yaxes(style.DECADES, row=1, col=col)
    figure.update_xaxes(title="|w| / rms", row=1, col=col)


def _subtitle(detail: LayerDetail) -> str:
    n, k = detail.shape
    rotation = "not rotated" if detail.group is None else f"rotated in groups of {detail.group}"
    stored = style.format_name(detail.format) if detail.marker else f"not packed, {detail.dtype}"
    parts = [
        f"{style.text(Path(detail.file).name)}: {stored}, {n} × {k}, {rotation}, {detail.bits:.2f} bits a weight"
    ]
    if detail.sqnr_db is not None:
        parts.append(closeness_text(detail))
    return "; ".join(parts)


def closeness_text(detail: LayerDetail) -> str:
    """How close a layer is to its source, for people: nothing is infinitely many decibels away."""
    if detail.sqnr_db is None or detail.cosine is None:
        return "no source was given"
    if math.isinf(detail.sqnr_db):
        return "equal to the source"
    return f"{detail.sqnr_db:.2f} dB and cosine {detail.cosine:.5f} to the source"
