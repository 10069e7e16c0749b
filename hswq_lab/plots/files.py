"""Figures of files beside each other and of LoRA files: how close, how large."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from hswq_lab.plots import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hswq_lab.checkpoint import DiffReport
    from hswq_lab.checkpoint.comparison import DiffRow
    from hswq_lab.lora import LoraReport, LoraRow

_STATUS_COLORS = {
    "matched": style.BLUE,
    "unmatched": style.VERMILION,
    "wrong shape": style.VERMILION,
    "conflict": style.ORANGE,
    "text encoder": style.GREY,
}


def difference_figure(report: DiffReport) -> go.Figure:
    """Signal to noise of b against a for every name that differs, coloured by b's format."""
    rows = [row for row in report.rows if row.status != "same" and row.sqnr_db is not None]
    same = sum(row.status == "same" for row in report.rows)
    figure = style.new_figure(
        "How far the second file is from the first",
        f"{Path(report.a).name} and {Path(report.b).name}; {len(rows)} names differ and can be compared, "
        f"{same} are the same",
        height=480,
    )
    for form in dict.fromkeys(row.format_b or "" for row in rows):
        figure.add_trace(_differences([row for row in rows if row.format_b == form], form))
    _by_name(figure, [row.name for row in rows])
    figure.update_yaxes(title="SQNR in dB", rangemode="tozero")
    return figure


def _differences(rows: Sequence[DiffRow], form: str) -> go.Bar:
    notes = [
        [
            f"{row.format_a} → {row.format_b}",
            f"cosine {row.cosine:.6f}" if row.cosine is not None else "",
            f"{row.changed_codes:,} of {row.codes:,} codes changed" if row.changed_codes is not None else "",
        ]
        for row in rows
    ]
    return go.Bar(
        name=style.text(form),
        x=style.texts(row.name.removesuffix(".weight") for row in rows),
        y=style.numbers(row.sqnr_db for row in rows),
        marker={"color": style.format_color(form)},
        customdata=[[style.text(cell) for cell in note] for note in notes],
        hovertemplate=(
            "%{x}<br>%{customdata[0]}<br>%{y:.2f} dB, %{customdata[1]}<br>%{customdata[2]}<extra></extra>"
        ),
    )


def lora_figure(report: LoraReport) -> go.Figure:
    """‖ΔW‖ at strength 1 of every module, coloured by whether it found its layer."""
    rows = [row for row in report.rows if row.norm is not None]
    lost = len(report.unmatched)
    figure = style.new_figure(
        f"What is in {report.lora}",
        f"‖ΔW‖ at strength 1; {style.count(len(report.rows), 'module')} on {len(report.layers)} layers, "
        f"{lost} go nowhere",
        height=480,
    )
    for status in dict.fromkeys(row.status for row in rows):
        figure.add_trace(_norms([row for row in rows if row.status == status], status))
    _by_name(figure, [row.module for row in rows])
    figure.update_yaxes(title="‖ΔW‖", rangemode="tozero")
    return figure


def _norms(rows: Sequence[LoraRow], status: str) -> go.Bar:
    return go.Bar(
        name=status,
        x=style.texts(row.module for row in rows),
        y=style.numbers(row.norm for row in rows),
        marker={"color": _STATUS_COLORS.get(status, style.GREY)},
        customdata=[
            [style.text(row.kind), row.rank or "–", style.text(row.layer or row.why_not)] for row in rows
        ],
        hovertemplate=(
            "%{x}<br>%{customdata[0]}, rank %{customdata[1]}, norm %{y:.4g}"
            "<br>→ %{customdata[2]}<extra></extra>"
        ),
    )


def _by_name(figure: go.Figure, names: Sequence[str]) -> None:
    short = [name.removesuffix(".weight") for name in names]
    figure.update_xaxes(categoryorder="array", categoryarray=style.texts(short), tickangle=-90)
    figure.update_xaxes(showticklabels=len(names) <= style.MOST_LABELS, tickfont={"size": 9})
    style.legend_above(figure)
