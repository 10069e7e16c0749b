"""A plotly figure as a widget: light, as wide as its panel, updated in place.

plotly's own FigureWidget brings five megabytes of JavaScript each time, which on a slow machine do not load within the
two seconds that anywidget allows: the plot stays blank. Here the library is sent once, by a model that all plots share.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from ipywidgets import widget_serialization
from plotly.offline import get_plotlyjs

from hswq_lab.widgets.followed import Followed

if TYPE_CHECKING:
    from collections.abc import Callable

    import plotly.graph_objects as go


class PlotlySource(anywidget.AnyWidget):
    """Holds plotly.js for all plots of a kernel; shows nothing."""

    _esm = "export default { render() {} };"
    code = traitlets.Unicode().tag(sync=True)


@cache
def plotly_source() -> PlotlySource:
    """The one source of this kernel."""
    return PlotlySource(code=get_plotlyjs())


class Plot(anywidget.AnyWidget):
    """Shows a figure.

    Args:
        figure: the first one.
    """

    _esm = (files("hswq_lab") / "assets" / "plot.js").read_text(encoding="utf-8")
    source = traitlets.Instance(PlotlySource).tag(sync=True, **widget_serialization)
    drawing = traitlets.Instance(Followed).tag(sync=True, **widget_serialization)

    def __init__(self, figure: go.Figure) -> None:
        super().__init__(source=plotly_source(), drawing=Followed(value=json.loads(figure.to_json())))
        self._handlers: list[Callable[[str, list[object]], None]] = []
        self.on_msg(self._received)

    def show(self, figure: go.Figure) -> None:
        """Shows another figure in the same place; from any thread."""
        self.drawing.value = json.loads(figure.to_json())

    def on_click(self, handler: Callable[[str, list[object]], None]) -> None:
        """Calls `handler` with the x value and the customdata of a point that is clicked."""
        self._handlers.append(handler)

    def close(self) -> None:
        """Frees its models; the source is everybody's and stays."""
        self.drawing.close()
        super().close()

    def _received(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        if content.get("event") == "click":
            for handler in self._handlers:
                handler(content["x"], content["note"])
