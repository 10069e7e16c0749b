"""BakeCheck where something comes in between: what it shows is what is on the pack."""

from __future__ import annotations

import threading

import pytest
from test_widgets_explore import SOON, loras  # noqa: F401  # a fixture

from hswq_lab.plots import retention_figure
from hswq_lab.widgets import BakeCheck

NOTHING = "no LoRA is on the pack"


@pytest.fixture
def shown(tiny_pack, loras):  # noqa: F811  # pytest's way
    panel = BakeCheck(tiny_pack, loras, steps=1)
    panel.apply_button.click()
    assert panel.wait(SOON)
    assert "PASSED" in panel.verdict.value
    yield panel
    panel.close()


@pytest.fixture
def held(shown):
    """The panel's next apply stops in its last picture, with the LoRA on the pack, until it is let go."""
    inside, go, run = threading.Event(), threading.Event(), shown.state._run

    def slow(model, prompt, seed, progress):
        if model.loras:
            inside.set()
            assert go.wait(SOON)
        return run(model, prompt, seed, progress)

    shown.state._run = slow
    shown.apply_button.click()
    assert inside.wait(SOON)
    yield go
    go.set()


def test_undo_stops_an_apply_that_runs_and_has_the_last_word(shown, held):
    shown.undo_button.click()
    held.set()
    assert shown.wait(SOON)
    assert shown.state.pack.loras == []
    assert NOTHING in shown.verdict.value
    assert shown.pictures.value == shown.errors.value == ""


def test_a_cancelled_apply_leaves_no_lora_and_no_verdict_of_the_one_before(shown, held):
    shown.cancel()
    held.set()
    assert shown.wait(SOON)
    assert shown.state.pack.loras == []
    assert shown.result() is None
    assert NOTHING in shown.verdict.value
    assert "cancelled" in shown.status.value


def test_after_a_fault_there_is_no_verdict_of_the_one_before(shown):
    def broken(*_: object):
        raise RuntimeError("out of memory")

    shown.state._run = broken
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert "out of memory" in shown.errors.value
    assert shown.state.pack.loras == []
    assert NOTHING in shown.verdict.value


def test_nothing_ticked_changes_nothing(shown):
    before = shown.verdict.value
    for ticked, _ in shown.rows:
        ticked.value = False
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert "no LoRA is chosen" in shown.errors.value
    assert len(shown.state.pack.loras) == 1
    assert shown.verdict.value == before


def test_strength_zero_is_no_failure(shown):
    shown.rows[0][1].value = 0.0
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert "×0" in shown.verdict.value
    assert "change no weight" in shown.verdict.value
    assert "FAILED" not in shown.verdict.value


def test_the_progress_names_the_picture_that_is_made(shown):
    told: list[str] = []
    say = shown.say
    shown.say = lambda text: (told.append(text), say(text))
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert any(text.startswith("picture without LoRA") for text in told)


def test_an_error_many_times_the_delta_does_not_crowd_the_axis(shown):
    axis = retention_figure({"bake": shown.state.report}).layout.yaxis
    assert axis.dtick is None
    assert axis.nticks == 5
