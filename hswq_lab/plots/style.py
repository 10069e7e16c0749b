"""One look for every figure: colours that the colour-blind can tell apart, a template, safe values and text.

Figures are drawn for paper: dark ink on white. Where one is shown on a page or in a panel, the style sheet
there recolours text, grid and background, so that one figure serves light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import torch

Values: TypeAlias = torch.Tensor | np.ndarray | Iterable[float | None]

# Okabe and Ito's palette (2008), without its yellow, which is hard to see on white.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A828C",
)  # fmt: skip
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)

INK, SOFT, GRID, PAPER = "#1d2329", "#5c646e", "#e4e7eb", "#ffffff"
FONT = "Inter, 'Source Sans 3', 'Liberation Sans', Arial, sans-serif"

_FORMATS = {
    "nvfp4": VERMILION, "int8": BLUE, "float8": GREEN, "mxfp8": PURPLE, "float32": SKY,
    "16-bit": GREY, "bfloat16": GREY, "float16": GREY,
}  # fmt: skip
_FORMAT_NAMES = {
    "nvfp4": "NVFP4", "int8": "INT8", "float8": "FP8", "mxfp8": "MXFP8", "float32": "FP32",
    "16-bit": "16 bit", "bfloat16": "BF16", "float16": "FP16",
}  # fmt: skip
_VARIANTS = {"parity": BLUE, "tc": VERMILION, "tc8": GREEN, "16-bit": GREY, "auto": GREY}

MOST_LABELS = 90
"""More names than this cannot be read side by side; hovering still shows them."""

SEQUENTIAL = "Cividis"  # uniform in lightness, and made for colour-blind readers (Nuñez et al. 2018)


def format_color(form: str) -> str:
    """The colour of a storage format, wherever it appears."""
    return next((color for prefix, color in _FORMATS.items() if form.startswith(prefix)), ORANGE)


def format_name(form: str) -> str:
    """A storage format as people write it."""
    return next((name for prefix, name in _FORMAT_NAMES.items() if form.startswith(prefix)), text(form))


def variant_colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for each variant: the known modes keep theirs, the others take what is left, in order."""
    names = list(dict.fromkeys(names))
    taken = {_VARIANTS[name] for name in names if name in _VARIANTS}
    free = [color for color in CYCLE if color not in taken] or list(CYCLE)
    others = (name for name in names if name not in _VARIANTS)
    chosen = {name: free[index % len(free)] for index, name in enumerate(others)}
    return {name: _VARIANTS.get(name) or chosen[name] for name in names}


def translucent(color: str, alpha: float) -> str:
    """A hex colour with an opacity."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def numbers(values: Values) -> list[float | None]:
    """Tensors of any dtype, arrays, series or lists as floats; NaN and infinities become gaps."""
    if isinstance(values, torch.Tensor):
        values = values.detach().float().cpu().numpy()
    flat = np.asarray([math.nan if v is None else v for v in values], dtype=np.float64).ravel()
    return [float(v) if math.isfinite(v) else None for v in flat]


def positive(values: Values, floor: float | None = None) -> list[float | None]:
    """Values for a logarithmic axis: what is not above zero becomes a gap, or `floor` if one is given."""
    return [_above_zero(value, floor) for value in numbers(values)]


def _above_zero(value: float | None, floor: float | None) -> float | None:
    if value is None:
        return None
    if floor is not None:
        return max(value, floor)
    return value if value > 0 else None


def medians(series: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The median at each position over several series, gaps left out; a gap where all have one."""
    columns = ([value for value in column if value is not None] for column in zip(*series, strict=True))
    return [float(np.median(column)) if column else None for column in columns]


def text(value: object) -> str:
    """A name from a file as plain text: plotly would read `<b>` or `<a href=…>` in it as markup."""
    return html.escape(str(value), quote=False)


def texts(values: Iterable[object]) -> list[str]:
    """Names from files as plain text."""
    return [text(value) for value in values]


