"""HTML of panels: errors, pictures, notes. Everything that comes from outside is escaped here."""

from __future__ import annotations

import base64
import html
import io
import traceback
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from hswq_lab.errors import HswqError
from hswq_lab.theme import theme

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from PIL.Image import Image

_UNFORESEEN = (
    "try again, with less to do if memory ran out; if it comes again, report it with what stands below"
)


@cache
def style_sheet() -> str:
    """The style of panels, as a `<style>` element."""
    return (
        theme() + f"<style>{(files('hswq_lab') / 'assets' / 'panel.css').read_text(encoding='utf-8')}</style>"
    )


def heading(title: str, note: str = "") -> str:
    """A panel's title and a line about it, plain text."""
    line = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<h3>{html.escape(title)}</h3>{line}"


def note(text: str) -> str:
    """A remark, plain text."""
    return f'<p class="hswq-note">{html.escape(text)}</p>'


def status(text: str) -> str:
    """What is going on; read aloud by screen readers when it changes."""
    return f'<span class="hswq-status" role="status" aria-live="polite">{html.escape(text)}</span>'


def banner(text: str, *, good: bool) -> str:
    """A verdict; the word says it, the colour only repeats it."""
    word = "PASSED" if good else "FAILED"
    return f'<div class="hswq-banner{"" if good else " bad"}"><b>{word}</b> {html.escape(text)}</div>'


def error_box(error: BaseException) -> str:
    """An exception in a panel: what is wrong and what to do; where it came from, if it is none of ours."""
    if not isinstance(error, HswqError):
        trace = html.escape("".join(traceback.format_exception(error)))
        name = html.escape(f"{type(error).__name__}: {error}")
        details = f"<details><summary>where it came from</summary><pre>{trace}</pre></details>"
        return f'<div class="hswq-error" role="alert"><b>{name}</b>{facts({"to do": _UNFORESEEN})}{details}</div>'
    told = {
        "file": error.file,
        "tensor": error.tensor,
        "found": error.found,
        "expected": error.expected,
        "to do": error.fix,
    }
    known = {label: value for label, value in told.items() if value is not None}
    return f'<div class="hswq-error" role="alert"><b>{html.escape(error.problem)}</b>{facts(known)}</div>'


class Safe(str):
    """Markup that was made here and is safe already; everything else is escaped."""

    __slots__ = ()


def chip(text: str, color: str) -> Safe:
    """A word with a dot of its colour."""
    dot = f'<span style="color:{color}" aria-hidden="true">■</span>'
    return Safe(f"{dot} {html.escape(text)}")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls on its own; numbers to the right."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        '<div class="hswq-scroll" tabindex="0"><table class="hswq-table">'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, Safe):
        return f"<td>{value}</td>"
    if isinstance(value, int | float | np.integer) and not isinstance(value, bool):
        return f'<td class="n">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def facts(items: Mapping[str, object]) -> str:
    """Names and values, one a line."""
    lines = "".join(
        f"<i>{html.escape(name)}</i><span>{html.escape(str(value))}</span>" for name, value in items.items()
    )
    return f'<div class="hswq-facts">{lines}</div>'


def pictures(items: Mapping[str, Image]) -> str:
    """Pictures side by side with their captions, plain text."""
    figures = "".join(
        f'<figure><img alt="{html.escape(caption, quote=True)}" src="{data_uri(picture)}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, picture in items.items()
    )
    return f'<div class="hswq-pictures">{figures}</div>'


def data_uri(picture: Image) -> str:
    """A picture as PNG in a data URI."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
