"""A plot that changes in place, or, where the front end cannot do that, a plain one and a message."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import ipywidgets
import plotly.graph_objects as go

from hswq_lab.widgets import markup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NO_ANYWIDGET = (
    "This plot cannot change in place, because the package anywidget is not installed where the kernel runs: "
    "pip install anywidget, then restart the kernel. Until then it is drawn anew each time."
)


class _Points(Protocol):
    """What plotly tells about a click."""

    xs: Sequence[object]


class LiveFigure(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """Shows a figure; `show` replaces it. Can be called from any thread.

    Args:
        figure: the first figure.
    """

    def __init__(self, figure: go.Figure) -> None:
        self._figure = figure
        self._live: go.FigureWidget | None = None
        self._plain = ipywidgets.Output()
        if find_spec("anywidget") is not None:
            self._live = go.FigureWidget(figure)
            super().__init__([self._live])
        else:
            super().__init__([ipywidgets.HTML(markup.note(_NO_ANYWIDGET)), self._plain])
            self.show(figure)

    @property
    def is_live(self) -> bool:
        """Whether the figure changes in place."""
        return self._live is not None

    @property
    def figure(self) -> go.Figure:
        """What is shown."""
        return self._figure

    def show(self, figure: go.Figure) -> None:
        """Shows another figure; one with the same traces is updated without being drawn anew."""
        self._figure = figure
        if self._live is None:
            drawn = {"application/vnd.plotly.v1+json": json.loads(figure.to_json()), "text/plain": "a plot"}
            self._plain.outputs = ({"output_type": "display_data", "data": drawn, "metadata": {}},)
            return
        live = self._live
        with live.batch_update():
            if [trace.type for trace in live.data] == [trace.type for trace in figure.data]:
                for mine, theirs in zip(live.data, figure.data, strict=True):
                    mine.update(theirs.to_plotly_json(), overwrite=True)
                live.layout.update(figure.layout.to_plotly_json(), overwrite=True)
                return
        live.data = ()
        live.add_traces(list(figure.data))
        live.layout = figure.layout

    def on_click(self, handler: Callable[[str], None]) -> None:
        """Calls `handler` with the x value of a point that is clicked; does nothing for a plain figure."""
        if self._live is None:
            return

        def clicked(_trace: object, points: _Points, _state: object) -> None:
            for x in points.xs:
                handler(str(x))

        for trace in self._live.data:
            trace.on_click(clicked)
