"""The roofline: what a product may reach at its ratio of operations to bytes, and what it reached."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from hswq_lab.plots import style
from hswq_lab.plots.bench import OP_COLORS, others

if TYPE_CHECKING:
    from hswq_lab.bench import GemmBench, GemmRow

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "pentagon", "x")
_OTHERS = ("-open", "-open-dot")  # other packages' points


def roofline_figure(report: GemmBench) -> go.Figure:
    """TFLOP/s over operations a byte, both logarithmic (Williams et al. 2009): a colour an operation, a symbol an M.

    The roof is measured: the slope is a copy, the flat part torch's product in the benchmark's dtype. A point above
    the flat part computes with narrower numbers than that product; one above the slope was served by a cache.
    """
    figure = style.new_figure(
        "The roofline: memory to the left, arithmetic to the right",
        f"{report.machine['name']}; copy {report.roofline.copy / 1e9:,.1f} GB/s, {report.dtype} product "
        f"{report.roofline.matmul / 1e12:.3g} TFLOP/s, both measured",
        height=520,
    )
    sizes = sorted({row.m for row in report.rows})
    symbols = {m: _SYMBOLS[place % len(_SYMBOLS)] for place, m in enumerate(sizes)}
    marks = dict(zip(others(report.rows), cycle(_OTHERS), strict=False))
    for op, stage, backend in dict.fromkeys((row.op, row.stage, row.backend) for row in report.rows):
        rows = [row for row in report.rows if (row.op, row.stage, row.backend) == (op, stage, backend)]
        figure.add_trace(_points(rows, symbols, marks.get(backend, "")))
    for m, symbol in symbols.items():
        figure.add_trace(_key(m, symbol))
    figure.add_trace(_roof(report))
    figure.update_xaxes(type="log", title="operations a byte of least traffic", exponentformat="power")
    figure.update_yaxes(type="log", title="TFLOP/s", exponentformat="power")
    style.legend_below(figure)
    return figure


def intensity(row: GemmRow) -> float:
    """Operations a byte: 2·M·N·K over the bytes that cannot be avoided."""
    return row.tflops * 1e12 / (row.gb_per_s * 1e9)


def _key(m: int, symbol: str) -> go.Scatter:
    """The legend's word on a symbol."""
    marker = {"symbol": symbol, "color": style.SOFT, "size": 10}
    return go.Scatter(name=f"M = {m}", mode="markers", x=[None], y=[None], marker=marker)


def _points(rows: list[GemmRow], symbols: dict[int, str], mark: str) -> go.Scatter:
    first = rows[0]
    color, alone = OP_COLORS.get(first.op, style.GREY), first.stage == "product alone"
    return go.Scatter(
        name=f"{first.op}{', product alone' if alone else ''} ({first.backend})",
        mode="markers",
        x=style.positive(map(intensity, rows)),
        y=style.positive(row.tflops for row in rows),
        marker={
            "color": style.translucent(color, 0.45) if alone else color,
            "size": 10,
            "symbol": [symbols[row.m] + mark for row in rows],
            "line": {"color": color, "width": 1.2},
        },
        customdata=[
            [f"{row.m} × {row.n} × {row.k}", f"{row.seconds * 1e6:,.1f}", f"{100 * row.of_roofline:.0f}"]
            for row in rows
        ],
        hovertemplate=(
            "%{fullData.name}<br>M × N × K = %{customdata[0]}<br>%{y:.3g} TFLOP/s, %{customdata[1]} µs, "
            "%{customdata[2]} % of the roofline<extra></extra>"
        ),
    )


def _roof(report: GemmBench) -> go.Scatter:
    found = [intensity(row) for row in report.rows]
    limits = report.roofline
    ridge = limits.matmul / limits.copy
    x = np.array([min([ridge, *found]) / 2, ridge, max([ridge, *found]) * 2])
    return go.Scatter(
        name=f"roofline in {report.dtype}",
        mode="lines",
        line={"color": style.INK, "width": 2, "dash": "dash"},
        x=style.numbers(x),
        y=style.numbers(np.minimum(x * limits.copy, limits.matmul) / 1e12),
        hovertemplate="at most %{y:.3g} TFLOP/s<extra></extra>",
    )
