"""The style sheet by which panels and figures follow a notebook's light or dark theme."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def theme() -> str:
    """A `<style>` element; it holds for the whole page that it stands in, and touches nothing of other packages."""
    return f"<style>{(files('hswq_lab') / 'assets' / 'theme.css').read_text(encoding='utf-8')}</style>"
