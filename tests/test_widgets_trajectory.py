"""TrajectoryViewer: worst seed first, pictures of a step, comparisons, cancel, errors inside."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace

import pytest
import torch

from hswq_lab.errors import HswqError
from hswq_lab.progress import silent
from hswq_lab.trajectory.compare import compare_runs
from hswq_lab.widgets import TrajectoryViewer
from hswq_lab.widgets.trajectory_state import TrajectoryState

SOON = 30.0
SEEDS = (42, 137, 5517)


def with_x0(run, step, value):
    x0 = run.x0.clone()
    x0[step] = value
    return replace(run, x0=x0)


@pytest.fixture
def report(make_run):
    """Three seeds, two variants: "far" is worst on 137 and bifurcates on 5517."""
    reference = [make_run(seed) for seed in SEEDS]
    near = [make_run(seed, error=0.05) for seed in SEEDS]
    far = [make_run(seed, error=error) for seed, error in zip(SEEDS, (0.1, 1.5, 0.1), strict=True)]
    turned = far[2].latents.clone()
    turned[5:] += 0.6 * torch.randn(turned[5].shape, generator=torch.Generator().manual_seed(1))
    far[2] = replace(far[2], latents=turned)
    return compare_runs(reference, {"near": near, "far": far})


def images(viewer):
    return re.findall(r"data:image/png;base64,([^\"]+)", viewer.pictures.value)


def shown(viewer):
    assert viewer.wait(SOON)
    assert viewer.errors.value == ""
    return images(viewer)


def test_the_worst_seed_is_first_and_says_why(report):
    seeds = TrajectoryState(report).seeds()
    worst = {seed: min(t.final_cos for t in report.traces if t.seed == seed) for seed in SEEDS}
    assert list(seeds.values()) == sorted(SEEDS, key=worst.get)
    assert list(seeds.values())[-1] == 42
    label = next(text for text, seed in seeds.items() if seed == 5517)
    assert "✕ step 5" in label
    assert label.startswith("5517: near 0.")


def test_a_failed_seed_is_the_worst_and_has_a_blank_picture(make_run):
    reference = [make_run(seed) for seed in SEEDS]
    broken = [make_run(42), make_run(137, error=1.0), with_x0(make_run(5517), 3, float("nan"))]
    state = TrajectoryState(compare_runs(reference, {"v": broken}))
    assert next(iter(state.seeds().items())) == ("5517: v NaN at step 3", 5517)
    assert state.first_step_to_show(5517) == 3
    pictures = state.frame(5517, 3, silent).pictures
    blank = next(picture for caption, picture in pictures.items() if "cos x0 NaN" in caption)
    assert blank.getextrema() == ((96, 96),) * 3
    assert blank.size == next(iter(pictures.values())).size


def test_a_frame_is_the_decoded_x0_of_that_step(report):
    frame = TrajectoryState(report).frame(137, 2, silent)
    expected = [report.reference_runs[1], report.variant_runs["near"][1], report.variant_runs["far"][1]]
    assert [p.tobytes() for p in frame.pictures.values()] == [run.x0_image(2).tobytes() for run in expected]
    captions = list(frame.pictures)
    assert captions[0] == "synthetic, the reference"
    assert captions[2].startswith(f"far: cos x0 {report.of('far')[1].cos_x0[2]:.4f}, latent ")
    assert "step 2 of 0 to 7" in frame.facts


def test_it_opens_at_the_worst_seeds_bifurcation_or_end(report):
    viewer = TrajectoryViewer(report)
    assert len(shown(viewer)) == 3
    first = next(iter(viewer.state.seeds().values()))
    assert viewer.seed.value == first
    assert viewer.step.value == viewer.state.first_step_to_show(first)
    viewer.seed.value = 5517
    assert viewer.step.value == 5
    viewer.seed.value = 42
    assert viewer.step.value == 7
    viewer.close()


def test_the_slider_changes_pictures_curves_and_the_line_in_them(report):
    viewer = TrajectoryViewer(report)
    before = shown(viewer)
    viewer.step.value = 1
    after = shown(viewer)
    assert before[0] == after[0], "the synthetic reference has the same x0 in every step"
    assert all(a != b for a, b in zip(before[1:], after[1:], strict=True))
    figure = viewer.figure.shown
    lines = [shape for shape in figure.layout.shapes if shape.x0 == shape.x1 == 1]
    assert len(lines) == 4, "one in every panel"
    emphasised = {row[0] for t in figure.data if t.legendgroup == "emphasis" for row in t.customdata}
    assert emphasised == {str(viewer.seed.value)}
    viewer.figure.plot._received(None, {"event": "click", "x": "4", "note": []}, [])
    assert viewer.step.value == 4
    other = next(seed for seed in report.seeds if seed != viewer.seed.value)
    viewer.figure.plot._received(None, {"event": "click", "x": "2", "note": [str(other), "0.9", "a"]}, [])
    assert (viewer.seed.value, viewer.step.value) == (other, 2)
    assert viewer.wait(SOON)
    assert f"step 2 of 0 to {report.steps - 1}" in viewer.pictures.value
    viewer.close()


def test_the_banner_says_the_verdict_of_every_variant(report):
    viewer = TrajectoryViewer(report)
    assert viewer.verdict.value.count("PASSED") == 1
    assert viewer.verdict.value.count("FAILED") == 1
    assert "5517 (step 5)" in viewer.verdict.value
    viewer.close()


def test_without_runs_the_curves_stay_and_the_panel_says_what_to_do(report):
    viewer = TrajectoryViewer(report.without_runs())
    assert viewer.wait(SOON)
    assert "holds no runs" in viewer.errors.value
    assert "without_runs()" in viewer.errors.value
    assert viewer.figure.shown.data
    assert images(viewer) == []
    viewer.close()


def test_without_a_codec_the_panel_says_so(make_run):
    runs = [make_run(42, codec=False)]
    viewer = TrajectoryViewer(compare_runs(runs, {"v": runs}))
    assert viewer.wait(SOON)
    assert "no latent codec" in viewer.errors.value
    viewer.close()


@pytest.mark.parametrize("wrong", [None, "report.json"])
def test_nothing_to_show_is_said_inside(wrong):
    viewer = TrajectoryViewer(wrong)
    assert 'role="alert"' in viewer.errors.value
    assert "hl.compare" in viewer.errors.value
    assert viewer.result() is None
    with pytest.raises(HswqError, match="nothing to export"):
        viewer.export("csv")


def test_it_runs_a_comparison_by_itself_twice(tiny_model, tiny_pack):
    viewer = TrajectoryViewer(model=tiny_model, variants={"tc": tiny_pack.in_mode("tc")}, seeds=2, steps=3)
    assert viewer.view.layout.display == "none"
    viewer.compare_button.click()
    assert len(shown(viewer)) == 2
    assert viewer.result().seeds == [42, 137]
    viewer.step.value = 2
    viewer.seed_count.value, viewer.steps.value = 1, 2
    viewer.compare_button.click()
    assert len(shown(viewer)) == 2
    assert (viewer.result().seeds, viewer.result().steps, viewer.step.max) == ([42], 2, 1)
    viewer.close()


def test_a_comparison_is_cancelled_within_a_second_and_the_old_report_stays(
    tiny_model, tiny_pack, monkeypatch
):
    viewer = TrajectoryViewer(model=tiny_model, variants={"tc": tiny_pack}, seeds=1, steps=1)
    viewer.compare_button.click()
    shown(viewer)
    old = viewer.result()
    began = threading.Event()
    say = viewer.say
    monkeypatch.setattr(viewer, "say", lambda text: (began.set(), say(text)))
    viewer.seed_count.value, viewer.steps.value = 20, 100
    viewer.compare_button.click()
    assert began.wait(SOON)
    before = time.monotonic()
    viewer.cancel_button.click()
    assert viewer.wait(SOON)
    assert time.monotonic() - before < 1
    assert "cancelled" in viewer.status.value
    assert viewer.result() is old
    viewer.close()


def test_a_comparison_without_variants_fails_in_the_panel(tiny_model):
    viewer = TrajectoryViewer(model=tiny_model)
    viewer.compare_button.click()
    assert viewer.wait(SOON)
    assert "nothing to compare" in viewer.errors.value


def test_every_control_has_a_name(report):
    viewer = TrajectoryViewer(report)
    for control in (
        viewer.seed,
        viewer.step,
        viewer.seed_count,
        viewer.steps,
        viewer.cfg,
        viewer.compare_button,
    ):
        assert control.description
    assert not viewer.step.continuous_update
    viewer.close()


@pytest.fixture
def comparing(report, tiny_model, tiny_pack):
    """A viewer whose comparison has said "the first half" and goes on when it is let go."""
    viewer = TrajectoryViewer(report, model=tiny_model, variants={"tc": tiny_pack})
    assert viewer.wait(SOON)
    inside, go = threading.Event(), threading.Event()

    def compared(seeds, steps, cfg, progress):
        progress(0, 2, "the first half")
        inside.set()
        assert go.wait(SOON)
        progress(1, 2, "the second half")
        return report

    viewer.state.compare = compared
    viewer.compare_button.click()
    assert inside.wait(SOON)
    yield viewer, go
    go.set()
    assert viewer.wait(SOON)
    viewer.close()


def test_looking_at_a_step_leaves_the_comparison_that_runs(comparing):
    viewer, go = comparing
    before = viewer.pictures.value
    viewer.step.value = 0 if viewer.step.value else 1
    assert viewer._looking.wait(SOON)
    assert viewer.pictures.value != before
    assert viewer.cancel_button in viewer._running.children
    assert viewer._running.layout.display == "", "the comparison can still be cancelled"
    assert "the first half" in viewer.status.value
    go.set()
    assert viewer.wait(SOON)
    assert viewer._running.layout.display == "none"
    assert "cancelled" not in viewer.status.value


def test_an_export_leaves_the_cancel_button_of_the_work(comparing, tmp_path):
    viewer, _ = comparing
    viewer._folder = tmp_path
    viewer.export_buttons["json"].click()
    assert viewer._writing.wait(SOON)
    assert (tmp_path / "hswq-trajectory.json").is_file()
    assert viewer._running.layout.display == ""


def test_pictures_of_one_report_are_never_those_of_another(report):
    """A look may still decode the old report's pictures while a comparison brings the new one."""
    state = TrajectoryState(report)
    before = next(iter(state.frame(42, 1, silent).pictures.values()))
    flat = [with_x0(run, 1, 0.5) for run in report.reference_runs]
    state.report = compare_runs(flat, {"near": flat})
    after = next(iter(state.frame(42, 1, silent).pictures.values()))
    assert after.tobytes() != before.tobytes()
