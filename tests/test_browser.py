"""The notebooks in a real JupyterLab in a real browser: sliders, cancel, errors, exports; nothing in the console.

With HSWQ_LAB_SCREENSHOTS=FOLDER the panels are photographed into that folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
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
BAKE = (
    "hl.widgets.BakeCheck(pack, [hl.load_lora(p) for p in model.companion.loras.values()], model, steps=20)"
)
COMPARE = "hl.widgets.TrajectoryViewer(model=model, variants=variants, steps=60)"
RESULTS = NOTEBOOKS.parent / "benchmarks" / "results"
GEMM = "import hswq_lab as hl\nhl.widgets.GemmBench(results='results')"  # a copy beside the notebook
MODEL = """
import torch
import hswq_lab as hl
from hswq_lab.session import bar, open_model
torch.set_num_threads(1)
model = open_model("mini-zimage", device="cpu")
with bar("packing") as progress:
    pack = hl.pack(model, hl.Plan({"layers.*": "nvfp4"}), scales="rtn", progress=progress)
pack.report().figure()
"""
PACK = """
source = hl.save(model, "mini-zimage.safetensors")  # a name that a picture may show
hl.widgets.PackExplorer(hl.save(pack, "pack.safetensors"), source)
"""
STRENGTH = """
lora = hl.load_lora(next(iter(model.companion.loras.values())))
hl.widgets.StrengthSlider(pack, lora, model, steps=2)
"""
LOOKS = """() => [...document.querySelectorAll('.js-plotly-plot')].filter(p => p.querySelector('.gtitle')).map(plot => [
  getComputedStyle(plot.querySelector('.gtitle')).fill,
  getComputedStyle(plot.querySelector('.main-svg')).backgroundColor,
])"""
CUT_OFF = """() => [...document.querySelectorAll('.hswq-panel .gtitle-subtitle')].filter(text => {
  const plot = text.closest('.js-plotly-plot').getBoundingClientRect();
  return plot.width > 0 && text.getBoundingClientRect().right > plot.right;
}).map(text => text.textContent)"""
# Subtitles of a panel that its plots' tool bars cover, and boxes that scroll sideways.
COVERED = """css => [...document.querySelectorAll(`.${css} .js-plotly-plot`)].filter(plot => {
  const text = plot.querySelector('.gtitle-subtitle')?.getBoundingClientRect();
  const bar = plot.querySelector('.modebar-group')?.getBoundingClientRect();
  return text && bar && text.right > bar.left && text.bottom > bar.top;
}).length"""
SCROLLING = """css => [...document.querySelectorAll(`.${css}, .${css} .widget-box`)]
  .filter(box => box.clientWidth > 0 && box.scrollWidth > box.clientWidth).length"""
LIVE = """
import ipywidgets, plotly.graph_objects as go
from hswq_lab.widgets.live_figure import LiveFigure
named = lambda name: go.Figure(go.Bar(y=[1]), layout={"title": {"text": name}})
live, button = LiveFigure(named("first")), ipywidgets.Button(description="Change")
button.on_click(lambda _: live.show(named("second")))
ipywidgets.VBox([button, live])
"""
BUSY_PANEL = """
import time
from itertools import count
from hswq_lab.widgets import Panel
made = globals().get("made", [])
def endless(progress):
    for unit in count():
        progress(unit, unit + 1, "at work")
        time.sleep(0.05)
made.append(Panel("busy", "", [], css_class="hswq-busy"))
made[-1].start(endless, lambda result: None)
made[-1]
"""
TWINS = """
import ipywidgets
from hswq_lab.widgets import Panel
class Typed(Panel):
    def __init__(self):
        self.text = ipywidgets.Text(description="text", continuous_update=False)
        super().__init__("typed", "", [self.text, ipywidgets.Button(description="Press")], css_class="hswq-typed")
        self.mind(text=self.text)
