"""Figures to files: HTML always, PNG, SVG and PDF where a browser for the export is found."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plotly.basedatatypes import BaseFigure

from hswq_lab.arguments import path_of
from hswq_lab.errors import HswqError
from hswq_lab.outlines import FAMILY, outlined
from hswq_lab.partial import write_whole
from hswq_lab.results import write_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    import plotly.graph_objects as go

_BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "brave-browser",
)
_exports = threading.local()


def find_browser() -> str | None:
    """The path of a Chromium-like browser for static export, or None. BROWSER_PATH, kaleido's own, wins."""
    named = os.environ.get("BROWSER_PATH")
    if named:
        return named if Path(named).is_file() else None
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def why_no_static_export() -> str | None:
    """None where PNG, SVG and PDF can be written, else one sentence that says what is missing."""
    if find_spec("kaleido") is None:
        return "the package kaleido is not installed (pip install 'hswq-lab[export]')"
    if find_browser() is None:
        return "no Chromium or Chrome was found (install one, or set BROWSER_PATH)"
    return None


@contextmanager
def static_export() -> Iterator[None]:
    """Keeps one browser for all static pictures made inside: a tenth of the time that one browser each takes.

    Does nothing where no static picture can be made, and nothing when it is entered again.
    """
    if why_no_static_export() is not None or getattr(_exports, "open", False):
        yield
        return
    kaleido = import_module("kaleido")
    # Without mathjax, which kaleido would fetch from the net and no figure of ours uses.
    kaleido.start_sync_server(mathjax=False, silence_warnings=True)
    _exports.open = True
    try:
        yield
    finally:
        _exports.open = False
        kaleido.stop_sync_server(silence_warnings=True)


def save_figure(
    figure: go.Figure, path: str | os.PathLike[str], *, width: int = 1000, height: int = 560
) -> Path:
    """Writes a plotly figure to .html (self-contained, opens offline) or .png, .svg, .pdf.

    No file needs a font of the machine that shows it: a PDF has its fonts inside, the text of an SVG is outlines.

    Args:
        figure: the figure.
        path: the target; its suffix chooses the form.
        width: width in CSS pixels of a static picture.
        height: height in CSS pixels of a static picture; a height set in the figure's layout wins.

    Raises:
        HswqError: no figure, an unknown suffix, a static form where no browser can be found (HTML still works), or a
            file that cannot be written.
    """
    target = path_of(path, "a figure's file")
    if not isinstance(figure, BaseFigure):
        raise HswqError(
            "this is no figure", file=target, found=repr(figure)[:80], fix="give what a plot function returns"
        )
    suffix = target.suffix.lower()
    if suffix == ".html":
        write_text(target, figure.to_html(include_plotlyjs=True, full_html=True))
        return target
    if suffix not in (".png", ".svg", ".pdf"):
        raise HswqError(
            "a figure cannot be saved in this form",
            file=target,
            found=suffix or "no suffix",
            expected=".html, .png, .svg or .pdf",
        )
    missing = why_no_static_export()
    if missing is not None:
        raise HswqError(
            "a static picture cannot be made here", file=target, found=missing, fix="save as .html instead"
        )
    options = {
        "format": suffix[1:],
        "width": width,
        "height": figure.layout.height or height,
        "scale": 2 if suffix == ".png" else 1,
    }
    write_whole(target, _drawn(figure, options))
    return target


def _drawn(figure: go.Figure, options: dict[str, Any]) -> bytes:
    content = figure.to_dict()
    if options["format"] == "svg":
        layout = content["layout"]
        layout["font"] = {**layout.get("font", {}), "family": FAMILY}
    with static_export():
        drawn: bytes = import_module("kaleido").calc_fig_sync(content, opts=options)
    return outlined(drawn.decode()).encode() if options["format"] == "svg" else drawn
