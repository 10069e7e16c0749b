"""Where denoising leaves the reference: divergence per step, seed and variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hswq_lab.plots import style
from hswq_lab.trajectory.trace import BIFURCATION_DROP, SAME_IMAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hswq_lab.trajectory import SeedTrace, TrajectoryReport

Measure = Literal["cos_latent", "cos_x0"]

FLOOR = 1e-8  # where equal latents are drawn: fp32 latents know a cosine no better than this
_ROWS: tuple[tuple[Measure, str], ...] = (("cos_latent", "latent"), ("cos_x0", "predicted x0"))
_HOVER = "seed %{customdata[0]}, step %{x}<br>cos %{customdata[1]}<br>%{customdata[2]}<extra></extra>"


def divergence_figure(
    report: TrajectoryReport, seed: int | None = None, step: int | None = None
) -> go.Figure:
    """1 − cosine to the reference on a log axis: a column a variant, latent above, predicted x0 below.

    Both rows and all columns share one scale, so heights can be compared across the figure.

    Args:
        report: from `hl.compare`.
        seed: the seed to emphasise; without it each variant's worst one.
        step: a step (from 0) to mark with a line across all panels.
    """
    figure = make_subplots(
        rows=2,
        cols=len(report.variants),
        shared_xaxes="all",
        shared_yaxes="all",
        vertical_spacing=0.06,
        horizontal_spacing=0.03,
        column_titles=style.texts(report.variants),
    )
    style.dress(figure, "Divergence from the reference, step by step", _subtitle(report), height=640)
    style.name_panels(figure)
    colors = style.variant_colors(report.variants)
    emphasis = "worst seed" if seed is None else f"seed {seed}"
    shown: set[str] = set()
    for column, variant in enumerate(report.variants, start=1):
        chosen = report.verdict[variant].worst_seed if seed is None else seed
        for row, (measure, _) in enumerate(_ROWS, start=1):
            for trace in _panel(report.of(variant), measure, chosen, colors[variant], emphasis):
                trace.showlegend = trace.legendgroup not in shown
                shown.add(trace.legendgroup)
                figure.add_trace(trace, row=row, col=column)
    _label(figure, len(report.variants))
    figure.update_xaxes(dtick=max(1, report.steps // 6))
    if step is not None:
        figure.add_vline(x=step, line={"color": style.SOFT, "width": 1.5}, layer="below")
    return figure


def _subtitle(report: TrajectoryReport) -> str:
    runs = f"{style.count(len(report.seeds), 'seed')}, {style.count(report.steps, 'step')}"
    settings = f"{runs}, cfg {report.cfg:g}, shift {report.shift:g}"
    return f"1 − cos(variant, {report.model}) after each step; {settings}. Lower is better."


def _panel(
    traces: Sequence[SeedTrace], measure: Measure, chosen: int, color: str, emphasis: str
) -> list[go.Scatter]:
    drawn = [_every_seed(traces, measure, color), _median(traces, measure, color)]
    drawn += [_emphasised(trace, measure, color, emphasis) for trace in traces if trace.seed == chosen]
    if measure == "cos_latent" and any(trace.bifurcated for trace in traces):
        drawn.append(_bifurcations(traces))
    return drawn


def _every_seed(traces: Sequence[SeedTrace], measure: Measure, color: str) -> go.Scatter:
    """All seeds in one trace with a gap after each: twenty traces would be slow and fill the legend."""
    x: list[int | None] = []
    y: list[float | None] = []
    notes: list[list[str] | None] = []
    for trace in traces:
        x += [*range(len(getattr(trace, measure))), None]
        y += [*_divergence(trace, measure), None]
        notes += [*_notes(trace, measure), None]
    line = {"color": style.translucent(color, 0.45), "width": 1.2}
    return go.Scatter(
        name="each seed",
        legendgroup="each",
        mode="lines",
        line=line,
        x=x,
        y=y,
        customdata=notes,
        hovertemplate=_HOVER,
        connectgaps=False,
    )


def _median(traces: Sequence[SeedTrace], measure: Measure, color: str) -> go.Scatter:
    middle = style.medians([_divergence(trace, measure) for trace in traces])
    return go.Scatter(
        name="median of the seeds",
        legendgroup="median",
        mode="lines",
        line={"color": color, "width": 2, "dash": "dash"},
        x=list(range(len(middle))),
        y=middle,
        hovertemplate="median, step %{x}: 1 − cos = %{y:.3g}<extra></extra>",
    )


def _emphasised(trace: SeedTrace, measure: Measure, color: str, name: str) -> go.Scatter:
    values = _divergence(trace, measure)
    return go.Scatter(
        name=name,
        legendgroup="emphasis",
        mode="lines+markers",
        line={"color": color, "width": 2.8},
        marker={"size": 6},
        x=list(range(len(values))),
        y=values,
        customdata=_notes(trace, measure),
        hovertemplate=_HOVER,
        connectgaps=False,
    )


def _bifurcations(traces: Sequence[SeedTrace]) -> go.Scatter:
    at = [(trace, trace.bifurcation_step) for trace in traces if trace.bifurcation_step is not None]
    window = traces[0].window
    within = "in a step" if window == 1 else f"within {window} steps"
    return go.Scatter(
        name=f"bifurcation (cos falls by > {BIFURCATION_DROP} {within})",
        legendgroup="bifurcation",
        mode="markers",
        marker={"symbol": "x", "size": 11, "color": style.INK, "line": {"color": style.PAPER, "width": 1}},
        x=[step for _, step in at],
        y=[_divergence(trace, "cos_latent")[step] for trace, step in at],
        customdata=[_notes(trace, "cos_latent")[step] for trace, step in at],
        hovertemplate="bifurcation: " + _HOVER,
    )


def _divergence(trace: SeedTrace, measure: Measure) -> list[float | None]:
    return style.positive((1 - value for value in getattr(trace, measure)), FLOOR)


def _notes(trace: SeedTrace, measure: Measure) -> list[list[str]]:
    prompt = style.text(trace.prompt)
    return [[str(trace.seed), f"{value:.6f}", prompt] for value in getattr(trace, measure)]


def _label(figure: go.Figure, columns: int) -> None:
    for row, (_, name) in enumerate(_ROWS, start=1):
        figure.update_yaxes(title_text=f"1 − cos, {name}", row=row, col=1)
    figure.update_yaxes(style.DECADES)
    figure.update_xaxes(title_text="step", row=2)
    for column in range(1, columns + 1):
        style.rule(figure, 1 - SAME_IMAGE, col=column)
    # Its meaning stands in the legend: written on the line, it would lie under curves.
    line = {"color": style.GREY, "width": 1, "dash": "dot"}
    name = f"same image below: cos ≥ {SAME_IMAGE}"
    figure.add_trace(go.Scatter(name=name, mode="lines", line=line, x=[None], y=[None]), row=1, col=1)
    style.legend_below(figure)
