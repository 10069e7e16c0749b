"""Figures that explain: plain bars and lines, one block of sixteen values, proxies against the truth, pictures."""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hswq_lab.plots import style
from hswq_lab.quantize.impact import PROXIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

    from hswq_lab.quantize.impact import ImpactReport

_PROXY_NAMES = {
    "weight_error": "weight error",
    "weight_power": "weight error × input power",
    "output_error": "relative output error",
    "output_variance": "output error",
}
_PICTURE, _GAP, _LABEL = 96, 6, 120  # pixels


def bars_figure(
    title: str,
    subtitle: str,
    groups: Mapping[str, Mapping[str, float]],
    unit: str,
    *,
    digits: int = 2,
    log: bool = False,
) -> go.Figure:
    """Groups of bars with their values written on them.

    Args:
        title: plain text.
        subtitle: plain text.
        groups: name of a colour → name of a bar → value.
        unit: title of the axis.
        digits: after the decimal point, on the bars.
        log: a logarithmic axis.
    """
    figure = style.new_figure(title, subtitle, height=400)
    for color, (name, bars) in zip(style.CYCLE, groups.items(), strict=False):
        figure.add_trace(
            go.Bar(
                name=style.text(name),
                x=style.texts(bars),
                y=style.numbers(bars.values()),
                marker={"color": color},
                text=[f"{value:.{digits}f}" for value in bars.values()],
                textposition="outside",
                # Style sheets recolour axes and titles for a dark page, not this: a grey that both pages show.
                outsidetextfont={"color": style.GREY},
                cliponaxis=False,
                hovertemplate=f"{style.text(name)}, %{{x}}: %{{y:.5g}}<extra></extra>",
                showlegend=len(groups) > 1,
            )
        )
    figure.update_yaxes(title=style.text(unit))
    if log:
        figure.update_yaxes(style.DECADES)
    if len(groups) > 1:
        style.legend_below(figure)
    return figure


def lines_figure(
    title: str,
    subtitle: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    axes: tuple[str, str],
    *,
    log: str = "",
    mark: tuple[float, str] | None = None,
    mode: str = "lines+markers",
) -> go.Figure:
    """Lines over a common axis.

    Args:
        title: plain text.
        subtitle: plain text.
        lines: name → (x, y).
        axes: titles of the two axes.
        log: the axes that are logarithmic, "", "x", "y" or "xy".
        mark: an x with a word for it, drawn as a dotted line.
        mode: plotly's, "lines", "markers" or both.
    """
    figure = style.new_figure(title, subtitle, height=430)
    for color, (name, (x, y)) in zip(style.CYCLE, lines.items(), strict=False):
        values = style.positive(y) if "y" in log else style.numbers(y)
        figure.add_trace(
            go.Scatter(
                name=style.text(name),
                mode=mode,
                line={"color": color, "width": 2},
                marker={"size": 7, "color": color},
                x=style.numbers(x),
                y=values,
                hovertemplate=f"{style.text(name)}<br>%{{x:.5g}}: %{{y:.5g}}<extra></extra>",
            )
        )
    figure.update_xaxes(title=style.text(axes[0]))
    figure.update_yaxes(title=style.text(axes[1]))
    for axis, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
        if axis in log:
            update(type="log", exponentformat="power", minor={"showgrid": False})
    if mark is not None:
        figure.add_vline(x=mark[0], line={"color": style.GREY, "width": 1, "dash": "dot"})
        figure.add_annotation(
            text=style.text(mark[1]), font={"size": 11, "color": style.SOFT}, showarrow=False, xanchor="left",
            x=math.log10(mark[0]) if "x" in log else mark[0], y=1, yref="y domain", yanchor="bottom",
        )  # fmt: skip
    style.legend_below(figure)
    return figure


