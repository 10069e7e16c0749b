"""Panels for notebooks; they hold no logic that a script could not call."""

from __future__ import annotations

from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.panel import Panel
from hswq_lab.widgets.strength import StrengthSlider

__all__ = ["LiveFigure", "Panel", "StrengthSlider"]
