"""PackExplorer, SensitivityExplorer and BakeCheck: their states as a script would use them, and their panels."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.detail import TAIL_BINS, layer_detail
from hswq_lab.errors import HswqError
from hswq_lab.formats import pack_nibbles
from hswq_lab.loading import save
from hswq_lab.lora import lora_from_tensors
from hswq_lab.packing import pack_weight
from hswq_lab.plots import detail_figure, impact_figure
from hswq_lab.progress import silent
from hswq_lab.quantize import ImpactReport, LayerImpact
from hswq_lab.widgets import BakeCheck, PackExplorer, SensitivityExplorer
from hswq_lab.widgets.bake_state import AMPLIFIED, BakeState, Choice, SecondGeneration, difference
from hswq_lab.widgets.file_picker import FilePicker
from hswq_lab.widgets.pack_state import PackState
from hswq_lab.widgets.sensitivity_state import SensitivityState

SOON = 60.0
NVFP4 = "layers.0.attention.out.weight"


@pytest.fixture
def pack_file(tiny_pack, tmp_path):
    return save(tiny_pack, tmp_path / "tiny.safetensors")


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
def impacts(tiny_model):
    """Impacts that grow from layer to layer."""
    rows = [
        LayerImpact(layer, "nvfp4", n, k, [10.0 ** (place - 8)])
        for place, (layer, (n, k)) in enumerate(tiny_model.layers().items())
    ]
    return ImpactReport("tiny", "", ["a"], [1], 4, 2.5, 1.5, (16, 16), "rtn", rows)


# -- one layer -----------------------------------------------------------------------------------------------


def nvfp4_layer(pack):
    return next(entry.name for entry in pack.checkpoint.entries() if entry.format == "nvfp4")


def test_the_code_histogram_counts_every_logical_weight(tiny_pack):
    name = nvfp4_layer(tiny_pack)
    detail = layer_detail(tiny_pack, name)
    assert sum(detail.code_counts) == detail.shape[0] * detail.shape[1]
    assert detail.code_values == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weight = tiny_pack.checkpoint[name]
    six = pack_nibbles(torch.full((1, 2), 7, dtype=torch.uint8))
    assert six.item() == 0x77
    nibbles = torch.stack([weight.codes >> 4, weight.codes & 15])
    assert detail.code_counts[-1] == int((nibbles == 7).sum())


def test_a_detail_knows_the_basis_and_the_distance_to_the_source(tiny_model, tiny_pack):
    name = nvfp4_layer(tiny_pack)
    detail = layer_detail(tiny_pack, name, tiny_model)
    assert (detail.group, detail.marker["convrot"]) == (64, True)
    assert 15 < detail.sqnr_db < 30
    assert [len(tails.counts) for tails in detail.tails] == [TAIL_BINS, TAIL_BINS]
    assert all(sum(tails.counts) == detail.shape[0] * detail.shape[1] for tails in detail.tails)
    assert detail.tails[0].crest != detail.tails[1].crest
    assert layer_detail(tiny_pack, name.removesuffix(".weight")).name == name


def test_a_16_bit_layer_has_tails_and_no_codes(tiny_model):
    detail = layer_detail(tiny_model, "x_embedder")
    assert (detail.code_values, detail.scales, detail.marker) == ([], [], {})
    assert detail.bits == 16
    figure = detail_figure(detail)
    assert [trace.type for trace in figure.data] == ["scatter", "scatter"], (
        "no axes for what it does not have"
    )


def test_one_outlier_shows_in_the_tail_and_the_rotation_spreads_it():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[3, 5] = 60.0
    used, rotated = layer_detail(Checkpoint.from_mapping({"a.weight": weight}), "a").tails
    assert used.crest > 20
    assert used.kurtosis > 50
    assert rotated.crest < used.crest / 3


def test_a_source_of_another_shape_and_an_empty_tensor_are_refused_by_name():
    weights = Checkpoint.from_mapping({"a.weight": torch.ones(16, 32), "b.weight": torch.ones(0, 16)})
    other = Checkpoint.from_mapping({"a.weight": torch.ones(32, 16)})
    with pytest.raises(HswqError, match="another shape") as refused:
        layer_detail(weights, "a", other)
    assert (refused.value.tensor, refused.value.expected) == ("a.weight", [16, 32])
    with pytest.raises(HswqError, match="empty tensor"):
        layer_detail(weights, "b")


@pytest.mark.parametrize(
    ("form", "title", "columns"),
    [("nvfp4", "block scales", 8), ("mxfp8", "block scales", 4), ("int8_tensorwise", "row scales", 1),
     ("float8_e4m3fn", "tensor scale", 1)],
)  # fmt: skip
def test_the_map_of_scales_lies_over_the_rows_and_columns_of_the_weight(form, title, columns):
    weight = torch.randn(400, 128, generator=torch.Generator().manual_seed(0))
    packed = pack_weight(weight, form, 64 if form in ("nvfp4", "int8_tensorwise") else None)
    detail = layer_detail(Checkpoint.from_mapping({"a.weight": packed}), "a")
    figure = detail_figure(detail)
    heat = next(trace for trace in figure.data if trace.type == "heatmap")
    assert len(heat.z[0]) == columns
    for first, step, cells, length in (
        (heat.x0, heat.dx, columns, 128), (heat.y0, heat.dy, len(heat.z), 400)
    ):  # fmt: skip
        assert first - step / 2 == pytest.approx(-0.5)
        assert first + (cells - 0.5) * step == pytest.approx(length - 0.5)
    assert any(title in note.text for note in figure.layout.annotations)


def test_a_tensor_that_is_not_packed_says_its_dtype():
    detail = layer_detail(Checkpoint.from_mapping({"a.weight": torch.ones(16, 32)}), "a")
    assert "not packed, float32" in detail_figure(detail).layout.title.subtitle.text


def test_an_unknown_layer_is_refused(tiny_pack):
    with pytest.raises(HswqError, match="no such tensor"):
        layer_detail(tiny_pack, "layers.9.attention.qkv")


# -- PackExplorer --------------------------------------------------------------------------------------------


def test_rows_are_filtered_by_glob_or_word_and_sorted(tiny_pack):
    state = PackState()
    assert state.rows() == []
    state.open(tiny_pack, None, silent)
    assert {row.name for row in state.rows("*.attention.qkv.weight")} == {
        row.name for row in state.rows("qkv")
    }
    sizes = [row.nbytes for row in state.rows(order="bytes", descending=True)]
    assert sizes == sorted(sizes, reverse=True)
    assert [row.name for row in state.rows(order="name")] == sorted(row.name for row in state.rows())
    assert state.rows("[") == [], "no glob, and in no name"
    assert state.rows("no such thing") == []


def test_a_file_that_does_not_open_leaves_the_old_one(tiny_pack, tmp_path):
    state = PackState()
    state.open(tiny_pack, None, silent)
    before = state.report
    with pytest.raises(HswqError):
        state.open(tmp_path / "nowhere.safetensors", None, silent)
    assert state.report is before


def test_only_a_file_can_be_checked(tiny_pack, pack_file):
    state = PackState()
    with pytest.raises(HswqError, match="nothing is open"):
        state.check(silent)
    state.open(tiny_pack, None, silent)
    with pytest.raises(HswqError, match="only a file"):
        state.check(silent)
    state.open(pack_file, None, silent)
    assert state.check(silent).ok


def test_the_picker_walks_folders_and_names_what_is_chosen(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("x.safetensors", "a/y.safetensors", "a/notes.txt", ".hidden"):
        (tmp_path / name).write_text("")
    chosen = []
    picker = FilePicker(tmp_path, chosen.append)
    assert dict(picker.entries.options) == {
        "../": "..",
        "a/": "a",
        "x.safetensors (0.0 MiB)": "x.safetensors",
    }
    picker.entries.value = "x.safetensors"
    assert chosen == [tmp_path / "x.safetensors"]
    assert picker.enter_button.disabled
    with pytest.raises(HswqError, match="no folder"):
        picker.enter()
    picker.entries.value = "a"
    picker.enter()
    assert list(picker.entries.options.values()) == ["..", "y.safetensors"]
    picker.entries.value = ".."
    picker.enter()
    assert picker.folder == tmp_path.resolve()
    with pytest.raises(HswqError, match="cannot be read"):
        picker.list(tmp_path / "gone")


def test_a_file_is_picked_opened_and_its_first_packed_layer_shown(pack_file, monkeypatch):
    monkeypatch.chdir(pack_file.parent)
    shown = PackExplorer()
    assert shown.picker.layout.display == "none"
    shown.browse_button.value = True
    assert shown.picker.layout.display == ""
    shown.picker.entries.value = pack_file.name
    shown.open_button.click()
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert shown.path.value == str(pack_file)
    assert shown._detail.format != "16-bit"
    assert "not checked yet" in shown.detail.value


def test_findings_of_a_layer_stand_beside_it(tmp_path):
    weight = torch.full((32, 64), float("nan"))
    path = Checkpoint.from_mapping({"a.weight": weight, "ab.weight": weight[:, :16]}).save(
        tmp_path / "x.safetensors"
    )
    state = PackState()
    state.open(path, None, silent)
    state.check(silent)
    assert "error" in state.findings_of("a.weight")
    assert state.findings_of("a.weight").count("error") == 1, "ab is another layer"


def test_the_panel_opens_a_file_shows_a_layer_and_exports_it(pack_file, tiny_model, tmp_path):
    shown = PackExplorer(pack_file, tiny_model)
    shown._folder = tmp_path / "exports"
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert shown.layers.value in shown.table.value
    name = nvfp4_layer(Checkpoint.open(pack_file) and shown.state)
    shown.layers.value = name
    assert shown.wait(SOON)
    assert "dB" in shown.detail.value
    assert shown.figure.shown.layout.title.text == name
    exported = json.loads(shown.export("json").read_text())
    assert exported["result"] == "LayerDetail"
    shown.tabs.selected_index = 1
    assert json.loads(shown.export("json").read_text())["result"] == "InspectReport"
    shown.check_button.click()
    assert shown.wait(SOON)
    assert "PASSED" in shown.findings.value


def test_the_panel_filters_and_says_what_is_wrong_with_a_path(pack_file):
    shown = PackExplorer(pack_file)
    assert shown.wait(SOON)
    shown.filter.value = "adaLN"
    assert shown.wait(SOON)
    assert all("adaLN" in name for name in shown.layers.options)
    shown.path.value = "nowhere.safetensors"
    shown.open_button.click()
    assert shown.wait(SOON)
    assert "does not exist" in shown.errors.value
    assert "adaLN" in shown.table.value


def test_a_layer_of_the_same_name_in_another_file_is_read_again():
    one = Checkpoint.from_mapping({"a.weight": torch.ones(16, 16)})
    other = Checkpoint.from_mapping({"a.weight": torch.eye(16)})
    shown = PackExplorer(one)
    assert shown.wait(SOON)
    before = shown.result()
    shown.load(other)
    assert shown.wait(SOON)
    assert shown.result() == layer_detail(other, "a") != before
    shown._given_source = other  # the same file, compared now
    shown.load(other)
    assert shown.wait(SOON)
    assert "equal to the source" in shown.detail.value


def test_nothing_of_another_layer_is_shown_or_exported():
    weights = Checkpoint.from_mapping({"a.weight": torch.ones(16, 16), "b.weight": torch.ones(0, 16)})
    shown = PackExplorer(weights)
    assert shown.wait(SOON)
    shown.layers.value = "b.weight"  # cannot be looked at
    assert shown.wait(SOON)
    assert "empty tensor" in shown.errors.value
    assert (shown.detail.value, type(shown.result()).__name__) == ("", "InspectReport")
    shown.layers.value = "a.weight"
    assert shown.wait(SOON)
    assert type(shown.result()).__name__ == "LayerDetail"
    shown.filter.value = "no such layer"
    assert (shown.detail.value, type(shown.result()).__name__) == ("", "InspectReport")
    assert "0 of 2 names" in shown.count.value
    shown.filter.value = ""
    assert shown.wait(SOON)
    shown.load(Checkpoint.from_mapping({"bias": torch.ones(4)}))
    assert shown.wait(SOON)
    assert (shown.detail.value, shown.result().rows[0].name) == ("", "bias")


def test_findings_say_what_was_found_and_can_be_exported(tmp_path):
    path = Checkpoint.from_mapping({"a.weight": torch.ones(32, 64)}).save(tmp_path / "x.safetensors")
    shown = PackExplorer(path, Checkpoint.from_mapping({"a.weight": -torch.ones(32, 64)}))
    shown._folder = tmp_path
    assert shown.wait(SOON)
    shown.check_button.click()
    assert shown.wait(SOON)
    found = shown.state.checked.findings[0]
    assert found.found in shown.findings.value
    shown.tabs.selected_index = shown.tabs.titles.index("findings")
    assert json.loads(shown.export("json").read_text())["result"] == "CheckReport"


def test_choosing_a_layer_does_not_end_a_check(tmp_path):
    weights = {f"{name}.weight": torch.randn(16, 16) for name in "ab"}
    path = Checkpoint.from_mapping(weights).save(tmp_path / "x.safetensors")
    shown = PackExplorer(path)
    assert shown.wait(SOON)
    shown.check_button.click()
    shown.layers.value = "b.weight"
    assert shown.wait(SOON)
    assert shown.state.checked.ok
    assert shown.result().name == "b.weight"


def test_names_are_ordered_as_people_count():
    names = [f"layers.{n}.a.weight" for n in (1, 10, 2)]
    state = PackState()
    state.open(Checkpoint.from_mapping({name: torch.ones(16, 16) for name in names}), None, silent)
    assert [row.name for row in state.rows(order="name")] == [names[0], names[2], names[1]]


# -- SensitivityExplorer -------------------------------------------------------------------------------------


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


# -- BakeCheck -----------------------------------------------------------------------------------------------


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
