"""Times of products and pictures, against torch and against what the machine can do."""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hswq_lab import ops
from hswq_lab.plots import style

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hswq_lab.bench import GemmBench, GemmRow, ModelBench

OP_COLORS = {
    "w4a4": style.VERMILION,
    "w4a8": style.GREEN,
    "w4a8 kept": style.ORANGE,
    "w4a16": style.BLUE,
    "int8": style.PURPLE,
}


OURS = {"torch", *ops.backends()}  # other packages are hatched, or open
_HATCHES = ("/", "\\", "x", "-")
_ONE_COLUMN = 3  # so many panels at most stand in one column
_NO_FALLBACKS = {True: "no fallbacks", False: "fallbacks not counted"}


def gemm_figure(report: GemmBench) -> go.Figure:
    """TFLOP/s of every way to multiply, a panel a number of rows M, a group a weight; the roofline dashed.

    Full bars hold rotation and quantisation of the activations, pale ones the product alone.
    """
    sizes = sorted({row.m for row in report.rows})
    columns = 1 if len(sizes) <= _ONE_COLUMN else 2
    lines = math.ceil(len(sizes) / columns)
    figure = make_subplots(
        rows=max(1, lines),
        cols=columns,
        shared_xaxes="all",
        vertical_spacing=0.2 / max(1, lines),
        horizontal_spacing=0.09,
        subplot_titles=[f"M = {m}" for m in sizes],
    )
    fallbacks = sum(row.fallbacks for row in report.rows)
    style.dress(
        figure,
        "One Linear, every way to multiply it",
        f"{report.machine['name']}, {report.dtype}, "
        + (f"median of {style.count(report.repeats, 'call')}; " if report.repeats else "medians; ")
        + (
            f"{fallbacks} calls fell back to the reference"
            if fallbacks
            else _NO_FALLBACKS[report.repeats > 0]
        ),
        height=210 * lines + 190,
    )
    style.name_panels(figure)
    hatches = dict(zip(others(report.rows), cycle(_HATCHES), strict=False))
    ways = list(dict.fromkeys((row.op, row.stage, row.backend) for row in report.rows))
    for place, m in enumerate(sizes):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        here = [row for row in report.rows if row.m == m]
        for way in ways:
            rows = [row for row in here if (row.op, row.stage, row.backend) == way]
            figure.add_trace(_products(rows, way, hatches.get(way[2], ""), show=place == 0), **at)
        figure.add_trace(_roofline(here, report, show=place == 0), **at)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="TFLOP/s", col=1)
    figure.update_xaxes(title="N × K", row=lines)
    if len(sizes) < lines * columns:  # nothing stands below the last panel of the right column
        figure.update_xaxes(title="N × K", showticklabels=True, row=lines - 1, col=columns)
    figure.update_layout(barmode="group", bargap=0.2, bargroupgap=0.05)
    style.legend_below(figure)
    return figure


def others(rows: Iterable[GemmRow]) -> list[str]:
    """Other packages among the back ends, in order."""
    return [name for name in dict.fromkeys(row.backend for row in rows) if name not in OURS]


def _products(rows: Sequence[GemmRow], way: tuple[str, str, str], hatch: str, *, show: bool) -> go.Bar:
    op, stage, backend = way
    color = OP_COLORS.get(op, style.GREY)
    alone = stage == "product alone"
    return go.Bar(
        name=f"{op}{', product alone' if alone else ''} ({backend})",
        legendgroup="".join(way),
        showlegend=show,
        x=[_shape(row) for row in rows],
        y=style.numbers(row.tflops for row in rows),
        marker={
            "color": style.translucent(color, 0.45) if alone else color,
            "pattern": {"shape": hatch},
        },
        customdata=[
            [f"{row.seconds * 1e6:,.1f}", f"{row.speedup:.2f}", f"{100 * row.of_roofline:.0f}", row.fallbacks]
            for row in rows
        ],
        hovertemplate=(
            f"{op}, {stage}, {backend}<br>%{{x}}: %{{y:.4g}} TFLOP/s, %{{customdata[0]}} µs"
            "<br>%{customdata[1]}× torch, %{customdata[2]} % of the roofline, "
            "%{customdata[3]} fallbacks<extra></extra>"
        ),
    )


def _roofline(rows: Sequence[GemmRow], report: GemmBench, *, show: bool) -> go.Scatter:
    """What torch's own product could reach: its operations and bytes at the measured limits."""
    peers = [row for row in rows if row.backend == "torch"]
    return go.Scatter(
        name=f"roofline in {report.dtype}",
        legendgroup="roofline",
        showlegend=show,
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 30, "color": style.INK, "line": {"width": 2}},
        x=[_shape(row) for row in peers],
        y=style.numbers(row.tflops / row.of_roofline if row.of_roofline else None for row in peers),
        hovertemplate="at most %{y:.4g} TFLOP/s<extra></extra>",
    )


def _shape(row: GemmRow) -> str:
    return f"{row.n} × {row.k}"


def pictures_figure(report: ModelBench) -> go.Figure:
    """Seconds a picture for every model, with what it is made of."""
    figure = style.new_figure(
        "A whole picture",
        f"{report.machine['name']}; {style.count(report.steps, 'step')}, "
        f"{report.size[0]} × {report.size[1]} pixels, median of {report.repeats}",
        height=170 + 56 * len(report.rows),
    )
    colors = style.variant_colors(row.mode for row in report.rows)
    figure.add_trace(
        go.Bar(
            orientation="h",
            x=style.numbers(row.seconds for row in report.rows),
            y=style.texts(row.model for row in report.rows),
            marker={"color": [colors[row.mode] for row in report.rows]},
            text=[f"{row.seconds:.2f} s, {row.speedup:.2f}×" for row in report.rows],
            customdata=[
                [f"{row.weight_bytes / 2**20:.1f}", f"{row.final_cos:.4f}", f"{row.tflops:.3g}"]
                for row in report.rows
            ],
            hovertemplate=(
                "%{y}: %{x:.3f} s<br>%{customdata[0]} MiB of weights, final cosine %{customdata[1]}"
                "<br>%{customdata[2]} TFLOP/s<extra></extra>"
            ),
        )
    )
    figure.update_xaxes(title="seconds a picture", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure
