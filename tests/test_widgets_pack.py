"""PackExplorer: its state as a script would use it, and the panel."""

from __future__ import annotations

import json
import re

import pytest
import torch

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.detail import layer_detail
from hswq_lab.errors import HswqError
from hswq_lab.loading import save
from hswq_lab.progress import silent
from hswq_lab.widgets import PackExplorer
from hswq_lab.widgets.file_picker import FilePicker
from hswq_lab.widgets.pack_state import PackState

SOON = 60.0


@pytest.fixture
def pack_file(tiny_pack, tmp_path):
    return save(tiny_pack, tmp_path / "tiny.safetensors")


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
    name = next(row.name for row in shown.state.report.rows if row.format == "nvfp4")
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
    columns = re.findall("<th>(.*?)</th>", shown.findings.value)
    assert columns[:4] == ["severity", "rule", "tensor", "problem"]
    assert ("to do" in columns) == any(each.fix for each in shown.state.checked.findings), "no empty columns"
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


def opened(*what):
    shown = PackExplorer(*what)
    assert shown.wait(SOON)
    return shown


def test_the_open_file_is_named_whatever_the_boxes_say(pack_file, tmp_path):
    shown = opened(pack_file)
    shown._folder = tmp_path / "exports"
    shown.path.value = "typo.safetensors"
    shown.open_button.click()
    assert shown.wait(SOON)
    shown.layers.value = shown.layers.options[1]
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert str(pack_file) in shown.opened.value
    assert str(pack_file) in shown.detail.value
    assert pack_file.name in shown.figure.shown.layout.title.subtitle.text
    assert json.loads(shown.export("json").read_text())["file"] == str(pack_file)
    assert str(pack_file) in shown.export("html").read_text()


def test_a_source_without_the_layer_says_so_and_how_many_it_has():
    def weights(names):
        return Checkpoint.from_mapping({name: torch.ones(16, 16) for name in names})

    shown = opened(weights(["a.weight", "b.weight"]), weights(["b.weight", "c.weight"]))
    assert "the source has no such layer" in shown.detail.value
    assert "has 1 of these names" in shown.opened.value
    shown.layers.value = "b.weight"
    assert shown.wait(SOON)
    assert "equal to the source" in shown.detail.value
    assert "no source was given" in opened(weights(["a.weight"])).detail.value


def test_a_restart_opens_file_and_source_again_and_only_what_was_open(pack_file, tiny_model, tmp_path):
    other = Checkpoint.from_mapping({"a.weight": torch.ones(16, 16)}).save(tmp_path / "other.safetensors")
    source = save(tiny_model, tmp_path / "source.safetensors")
    before = opened(other)
    before.path.value, before.source.value = str(pack_file), str(source)
    before.open_button.click()
    assert before.wait(SOON)
    before.path.value, before.source.value = "typed", "but not opened"
    kept = before.children[-1].current.value

    shown = opened(other)
    shown.children[-1]._received(None, {"event": "restore", "values": json.loads(json.dumps(kept))}, [])
    assert shown.wait(SOON)
    assert shown.errors.value == ""
    assert (shown.path.value, shown.source.value) == (str(pack_file), str(source))
    assert (shown.state.checkpoint.path, shown.state.source.path) == (pack_file, source)
    assert "dB" in shown.detail.value


def test_a_source_for_what_was_given_as_an_object_comes_back_too(tiny_pack, tiny_model, tmp_path):
    source = save(tiny_model, tmp_path / "source.safetensors")
    shown = opened(tiny_pack)
    shown.children[-1]._received(None, {"event": "restore", "values": {"named": ["", str(source)]}}, [])
    assert shown.wait(SOON)
    assert shown.state.source.path == source
    assert shown.state.checkpoint is tiny_pack.checkpoint


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_is_another_one_by_now_is_not_checked_in_its_stead(pack_file, how):
    shown = opened(pack_file)
    pack_file.unlink()
    if how == "replaced":
        Checkpoint.from_mapping({"a.weight": torch.ones(16, 16)}).save(pack_file)
    shown.check_button.click()
    assert shown.wait(SOON)
    assert "since it was opened" in shown.errors.value
    assert "PASSED" not in shown.findings.value
    shown.layers.value = shown.layers.options[1]
    assert shown.wait(SOON)
    assert "since replaced" in shown.detail.value
    if how == "replaced":
        shown.open_button.click()
        assert shown.wait(SOON)
        shown.check_button.click()
        assert shown.wait(SOON)
        assert "PASSED" in shown.findings.value


def test_a_path_may_be_quoted_and_an_empty_one_is_asked_for(pack_file):
    shown = PackExplorer()
    for typed in (f'"{pack_file}"', f" '{pack_file}' "):
        shown.path.value = typed
        shown.open_button.click()
        assert shown.wait(SOON)
        assert shown.errors.value == ""
        assert shown.path.value == str(pack_file)
    shown.path.value = " "
    shown.open_button.click()
    assert "no file is named" in shown.errors.value


def test_a_second_press_does_not_begin_a_check_anew(pack_file):
    shown = opened(pack_file)
    shown.check_button.click()
    shown.check_button.click()
    assert "at work" in shown.errors.value
    assert shown.wait(SOON)
    assert "PASSED" in shown.findings.value
    assert shown.errors.value == ""
