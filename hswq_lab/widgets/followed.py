"""Followed: a value that the kernel changes and the page follows, whatever the page was busy with at first."""

from __future__ import annotations

import ipywidgets
import traitlets


class Followed(ipywidgets.Widget):  # type: ignore[misc]  # ipywidgets has no types
    """Shows nothing; holds a value for the scripts of other widgets.

    It is a model of ipywidgets' own. A model of anywidget (0.11) takes no change for the rest of its life when its
    script needed more than two seconds to load, which a busy page or machine brings about: a plot would stay as it was.

    Attributes:
        value: what JSON can hold.
    """

    value = traitlets.Dict().tag(sync=True)
