"""SensitivityExplorer: forecasts, budgets, measured plans, the panel, and where the user makes mistakes."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import pytest

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.plots import impact_figure, plans_figure
from hswq_lab.plots.style import placeholder
from hswq_lab.progress import silent
from hswq_lab.quantize import ImpactReport, LayerImpact, Plan
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
    sha256, encoder = tiny_model.checkpoint.sha256, tiny_model.companion.encoder_identity
    return ImpactReport("tiny", sha256, ["a"], [1], 4, 2.5, 1.5, (16, 16), "rtn", rows, captions=encoder)


def state_of(model, report):
    state = SensitivityState(model)
    state.take(report)
    return state


@pytest.fixture
def shown(tiny_model, impacts):
    panel = SensitivityExplorer(tiny_model, impacts, steps=1, seeds=1)
    yield panel
    panel.close()


def test_a_forecast_is_that_of_the_plan(tiny_model, impacts):
    state = state_of(tiny_model, impacts)
    few, many = state.forecast(2), state.forecast(10)
    assert (few.nvfp4, many.nvfp4) == (2, 10)
    assert few.nbytes == impacts.plan(nvfp4=2).nbytes(impacts.layers)
    assert few.bits > many.bits
    assert few.predicted > many.predicted
    assert state.measured_cos(2, 1, 1) is None


def test_a_byte_budget_gives_the_smallest_cut_that_fits(tiny_model, impacts):
    state = state_of(tiny_model, impacts)
    budget = state.forecast(7).nbytes
    found = state.count_within(budget)
    assert state.forecast(found).nbytes <= budget
    assert found == 0 or state.forecast(found - 1).nbytes > budget
    with pytest.raises(HswqError, match="no plan is that small"):
        state.count_within(10)


def test_a_measured_plan_is_kept_once_and_shown_beside_the_prediction(tiny_model, impacts):
    state = state_of(tiny_model, impacts)
    state.measure_plan(5, 1, 1, silent)
    state.measure_plan(2, 1, 1, silent)
    report = state.measure_plan(5, 1, 1, silent)
    assert [point.nvfp4 for point in report.points] == [2, 5]
    assert state.measured_cos(5, 1, 1) == report.points[1].mean


def test_a_plan_is_packed_into_a_file_and_never_over_another(tiny_model, impacts, tmp_path):
    state = state_of(tiny_model, impacts)
    path = state.pack(3, tmp_path / "x.safetensors", silent)
    formats = [entry.format for entry in Checkpoint.open(path).entries()]
    assert formats.count("nvfp4") == 3
    with pytest.raises(HswqError, match="exists"):
        state.pack(4, path, silent)


def test_without_impacts_everything_says_so(tiny_model):
    state = SensitivityState(tiny_model)
    for ask in (
        lambda: state.plan(3),
        lambda: state.forecast(3),
        lambda: state.measure_plan(3, 1, 1, silent),
    ):
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
    rest = dict(list(tiny_model.layers().items())[3:])
    shown = SensitivityExplorer(tiny_model, replace(impacts, rows=impacts.rows[:3], unmeasured=rest))
    assert (shown.errors.value, shown.cut.max) == ("", 3)
    shown.cut.value = 3
    assert f"3 NVFP4, 0 INT8, {len(rest)} left at 16 bit" in shown.forecast.value
    shown.close()


def test_impacts_can_be_measured_in_the_panel(tiny_model, tmp_path):
    shown = SensitivityExplorer(tiny_model, steps=1, seeds=1)
    assert shown.result() is None
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
    found, plan = state_of(tiny_model, partial).forecast(5), partial.plan(nvfp4=5)
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
    shown.state.measure_plan(1, 1, 1, lambda done, total, label: told.append((done, total, label)))
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

    def slow(nvfp4, prompts, steps, progress):
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
    assert shown.errors.value == "", "the work has ended"
    assert "cancelled" not in shown.status.value
    assert list(tmp_path.iterdir()) == []
    shown.pack_button.click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert (tmp_path / "x.safetensors").is_file()


# -- what is measured, and what it rests on ----------------------------------------------------------------------


@pytest.fixture
def other_order(impacts):
    """The same layers, the most sensitive ones now the least: other plans of the same length."""
    samples = [row.samples for row in impacts.rows]
    rows = [replace(row, samples=s) for row, s in zip(impacts.rows, reversed(samples), strict=True)]
    return replace(impacts, rows=rows)


def test_a_cosine_is_shown_only_for_the_very_plan_that_was_measured(tiny_model, impacts, other_order):
    state = state_of(tiny_model, impacts)
    first = state.measure_plan(5, 1, 1, silent).points[0].mean
    assert state.measured_cos(5, 1, 1) == first
    state.take(other_order)
    assert state.plan(5) != impacts.plan(nvfp4=5)
    assert state.measured_cos(5, 1, 1) is None, "as many layers, but others"
    report = state.measure_plan(5, 1, 1, silent)
    assert state.measured_cos(5, 1, 1) == report.points[1].mean != first
    state.take(impacts)
    assert state.measured_cos(5, 1, 1) == first, "both are kept"


def test_a_cosine_of_other_prompts_steps_or_guidance_is_not_shown(tiny_model, impacts):
    state = state_of(tiny_model, impacts)
    state.measure_plan(5, 1, 1, silent)
    assert state.measured_cos(5, 2, 1) is state.measured_cos(5, 1, 2) is None
    report = state.measure_plan(5, 2, 3, silent)
    assert (len(report.prompts), report.steps, len(report.points)) == (2, 3, 1)
    assert state.measured_cos(5, 2, 3) == report.points[0].mean != state.measured_cos(5, 1, 1)
    state.take(replace(impacts, cfg=4.0))
    assert state.measured_cos(5, 2, 3) is None
    assert state.measure_plan(5, 2, 3, silent).cfg == 4.0


def test_layers_that_no_impact_tells_of_make_another_plan(tiny_model, impacts):
    state = state_of(tiny_model, impacts)
    state.measure_plan(3, 1, 1, silent)
    rest = dict(list(tiny_model.layers().items())[5:])
    state.take(replace(impacts, rows=impacts.rows[:5], unmeasured=rest))
    assert state.measured_cos(3, 1, 1) is None, "these are 16 bit now"


def test_a_plan_is_measured_with_the_prompts_and_steps_on_screen(tiny_model, impacts):
    shown = SensitivityExplorer(tiny_model, impacts)
    assert (shown.prompts.value, shown.steps.value) == (1, 4), "those of the report"
    assert shown.prompts.max == len(tiny_model.prompts)
    shown.prompts.value, shown.steps.value = 2, 3
    assert "not measured (2 prompts, 3 steps)" in shown.forecast.value
    shown.plan_button.click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert re.search(
        r"predicted 0\.\d{5} \(1 prompt, 4 steps\), measured 0\.\d{5} \(2 prompts, 3 steps\)",
        shown.forecast.value,
    )
    assert "rest on different prompts, seeds or steps" in shown.forecast.value
    assert "measured plans: 2 seeds, 3 steps" in shown.plans.shown.layout.title.subtitle.text
    shown.steps.value = 2
    assert "not measured (2 prompts, 2 steps)" in shown.forecast.value
    assert "rest on different" not in shown.forecast.value
    shown.steps.value = 3
    assert "not measured" not in shown.forecast.value
    shown.close()


def test_predicted_and_measured_on_the_same_prompts_need_no_remark(tiny_model):
    shown = SensitivityExplorer(tiny_model, steps=2, seeds=1)
    for button in (shown.measure_button, shown.plan_button):
        button.click()
        assert shown.wait(SOON)
    assert shown.forecast.value.count("(1 prompt, 2 steps)") == 2
    assert "beware" not in shown.forecast.value
    shown.close()


# -- impacts of something else -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "problem"),
    [({"sha256": "0" * 64}, "another checkpoint"), ({"captions": "other"}, "another text encoder"),
     ({"rows": []}, "no layer")],
)  # fmt: skip
def test_impacts_of_another_model_are_refused_at_once(tiny_model, impacts, changed, problem):
    shown = SensitivityExplorer(tiny_model, replace(impacts, **changed))
    assert problem in shown.errors.value
    assert shown.result() is None
    assert shown.forecast.value == ""
    shown.close()


def test_captions_that_a_file_does_not_tell_are_no_reason_to_refuse(tiny_model, impacts):
    assert state_of(tiny_model, replace(impacts, captions=None)).report is not None


def test_what_is_no_impact_report_is_said_in_the_panel(tiny_model):
    shown = SensitivityExplorer(tiny_model, "impacts.json")
    assert "this is no impact report" in shown.errors.value
    assert "hl.sensitivity" in shown.errors.value
    shown.close()


# -- exports ---------------------------------------------------------------------------------------------------------


def test_impacts_measured_plans_and_the_plan_are_exported_as_chosen(shown, impacts, tmp_path):
    shown._folder = tmp_path
    assert shown.what.options == ("impacts", "plan")
    shown.cut.value = 4
    shown.plan_button.click()
    assert shown.wait(SOON)
    assert (shown.what.options, shown.what.value) == (("impacts", "measured plans", "plan"), "impacts")
    written = {}
    for what in shown.what.options:
        shown.what.value = what
        written[what] = shown.export("json")
    assert [path.name for path in written.values()] == [
        "hswq-sensitivity-impacts.json", "hswq-sensitivity-measured-plans.json", "hswq-sensitivity-plan.json",
    ]  # fmt: skip
    assert ImpactReport.load(written["impacts"]).rows == impacts.rows
    assert json.loads(written["measured plans"].read_text())["result"] == "ParetoReport"
    assert Plan.load(written["plan"]) == impacts.plan(nvfp4=4)


def test_a_plan_is_offered_as_json_only(shown, tmp_path):
    shown._folder = tmp_path
    shown.what.value = "plan"
    assert [form for form, button in shown.export_buttons.items() if not button.disabled] == ["json"]
    with pytest.raises(HswqError, match="JSON only"):
        shown.export("csv")
    shown.what.value = "impacts"
    assert not any(button.disabled for button in shown.export_buttons.values())


def test_measured_plans_are_offered_while_their_prompts_and_steps_are_on_screen(shown):
    shown.plan_button.click()
    assert shown.wait(SOON)
    shown.what.value = "measured plans"
    shown.cut.value -= 1
    assert shown.what.value == "measured plans"
    shown.steps.value += 1
    assert (shown.what.options, shown.what.value) == (("impacts", "plan"), "impacts")
