"""GemmBench: what is typed, runs and cancels, stored results, gains from product to picture, what only compiled."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hswq_lab import bench, ops
from hswq_lab.bench import gemm, stored
from hswq_lab.bench.gains import gains, side_by_side
from hswq_lab.bench.machine import Roofline
from hswq_lab.errors import HswqError
from hswq_lab.plots import roofline_figure
from hswq_lab.plots.roofline import intensity
from hswq_lab.widgets import GemmBench
from hswq_lab.widgets.gemm_state import GemmState, parse_rows, parse_shapes

SOON = 60.0
CARD = {"name": "Card X (capability 9.0)", "torch": "2.13.0", "device": "cuda"}
CPU = {"name": "x86, 2 cores", "torch": "2.13.0", "device": "cpu"}


@pytest.fixture(autouse=True)
def quick_roofline(monkeypatch):
    monkeypatch.setattr(
        gemm, "measure_roofline", lambda device, dtype, _: Roofline(1e9, 1e10, str(dtype)[6:])
    )


def row(op, stage, n, speedup, m=16, backend="cuda", **fields):
    seconds = 1e-4 / speedup
    values = {
        "seconds": seconds, "tflops": 2 * m * n * 64 / seconds / 1e12, "gb_per_s": 10.0, "of_roofline": 0.5,
        "speedup": speedup, "error": 0.1, **fields,
    }  # fmt: skip
    return bench.GemmRow(op, stage, backend, m, n, 64, **values)


def products(machine=CARD):
    rows = [row("torch bfloat16", gemm.WHOLE, n, 1.0, m, "torch") for n in (32, 128) for m in (1, 16)]
    rows += [
        row("w4a4", gemm.ALONE, 32, 2.0),
        row("w4a4", gemm.ALONE, 128, 8.0),
        row("w4a4", gemm.WHOLE, 32, 1.5),
    ]
    rows += [
        row("w4a4", gemm.WHOLE, 32, 9.0, 1),
        row("int8", gemm.WHOLE, 32, 1.2, fallbacks=20, why="no <compiler>"),
    ]
    return bench.GemmBench(machine, Roofline(4e12, 7e14, "bfloat16"), "bfloat16", 20, rows)


def pictures(machine=CARD):
    common = {
        "slowest": 1.0, "final_cos": 0.99, "ssim": math.nan, "psnr": math.inf, "weight_bytes": 100,
        "peak_bytes": None, "tflops": 1.0, "fallbacks": 0, "why": "", "clipped": None,
    }  # fmt: skip
    rows = [
        bench.ModelRow("16 bit", "16-bit", seconds=1.0, speedup=1.0, hits={"16-bit": 4}, **common),
        bench.ModelRow("tc", "tc", seconds=0.8, speedup=1.25, hits={"tc": 3, "int8": 1}, **common),
    ]
    return bench.ModelBench(machine, "a thing", 42, 4, 2.5, (64, 64), 3, rows)


# -- stored results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [products, pictures])
def test_a_stored_result_comes_back_as_it_was(tmp_path, make):
    result = make()
    again = bench.read_bench(result.save(tmp_path / "x.json"))
    assert type(again) is type(result)
    assert again.to_dict() == result.to_dict()
    assert again.figure().data


def test_null_is_nan_where_a_number_belongs_and_none_elsewhere(tmp_path):
    again = bench.read_bench(pictures().save(tmp_path / "x.json"))
    assert math.isnan(again.rows[0].ssim)
    assert again.rows[0].peak_bytes is None
    assert again.rows[0].clipped is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "no stored benchmark"),
        ('{"result": "TrajectoryReport"}', "no stored benchmark"),
        ('{"result": "GemmBench"}', "lacks something"),
        ('{"result": "ModelBench", "machine": {}}', "lacks something"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, problem):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(HswqError, match=problem) as caught:
        bench.read_bench(path)
    assert caught.value.file == str(path)


def test_a_result_with_a_column_of_another_version_is_refused(tmp_path):
    path = products().save(tmp_path / "x.json")
    content = json.loads(path.read_text())
    content["rows"][0]["tokens"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(HswqError, match="too much"):
        bench.read_bench(path)


def test_a_folder_gives_its_benchmarks_and_leaves_other_files_alone(tmp_path):
    products().save(tmp_path / "h200.json")
    pictures().save(tmp_path / "a.json")
    (tmp_path / "other.json").write_text('{"kernels": []}')
    (tmp_path / "report.json").write_text('{"machine": {"bf16_tflops": 700}}')
    assert list(bench.read_benches(tmp_path)) == ["a", "h200"]
    with pytest.raises(HswqError, match="no such folder"):
        bench.read_benches(tmp_path / "missing")


def test_the_linears_of_a_kernel_benchmark_are_read_too(tmp_path):
    sizes = {"m": 16, "n": 128, "k": 64, "us": 2.0, "tflops": 0.131072, "speedup": 1.0}
    content = {
        "machine": CARD, "copy_gb_per_s": 4000.0, "bf16_tflops": 700.0,
        "rows": [{"kernel": "rotate", "us": 1.0}, {"linear": "bf16", **sizes}, {"linear": "w4a8", **sizes},
                 {"linear": "w4a8 kept", **sizes}, {"linear": "int8, comfy-kitchen", **sizes}],
    }  # fmt: skip
    (tmp_path / "kernels.json").write_text(json.dumps(content))
    (found,) = bench.read_benches(tmp_path).values()
    peer, w4a8, kept, other = found.rows
    assert (kept.op, kept.backend, other.op, other.backend) == ("w4a8 kept", "cuda", "int8", "comfy-kitchen")
    assert kept.gb_per_s > w4a8.gb_per_s, "a byte a weight, not a nibble and its scale"
    assert gains(found).set_index("backend").loc["comfy-kitchen", "mode"] == ""
    assert (peer.op, peer.backend, w4a8.op, w4a8.backend) == ("torch bfloat16", "torch", "w4a8", "cuda")
    assert peer.gb_per_s == pytest.approx((2 * (16 * 64 + 16 * 128) + 2 * 128 * 64) / 2e3)
    assert w4a8.gb_per_s == pytest.approx((2 * (16 * 64 + 16 * 128) + 128 * 64 * 9 / 16) / 2e3)
    assert intensity(w4a8) == pytest.approx(2 * 16 * 128 * 64 / (w4a8.gb_per_s * 2e3))
    assert w4a8.of_roofline == pytest.approx(w4a8.gb_per_s / 4000)
    panel = GemmBench(results=str(tmp_path))
    assert panel.errors.value == ""
    assert panel.summary.value.count("not counted") == 2, "neither hits nor fallbacks"
    assert "fallbacks not counted" in panel.products.shown.layout.title.subtitle.text
    assert "not measured" in panel.times.value
    panel.close()


def test_the_results_that_are_shipped_can_be_read():
    found = bench.read_benches(Path(__file__).parents[1] / "benchmarks" / "results")
    assert any("H200" in each.machine["name"] for each in found.values())


def test_what_only_compiled_is_said_not_to_have_run(monkeypatch):
    built = {
        "cpu": ops.Backend("cpu", True, True, ("avx2", "amx"), "amx", False, ""),
        "cuda": ops.Backend("cuda", True, False, ("80", "90a", "100f", "120f"), "", False, "a CPU build"),
    }
    monkeypatch.setattr(ops, "backends", lambda: built)
    by = {row.target: row.status for row in stored.compiled_targets([products(), products(CPU)])}
    assert by == {
        "avx2": "not in use here",
        "amx": "in use here",
        "80": "compiled, not run",
        "90a": "ran: Card X (capability 9.0)",
        "100f": "compiled, not run",
        "120f": "compiled, not run",
    }


# -- from the product to the picture ---------------------------------------------------------------------------


def test_gains_go_from_the_product_to_the_picture():
    table = gains(products(), pictures())
    w4a4 = table[table.op == "w4a4"].iloc[0]
    assert w4a4["product alone"] == pytest.approx(4)
    assert (w4a4["whole Linear"], w4a4["mode"], w4a4["whole picture"]) == (1.5, "tc", 1.25)
    int8 = table[table.op == "int8"].iloc[0]
    assert math.isnan(int8["product alone"])
    assert math.isnan(int8["whole picture"])
    assert gains(products(), m=1)["whole Linear"].tolist() == [pytest.approx(9)]
    assert gains(products())["whole picture"].isna().all()


def test_machines_stand_side_by_side():
    table = side_by_side({"here": products(CPU), "h200": products()})
    mine = table[(table.result == "h200") & (table.op == "w4a4") & (table.stage == gemm.ALONE)].iloc[0]
    assert mine["speedup"] == pytest.approx(4)
    assert mine["best of roofline"] == 0.5
    assert table[table.op == "int8"].fallbacks.tolist() == [20, 20]
    assert side_by_side({}).empty


def test_fallbacks_that_nobody_counted_are_not_shown_as_none():
    panel = GemmBench(results={"counted": products(CPU), "stored": replace(products(), repeats=0)})
    assert panel.machines.value.count("<td>–</td>") == 6
    assert panel.machines.value.count('<td class="n">0</td>') == 5
    assert panel.machines.value.count('<td class="n">20</td>') == 1
    panel.close()


def test_the_roofline_is_drawn_from_the_measured_limits():
    result = products()
    figure = roofline_figure(result)
    roof = figure.data[-1]
    assert max(roof.y) == pytest.approx(700)
    assert roof.y[0] == pytest.approx(roof.x[0] * 4)
    assert intensity(result.rows[0]) == pytest.approx(result.rows[0].tflops * 100)
    points = figure.data[1]
    assert len(points.x) == 2
    assert "product alone" in points.name


# -- what is typed -----------------------------------------------------------------------------------------------


def test_sizes_are_read_as_people_type_them():
    assert parse_shapes("768×256, 256x768,16*64") == [(768, 256), (256, 768), (16, 64)]
    assert parse_rows("1, 16 ,192") == [1, 16, 192]
    for device in ("cpu", "cuda"):
        shapes, rows = GemmState.sizes(device)
        assert parse_shapes(shapes)
        assert parse_rows(rows)


def test_a_cross_may_be_a_capital():
    assert parse_shapes("32X64") == [(32, 64)]


@pytest.mark.parametrize("text", ["", "768", "768×", "a×b", "1.5×2", "768×256;1×1", "9" * 5000 + "×1"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(HswqError, match="no shapes"):
        parse_shapes(text)


@pytest.mark.parametrize("text", ["", "1,", "-1", "x", "9" * 5000])
def test_what_is_no_row_is_refused(text):
    with pytest.raises(HswqError, match="no numbers of rows"):
        parse_rows(text)


# -- the panel ---------------------------------------------------------------------------------------------------


def small_panel(**given):
    panel = GemmBench(**given)
    panel.shapes.value, panel.rows.value, panel.repeats.value = "32×64", "2", 2
    return panel


def test_it_runs_and_shows_every_way_to_multiply():
    panel = small_panel()
    panel.dtype.value = "float32"
    panel.backends.value = panel.backends.options[-1:]
    assert panel.result() is None
    panel.run_button.click()
    assert panel.wait(SOON)
    assert panel.errors.value == ""
    assert [each.op for each in panel.result().rows] == [
        "torch float32", "w4a4", "w4a4", "w4a8", "w4a16", "w4a16", "int8"
    ]  # fmt: skip
    assert {each.backend for each in panel.result().rows[1:]} == {"reference"}
    assert panel.shown.value == "this machine, cpu, float32"
    assert "no fallbacks" in str(panel.result())
    assert "14 of 14" in panel.summary.value
    assert panel.times.value.count("<tr>") == 8
    assert panel.products.shown.layout.title.text != "press Run, or load a stored result"
    assert "not measured" in panel.left.value
    panel.close()


def test_a_run_is_cancelled_within_a_second():
    panel = small_panel()
    panel.shapes.value, panel.repeats.value = "768×256", 1000
    began = threading.Event()
    say = panel.say
    panel.say = lambda text: (began.set(), say(text))
    panel.run_button.click()
    assert began.wait(SOON)
    before = time.monotonic()
    panel.cancel_button.click()
    assert panel.wait(SOON)
    assert time.monotonic() - before < 1
    assert "cancelled" in panel.status.value
    assert panel.result() is None
    panel.close()


def test_what_cannot_be_read_is_said_in_the_panel():
    panel = small_panel()
    panel.rows.value = "many"
    panel.run_button.click()
    assert panel.wait(SOON)
    assert "no numbers of rows" in panel.errors.value
    panel.where.value = "missing.json"
    panel.load_button.click()
    assert "cannot be read" in panel.errors.value
    panel.close()


def test_stored_results_are_shown_and_compared(tmp_path):
    products().save(tmp_path / "h200.json")
    replace(products(CPU), dtype="float32").save(tmp_path / "cpu.json")
    pictures().save(tmp_path / "h200_pictures.json")
    panel = GemmBench(results=str(tmp_path))
    assert panel.errors.value == ""
    assert panel.shown.options == ("cpu", "h200", "h200_pictures")
    assert panel.shown.value == "cpu", "products first"
    panel.shown.value = "h200"
    assert "Card X" in panel.summary.value
    assert "20 ran in the reference: no &lt;compiler&gt;" in panel.summary.value
    assert "1.25" in panel.left.value
    assert "3 tc, 1 int8" in panel.arithmetic.value
    assert panel.machines.value.count("<td>cpu</td>") == panel.machines.value.count("<td>h200</td>") == 6
    panel.shown.value = "cpu"
    assert "1.25" not in panel.left.value, "pictures of another machine"
    assert panel.result().dtype == "float32"
    panel.close()


def test_objects_can_be_given_and_a_folder_without_benchmarks_is_an_error(tmp_path):
    panel = GemmBench(results={"mine": products()})
    assert panel.shown.value == "mine"
    panel.load_button.click()
    panel.where.value = str(tmp_path)
    panel.load_button.click()
    assert "no stored benchmark in this folder" in panel.errors.value
    assert panel.shown.value == "mine"
    panel.close()


def test_whole_pictures_are_timed_with_their_hits(tiny_model, tiny_pack):
    panel = GemmBench({"16 bit": tiny_model, "tc": tiny_pack.in_mode("tc")}, steps=1)
    panel.picture_button.click()
    assert panel.wait(SOON)
    assert panel.errors.value == ""
    assert panel.tabs.titles[panel.tabs.selected_index] == "picture"
    assert [each.model for each in panel.result().rows] == ["16 bit", "tc"]
    assert " tc" in panel.arithmetic.value
    panel.close()
    assert GemmBench().picture_button.disabled


def test_pictures_timed_here_are_shown_beside_stored_products_of_another_machine(tiny_model):
    panel = GemmBench({"16 bit": tiny_model}, {"h200": products(), "there": pictures()}, steps=1)
    assert panel.shown.value == "h200"
    there = panel.pictures.shown
    panel.picture_button.click()
    assert panel.wait(SOON)
    assert panel.errors.value == ""
    assert panel.shown.value == "this machine, pictures"
    assert [each.model for each in panel.result().rows] == ["16 bit"]
    assert panel.pictures.shown != there
    assert (panel.left.value, panel.times.value) == ("", ""), "no products of this machine"
    panel.shown.value = "h200"
    assert panel.pictures.shown == there
    assert "Card X" in panel.summary.value
    panel.close()


def test_every_control_has_a_name():
    panel = GemmBench()
    for control in (
        panel.device, panel.dtype, panel.shapes, panel.rows, panel.backends, panel.repeats, panel.run_button,
        panel.shown, panel.where, panel.load_button, panel.picture_button,
    ):  # fmt: skip
        assert control.description
    panel.close()


def test_a_button_does_not_throw_away_the_run_of_another(tiny_model):
    panel = GemmBench({"16 bit": tiny_model}, steps=1)
    inside, go = threading.Event(), threading.Event()

    def slow(*_):
        inside.set()
        assert go.wait(SOON)
        return panel.state._keep("run", products(CPU))

    panel.state.run = slow
    panel.run_button.click()
    assert inside.wait(SOON)
    for button in (panel.picture_button, panel.run_button):
        button.click()
        assert "this panel is at work" in panel.errors.value
    go.set()
    assert panel.wait(SOON)
    assert (panel.errors.value, panel.shown.value) == ("", "run")
    panel.close()


def test_what_a_folder_holds_besides_is_named_with_the_reason(tmp_path):
    products().save(tmp_path / "h200.json")
    (tmp_path / "notes.json").write_text('{"kernels": []}')
    (tmp_path / "cut.json").write_text("{")
    (tmp_path / "old.json").write_text('{"result": "GemmBench"}')
    panel = GemmBench(results=str(tmp_path))
    assert panel.errors.value == ""
    assert panel.shown.options == ("h200",)
    for told in (
        "notes.json (this is no stored benchmark",
        "cut.json (",
        "not JSON",
        "old.json (",
        "lacks something",
    ):
        assert told in panel.loaded.value
    panel.load(str(tmp_path / "h200.json"))
    assert "skipped" not in panel.loaded.value
    (tmp_path / "h200.json").unlink()
    panel.load_button.click()
    assert "no stored benchmark in this folder" in panel.errors.value
    assert "notes.json" in panel.errors.value
    panel.close()
