"""BakeCheck: every way arrives, undo is exact, and where something comes in between, it shows what is on the pack."""

from __future__ import annotations

import html
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image

import hswq_lab as hl
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.lora import lora_from_tensors
from hswq_lab.plots import retention_figure
from hswq_lab.progress import silent
from hswq_lab.widgets import BakeCheck
from hswq_lab.widgets.bake_state import AMPLIFIED, BakeState, Choice, SecondGeneration, difference

SOON = 60.0
NOTHING = "no LoRA is on the pack"


@pytest.fixture
def loras():
    """Two LoRAs on one layer each."""
    made = []
    for seed, name in enumerate(("attention.to_q", "feed_forward.w1")):
        generator = torch.Generator().manual_seed(seed)
        rows = 64 if "to_q" in name else 128
        module = f"transformer.layers.0.{name}"
        tensors = {
            f"{module}.lora_A.weight": torch.randn(2, 64, generator=generator),
            f"{module}.lora_B.weight": torch.randn(rows, 2, generator=generator),
        }
        made.append(lora_from_tensors(tensors, name=f"style{seed}"))
    return made


@pytest.fixture
def shown(tiny_pack, loras):
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


def test_every_way_arrives_and_undo_is_exact(tiny_model, tiny_pack, loras):
    state = BakeState(tiny_pack, loras, tiny_model, steps=1)
    plain = tiny_pack.generate("a thing", 1, 1).final
    for way in ("branch", "bake", "bake_from_source"):
        checked = state.apply([Choice(lora, 1.0) for lora in loras], way, "a thing", 1, silent)
        assert checked.report.verdict == "OK"
        assert checked.before.tobytes() != checked.after.tobytes()
        assert len(checked.pictures()) == 4
    state.undo()
    assert torch.equal(state.pack.generate("a thing", 1, 1).final, plain)
    assert tiny_pack.loras == []


def test_a_lora_that_does_not_fit_leaves_nothing_on_the_pack(tiny_pack, loras):
    wrong = lora_from_tensors(
        {
            "transformer.layers.0.attention.to_q.lora_A.weight": torch.ones(2, 32),
            "transformer.layers.0.attention.to_q.lora_B.weight": torch.ones(32, 2),
        }
    )
    state = BakeState(tiny_pack, [*loras, wrong], None, steps=1)
    with pytest.raises(HswqError):
        state.apply([Choice(loras[1], 1.0), Choice(wrong, 1.0)], "bake", "a thing", 1, silent)
    assert state.pack.loras == []
    with pytest.raises(HswqError, match="no LoRA is chosen"):
        state.apply([], "bake", "a thing", 1, silent)


def test_the_second_generation_is_the_first_and_the_test_can_fail(tiny_pack, loras):
    state = BakeState(tiny_pack, loras, None, steps=1)
    with pytest.raises(HswqError, match="press Apply first"):
        state.second_generation("a thing", 1, silent)
    state.apply([Choice(loras[0], 1.0)], "bake", "a thing", 1, silent)
    told = state.second_generation("a thing", 1, silent)
    assert told.passed
    assert "bit for bit" in str(told)
    lost = SecondGeneration(same_latent=False, same_evidence=True)
    assert not lost.passed
    assert "another latent" in str(lost)


def test_a_difference_is_grey_where_there_is_none_and_amplified_both_ways():
    a = Image.fromarray(np.array([[[10, 20, 30], [100, 0, 255]]], dtype=np.uint8))
    b = Image.fromarray(np.array([[[10, 20, 30], [90, 5, 0]]], dtype=np.uint8))
    shown = np.asarray(difference(a, b)).tolist()
    assert shown == [[[128, 128, 128], [128 + 10 * AMPLIFIED, 128 - 5 * AMPLIFIED, 255]]]


def test_the_panel_applies_what_is_ticked(tiny_model, tiny_pack, loras, tmp_path):
    shown = BakeCheck(tiny_pack, loras, tiny_model, steps=1)
    shown._folder = tmp_path
    shown.rows[0][0].value, shown.rows[1][0].value = False, True
    shown.rows[1][1].value = 0.5
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert "style1 ×0.5 (bake)" in shown.verdict.value
    assert "style0" not in shown.verdict.value
    assert shown.pictures.value.count("<img") == 4
    assert json.loads(shown.export("json").read_text())["loras"] == ["style1 ×0.5 (bake)"]
    shown.again_button.click()
    assert shown.wait(SOON)
    assert "bit for bit" in shown.generation.value
    assert "style1" in shown.verdict.value, "the evidence stays"
    shown.undo_button.click()
    assert shown.wait(SOON)
    assert shown.result() is None