def count(number: int, noun: str) -> str:
    """The number with its noun: 1 seed, 20 seeds."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def new_figure(title: str, subtitle: str = "", height: int = 460) -> go.Figure:
    """An empty figure in the package's look.

    Args:
        title: plain text.
        subtitle: what was measured and how, in one line of plain text.
        height: in CSS pixels.
    """
    figure = go.Figure()
    dress(figure, title, subtitle, height)
    return figure


def placeholder(title: str) -> go.Figure:
    """What a panel shows where a figure will be: a line of words, and no axes that mean nothing."""
    figure = new_figure(title, height=90)
    figure.update_layout(margin={"t": 44, "b": 0})  # plotly draws nothing where no height is left for axes
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def dress(figure: go.Figure, title: str, subtitle: str = "", height: int = 460) -> go.Figure:
    """Gives a figure (with subplots made already) title, template and size."""
    heading: dict[str, Any] = {"text": text(title)}
    if subtitle:
        heading["subtitle"] = {"text": text(subtitle)}
    figure.update_layout(template=TEMPLATE, title=heading, height=height)
    return figure


def name_panels(figure: go.Figure) -> None:
    """Gives the titles that `make_subplots` wrote over the panels the right size, and room."""
    figure.for_each_annotation(lambda note: note.update(font={"size": 13, "weight": 600}, yshift=2))
    figure.update_layout(margin={"t": 100})


def legend_below(figure: go.Figure) -> None:
    """Puts the legend along the lower edge of the figure; the axes make room for all of its lines."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"}
    figure.update_layout(legend=place)


def legend_above(figure: go.Figure) -> None:
    """Puts the legend between the title and the plot, for figures whose axis labels need the room below."""
    figure.update_layout(
        legend={"orientation": "h", "x": 0, "y": 1.01, "xanchor": "left", "yanchor": "bottom"},
        margin={"t": 104},
    )


def rule(
    figure: go.Figure, y: float, label: str = "", *, row: int = 1, col: int = 1, log: bool = False
) -> None:
    """A dotted horizontal line across a panel, with its meaning written on it.

    Args:
        figure: made by `make_subplots`.
        y: the value.
        label: plain text; empty for no label.
        row: of the panel.
        col: of the panel.
        log: whether the axis is logarithmic (annotations then want the exponent, shapes the value).
    """
    figure.add_hline(y=y, line={"color": GREY, "width": 1, "dash": "dot"}, row=row, col=col)
    if label:
        figure.add_annotation(
            text=text(label), font={"size": 11, "color": SOFT}, showarrow=False, xref="x domain", x=0.01,
            xanchor="left", y=math.log10(y) if log else y, yanchor="bottom", row=row, col=col,
        )  # fmt: skip


DECADES: dict[str, Any] = {
    "type": "log",
    "exponentformat": "power",
    "dtick": 1,
    "tickfont": {"size": 10},  # plotly draws powers of ten a quarter larger than it is told
}
"""A logarithmic axis with a tick each power of ten."""


def _axis() -> dict[str, Any]:
    return {
        "gridcolor": GRID,
        "linecolor": "#98a1ab",
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#98a1ab",
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 13}},
        "tickfont": {"size": 12},
    }


def _template() -> go.layout.Template:
    layout = go.Layout(
        font={"family": FONT, "size": 13, "color": INK},
        title={
            "x": 0.0,
            "xref": "container",
            "xanchor": "left",
            "y": 1.0,  # the room above is in pixels, the same for figures of all heights
            "yanchor": "top",
            "pad": {"l": 14, "t": 14},
        },
        title_font={"size": 16},
        title_subtitle={"font": {"size": 12, "color": SOFT}},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        colorway=list(CYCLE),
        colorscale={"sequential": SEQUENTIAL},
        margin={"l": 68, "r": 20, "t": 78, "b": 56},
        xaxis=_axis(),
        yaxis=_axis(),
        hovermode="closest",
        hoverlabel={"align": "left", "font": {"family": FONT, "size": 12}},
        bargap=0.25,
        # Nothing here may leave the machine: plotly would offer to upload the figure and its data.
        modebar={"remove": ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d"], "orientation": "v"},
    )
    return go.layout.Template(layout=layout)


TEMPLATE = _template()
