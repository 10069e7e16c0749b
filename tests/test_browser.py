"""The notebooks in a real JupyterLab in a real browser: sliders, cancel, errors, exports; nothing in the console.

With HSWQ_LAB_SCREENSHOTS=FOLDER the panels are photographed into that folder.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest
from lab_browser import CHROMIUM_FLAGS, LabPage, LabServer, chromium, why_no_browser_test

WHY_NOT = why_no_browser_test()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PICTURES = "() => [...document.querySelectorAll('{} img')].map(i => i.src)"
BAKE = "hl.widgets.BakeCheck(pack, [hl.load_lora(p) for p in model.companion.loras.values()], model, steps=2)"


@pytest.fixture(scope="module")
def browser():
    playwright = import_module("playwright.sync_api")  # not there where the tests are skipped
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        yield running
        running.close()


@pytest.fixture
def lab(browser, tmp_path):
    with LabServer(tmp_path) as server:
        page = browser.new_page(viewport={"width": 1250, "height": 1300})
        yield LabPage(page, server)
        page.close()


def keep(panel, name):
    """A picture of a panel, if somebody wants them."""
    folder = os.environ.get("HSWQ_LAB_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        panel.screenshot(path=str(Path(folder) / f"{name}.png"))


def press(lab, panel, key, times=1):
    """Keys on the panel's first slider."""
    panel.locator(".noUi-handle").first.focus()
    for _ in range(times):
        lab.page.keyboard.press(key)


def drag(lab, panel, by):
    """The panel's first slider, with the mouse."""
    box = panel.locator(".noUi-handle").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    lab.page.mouse.move(x, y)
    lab.page.mouse.down()
    lab.page.mouse.move(x + by, y, steps=6)
    lab.page.mouse.up()


def pictures(lab, css):
    return lab.page.evaluate(PICTURES.format(css))


def changed(css):
    """A condition: the pictures of a panel are other ones than before."""
    return (
        f"before => {{ const now = ({PICTURES.format(css)})(); return now.length && now[1] !== before[1]; }}"
    )


def test_the_tours_slider_by_keyboard_and_by_mouse(lab):
    lab.open(NOTEBOOKS / "00_tour.ipynb", FAST=True)
    lab.run_all()
    panel = lab.panel("hswq-strength")
    lab.wait_for("() => document.querySelectorAll('.hswq-strength img').length === 3")
    before = pictures(lab, ".hswq-strength")
    press(lab, panel, "ArrowLeft", 8)
    lab.wait_for(changed(".hswq-strength"), before)
    after_keys = pictures(lab, ".hswq-strength")
    assert after_keys[0] == before[0]
    assert "0.60" in panel.inner_text()
    drag(lab, panel, 120)
    lab.wait_for(changed(".hswq-strength"), after_keys)
    keep(panel, "strength_slider")
    assert lab.complaints == []


def test_a_slider_without_its_callback_changes_nothing(lab):
    """The negative control of this file: the same waiting must fail where the callback is taken away."""
    lab.open(NOTEBOOKS / "00_tour.ipynb", more="slider.strength.unobserve_all(); slider.wait(60)", FAST=True)
    lab.run_all()
    panel = lab.panel("hswq-strength")
    lab.wait_for("() => document.querySelectorAll('.hswq-strength img').length === 3")
    before = pictures(lab, ".hswq-strength")
    press(lab, panel, "ArrowLeft", 8)
    with pytest.raises(import_module("playwright.sync_api").TimeoutError):
        lab.wait_for(changed(".hswq-strength"), before, seconds=8)


def test_plans_move_with_the_cut_cancel_stops_and_an_export_is_a_file(lab):
    lab.open(NOTEBOOKS / "02_sensitivity_and_plans.ipynb", FAST=True)
    lab.run_all()
    panel = lab.panel("hswq-sensitivity")
    plot = "document.querySelector('.hswq-sensitivity .js-plotly-plot')"
    drawn = f"() => JSON.stringify({plot}.data.map(t => t.x.length))"
    lab.wait_for("() => document.querySelector('.hswq-sensitivity .js-plotly-plot .bars path')")
    before, told = lab.page.evaluate(drawn), panel.inner_text()
    press(lab, panel, "ArrowLeft", 6)
    lab.wait_for(f"before => ({drawn})() !== before", before)
    assert panel.inner_text() != told
    panel.get_by_role("button", name="Measure impacts").click()
    panel.get_by_role("button", name="Cancel").click(timeout=60_000)
    lab.wait_for("() => document.querySelector('.hswq-sensitivity').innerText.includes('cancelled')")
    panel.get_by_role("button", name="CSV").click()
    lab.wait_for("() => document.querySelector('.hswq-sensitivity').innerText.includes('written:')")
    assert (lab.server.root / "exports" / "hswq-sensitivity.csv").stat().st_size > 100
    keep(panel, "sensitivity_explorer")
    assert lab.complaints == []


def test_a_lora_is_baked_and_an_error_is_shown_where_the_user_is(lab):
    lab.open(NOTEBOOKS / "04_bake_correctness.ipynb", more=BAKE, FAST=True)
    lab.run_all()
    panel = lab.panel("hswq-bake")
    panel.get_by_role("button", name="Apply").click()
    lab.wait_for("() => document.querySelectorAll('.hswq-bake img').length === 4")
    assert "OK" in panel.locator(".hswq-banner").inner_text()
    panel.get_by_role("button", name="Second generation").click()
    lab.wait_for("() => document.querySelector('.hswq-bake').innerText.includes('bit for bit')")
    keep(panel, "bake_check")
    panel.get_by_role("checkbox").first.uncheck()
    panel.get_by_role("button", name="Apply").click()
    lab.wait_for("() => document.querySelector('.hswq-bake [role=alert]')")
    assert "no LoRA is chosen" in panel.locator("[role=alert]").inner_text()
    assert lab.complaints == []


def test_the_steps_of_a_trajectory_show_other_pictures(lab):
    lab.open(NOTEBOOKS / "05_trajectories.ipynb", FAST=True)
    lab.run_all()
    panel = lab.panel("hswq-trajectory")
    lab.wait_for("() => document.querySelectorAll('.hswq-trajectory img').length >= 2")
    # The panel opens at the step that is worth a look, which may be any.
    press(lab, panel, "Home")
    lab.wait_for("() => document.querySelector('.hswq-trajectory').innerText.includes('step 0 of')")
    before = pictures(lab, ".hswq-trajectory")
    press(lab, panel, "ArrowRight", 2)
    lab.wait_for("() => document.querySelector('.hswq-trajectory').innerText.includes('step 2 of')")
    lab.wait_for(changed(".hswq-trajectory"), before)
    keep(panel, "trajectory_viewer")
    assert lab.complaints == []
