"""Self-contained HTML pages: text, tables, pictures and interactive plots that open offline."""

from __future__ import annotations

import base64
import html
import math
from importlib.resources import files
from typing import TYPE_CHECKING

from pandas.api.types import is_bool_dtype, is_numeric_dtype
from plotly.offline import get_plotlyjs

from hswq_lab.plots import has_figure
from hswq_lab.results import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    import plotly.graph_objects as go

    from hswq_lab.results import Result

_FILTER = """
document.querySelectorAll('input.filter').forEach(function (field) {
  var rows = field.nextElementSibling.querySelectorAll('tbody tr');
  field.addEventListener('input', function () {
    var wanted = field.value.toLowerCase();
    rows.forEach(function (row) { row.hidden = !row.textContent.toLowerCase().includes(wanted); });
  });
});
"""
_PLOT_CONFIG = {"responsive": True, "displaylogo": False}


class Page:
    """A page under construction. What comes from files or users is escaped by the functions that take it.

    Args:
        title: plain text.
        lead: a sentence or two under the title, plain text.
    """

    def __init__(self, title: str, lead: str) -> None:
        self._title = html.escape(title)
        self._lead = html.escape(lead)
        self._sections: list[tuple[str, str, str]] = []

    def section(self, heading: str, *parts: str) -> None:
        """Adds a section of parts that the functions below have made."""
        anchor = f"s{len(self._sections) + 1}"
        self._sections.append((anchor, html.escape(heading), "".join(parts)))

    def html(self) -> str:
        """The whole page, with plotly.js in it once, if there is a plot."""
        links = "".join(f'<a href="#{anchor}">{heading}</a>' for anchor, heading, _ in self._sections)
        body = "".join(
            f'<section id="{anchor}"><h2>{heading}</h2>{content}</section>'
            for anchor, heading, content in self._sections
        )
        script = f"<script>{get_plotlyjs()}</script>" if 'class="plot"' in body else ""
        style = (files("hswq_lab") / "assets" / "report.css").read_text(encoding="utf-8")
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{self._title}</title><style>{style}</style>{script}</head><body>"
            f'<header><h1>{self._title}</h1><p class="lead">{self._lead}</p></header>'
            f"<nav>{links}</nav><main>{body}</main><script>{_FILTER}</script></body></html>"
        )

    def write(self, path: Path) -> None:
        """Writes the page whole or not at all; raises HswqError where that is not possible."""
        write_text(path, self.html())


def result_page(result: Result) -> Page:
    """One result object as a page: what it says of itself, its plot if there is one, its table."""
    made = Page(type(result).__name__, getattr(result, "model", ""))
    told = str(result)
    if not told.startswith(f"{type(result).__name__}("):  # what dataclasses print by themselves is no summary
        made.section("In short", code(told))
    if has_figure(result):
        made.section("Plot", plot(result.figure()))
    made.section("Table", table(result.to_frame(), searchable=True))
    return made


def prose(*paragraphs: str) -> str:
    """Paragraphs of plain text."""
    return "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs)


def note(text: str) -> str:
    """A remark in small print, plain text."""
    return f'<p class="note">{html.escape(text)}</p>'


def code(text: str) -> str:
    """Lines of code."""
    return f"<pre><code>{html.escape(text)}</code></pre>"


def tiles(values: Mapping[str, str]) -> str:
    """Figures that matter most, large: what it is → its value."""
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'
        for label, value in values.items()
    )
    return f'<div class="tiles">{cells}</div>'


def banner(text: str, *, good: bool) -> str:
    """A verdict; the word says it, the colour only repeats it."""
    word = "PASSED" if good else "FAILED"
    return f'<div class="banner{"" if good else " bad"}"><b>{word}</b>{html.escape(text)}</div>'


def plot(figure: go.Figure) -> str:
    """An interactive plot that is as wide as the page."""
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=_PLOT_CONFIG)
    return f'<figure class="plot">{drawn}</figure>'


def table(frame: pd.DataFrame, *, searchable: bool = False) -> str:
    """A table that scrolls on its own; with `searchable`, a field that filters its rows."""
    kinds = [
        ' class="n"' if is_numeric_dtype(kind) and not is_bool_dtype(kind) else "" for kind in frame.dtypes
    ]
    head = "".join(f"<th{kind}>{_cell(name)}</th>" for name, kind in zip(frame.columns, kinds, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{k}>{_cell(v)}</td>" for v, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in frame.itertuples(index=False)
    )
    field = '<input class="filter" type="search" placeholder="filter rows" aria-label="filter rows">'
    return (
        f'{field if searchable else ""}<div class="scroll" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def strip(columns: Sequence[str], rows: Mapping[str, Sequence[bytes]]) -> str:
    """Pictures in a grid: a column a prompt, a row a variant.

    Args:
        columns: captions over the columns, plain text.
        rows: label of the row → its pictures as PNG, one a column.
    """
    cells = ["<span></span>", *(f'<span class="head">{html.escape(text)}</span>' for text in columns)]
    for label, pictures in rows.items():
        cells.append(f'<span class="row">{html.escape(label)}</span>')
        for caption, picture in zip(columns, pictures, strict=True):
            alt = html.escape(f"{label}: {caption}", quote=True)
            data = base64.b64encode(picture).decode()
            cells.append(f'<img alt="{alt}" title="{alt}" src="data:image/png;base64,{data}">')
    template = f"grid-template-columns:88px repeat({len(columns)},minmax(64px,1fr))"
    return f'<div class="strip" style="{template}">{"".join(cells)}</div>'


def _cell(value: object) -> str:
    """A value as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return html.escape(f"{value:.5g}" if isinstance(value, float) else str(value))
