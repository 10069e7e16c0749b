"""Manners: what a panel asks of the page beyond ipywidgets; see assets/panel.js."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from ipywidgets import widget_serialization

from hswq_lab.widgets.followed import Followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    import ipywidgets


class Manners(anywidget.AnyWidget):
    """Shows nothing; keeps the keys of the panel around it, names its sliders, and remembers its controls.

    The page keeps the controls' values, so they survive "restart kernel and run all cells", and nothing is written.

    Args:
        place: where the panel stands, the same after a restart; "" for one whose controls are not to be remembered.
        controls: name → control with a `value` that JSON can hold.
    """

    _esm = (files("hswq_lab") / "assets" / "panel.js").read_text(encoding="utf-8")
    place = traitlets.Unicode().tag(sync=True)
    initial = traitlets.Dict().tag(sync=True)
    current = traitlets.Instance(Followed).tag(sync=True, **widget_serialization)

    def __init__(self, place: str, controls: Mapping[str, ipywidgets.Widget]) -> None:
        self._controls = dict(controls)
        values = self._read()
        super().__init__(place=place, initial=values, current=Followed(value=values))
        self.on_msg(self._received)
        for control in self._controls.values():
            control.observe(self._keep, names="value")

    def close(self) -> None:
        """Frees its models."""
        self.current.close()
        super().close()

    def _keep(self, _change: object) -> None:
        self.current.value = self._read()

    def _read(self) -> dict[str, Any]:
        return {name: control.value for name, control in self._controls.items()}

    def _received(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        if content.get("event") != "restore":
            return
        for name, value in content["values"].items():
            restored = tuple(value) if isinstance(value, list) else value
            try:
                self._controls[name].value = restored
            except (KeyError, traitlets.TraitError):
                continue  # an option or a range that is not there any more