def test_without_a_source_there_is_no_bake_from_source(tiny_pack, loras):
    shown = BakeCheck(tiny_pack, loras, steps=1)
    assert "bake_from_source" not in [way for _, way in shown.way._options_full]
    for row in shown.rows:
        row[0].value = False
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert "tick one" in shown.errors.value


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


def test_applying_a_lora_tells_every_layer_and_a_cancel_there_changes_nothing(tiny_pack, loras):
    told: list[tuple[int, int, str]] = []
    tiny_pack.attach(loras[0], how="bake", progress=lambda *tick: told.append(tick))
    layers = list(loras[0].deltas(tiny_pack))
    assert told == [(0, 1, layers[0]), (1, 1, "what arrived is known")]

    def cancelled(done, total, label):
        raise Cancelled("cancelled by the user")

    with pytest.raises(Cancelled):
        tiny_pack.attach(loras[1], how="bake", progress=cancelled)
    assert [item.lora for item in tiny_pack.loras] == [loras[0]]


def test_the_progress_goes_up_and_names_the_lora(tiny_pack, tiny_model, loras):
    told: list[tuple[int, int, str]] = []
    state = BakeState(tiny_pack, loras, tiny_model, steps=1)
    state.apply([Choice(lora, 1.0) for lora in loras], "bake", "a thing", 1, lambda *tick: told.append(tick))
    done, totals, labels = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {400}
    assert done[-1] == 400
    assert {"applying style0", "applying style1", "computing the evidence"} <= set(labels)


def test_what_an_error_asks_for_can_be_ticked(tiny_pack, loras, tmp_path):
    generator = torch.Generator().manual_seed(5)
    rest = {
        f"transformer.layers.{place}.attention.to_k.lora_{end}.weight": torch.randn(
            shape, generator=generator
        )
        for place in (0, 77)
        for end, shape in (("A", (2, 64)), ("B", (64, 2)))
    }
    more = lora_from_tensors(rest, name="of a larger model")
    tiny_pack.attach(loras[0], how="bake")
    file = hl.save(tiny_pack, tmp_path / "baked.safetensors")
    pack = hl.Model(hl.Checkpoint.open(file), name="baked", companion=tiny_pack.companion)
    shown = BakeCheck(pack, [more], steps=1)
    for control in (shown.allow_baked, shown.allow_unmatched):
        shown.apply_button.click()
        assert shown.wait(SOON)
        assert control.description in shown.errors.value
        control.value = True
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert "of a larger model" in shown.verdict.value
    left_out = "1 of 2 modules applied; 1 matches no layer: transformer.layers.77.attention.to_k"
    assert left_out in shown.verdict.value
    shown.rows[0][1].value = 0.0
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert "Nothing was to arrive" in shown.verdict.value
    assert left_out in shown.verdict.value
    shown.close()


def test_while_an_apply_runs_nothing_of_the_one_before_is_shown_or_exported(shown, held):
    assert "being applied" in shown.verdict.value
    assert shown.pictures.value == ""
    assert shown.checked is None
    shown.export_buttons["json"].click()
    assert shown._writing.wait(SOON)
    assert "at work" in shown.errors.value
    held.set()
    assert shown.wait(SOON)
    assert "PASSED" in shown.verdict.value
    assert shown.errors.value == "", "the reason is gone"


@pytest.mark.parametrize("button", ["apply_button", "again_button"])
def test_a_press_replaces_no_work_that_runs_and_the_word_about_it_ends_with_it(shown, held, button):
    getattr(shown, button).click()
    assert "this panel is at work" in shown.errors.value
    held.set()
    assert shown.wait(SOON)
    assert "style0 ×1" in shown.verdict.value
    assert shown.errors.value == ""


def test_pictures_say_what_they_are_of(shown):
    assert f"“{shown.prompt.value}”, seed 42, 1 step; with: style0 ×1 (bake)" in shown.pictures.value


def test_the_notes_of_the_evidence_are_shown(tiny_pack, tiny_model, loras):
    pack = hl.calibrate(tiny_pack, prompts=["a thing"], steps=1)
    shown = BakeCheck(pack, loras, tiny_model, steps=1)
    shown.apply_button.click()
    assert shown.wait(SOON)
    assert "measured without these LoRAs" in shown.verdict.value
    assert shown.state.report.notes
    assert all(html.escape(note) in shown.verdict.value for note in shown.state.report.notes)


def test_progress_and_cancel_stand_under_the_buttons_that_start_work(shown):
    parts = list(shown.children)
    buttons = next(
        place for place, part in enumerate(parts) if shown.apply_button in getattr(part, "children", ())
    )
    assert shown.status in parts[buttons + 1].children
    assert parts[buttons + 2] is shown.errors


def test_a_figure_is_named_alike_in_the_panel_and_in_its_export(shown):
    said = [each.text for each in shown.figure.shown.layout.annotations]
    assert said == [each.text for each in shown.result().figure().layout.annotations]
