"""Plotly figures made from result objects; the only place that knows both."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    import plotly.graph_objects as go


@singledispatch
def figure_of(result: object) -> go.Figure:
    """The figure of a result.

    Raises:
        HswqError: no figure is known for this kind.
    """
    raise HswqError("there is no figure for this kind of result", found=type(result).__name__)
