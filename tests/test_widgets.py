"""Panels: jobs, newest request wins, errors in the panel, exports, figures with and without anywidget."""

from __future__ import annotations

import gc
import json
import math
import re
import threading
import time
from dataclasses import dataclass

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from PIL import Image

import hswq_lab as hl
from hswq_lab.errors import HswqError
from hswq_lab.lora import lora_from_tensors
from hswq_lab.progress import silent
from hswq_lab.results import Result
from hswq_lab.widgets import LiveFigure, Panel, StrengthSlider, live_figure, markup, panel
from hswq_lab.widgets.latest import Latest
from hswq_lab.widgets.strength import StrengthModel

EVIL = '<img src=x onerror="alert(1)">'
SOON = 20.0


@pytest.fixture
def lora():
    """A LoRA on one layer of the tiny model."""
    generator = torch.Generator().manual_seed(3)
    name = "transformer.layers.0.attention.to_q"
    return lora_from_tensors(
        {
            f"{name}.lora_A.weight": torch.randn(2, 64, generator=generator),
            f"{name}.lora_B.weight": torch.randn(64, 2, generator=generator),
        },
        name="style",
    )


@dataclass(frozen=True)
class Small(Result):
    values: list[float]

    def to_frame(self):
        return pd.DataFrame({"value": self.values})

    def figure(self):
        return go.Figure(go.Bar(y=self.values))


class SmallPanel(Panel):
    """A panel with a result from the start."""

    def __init__(self, folder):
        super().__init__("small", "", [], css_class="hswq-small", folder=folder)
        self.allow_exports()

    def result(self):
        return Small([1.0, 2.0])


def test_the_newest_request_wins_and_the_ones_between_never_run():
    ran, shown = [], []
    work = Latest(lambda job: None, delay=0.01)
    started = threading.Event()

    def make(number):
        def unit(progress):
            ran.append(number)
            started.set()
            for step in range(1000):
                progress(step, 1000, str(number))
                if number == 9:
                    break
                time.sleep(0.005)
            return number

        return unit

    work.request(make(0), shown.append)
    assert started.wait(SOON)
    for number in range(1, 10):
        work.request(make(number), shown.append)
    assert work.wait(SOON)
    assert shown == [9]
    assert ran == [0, 9]


def test_work_that_has_ended_and_is_being_shown_is_over():
    shown, seen, go = [], [], threading.Event()
    work = Latest(lambda job: None, delay=0.0)

    def show(result):
        shown.append((result, work.busy))
        if result == 1:
            work.request(lambda progress: 2, show)
            seen.append(work.busy)

    work.request(lambda progress: 1 if go.wait(SOON) else None, show)
    assert work.busy
    go.set()
    assert work.wait(SOON)
    assert shown == [(1, False), (2, False)]
    assert seen == [True]
    assert not work.busy


def test_a_request_that_waits_can_be_cancelled():
    shown = []
    work = Latest(lambda job: None, delay=30.0)
    work.request(lambda progress: 1, shown.append)
    work.cancel()
    assert work.wait(SOON)
    assert shown == []


def test_progress_shows_time_left_and_cancel_stops_within_a_second():
    shown = SmallPanel("x")
    running = threading.Event()

    def slow(progress):
        for unit in range(10_000):
            progress(unit, 10_000, "unit")
            if unit == 60:
                running.set()
            time.sleep(0.005)

    shown.start(slow, lambda _: None)
    assert running.wait(SOON)
    time.sleep(0.2)
    assert shown.cancel_button.description == "Cancel"
    assert "left" in shown.status.value
    assert 0 < shown.bar.value < 1
    before = time.monotonic()
    shown.cancel_button.click()
    assert "stopping" in shown.status.value or "cancelled" in shown.status.value
    assert shown.wait(SOON)
    assert time.monotonic() - before < 1
    assert "cancelled" in shown.status.value


def test_a_worker_threads_error_is_shown_in_the_panel_and_cleared_by_the_next_work():
    shown = SmallPanel("x")

    def broken(progress):
        raise HswqError("the layer is missing", tensor=EVIL, fix="name another")

    shown.start(broken, lambda _: None)
    assert shown.wait(SOON)
    assert "the layer is missing" in shown.errors.value
    assert "name another" in shown.errors.value
    assert 'role="alert"' in shown.errors.value
    assert EVIL not in shown.errors.value
    shown.start(lambda progress: 1, lambda _: None)
    assert shown.wait(SOON)
    assert shown.errors.value == ""


def test_an_error_in_the_handler_of_a_result_is_shown_too():
    shown = SmallPanel("x")
    shown.start(lambda progress: 1, lambda result: result / 0)
    assert shown.wait(SOON)
    assert "ZeroDivisionError" in shown.errors.value
    assert "where it came from" in shown.errors.value


def test_a_guarded_handler_shows_what_a_click_would_swallow():
    shown = SmallPanel("x")
    button = ipywidgets.Button()
    button.on_click(shown.guarded(lambda _: {}["key"]))
    button.click()
    assert "KeyError" in shown.errors.value


