"""Manners: what a panel asks of the page beyond ipywidgets; see assets/panel.js."""

from __future__ import annotations

from importlib.resources import files

import anywidget


class Manners(anywidget.AnyWidget):
    """Shows nothing; keeps the keys of the panel around it, and names its sliders for screen readers."""

    _esm = (files("hswq_lab") / "assets" / "panel.js").read_text(encoding="utf-8")
