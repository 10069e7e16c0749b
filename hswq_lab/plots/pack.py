"""What a pack is made of: the format of every layer on one map, and where the bytes go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hswq_lab.checkpoint.slots import UNPACKED
from hswq_lab.plots import style

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hswq_lab.checkpoint import InspectReport
    from hswq_lab.checkpoint.inspection import InspectRow
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
    if len(parts) > 2 and parts[1].isdecimal():
        return Place(".".join(parts[:2]), ".".join(parts[2:]))
    return Place("", layer)


class Tile(NamedTuple):
    """One layer on the map; `note` is what hovering shows, as markup that is safe already."""

    layer: str
    format: str
    bytes: int
    note: str


def layer_map_figure(report: LoadReport) -> go.Figure:
    """A cell for each Linear (rows: kinds, columns: blocks), coloured by format; bytes by format below."""
    modes = ", ".join(f"{count} {mode}" for mode, count in Counter(row.mode for row in report.layers).items())
    calibrated = sum(row.calibrated for row in report.layers)
    return tile_map(
        [Tile(row.layer, row.format, row.bytes, _note(row)) for row in report.layers],
        f"{len(report.layers)} Linears, {report.bits_per_weight:.2f} bits a weight",
        f"{report.model} on {report.device}; layers by mode: {modes}; {calibrated} calibrated",
    )


def stored_as(row: InspectRow) -> str:
    """What a name of a file is stored as: its format, or, unpacked and not in 16 bits, its dtype."""
    return row.dtype if row.format == UNPACKED and row.bits != 16 else row.format


def contents_figure(report: InspectReport) -> go.Figure:
    """The same map from a file alone: every matrix named ….weight."""
    rows = [row for row in report.rows if row.name.endswith(".weight") and len(row.shape) == 2]
    packed = sum(row.scales is not None for row in rows)
    calibrated = sum(row.calibrated for row in rows)
    return tile_map(
        [
            Tile(row.name.removesuffix(".weight"), stored_as(row), row.nbytes, _contents_note(row))
            for row in rows
        ],
        f"{len(rows)} matrices, {report.bits_per_weight:.2f} bits a weight",
        f"{Path(report.path).name}: {packed} packed, {calibrated} of them calibrated",
    )


def tile_map(tiles: Sequence[Tile], title: str, subtitle: str) -> go.Figure:
    """The map of any set of layers.

    Args:
        tiles: in network order.
        title: plain text.
        subtitle: plain text.
    """
    places = {tile.layer: place_of(tile.layer) for tile in tiles}
    inside = [tile for tile in tiles if places[tile.layer].block]
    outside = [tile for tile in tiles if not places[tile.layer].block]
    kinds = list(dict.fromkeys(places[tile.layer].kind for tile in inside))
    blocks = _in_order(dict.fromkeys(places[tile.layer].block for tile in inside))
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
    style.dress(figure, title, subtitle, height=map_height + _BAR + _AROUND)
    formats = sorted({tile.format for tile in tiles})
    cells = {places[tile.layer]: tile for tile in inside}
    grid = [[cells.get(Place(block, kind)) for block in blocks] for kind in kinds]
    figure.add_trace(_map(grid, style.texts(blocks), style.texts(kinds), formats), row=1, col=1)
    names = style.texts(tile.layer for tile in outside)
    figure.add_trace(_map([[tile] for tile in outside], [""], names, formats), row=1, col=2)
    for form in formats:
        figure.add_trace(_bytes(form, [tile for tile in tiles if tile.format == form]), row=2, col=1)
    _arrange(figure)
    return figure


def _in_order(blocks: Iterable[str]) -> list[str]:
    """Blocks by number: the parts of a large checkpoint list layers.10 before layers.2."""
    named = [tuple(block.split(".")) for block in blocks]
    stacks = list(dict.fromkeys(stack for stack, _ in named))
    return [
        ".".join(block) for block in sorted(named, key=lambda each: (stacks.index(each[0]), int(each[1])))
    ]


def _map(
    grid: Sequence[Sequence[Tile | None]], columns: list[str], rows: list[str], formats: Sequence[str]
) -> go.Heatmap:
    """One tile a layer. A heat map's colours are a scale, so each format gets a flat stretch of it."""
    share = 1 / max(1, len(formats))
    scale: list[tuple[float, str]] = []
    for index, form in enumerate(formats):
        color = style.format_color(form)
        scale += [(index * share, color), ((index + 1) * share, color)]
    return go.Heatmap(
        x=columns,
        y=rows,
        z=[[None if tile is None else formats.index(tile.format) for tile in line] for line in grid],
        zmin=-0.5,
        zmax=len(formats) - 0.5,
        colorscale=scale or None,
        showscale=False,
        xgap=2,
        ygap=2,
        customdata=[["" if tile is None else tile.note for tile in line] for line in grid],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
    )


def _note(row: LayerRow) -> str:
    lines = [
        style.text(row.layer),
        f"{style.format_name(row.format)}, {row.n} × {row.k}, {_rotation(row.group)}",
        f"runs as {row.mode}: {style.text(row.why)}",
    ]
    return "<br>".join([*lines, style.text(row.loras)] if row.loras else lines)


def _contents_note(row: InspectRow) -> str:
    lines = [
        style.text(row.name),
        f"{style.format_name(stored_as(row))}, {' × '.join(map(str, row.shape))}, {_rotation(row.group)}",
        f"{row.nbytes:,} bytes, {row.bits:.2f} bits a weight",
    ]
    if row.scales is not None and row.scales.input_scale is not None:
        lines.append(f"input_scale {row.scales.input_scale:.4g}")
    return "<br>".join(lines)


def _rotation(group: int | None) -> str:
    return "not rotated" if group is None else f"rotated in groups of {group}"


def _bytes(form: str, tiles: Sequence[Tile]) -> go.Bar:
    size = sum(tile.bytes for tile in tiles)
    return go.Bar(
        name=f"{style.format_name(form)}: {style.count(len(tiles), 'layer')}",
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
    figure.update_layout(
        uniformtext={"minsize": 9, "mode": "hide"}
    )  # a number too small to read says nothing
    style.legend_below(figure)
