"""SensitivityExplorer where the user makes mistakes, and what stands beside the plots."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from test_widgets_explore import SOON, impacts  # noqa: F401  # a fixture

from hswq_lab.errors import HswqError
from hswq_lab.plots import plans_figure
from hswq_lab.plots.style import placeholder
from hswq_lab.progress import silent
from hswq_lab.widgets import SensitivityExplorer
from hswq_lab.widgets.sensitivity_state import SensitivityState


@pytest.fixture
def shown(tiny_model, impacts):  # noqa: F811  # pytest's way
    panel = SensitivityExplorer(tiny_model, impacts, steps=1, seeds=1)
    yield panel
    panel.close()


def test_a_forecast_counts_the_layers_that_were_not_measured(tiny_model, impacts):  # noqa: F811
    rows = [row for row in impacts.rows if row.layer != "x_embedder"]
    partial = replace(impacts, rows=rows, unmeasured={"x_embedder": tiny_model.layers()["x_embedder"]})
    found, plan = SensitivityState(tiny_model, partial).forecast(5), partial.plan(nvfp4=5)
    assert found.nbytes == plan.nbytes(tiny_model.layers())
    assert found.bits == plan.bits(tiny_model.layers())


def test_a_refused_budget_is_forgotten_when_the_cut_moves(shown):
    shown.budget.value = "no size"
    assert "this is no size" in shown.errors.value
    shown.cut.value = 1
    assert shown.budget.value == shown.errors.value == ""


def test_a_plan_is_packed_only_into_a_file_that_is_named(shown, tmp_path, monkeypatch):
    with pytest.raises(HswqError, match="no file is named"):
        shown.state.pack(1, " ", silent)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert shown.state.pack(1, "~/planned.safetensors", silent) == tmp_path / "planned.safetensors"
    assert (tmp_path / "planned.safetensors").stat().st_size > 1000


def test_the_progress_of_a_measured_plan_says_what_runs(shown):
    told = []
    shown.state.measure_plan(1, lambda done, total, label: told.append((done, total, label)))
    assert {label for _, _, label in told} == {"measuring the plan of 1 NVFP4"}
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert len({done for done, _, _ in told}) > 10, "the time left is known soon"


def test_the_slider_computes_once_it_is_let_go(shown):
    assert shown.cut.continuous_update is False


def test_every_line_of_the_plans_is_in_the_legend():
    names = [trace.name for trace in plans_figure([(8, 1.0), (6, 0.99), (4.5, 0.9)], 1).data]
    assert names == ["predicted", "this cut", "same image below: cos ≥ 0.98"]


def test_an_exception_of_others_comes_with_what_to_do(shown):
    def broken(*_: object):
        raise MemoryError

    shown.state.measure_plan = broken
    shown.plan_button.click()
    assert shown.wait(SOON)
    assert "MemoryError" in shown.errors.value
    assert "to do" in shown.errors.value


def test_a_placeholder_leaves_its_axes_a_height():
    layout = placeholder("what was measured comes here").layout
    assert layout.height - layout.margin.t - layout.margin.b > 40, "plotly fails without one"


def test_a_second_button_does_not_throw_away_the_work_that_runs(shown, tmp_path):
    inside, go = threading.Event(), threading.Event()

    def slow(nvfp4, progress):
        progress(0, 1, "measuring")
        inside.set()
        assert go.wait(SOON)
        shown.state.model.generate("a thing", 1, 1, progress=progress)
        return nvfp4

    shown.state.measure_plan = slow
    shown.plan_button.click()
    assert inside.wait(SOON)
    shown.path.value = str(tmp_path / "x.safetensors")
    shown.pack_button.click()
    assert "this panel is at work" in shown.errors.value
    go.set()
    assert shown.wait(SOON)
    assert "cancelled" not in shown.status.value
    assert list(tmp_path.iterdir()) == []
    shown.pack_button.click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert (tmp_path / "x.safetensors").is_file()
