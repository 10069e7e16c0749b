"""What a pack is made of: the format of every layer on one map, and where the bytes go."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hswq_lab.plots import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hswq_lab.report import LayerRow, LoadReport

_CELL = 24  # pixels a row of the map
_AROUND = 310  # pixels above, between and below the panels
_BAR = 44


class Place(NamedTuple):
    """Where a layer stands on the map: its block, and what it does there."""

    block: str
    kind: str


def place_of(layer: str) -> Place:
    """The place of a layer: layers.3.attention.qkv is attention.qkv in block layers.3.

    A layer outside the numbered blocks (embedders, the final layer) has the block "".
    """
    parts = layer.split(".")
    if len(parts) > 2 and parts[1].isdigit():
        return Place(".".join(parts[:2]), ".".join(parts[2:]))
    return Place("", layer)


def layer_map_figure(report: LoadReport) -> go.Figure:
    """A cell for each Linear (rows: kinds, columns: blocks), coloured by format; bytes by format below."""
    places = {row.layer: place_of(row.layer) for row in report.layers}
    inside = [row for row in report.layers if places[row.layer].block]
    outside = [row for row in report.layers if not places[row.layer].block]
    kinds = list(dict.fromkeys(places[row.layer].kind for row in inside))
    blocks = list(dict.fromkeys(places[row.layer].block for row in inside))
    map_height = _CELL * max(3, len(kinds), len(outside))
    figure = make_subplots(
        rows=2,
        cols=2,
        column_widths=[0.93, 0.07],
        row_heights=[map_height, _BAR],
        horizontal_spacing=0.03,
        vertical_spacing=90 / (map_height + _BAR + 90),
        specs=[[{}, {}], [{}, None]],
    )
    title = f"{len(report.layers)} Linears, {report.bits_per_weight:.2f} bits a weight"
    style.dress(figure, title, _about(report), height=map_height + _BAR + _AROUND)
    formats = sorted({row.format for row in report.layers})
    cells = {places[row.layer]: row for row in inside}
    grid = [[cells.get(Place(block, kind)) for block in blocks] for kind in kinds]
    figure.add_trace(_map(grid, style.texts(blocks), style.texts(kinds), formats), row=1, col=1)
    names = style.texts(row.layer for row in outside)
    figure.add_trace(_map([[row] for row in outside], [""], names, formats), row=1, col=2)
    for form in formats:
        figure.add_trace(_bytes(form, [row for row in report.layers if row.format == form]), row=2, col=1)
    _arrange(figure)
    return figure


def _about(report: LoadReport) -> str:
    modes = ", ".join(f"{count} {mode}" for mode, count in Counter(row.mode for row in report.layers).items())
    calibrated = sum(row.calibrated for row in report.layers)
    return f"{report.model} on {report.device}; layers by mode: {modes}; {calibrated} calibrated"


def _map(
    grid: Sequence[Sequence[LayerRow | None]], columns: list[str], rows: list[str], formats: Sequence[str]
) -> go.Heatmap:
    """One tile a layer. A heat map's colours are a scale, so each format gets a flat stretch of it."""
    share = 1 / len(formats)
    scale: list[tuple[float, str]] = []
    for index, form in enumerate(formats):
        color = style.format_color(form)
        scale += [(index * share, color), ((index + 1) * share, color)]
    return go.Heatmap(
        x=columns,
        y=rows,
        z=[[None if row is None else formats.index(row.format) for row in line] for line in grid],
        zmin=-0.5,
        zmax=len(formats) - 0.5,
        colorscale=scale,
        showscale=False,
        xgap=2,
        ygap=2,
        customdata=[[_note(row) for row in line] for line in grid],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
    )


def _note(row: LayerRow | None) -> str:
    if row is None:
        return ""
    group = "not rotated" if row.group is None else f"rotated in groups of {row.group}"
    lines = [
        style.text(row.layer),
        f"{style.format_name(row.format)}, {row.n} × {row.k}, {group}",
        f"runs as {row.mode}: {style.text(row.why)}",
    ]
    return "<br>".join([*lines, style.text(row.loras)] if row.loras else lines)


def _bytes(form: str, rows: Sequence[LayerRow]) -> go.Bar:
    size = sum(row.bytes for row in rows)
    return go.Bar(
        name=f"{style.format_name(form)}: {len(rows)} layers",
        orientation="h",
        x=[size / 2**20],
        y=[""],
        marker={"color": style.format_color(form)},
        text=f"{size / 2**20:.2f} MiB",
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertemplate=f"{style.format_name(form)}: {size:,} bytes<extra></extra>",
    )


def _arrange(figure: go.Figure) -> None:
    quiet: dict[str, Any] = {"showgrid": False, "showline": False, "ticks": ""}
    figure.update_xaxes(quiet, tickangle=-45, tickfont={"size": 11}, row=1)
    figure.update_yaxes(quiet, autorange="reversed", type="category", tickfont={"size": 11}, row=1)
    figure.update_yaxes(side="right", row=1, col=2)
    figure.update_xaxes(title="MiB of weights and scales", row=2, col=1)
    figure.update_yaxes(quiet, showticklabels=False, row=2, col=1)
    figure.update_layout(barmode="stack", bargap=0)
    style.legend_below(figure, 60)
