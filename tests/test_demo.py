"""The demo's path on a tiny model, its files, and the pages that it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hswq_lab import demo as demo_module
from hswq_lab import demo_report, loading, page, shipped
from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.demo import FAST, Settings, require_same, run_demo, shipped_lora
from hswq_lab.errors import HswqError
from hswq_lab.progress import silent
from hswq_lab.tables import retention_table, verdict_table
from hswq_lab.trajectory import SEEDS_20

EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_tensors, tiny_companion):
    """(Demo, its folder): the whole path, with a LoRA, on the tiny network."""
    folder = tmp_path_factory.mktemp("demo")
    source = write(folder / "source.safetensors", tiny_tensors.items())
    generator = torch.Generator().manual_seed(3)
    name = "transformer.layers.0.attention.to_q"
    factors = {
        f"{name}.lora_A.weight": torch.randn(2, 64, generator=generator),
        f"{name}.lora_B.weight": torch.randn(64, 2, generator=generator),
    }
    save_file(factors, folder / "outline.safetensors")
    companion = replace(tiny_companion, loras={"outline": str(folder / "outline.safetensors")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "companion_for", lambda _: companion)
        patch.setattr(shipped, "asset", lambda _: source)
        settings = replace(FAST, nvfp4=6, shown=2, seeds=SEEDS_20[:2])
        made = run_demo(folder / "out", settings)
        demo_report.write_all(made, folder / "out", silent)
    return made, folder / "out"


@pytest.fixture(scope="module")
def report_html(made):
    return (made[1] / "report.html").read_text(encoding="utf-8")


def test_the_demo_packs_as_many_layers_as_it_says_and_calibrates_them(made):
    demo, _ = made
    entries = [entry for entry in Checkpoint.open(demo.file).entries() if entry.packed]
    four_bit = [entry for entry in entries if entry.format == "nvfp4"]
    assert len(four_bit) == 6
    assert all(entry.calibrated for entry in four_bit)
    assert {entry.format for entry in entries} == {"nvfp4", "int8_tensorwise"}


def test_every_way_is_tried_and_the_pack_is_pristine_afterwards(made):
    demo, _ = made
    assert list(demo.ways) == ["branch", "bake", "bake_from_source"]
    assert all(report.verdict == "OK" for report in demo.ways.values())
    assert demo.pack.loras == []
    assert retention_table(demo.ways)["retained"].between(0.5, 1.5).all()


def test_the_verdict_table_says_what_the_verdict_says(made):
    report = made[0].trajectories
    table = verdict_table(report).set_index("variant")
    assert list(table.index) == ["parity", "tc"]
    for verdict in report.verdict.variants:
        assert table.loc[verdict.variant, "mean cos"] == verdict.mean
        assert table.loc[verdict.variant, "gate"] == ("passed" if verdict.passed else "FAILED")


def test_the_pictures_with_the_lora_differ_from_those_without(made):
    pictures = made[0].pictures
    assert list(pictures) == ["16 bit", "parity", "tc", "16 bit + outline", "tc + outline"]
    for plain, dressed in (("16 bit", "16 bit + outline"), ("tc", "tc + outline")):
        assert not torch.equal(pictures[plain][0].final, pictures[dressed][0].final)
        assert pictures[plain][0].seed == pictures[dressed][0].seed


def test_every_file_is_there_and_can_be_read(made):
    _, out = made
    tables = {path.name for path in (out / "tables").iterdir()}
    for name in (
        "trajectories",
        "impact",
        "layers",
        "calibration",
        "lora_bake",
        "verdict",
        "seeds",
        "retention",
    ):
        assert {f"{name}.csv", f"{name}.json"} <= tables
    for path in (out / "tables").glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert len(pd.read_csv(out / "tables" / "layers.csv")) == len(made[0].model.layers())
    assert len(list((out / "pictures").glob("*.png"))) == 5 * 2 + 1
    with Image.open(out / "pictures" / "strip.png") as strip:
        assert strip.height > strip.width * 0.3


def test_the_report_is_one_file_with_plotly_in_it_once(report_html):
    assert report_html.count("plotly.js v") == 1
    assert report_html.count("Plotly.newPlot(") == 5
    assert not re.search(r'<(script|img|link|iframe)[^>]+(src|href)="(?!data:)', report_html)
    assert "prefers-color-scheme: dark" in report_html


def test_the_report_holds_the_pictures_and_the_verdict(made, report_html):
    assert report_html.count("<img alt=") == 10
    for verdict in made[0].trajectories.verdict.variants:
        assert verdict.text.replace("&", "&amp;").replace("<", "&lt;") in report_html


class Tags(HTMLParser):
    """Collects the tags of a page and what is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_well_formed_and_its_pictures_have_words(report_html):
    tags = Tags()
    tags.feed(report_html)
    assert tags.open == []
    assert all(attrs.get("alt") for tag, attrs in tags.seen if tag == "img")


