"""SensitivityExplorer: forecasts, budgets, measured plans, the panel, and where the user makes mistakes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.plots import impact_figure, plans_figure
from hswq_lab.plots.style import placeholder
from hswq_lab.progress import silent
from hswq_lab.quantize import ImpactReport, LayerImpact
from hswq_lab.widgets import SensitivityExplorer
from hswq_lab.widgets.sensitivity_state import SensitivityState

SOON = 60.0


@pytest.fixture
def impacts(tiny_model):
    """Impacts that grow from layer to layer."""
    rows = [
        LayerImpact(layer, "nvfp4", n, k, [10.0 ** (place - 8)])
        for place, (layer, (n, k)) in enumerate(tiny_model.layers().items())
    ]
    return ImpactReport("tiny", "", ["a"], [1], 4, 2.5, 1.5, (16, 16), "rtn", rows)


@pytest.fixture
def shown(tiny_model, impacts):
    panel = SensitivityExplorer(tiny_model, impacts, steps=1, seeds=1)
    yield panel
    panel.close()


def test_a_forecast_is_that_of_the_plan(tiny_model, impacts):
    state = SensitivityState(tiny_model, impacts)
    few, many = state.forecast(2), state.forecast(10)
    assert (few.nvfp4, many.nvfp4) == (2, 10)
    assert few.nbytes == impacts.plan(nvfp4=2).nbytes(impacts.layers)
    assert few.bits > many.bits
    assert few.predicted > many.predicted
    assert state.measured_cos(2) is None


def test_a_byte_budget_gives_the_smallest_cut_that_fits(tiny_model, impacts):
    state = SensitivityState(tiny_model, impacts)
    budget = state.forecast(7).nbytes
    found = state.count_within(budget)
    assert state.forecast(found).nbytes <= budget
    assert found == 0 or state.forecast(found - 1).nbytes > budget
    with pytest.raises(HswqError, match="no plan is that small"):
        state.count_within(10)


def test_a_measured_plan_is_kept_once_and_shown_beside_the_prediction(tiny_model, impacts):
    state = SensitivityState(tiny_model, impacts, steps=1, seeds=1)
    state.measure_plan(5, silent)
    state.measure_plan(2, silent)
    report = state.measure_plan(5, silent)
    assert [point.nvfp4 for point in report.points] == [2, 5]
    assert state.measured_cos(5) == report.points[1].mean


def test_a_plan_is_packed_into_a_file_and_never_over_another(tiny_model, impacts, tmp_path):
    state = SensitivityState(tiny_model, impacts)
    path = state.pack(3, tmp_path / "x.safetensors", silent)
    formats = [entry.format for entry in Checkpoint.open(path).entries()]
    assert formats.count("nvfp4") == 3
    with pytest.raises(HswqError, match="exists"):
        state.pack(4, path, silent)


def test_without_impacts_everything_says_so(tiny_model):
    state = SensitivityState(tiny_model)
    for ask in (lambda: state.plan(3), lambda: state.forecast(3), lambda: state.measure_plan(3, silent)):
        with pytest.raises(HswqError, match="not measured"):
            ask()


def test_the_slider_moves_the_cut_and_a_click_on_a_bar_too(tiny_model, impacts):
    shown = SensitivityExplorer(tiny_model, impacts)
    shown.cut.value = 4
    assert "4 NVFP4" in shown.forecast.value
    before = shown.bars.plot.drawing.value
    shown.bars.plot._received(None, {"event": "click", "x": impacts.ranking()[6], "note": []}, [])
    assert shown.cut.value == 7
    assert shown.bars.plot.drawing.value != before
    shown.plans.plot._received(None, {"event": "click", "x": "4.5", "note": [3, "0.99"]}, [])
    assert shown.cut.value == 3
    shown.order.value = "kind"
    assert shown.errors.value == ""


def test_a_budget_moves_the_cut_and_is_forgotten_when_the_cut_moves_on(tiny_model, impacts):
    shown = SensitivityExplorer(tiny_model, impacts)
    size = shown.state.forecast(9).nbytes
    shown.budget.value = str(size / 2**20)
    assert shown.cut.value == shown.state.count_within(size)
    assert shown.budget.value != ""
    shown.cut.value = 2
    assert shown.budget.value == ""
    for text, problem in (("many", "no size"), ("-1", "no size"), ("0.0001", "no plan is that small")):
        shown.budget.value = text
        assert problem in shown.errors.value
        assert shown.cut.value == 2
    shown.budget.value = str(size / 2**20)
    assert shown.errors.value == ""


def test_a_report_of_some_layers_offers_only_those(tiny_model, impacts):
    shown = SensitivityExplorer(tiny_model, replace(impacts, rows=impacts.rows[:3]))
    assert (shown.errors.value, shown.cut.max) == ("", 3)
    shown.cut.value = 3
    assert "3 NVFP4, 0 INT8" in shown.forecast.value


def test_impacts_can_be_measured_in_the_panel(tiny_model, tmp_path):
    shown = SensitivityExplorer(tiny_model, steps=1, seeds=1)
    assert shown.result() is None
    shown.impact_seeds.value, shown.impact_steps.value = 1, 1
    shown.measure_button.click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert "NVFP4" in shown.forecast.value
    shown.plan_button.click()
    assert shown.wait(SOON)
    assert "not measured" not in shown.forecast.value
    shown.path.value = str(tmp_path / "made.safetensors")
    shown.pack_button.click()
    assert shown.wait(SOON)
    assert "calibrate it" in shown.status.value
    assert (tmp_path / "made.safetensors").is_file()


@pytest.mark.parametrize("order", ["impact", "block", "kind"])
def test_bars_come_in_the_order_that_was_asked_for(impacts, order):
    names = list(impact_figure(impacts, order=order).layout.xaxis.categoryarray)
    network = list(impacts.layers)
    assert sorted(names) == sorted(network)
    if order == "block":
        assert names == network
        assert list(impact_figure(impacts, order=order).layout.xaxis.ticktext)[-1] == "others"
    if order == "kind":
        ends = [name.split(".", 2)[-1] for name in names if name.startswith("layers.")]
        assert ends == sorted(ends, key=ends.index)
        axis = impact_figure(impacts, order=order).layout.xaxis
        middle = axis.ticktext.index("attention.qkv")
        assert names[round(axis.tickvals[middle])].endswith("attention.qkv")


def test_a_forecast_counts_the_layers_that_were_not_measured(tiny_model, impacts):
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
