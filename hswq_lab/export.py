"""Figures to files: HTML always, PNG, SVG and PDF where a browser for the export is found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError
from hswq_lab.results import write_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

_BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "brave-browser",
)


def find_browser() -> str | None:
    """The path of a Chromium-like browser for static export, or None. BROWSER_PATH, kaleido's own, wins."""
    named = os.environ.get("BROWSER_PATH")
    if named:
        return named if Path(named).is_file() else None
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def why_no_static_export() -> str | None:
    """None where PNG, SVG and PDF can be written, else one sentence that says what is missing."""
    try:
        import kaleido  # noqa: F401
    except ImportError:
        return "the package kaleido is not installed (pip install 'hswq-lab[export]')"
    if find_browser() is None:
        return "no Chromium or Chrome was found (install one, or set BROWSER_PATH)"
    return None


def save_figure(
    figure: go.Figure, path: str | os.PathLike[str], *, width: int = 1000, height: int = 560
) -> Path:
    """Writes a plotly figure to .html (self-contained, opens offline) or .png, .svg, .pdf.

    Args:
        figure: the figure.
        path: the target; its suffix chooses the form.
        width: width in CSS pixels of a static picture.
        height: height in CSS pixels of a static picture; a height set in the figure's layout wins.

    Raises:
        HswqError: an unknown suffix, or a static form where no browser can be found (HTML still works).
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix == ".html":
        write_text(target, figure.to_html(include_plotlyjs=True, full_html=True))
        return target
    if suffix not in (".png", ".svg", ".pdf"):
        raise HswqError(
            "a figure cannot be saved in this form",
            file=target,
            found=suffix,
            expected=".html, .png, .svg or .pdf",
        )
    missing = why_no_static_export()
    if missing is not None:
        raise HswqError(
            "a static picture cannot be made here", file=target, found=missing, fix="save as .html instead"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    scale = 2 if suffix == ".png" else 1
    figure.write_image(target, width=width, height=figure.layout.height or height, scale=scale)
    return target
