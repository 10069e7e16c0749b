"""Panels whose cell is run again or deleted: their work ends, that of panels which are still shown goes on."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest
from IPython.core.interactiveshell import InteractiveShell

from hswq_lab.widgets import Panel, places

SOON = 20.0


class Kernel(InteractiveShell):
    """A shell that runs cells as a kernel does: each run is a message, with the cell's id where the front end tells."""

    def run(self, cell, code, deleted=()):
        told = {} if cell is None else {"cellId": cell, "deletedCells": list(deleted)}
        self.request = {"header": {"msg_id": f"run {next(self.numbers)}"}, "metadata": told}
        self.run_cell(code, cell_id=cell).raise_error()

    def get_parent(self):
        return self.request


class Busy(Panel):
    """A panel that works from the start until it is cancelled."""

    def __init__(self):
        super().__init__("busy", "", [], css_class="hswq-busy")
        self.running, self.ended = threading.Event(), threading.Event()
        self.start(self._endless, lambda _: None)
        assert self.running.wait(SOON)

    def _endless(self, progress):
        try:
            for unit in count():
                progress(unit, unit + 1, "unit")
                self.running.set()
                time.sleep(0.01)
        finally:
            self.ended.set()


@pytest.fixture
def kernel(monkeypatch):
    shell = Kernel()
    shell.numbers, shell.user_ns["Busy"] = count(), Busy
    monkeypatch.setattr(places, "get_ipython", lambda: shell)
    made = []
    shell.user_ns |= {"made": made, "show": lambda panel: panel._repr_mimebundle_() and None}
    yield shell
    for panel in made:
        panel.close()


def make(kernel, cell):
    kernel.run(cell, "made.append(Busy()); show(made[-1])")
    return kernel.user_ns["made"][-1]


def goes_on(panel):
    return panel._work.busy and not panel.ended.wait(0.1)


def test_a_cell_that_is_run_again_ends_the_work_of_the_panel_it_showed(kernel):
    first, other = make(kernel, "a"), make(kernel, "b")
    second = make(kernel, "a")
    assert first.ended.wait(SOON)
    assert first.wait(SOON)
    assert "cancelled" in first.status.value
    assert goes_on(second)
    assert goes_on(other)


def test_a_cell_that_fails_or_makes_no_panel_any_more_ends_the_work_too(kernel):
    panel = make(kernel, "a")
    with pytest.raises(ZeroDivisionError):
        kernel.run("a", "1 / 0")
    assert panel.ended.wait(SOON)


def test_a_panel_that_is_shown_again_or_elsewhere_works_on(kernel):
    panel = make(kernel, "a")
    kernel.run("a", "show(made[0])")
    kernel.run("b", "show(made[0])")
    kernel.run("a", "0")
    assert goes_on(panel), "cell b shows it"
    kernel.run("b", "0")
    assert panel.ended.wait(SOON)


def test_a_deleted_cell_ends_the_work_once_another_cell_runs(kernel):
    panel = make(kernel, "a")
    kernel.run("b", "0", deleted=["a"])
    assert panel.ended.wait(SOON)


def test_where_nobody_says_which_cell_runs_nothing_is_ended(kernel, monkeypatch):
    panel = make(kernel, None)
    kernel.run(None, "0")
    assert goes_on(panel)
    monkeypatch.setattr(places, "get_ipython", lambda: None)
    assert "hswq-busy" in panel._dom_classes
    assert panel._repr_mimebundle_()["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.model_id


def test_what_is_remembered_of_a_panel_is_its_own(kernel):
    kernel.user_ns["place_of"] = places.place_of
    kernel.user_ns["told"] = told = []
    twice = "told.append([place_of('pack'), place_of('pack'), place_of('other')])"
    kernel.run("a", twice)
    kernel.run("b", twice)
    kernel.run("a", twice)  # as after a restart
    first, second, again = map(tuple, told)
    assert first == again
    assert len({*first, *second}) == 6
    kernel.run(None, twice)
    assert told[-1] == ["", "", ""], "nobody says where that is"