@pytest.mark.parametrize("form", ["html", "csv", "json"])
def test_exports_are_written_and_the_file_is_named(tmp_path, form):
    shown = SmallPanel(tmp_path)
    shown.export_buttons[form].click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    path = tmp_path / f"hswq-small.{form}"
    assert str(path) in shown.status.value
    assert path.stat().st_size > 10
    if form == "json":
        assert json.loads(path.read_text())["values"] == [1.0, 2.0]


@pytest.mark.parametrize("late", [False, True])
def test_a_cancelled_export_leaves_no_file_or_says_that_it_is_written(tmp_path, late):
    shown = SmallPanel(tmp_path)
    save, inside, go = shown.export, threading.Event(), threading.Event()

    def slow(form):
        inside.set()
        assert go.wait(SOON)
        return save(form)

    shown.export = slow
    shown.export_buttons["csv"].click()
    if late:
        assert inside.wait(SOON)
    shown.cancel()
    go.set()
    assert shown.wait(SOON)
    if not (tmp_path / "hswq-small.csv").exists():
        assert not late
    else:
        assert "written" in shown.status.value


def test_an_export_leaves_what_was_exported_before(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = SmallPanel("~/figures")
    written = [shown.export("csv"), shown.export("csv"), shown.export("json"), shown.export("csv")]
    names = ["hswq-small.csv", "hswq-small-2.csv", "hswq-small.json", "hswq-small-3.csv"]
    assert written == [tmp_path / "figures" / name for name in names]
    assert all(path.stat().st_size > 10 for path in written)


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_static_export_without_a_browser_says_so_and_offers_html(tmp_path, monkeypatch, form):
    monkeypatch.setattr(panel, "why_no_static_export", lambda: "no Chromium was found")
    shown = SmallPanel(tmp_path)
    shown.export_buttons[form].click()
    assert shown.wait(SOON)
    assert "no Chromium was found" in shown.errors.value
    assert "HTML" in shown.errors.value
    assert list(tmp_path.iterdir()) == []


def test_an_export_does_not_stop_the_work_that_runs(tmp_path):
    shown, results = SmallPanel(tmp_path), []
    going = threading.Event()

    def slow(progress):
        for unit in range(200):
            progress(unit, 200, "unit")
            going.set()
            time.sleep(0.005)
        return "done"

    shown.start(slow, results.append)
    assert going.wait(SOON)
    shown.export_buttons["csv"].click()
    assert shown.wait(SOON)
    assert results == ["done"]


def test_nothing_to_export_is_said():
    with pytest.raises(HswqError, match="nothing to export"):
        Panel("x", "", [], css_class="hswq-x").export("csv")


def test_every_control_has_a_name_for_screen_readers(tiny_pack, lora):
    shown = StrengthSlider(tiny_pack, lora, steps=1)
    for control in (
        shown.strength,
        shown.prompt,
        shown.seed,
        shown.cancel_button,
        *shown.export_buttons.values(),
    ):
        assert control.description
    assert shown.wait(SOON)
    shown.close()


def test_controls_come_back_after_a_restart_and_what_is_gone_is_left_out(tiny_pack, lora):
    shown = StrengthSlider(tiny_pack, lora, steps=1)
    manners = shown.children[-1]
    assert (
        manners.current.value == manners.initial == {"strength": 1.0, "prompt": "thing number 0", "seed": 42}
    )
    shown.strength.value = 0.3
    assert manners.current.value["strength"] == 0.3
    assert manners.initial["strength"] == 1.0
    kept = {"strength": 0.7, "seed": "no number", "no such control": 1}
    manners._received(None, {"event": "restore", "values": kept}, [])
    assert (shown.strength.value, shown.seed.value) == (0.7, 42)
    assert shown.wait(SOON)
    assert "strength 0.70" in shown.pictures.value
    assert "“thing number 0”, seed 42, 1 step" in shown.pictures.value
    assert shown.errors.value == ""
    shown.close()


def test_a_closed_panel_leaves_no_model_behind(tiny_pack, lora):
    warm = StrengthSlider(tiny_pack, lora, steps=1)  # what all panels share stays
    warm.close()
    models = ipywidgets.widgets.widget._instances
    before = set(models)
    shown = StrengthSlider(tiny_pack, lora, steps=1)
    assert shown.wait(SOON)
    shown.close()
    left = [models[name] for name in set(models) - before]
    assert [each for each in left if not isinstance(each, ipywidgets.Layout | ipywidgets.Style)] == []


def test_a_live_figure_changes_in_place():
    shown = LiveFigure(go.Figure(go.Bar(x=["a"], y=[1])))
    plot = shown.plot
    shown.show(go.Figure([go.Bar(y=[1]), go.Scatter(y=[math.nan, 3])], layout={"title": {"text": "new"}}))
    assert shown.plot is plot
    assert [trace["type"] for trace in plot.drawing.value["data"]] == ["bar", "scatter"]
    assert plot.drawing.value["data"][1]["y"] == [None, 3]
    assert plot.drawing.value["layout"]["title"]["text"] == "new"


def test_a_click_on_a_point_reaches_the_handler():
    shown, clicked = LiveFigure(go.Figure(go.Bar(x=["a"], y=[1]))), []
    shown.on_click(clicked.append)
    shown.plot._received(None, {"event": "click", "x": "a", "note": ["of a"]}, [])
    shown.plot._received(None, {"event": "hover", "x": "b"}, [])
    assert clicked == [("a", ["of a"])]


def test_plotly_comes_once_for_all_plots_and_a_plot_is_light():
    first, second = (LiveFigure(go.Figure(go.Bar(y=[1]))).plot for _ in range(2))
    assert first.source is second.source
    assert len(first.source.code) > 1_000_000
    assert len(json.dumps(first.drawing.get_state("value"))) + len(first._esm) < 20_000


def test_without_anywidget_a_plain_figure_and_a_message_are_shown(monkeypatch):
    monkeypatch.setattr(live_figure, "find_spec", lambda name: None)
    shown = LiveFigure(go.Figure(go.Bar(y=[1])))
    assert shown.plot is None
    assert "pip install anywidget" in shown.children[0].value
    (output,) = shown.children[1].outputs
    assert output["data"]["application/vnd.plotly.v1+json"]["data"][0]["y"] == [1]
    shown.show(go.Figure(go.Bar(y=[5])))
    assert shown.children[1].outputs[0]["data"]["application/vnd.plotly.v1+json"]["data"][0]["y"] == [5]


@pytest.mark.parametrize(
    "made",
    [
        markup.heading(EVIL, EVIL),
        markup.note(EVIL),
        markup.status(EVIL),
        markup.banner(EVIL, good=True),
        markup.error_box(ValueError(EVIL)),
        markup.error_box(HswqError(EVIL, file=EVIL, found=EVIL)),
        markup.pictures({EVIL: Image.new("RGB", (2, 2))}),
    ],
)
def test_markup_from_outside_is_text(made):
    assert not re.search(r"<img(?! alt=)", made)
    assert 'onerror="' not in made


def pictures(shown):
    return re.findall(r"data:image/png;base64,([^\"]+)", shown.pictures.value)


def test_the_slider_makes_a_picture_and_another_strength_another_one(tiny_model, tiny_pack, lora):
    shown = StrengthSlider(tiny_pack, lora, tiny_model, steps=2)
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    first = pictures(shown)
    assert len(first) == 3
    shown.strength.value = 0.5
    assert shown.wait(SOON)
    second = pictures(shown)
    assert "strength 0.50" in shown.pictures.value
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert second[2] != first[2]
    shown.close()


def test_strength_zero_is_the_pack_itself_and_the_models_given_stay_as_they_were(tiny_pack, lora):
    model = StrengthModel(tiny_pack, lora, None, "a thing", 42, 2)
    made = model.preview(0.0, silent)
    assert made.plain.tobytes() == made.packed.tobytes()
    assert made.source is None
    assert model.preview(1.0, silent).packed.tobytes() != made.packed.tobytes()
    assert tiny_pack.loras == []


def test_a_new_prompt_or_seed_makes_the_plain_picture_anew(tiny_pack, lora):
    shown = StrengthSlider(tiny_pack, lora, steps=1)
    assert shown.wait(SOON)
    first = pictures(shown)[0]
    shown.seed.value = 7
    assert shown.wait(SOON)
    assert pictures(shown)[0] != first
    shown.prompt.value = "another"
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    shown.close()


def test_progress_of_a_preview_goes_up_to_its_total(tiny_pack, lora):
    ticks = []
    StrengthModel(tiny_pack, lora, None, "a thing", 42, 2).preview(1.0, lambda *tick: ticks.append(tick[:2]))
    assert [done for done, _ in ticks] == sorted(done for done, _ in ticks)
    assert ticks[-1] == (200, 200)
    assert {total for _, total in ticks} == {200}


@pytest.mark.parametrize(
    "make",
    [
        lambda: hl.widgets.SensitivityExplorer("nowhere.safetensors"),
        lambda: hl.widgets.SensitivityExplorer(None),
        lambda: hl.widgets.GemmBench("nowhere.safetensors"),
        lambda: hl.widgets.GemmBench(3),
        lambda: hl.widgets.GemmBench({"a": 3}),
        lambda: hl.widgets.BakeCheck("pack.safetensors", []),
        lambda: hl.widgets.TrajectoryViewer(model="mini-zimage"),
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_panel_that_cannot_be_says_why_and_nothing_else(make):
    with pytest.raises(HswqError, match=r"this is no|have names"):
        make()
    gc.collect()  # what is left of it is closed without a second error


def test_a_missing_argument_is_one_error(tiny_pack):
    with pytest.raises(TypeError, match="loras"):
        hl.widgets.BakeCheck(tiny_pack)
    hl.widgets.BakeCheck.__new__(hl.widgets.BakeCheck).close()