@pytest.mark.parametrize(
    "part",
    [
        page.prose(EVIL),
        page.note(EVIL),
        page.code(EVIL),
        page.tiles({EVIL: EVIL}),
        page.banner(EVIL, good=False),
        page.table(pd.DataFrame({EVIL: [EVIL]})),
        page.strip([EVIL], {EVIL: [b""]}),
    ],
)
def test_text_from_outside_is_shown_as_text(part):
    tags = Tags()
    tags.feed(part)
    images = [attrs for tag, attrs in tags.seen if tag == "img"]
    assert all(attrs["src"].startswith("data:") and "onerror" not in attrs for attrs in images)


def test_a_pages_own_title_and_headings_are_text_too():
    built = page.Page(EVIL, EVIL)
    built.section(EVIL, page.prose("x"))
    tags = Tags()
    tags.feed(built.html())
    assert not [tag for tag, _ in tags.seen if tag == "img"]
    assert "plotly.js v" not in built.html()


def test_a_table_writes_gaps_flags_and_figures_for_people():
    cells = page.table(pd.DataFrame({"a": [True, False], "b": [1.23456789, float("nan")], "c": ["x", None]}))
    assert re.findall(r"<td[^>]*>([^<]*)</td>", cells) == ["yes", "1.2346", "x", "no", "–", "–"]
    assert '<td class="n">1.2346' in cells


def test_a_failed_gate_says_so_in_words():
    assert "FAILED" in page.banner("x", good=False)
    assert "PASSED" in page.banner("x", good=True)


def test_a_pack_that_comes_back_changed_is_refused(tiny_pack):
    require_same(tiny_pack.checkpoint, tiny_pack.checkpoint)
    name = "x_embedder.bias"
    changed = tiny_pack.checkpoint.with_values({name: tiny_pack.checkpoint[name] + 1})
    with pytest.raises(HswqError, match=name):
        require_same(tiny_pack.checkpoint, changed)
    packed = next(e.name for e in tiny_pack.checkpoint.entries() if e.format == "nvfp4")
    other = tiny_pack.checkpoint.with_values({packed: tiny_pack.checkpoint[packed].with_input_scale(None)})
    with pytest.raises(HswqError, match=packed):
        require_same(tiny_pack.checkpoint, other)


def test_a_lora_that_does_not_ship_is_named(tiny_model):
    with pytest.raises(HswqError, match="sepia"):
        shipped_lora(tiny_model, "sepia")


def test_without_a_browser_everything_else_is_written(made, tmp_path, monkeypatch):
    monkeypatch.setattr("hswq_lab.export.find_browser", lambda: None)
    why = demo_report.write_all(made[0], tmp_path, silent)
    assert why is not None
    assert "Chromium" in why
    assert (tmp_path / "report.html").is_file()
    assert not (tmp_path / "plots").exists()


def test_the_default_settings_are_those_of_the_issue():
    assert Settings().seeds == SEEDS_20
    assert (Settings().steps, Settings().shown) == (12, 8)
    assert demo_module.FAST.steps < Settings().steps


def test_captions_are_cut_with_an_ellipsis():
    font = demo_report.ImageFont.load_default(size=15)
    assert demo_report.fitting("heart", 400, font) == "heart"
    cut = demo_report.fitting("a very long prompt about many things", 80, font)
    assert cut.endswith("…")
    assert font.getlength(cut) <= 80
