"""Where panels are made and shown: what a page remembers of one, and when its work has no Cancel in sight any more."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from IPython import get_ipython


class Cancellable(Protocol):
    """What can be told to stop."""

    def cancel(self) -> None:
        """Stops the work."""


_places: WeakKeyDictionary[Cancellable, dict[str, str]] = WeakKeyDictionary()  # → cell → run that showed it

_made: dict[str, Counter[str]] = {}  # the last run of a cell → how many panels about each subject it has made


def place_of(subject: str) -> str:
    """Where a panel that is made now stands: its cell, its subject, and its number among those in this run of the cell.

    It is the same after a restart, and where cells were inserted above. "" where nobody says which cell runs.
    """
    request = _request(get_ipython())
    cell = request.get("metadata", {}).get("cellId")
    if cell is None:
        return ""
    run = request["header"]["msg_id"]
    if run not in _made:
        _made.clear()
    made = _made.setdefault(run, Counter())
    made[subject] += 1
    return f"{cell} {subject} {made[subject]}"


def note_place(panel: Cancellable) -> None:
    """To be called where a panel is displayed: notes the cell, and the run of it.

    From then on the panel's work is cancelled at the end of a run after which no cell shows it any more. Front ends
    that do not say which cell runs (a terminal, a script) never end it.
    """
    shell = get_ipython()
    request = _request(shell)
    cell = request.get("metadata", {}).get("cellId")
    if cell is not None:
        _places.setdefault(panel, {})[cell] = request["header"]["msg_id"]
        shell.events.register("post_run_cell", _cell_has_run)


def _cell_has_run(_result: object) -> None:
    request = _request(get_ipython())
    told, run = request.get("metadata", {}), request.get("header", {}).get("msg_id")
    emptied = [told.get("cellId"), *told.get("deletedCells", ())]
    for panel, cells in list(_places.items()):
        for cell in emptied:
            if cells.get(cell, run) != run:
                del cells[cell]
                if not cells:
                    panel.cancel()


def _request(shell: Any) -> dict[str, Any]:  # noqa: ANN401 - IPython's shells have no common type for this
    """The message that asked for what runs now; empty outside a kernel."""
    ask = getattr(shell, "get_parent", None)
    return {} if ask is None else dict(ask())