def block_figure(
    values: style.Values, kept: style.Values, levels: style.Values, title: str, subtitle: str
) -> go.Figure:
    """One block: its values, what four bits keep of them, and the levels that the block's scale offers.

    Args:
        values: before.
        kept: after, as many.
        levels: every value that a code can stand for with this block's scale.
        title: plain text.
        subtitle: plain text.
    """
    before, after = style.numbers(values), style.numbers(kept)
    figure = style.new_figure(title, subtitle, height=430)
    for level in style.numbers(levels):
        figure.add_hline(y=level, line={"color": style.GRID, "width": 1.5}, layer="below")
    places = list(range(len(before)))
    figure.add_trace(
        go.Bar(name="value", x=places, y=before, marker={"color": style.translucent(style.GREY, 0.55)})
    )
    figure.add_trace(
        go.Scatter(
            name="what four bits keep",
            mode="markers",
            x=places,
            y=after,
            marker={"color": style.VERMILION, "size": 10, "symbol": "diamond"},
        )
    )
    figure.update_xaxes(title="place in the block", dtick=1, showgrid=False)
    figure.update_yaxes(title="value", showgrid=False, exponentformat="power")
    style.legend_below(figure)
    return figure


def proxies_figure(report: ImpactReport, form: str = "nvfp4") -> go.Figure:
    """Every cheap proxy against the measured impact, a dot a layer; both axes logarithmic."""
    figure = make_subplots(
        rows=2,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.05,
        vertical_spacing=0.2,
        subplot_titles=[
            f"{_PROXY_NAMES[name]}: ρ = {rank:.2f}" for name, rank in report.correlations(form).items()
        ],
    )
    subtitle = f"{style.count(len(report.layers), 'layer')} in {style.format_name(form)}; ρ: rank correlation"
    style.dress(figure, "Cheap proxies beside the measured impact", subtitle, height=640)
    style.name_panels(figure)
    rows = [report.of(layer, form) for layer in report.ranking(form)]
    for index, proxy in enumerate(PROXIES):
        figure.add_trace(
            go.Scatter(
                mode="markers",
                marker={"color": style.translucent(style.BLUE, 0.7), "size": 7},
                x=style.positive(getattr(row, proxy) for row in rows),
                y=style.positive(row.impact for row in rows),
                customdata=style.texts(row.layer for row in rows),
                hovertemplate="%{customdata}<br>proxy %{x:.3g}, impact %{y:.3g}<extra></extra>",
                showlegend=False,
            ),
            row=index // 2 + 1,
            col=index % 2 + 1,
        )
    figure.update_xaxes(type="log", exponentformat="power", nticks=6, minor={"showgrid": False})
    figure.update_yaxes(style.DECADES)
    figure.update_yaxes(title="measured impact", col=1)
    return figure


def strip_figure(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Image]]) -> go.Figure:
    """Pictures in a grid.

    Args:
        title: plain text.
        columns: captions over the columns, plain text.
        rows: label of the row → its pictures, one a column.
    """
    cell = _PICTURE + _GAP
    figure = style.new_figure(title, height=90 + 26 + cell * len(rows))
    for line, (label, pictures) in enumerate(rows.items()):
        figure.add_annotation(
            x=-10, y=line * cell + _PICTURE / 2, text=style.text(label), showarrow=False, xanchor="right",
        )  # fmt: skip
        for place, picture in enumerate(pictures):
            figure.add_layout_image(
                source=_data_url(picture), x=place * cell, y=line * cell, sizex=_PICTURE, sizey=_PICTURE,
                xref="x", yref="y", xanchor="left", yanchor="top", layer="above",
            )  # fmt: skip
    for place, caption in enumerate(columns):
        figure.add_annotation(
            x=place * cell + _PICTURE / 2, y=-4, text=style.text(caption), showarrow=False, yanchor="bottom",
            font={"size": 10},
        )  # fmt: skip
    hidden = {"visible": False, "fixedrange": True}
    figure.update_xaxes(hidden, range=[-_LABEL, cell * len(columns)], constrain="domain")
    figure.update_yaxes(hidden, range=[cell * len(rows), -20], scaleanchor="x", constrain="domain")
    # A figure without a trace is not drawn.
    figure.add_trace(go.Scatter(x=[0], y=[0], mode="markers", marker={"opacity": 0}, hoverinfo="skip"))
    figure.update_layout(margin={"t": 50, "b": 10, "l": 10, "r": 10}, showlegend=False)
    return figure


def _data_url(picture: Image) -> str:
    buffer = io.BytesIO()
    picture.resize((2 * _PICTURE, 2 * _PICTURE), resample=0).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
