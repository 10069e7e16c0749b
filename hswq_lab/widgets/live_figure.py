"""A plot that changes in place, or, where the front end cannot do that, a plain one and a message."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import ipywidgets

from hswq_lab.widgets import markup

if TYPE_CHECKING:
    from collections.abc import Callable

    import plotly.graph_objects as go

    from hswq_lab.widgets.plot import Plot

_NO_ANYWIDGET = (
    "This plot cannot change in place, because the package anywidget is not installed where the kernel runs: "
    "pip install anywidget, then restart the kernel. Until then it is drawn anew each time."
)


class Click(NamedTuple):
    """A point of a figure that was clicked.

    Attributes:
        x: its x value; names as the figure has them.
        note: its customdata; empty if it has none.
    """

    x: str
    note: list[object]


class LiveFigure(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """Shows a figure; `show` replaces it. Can be called from any thread.

    Args:
        figure: the first figure.

    Attributes:
        shown: what is shown.
        plot: the widget that draws it; None where anywidget is missing.
    """

    def __init__(self, figure: go.Figure) -> None:
        self.shown = figure
        self.plot: Plot | None = None
        self._plain = ipywidgets.Output()
        if find_spec("anywidget") is not None:
            self.plot = import_module("hswq_lab.widgets.plot").Plot(figure)
            super().__init__([self.plot])
        else:
            super().__init__([ipywidgets.HTML(markup.note(_NO_ANYWIDGET)), self._plain])
            self.show(figure)

    def show(self, figure: go.Figure) -> None:
        """Shows another figure in the same place."""
        self.shown = figure
        if self.plot is not None:
            self.plot.show(figure)
            return
        drawn = {"application/vnd.plotly.v1+json": json.loads(figure.to_json()), "text/plain": "a plot"}
        self._plain.outputs = ({"output_type": "display_data", "data": drawn, "metadata": {}},)

    def on_click(self, handler: Callable[[Click], None]) -> None:
        """Calls `handler` with a point that is clicked; a plain figure cannot tell."""
        if self.plot is not None:
            self.plot.on_click(lambda x, note: handler(Click(x, note)))