ipywidgets.VBox([Typed(), Typed()])
"""
# What anywidget sees on a page that is busy for more than its two seconds.
BUSY = """AbortSignal.timeout = () => {
  const late = new AbortController();
  setTimeout(() => late.abort());
  return late.signal;
};"""
AT_ONCE = (
    2.0  # seconds from the click on Cancel to the panel's word: a second of work, and the way there and back
)


@pytest.fixture(scope="module")
def browser():
    playwright = import_module("playwright.sync_api")  # not there where the tests are skipped
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LabServer(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture
def lab(browser, server):
    page = browser.new_page(viewport={"width": 1250, "height": 1700})
    yield LabPage(page, server)
    page.close()
    server.stop_kernels()


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


def narrow(lab):
    """A page of 680 pixels, without the list of files."""
    lab.page.keyboard.press("Control+b")
    lab.page.set_viewport_size({"width": 680, "height": 1300})


def pictures(lab, css):
    return lab.page.evaluate(PICTURES.format(css))


def changed(css):
    """A condition: the pictures of a panel are other ones than before."""
    return (
        f"before => {{ const now = ({PICTURES.format(css)})(); return now.length && now[1] !== before[1]; }}"
    )


def cancel(lab, panel, start):
    """Starts long work, cancels it, and waits for the panel to say so."""
    panel.get_by_role("button", name=start).click()
    button = panel.get_by_role("button", name="Cancel")
    button.wait_for(timeout=60_000)
    clicked = time.monotonic()
    button.click()
    panel.get_by_role("status").filter(has_text="cancelled").wait_for(timeout=60_000)
    assert time.monotonic() - clicked < AT_ONCE


def export(lab, panel, form):
    """Presses an export button, waits for the panel to name the file, and returns it."""
    panel.get_by_role("button", name=form, exact=True).click()
    told = panel.get_by_role("status").filter(has_text=f".{form.lower()}")
    told.wait_for(timeout=60_000)
    return lab.server.root / told.inner_text().removeprefix("written: ")


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
    keep(panel, "StrengthSlider")
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


def test_a_plot_follows_the_kernel_on_a_page_that_was_too_busy_at_first(lab):
    lab.page.add_init_script(BUSY)
    lab.open_cells(LIVE)
    lab.run_all()
    title = "() => document.querySelector('.js-plotly-plot .gtitle')?.textContent === '{}'"
    lab.wait_for(title.format("first"))
    lab.page.get_by_role("button", name="Change").click()
    lab.wait_for(title.format("second"), seconds=20)
    assert lab.late, "the page was not too busy"


def test_a_cell_that_is_run_again_leaves_no_work_behind(lab):
    told = "print([panel.wait(5) for panel in made], [panel.status.value for panel in made])"
    lab.open_cells(BUSY_PANEL, f"{told} if len(made) > 1 else None")
    lab.run_all()
    lab.panel("hswq-busy").get_by_role("button", name="Cancel").wait_for()
    lab.run_all()
    printed = lab.page.locator('[data-mime-type="application/vnd.jupyter.stdout"]')
    printed.wait_for(timeout=30_000)
    assert printed.inner_text().startswith("[True, False]")
    assert "cancelled" in printed.inner_text()
    assert lab.complaints == []


def test_jupyterlab_keeps_its_keys_and_a_panel_keeps_its_own_values(lab):
    """A cell is made and filled by keys while a panel has the focus, the file is saved so, the kernel is restarted."""
    lab.open_cells(TWINS)
    lab.run_all()
    cells = lab.page.locator(".jp-CodeCell")
    for place, text in enumerate(("add", "above b")):
        lab.panel("hswq-typed", place).get_by_label("text").click()
        lab.page.keyboard.type(text)
    assert cells.count() == 1, "a and b were the text's"
    lab.page.keyboard.press("Control+s")
    saved = lab.server.root / "cells.ipynb"
    lab.server._wait(lambda: "execute_result" in saved.read_text(), 20, "nothing was saved")
    lab.panel("hswq-typed").get_by_role("button", name="Press").focus()
    lab.page.keyboard.press("a")
    assert cells.count() == 2, "a letter on a button was JupyterLab's"
    lab.page.keyboard.press("Enter")
    lab.page.keyboard.type("1")
    lab.restart_and_run_all()
    values = "() => [...document.querySelectorAll('.hswq-typed input')].map(field => field.value).join()"
    lab.wait_for(f"() => ({values})() === 'add,above b'", seconds=20)
    assert lab.complaints == []


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
    cancel(lab, panel, "Measure impacts")
    assert export(lab, panel, "CSV").stat().st_size > 100
    panel.get_by_label("≤ MiB").fill("7.5")
    lab.page.keyboard.press("Enter")
    lab.wait_for(
        "() => /7\\.[34]\\d MiB of Linears/.test(document.querySelector('.hswq-sensitivity').innerText)"
    )
    panel.get_by_label("order").select_option("kind")
    groups = f"() => [...{plot}.querySelectorAll('.xtick text')].map(t => t.textContent).includes('others')"
    lab.wait_for(groups)
    panel.get_by_label("file").fill("planned.safetensors")
    panel.get_by_role("button", name="Pack this plan").click()
    panel.get_by_role("status").filter(has_text="calibrate it").wait_for(timeout=60_000)
    assert (lab.server.root / "planned.safetensors").stat().st_size > 1_000_000
    keep(panel, "SensitivityExplorer")
    panel.get_by_label("export", exact=True).select_option("plan")
    panel.locator("button:disabled", has_text="CSV").wait_for()
    assert "formats" in json.loads(export(lab, panel, "JSON").read_text())
    narrow(lab)
    lab.wait_for(
        "() => document.querySelectorAll('.hswq-sensitivity .gtitle-subtitle tspan.line').length > 1"
    )
    assert lab.page.evaluate(COVERED, "hswq-sensitivity") == 0
    keep(panel, "SensitivityExplorer_narrow")
    assert lab.complaints == []


def test_a_lora_is_baked_and_an_error_is_shown_where_the_user_is(lab):
    lab.open(NOTEBOOKS / "04_bake_correctness.ipynb", more=BAKE, FAST=True)
    lab.run_all()
    panel = lab.panel("hswq-bake")
    cancel(lab, panel, "Apply")
    panel.get_by_role("button", name="Apply").click()
    lab.wait_for("() => document.querySelectorAll('.hswq-bake img').length === 4")
    assert "OK" in panel.locator(".hswq-banner").inner_text()
    panel.get_by_role("button", name="Second generation").click()
    lab.wait_for("() => document.querySelector('.hswq-bake').innerText.includes('bit for bit')")
    keep(panel, "BakeCheck")
    panel.get_by_role("button", name="Undo").click()
    panel.get_by_text("pristine").wait_for()
    panel.get_by_role("checkbox").first.uncheck()
    panel.get_by_role("button", name="Apply").click()
    lab.wait_for("() => document.querySelector('.hswq-bake [role=alert]')")
    assert "no LoRA is chosen" in panel.locator("[role=alert]").inner_text()
    assert lab.complaints == []


def test_the_steps_of_a_trajectory_show_other_pictures(lab):
    lab.open(NOTEBOOKS / "05_trajectories.ipynb", more=COMPARE, FAST=True)
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
    keep(panel, "TrajectoryViewer")
    lab.click_point("hswq-trajectory", trace=0, point=1)
    lab.wait_for("() => document.querySelector('.hswq-trajectory').innerText.includes('step 1 of')")
    assert export(lab, panel, "HTML").stat().st_size > 1_000_000, "plotly is inside"
    assert json.loads(export(lab, panel, "JSON").read_text())["result"] == "TrajectoryReport"
    cancel(lab, lab.panel("hswq-trajectory", 1), "Compare")
    narrow(lab)
    lab.wait_for(f"css => ({SCROLLING})(css) === 0", "hswq-trajectory")
    keep(panel, "TrajectoryViewer_narrow")
    assert lab.complaints == []


def test_a_pack_is_opened_filtered_checked_and_exported_by_keyboard(lab):
    lab.open_cells(MODEL, PACK)
    lab.run_all()
    panel = lab.panel("hswq-pack")
    title = "(document.querySelector('.hswq-pack .gtitle')?.textContent ?? '')"
    lab.wait_for(f"() => {title}.endsWith('weight')")
    before, cell = lab.page.evaluate(f"() => {title}"), lab.active_cell()
    panel.get_by_label("layer", exact=True).focus()
    lab.page.keyboard.press("ArrowDown")
    lab.wait_for(f"before => {title} !== before && {title}.endsWith('weight')", before)
    assert lab.active_cell() == cell, "the arrow was the list's"
    keep(panel, "PackExplorer")
    panel.get_by_label("filter").fill("feed_forward.w2")
    lab.page.keyboard.press("Enter")
    lab.wait_for(f"() => {title}.includes('feed_forward.w2')")
    assert json.loads(export(lab, panel, "JSON").read_text())["result"] == "LayerDetail"
    panel.get_by_role("tab", name="findings").click()
    panel.get_by_role("button", name="Check the whole file").click()
    panel.locator(".hswq-banner").filter(has_text="PASSED").wait_for()
    panel.get_by_role("button", name="Browse").click()
    panel.get_by_label("choose").select_option(label="../")
    panel.get_by_role("button", name="Go in").click()
    panel.get_by_label("choose").get_by_text("work/").wait_for(state="attached")
    panel.get_by_label("file", exact=True).fill("nowhere.safetensors")
    panel.get_by_role("button", name="Open").click()
    panel.get_by_role("alert").filter(has_text="does not exist").wait_for()
    (lab.server.root / "pack.safetensors").rename(lab.server.root / "my pack.safetensors")
    panel.get_by_label("file", exact=True).fill("'my pack.safetensors'")
    lab.page.keyboard.press("Enter")
    panel.get_by_text("my pack.safetensors, 1").wait_for()
    assert lab.complaints == []


def test_products_are_timed_cancelled_and_compared_and_a_restart_keeps_what_was_typed(lab):
    shutil.copytree(RESULTS, lab.server.root / "results")
    lab.open_cells(GEMM)
    lab.run_all()
    panel = lab.panel("hswq-gemm")
    panel.get_by_label("repeats").fill("1000")
    panel.get_by_label("M", exact=True).fill("192")
    cancel(lab, panel, "Run")
    panel.get_by_label("repeats").fill("2")
    panel.get_by_label("N × K").fill("32×64")
    panel.get_by_role("button", name="Run").click()
    panel.get_by_text("calls ran where they should").wait_for(timeout=60_000)
    panel.get_by_label("show").select_option("gpu_kernels_nvidia_h200")
    panel.get_by_text("NVIDIA H200 (").first.wait_for()
    panel.get_by_role("tab", name="roofline").click()
    lab.wait_for(
        "() => document.querySelectorAll('.hswq-gemm .js-plotly-plot .scatterlayer .point').length > 50"
    )
    assert export(lab, panel, "SVG").read_text().startswith("<svg")
    keep(panel, "GemmBench")
    lab.restart_and_run_all()
    panel = lab.panel("hswq-gemm")
    lab.wait_for("() => document.querySelector('.hswq-gemm input').value === '32×64'")
    assert panel.get_by_label("repeats").input_value() == "2"
    assert panel.get_by_label("M", exact=True).input_value() == "192"
    assert lab.complaints == []


def test_in_the_dark_at_900_pixels_all_is_readable_named_and_inside(browser, tmp_path):
    with LabServer(tmp_path, theme="JupyterLab Dark") as server:
        page = browser.new_page(viewport={"width": 900, "height": 1300})
        lab = LabPage(page, server)
        shutil.copytree(RESULTS, server.root / "results")
        lab.open_cells(MODEL, STRENGTH, PACK, GEMM)
        lab.run_all()
        page.keyboard.press("Control+b")  # hides the list of files
        for css in ("hswq-strength", "hswq-pack", "hswq-gemm"):
            panel = lab.panel(css)
            lab.wait_for(
                f"() => document.querySelector('.{css}').scrollWidth <= document.querySelector('.{css}').clientWidth"
            )
            keep(panel, f"dark_{css}")
            for slider in panel.get_by_role("slider").all():
                assert slider.get_attribute("aria-label").startswith("strength of")
        lab.wait_for("() => document.querySelectorAll('.js-plotly-plot .gtitle').length > 2")
        looks = page.evaluate(LOOKS)
        assert len(looks) > 2
        for ink, paper in looks:
            assert min(map(int, re.findall(r"\d+", ink)[:3])) > 180, "light ink"
            assert paper == "rgba(0, 0, 0, 0)"
        page.set_viewport_size({"width": 720, "height": 1300})
        lab.wait_for("() => document.querySelectorAll('.hswq-pack .gtitle-subtitle tspan').length > 1")
        assert page.evaluate(CUT_OFF) == []
        keep(lab.panel("hswq-pack"), "dark_hswq-pack_720")
        assert page.get_by_role("button", name="Share").count() == 0, "nothing is offered for upload"
        assert lab.complaints == []
        page.close()
