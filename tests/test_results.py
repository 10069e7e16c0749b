"""Result objects: strict JSON whatever is in them, tables, offline pages, files whole or not at all."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hswq_lab import export
from hswq_lab.errors import HswqError
from hswq_lab.results import Result, json_ready, write_text


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    bulk: torch.Tensor | None = field(default=None, metadata={"saved": False})


@dataclass(frozen=True)
class Toy(Result):
    rows: list[Row] = field(repr=False)
    path: Path = Path("a/b")
    runs: list[object] = field(default_factory=list, repr=False, metadata={"saved": False})

    def to_frame(self):
        return pd.DataFrame(
            {"name": [row.name for row in self.rows], "value": [row.value for row in self.rows]}
        )

    def figure(self):
        return go.Figure(go.Bar(x=[row.name for row in self.rows], y=[row.value for row in self.rows]))


TOY = Toy([Row("a<b>", 1.5, torch.ones(3)), Row("nan", math.nan), Row("inf", math.inf)], runs=[object()])

tensors = st.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]).map(
    lambda dtype: torch.tensor([[1.0, math.nan], [-2.0, 0.5]]).to(dtype)
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    tensors,
    st.just(np.float32("nan")),
    st.just(np.arange(3)),
    st.just(Path("x")),
    st.just(torch.float32),
)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.integers(), inner), max_leaves=12
)


@given(trees)
def test_anything_becomes_strict_json(tree):
    assert json.loads(json.dumps(json_ready(tree), allow_nan=False)) == json_ready(tree)


def test_values_survive():
    assert json_ready({"a": (1, 2.5, np.int64(3)), 4: {"b"}}) == {"a": [1, 2.5, 3], "4": ["b"]}
    assert json_ready(torch.tensor([[1.0, math.inf]], dtype=torch.bfloat16)) == [[1.0, None]]
    assert json_ready(torch.tensor([448.0]).to(torch.float8_e4m3fn)) == [448.0]


def test_json_file_is_strict_and_leaves_out_what_is_not_to_be_saved(tmp_path):
    content = json.loads(TOY.save(tmp_path / "toy.json").read_text(), parse_constant=pytest.fail)
    assert content == {
        "result": "Toy",
        "rows": [
            {"name": "a<b>", "value": 1.5},
            {"name": "nan", "value": None},
            {"name": "inf", "value": None},
        ],
        "path": "a/b",
    }


def test_csv_and_page(tmp_path):
    table = pd.read_csv(TOY.save(tmp_path / "toy.csv"), keep_default_na=False)
    assert list(table["name"]) == ["a<b>", "nan", "inf"]
    page = TOY.save(tmp_path / "new" / "toy.HTML").read_text()
    assert "a&lt;b&gt;" in page
    assert "<td>a<b>" not in page
    assert "Plotly.newPlot" in page
    assert "white-space: pre-wrap" in page, "long lines of the summary must not run off a printed page"
    assert 'src="http' not in page, "the page must open offline"


def test_a_page_begins_with_what_the_result_says_of_itself_if_it_says_anything(tmp_path):
    @dataclass(frozen=True)
    class Told(Toy):
        def __repr__(self):
            return "two of <three> arrived"

    page = Told(TOY.rows).save(tmp_path / "told.html").read_text()
    assert "<h2>In short</h2><pre><code>two of &lt;three&gt; arrived</code></pre>" in page
    assert "In short" not in TOY.save(tmp_path / "toy.html").read_text(), "a list of fields is no summary"


def test_unknown_form_is_refused(tmp_path):
    for name in ("toy.xlsx", "toy"):
        with pytest.raises(HswqError, match="cannot be saved in this form"):
            TOY.save(tmp_path / name)
    with pytest.raises(HswqError, match="cannot be saved in this form"):
        export.save_figure(TOY.figure(), tmp_path / "toy.bmp")
    assert list(tmp_path.iterdir()) == []


def disk_full(handle, data, offset):
    raise OSError(28, "No space left on device")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "text.txt"
    write_text(target, "first")
    monkeypatch.setattr(os, "pwrite", disk_full)
    with pytest.raises(HswqError, match="the disk is full"):
        write_text(target, "second")
    assert target.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HswqError, match="cannot be written"):
        write_text(tmp_path / "file" / "below.txt", "x")


def test_broken_file_names_do_not_break_a_file(tmp_path):
    write_text(tmp_path / "x", "broken \udcff name")
    assert (tmp_path / "x").read_text() == "broken \\udcff name"


def test_pictures_without_a_browser_are_one_clear_message(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    assert export.find_browser() is None
    with pytest.raises(HswqError, match="static picture cannot be made here") as caught:
        TOY.save(tmp_path / "toy.png")
    assert ".html" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_browser_path_wins(tmp_path, monkeypatch):
    browser = tmp_path / "browser"
    browser.touch()
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    assert export.find_browser() == str(browser)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(export.why_no_static_export() is not None, reason=str(export.why_no_static_export()))
@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF")])
def test_pictures_with_a_browser(tmp_path, suffix, start):
    assert TOY.save(tmp_path / f"toy{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("path", [5, None, ""])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(HswqError, match="named by its path"):
        TOY.save(path)
