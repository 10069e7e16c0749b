"""Whether a LoRA arrived: the retained share of its delta in every layer, for each way of applying it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hswq_lab.effect import DROWNED
from hswq_lab.lora.evidence import ENOUGH
from hswq_lab.plots import style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hswq_lab.effect import EffectReport
    from hswq_lab.lora import BakeReport
    from hswq_lab.lora.evidence import LayerEvidence


def retention_figure(reports: Mapping[str, BakeReport]) -> go.Figure:
    """Retained share per layer and the error that came with it, a row a way; both relative to ‖ΔW‖.

    Args:
        reports: what to call it → the report, e.g. {"branch": …, "bake": …}. All over the same layers.
    """
    figure = make_subplots(
        rows=len(reports),
        cols=1,
        shared_xaxes=True,
        shared_yaxes="all",
        vertical_spacing=0.28 / len(reports),
        subplot_titles=[style.text(f"{name}: {report.verdict}") for name, report in reports.items()],
    )
    names = list(dict.fromkeys(layer.layer for report in reports.values() for layer in report.rows))
    loras = dict.fromkeys(lora for report in reports.values() for lora in report.loras)
    subtitle = f"r = (W′−W)·ΔW / ‖ΔW‖² ± 2 standard errors (dotted: {ENOUGH}); {', '.join(loras)}"
    style.dress(figure, "What arrived of the LoRA in each layer", subtitle, height=300 + 170 * len(reports))
    style.name_panels(figure)
    shown: set[str] = set()
    for row, report in enumerate(reports.values(), start=1):
        for trace in _panel(report.rows):
            trace.showlegend = trace.legendgroup not in shown
            shown.add(trace.legendgroup)
            figure.add_trace(trace, row=row, col=1)
        style.rule(figure, ENOUGH, row=row)
    figure.update_xaxes(categoryorder="array", categoryarray=style.texts(names), tickangle=-90)
    figure.update_xaxes(showticklabels=False)
    figure.update_xaxes(
        showticklabels=len(names) <= style.MOST_LABELS, tickfont={"size": 9}, row=len(reports)
    )
    figure.update_yaxes(title="share of ‖ΔW‖", rangemode="tozero", nticks=5)
    style.legend_below(figure)
    return figure


def _panel(rows: Sequence[LayerEvidence]) -> list[go.Bar | go.Scatter]:
    forms = dict.fromkeys(row.format for row in rows)
    bars = [_retained([row for row in rows if row.format == form], form) for form in forms]
    return [*bars, _added_error(rows)]


def _retained(rows: Sequence[LayerEvidence], form: str) -> go.Bar:
    notes = [[row.verdict, _share(row.retained), style.text(row.warning)] for row in rows]
    return go.Bar(
        name=f"retained, {style.format_name(form)}",
        legendgroup=form,
        x=style.texts(row.layer for row in rows),
        y=style.numbers(row.retained for row in rows),
        marker={"color": style.format_color(form)},
        error_y={
            "type": "data",
            "array": style.numbers(None if row.retained_se is None else 2 * row.retained_se for row in rows),
            "color": style.SOFT,
            "thickness": 1,
            "width": 2,
        },
        customdata=notes,
        hovertemplate=(
            "%{x}<br>%{customdata[0]}: retained %{customdata[1]}<br>%{customdata[2]}<extra></extra>"
        ),
    )


def _added_error(rows: Sequence[LayerEvidence]) -> go.Scatter:
    return go.Scatter(
        name="added error ‖W′−W−ΔW‖ / ‖ΔW‖",
        legendgroup="added",
        mode="markers",
        marker={"symbol": "diamond", "size": 7, "color": "white", "line": {"color": style.INK, "width": 1.5}},
        x=style.texts(row.layer for row in rows),
        y=style.numbers(row.added_error for row in rows),
        hovertemplate="%{x}<br>added error %{y:.3f} of ‖ΔW‖<extra></extra>",
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def effect_figure(report: EffectReport) -> go.Figure:
    """Cosine of what LoRAs do on the pack with what they do at 16 bits, a dot a layer, in network order."""
    rows = [row for row in report.rows if row.cosine is not None]
    figure = style.new_figure(
        "What the LoRA does to each layer's outputs",
        f"cosine of the change on {report.model} with the change at 16 bits; {', '.join(report.loras)}",
        height=480,
    )
    for form in dict.fromkeys(row.format for row in rows):
        mine = [row for row in rows if row.format == form]
        figure.add_trace(
            go.Scatter(
                name=style.format_name(form),
                mode="markers",
                marker={"color": style.format_color(form), "size": 9},
                x=style.texts(row.layer for row in mine),
                y=style.numbers(row.cosine for row in mine),
                customdata=[[_share(row.gain), _share(row.error), row.mode] for row in mine],
                hovertemplate=(
                    "%{x}<br>cosine %{y:.4f}, %{customdata[0]} of the effect, error %{customdata[1]} of it"
                    "<br>runs as %{customdata[2]}<extra></extra>"
                ),
            )
        )
    figure.update_xaxes(
        categoryorder="array", categoryarray=style.texts(row.layer for row in rows), tickangle=-90
    )
    figure.update_xaxes(showticklabels=len(rows) <= style.MOST_LABELS, tickfont={"size": 9})
    figure.update_yaxes(title="cosine of the effect")
    figure.add_hline(y=DROWNED, line={"color": style.GREY, "width": 1, "dash": "dot"})
    style.legend_above(figure)
    return figure
