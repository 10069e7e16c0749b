"""SVGs whose text is outlines: where each letter stands, what is kept, and what stays text."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree.ElementTree import fromstring

import numpy as np
import plotly.graph_objects as go
import pytest
from PIL import Image, ImageFilter

import hswq_lab
from hswq_lab import export
from hswq_lab.outlines import FAMILY, faces, outlined

LOOK = "font-family: Arimo; font-size: 20px; fill: rgb(1, 2, 3); white-space: pre"
ROOT = Path(hswq_lab.__file__).parents[1]


def drawn(text):
    """The group that a text becomes: its attributes, and (glyph, x, y, scale) of each letter."""
    svg = outlined(f'<svg xmlns="http://www.w3.org/2000/svg"><g>{text}</g></svg>')
    group = fromstring(svg)[1][0]  # noqa: S314 - made here
    letters = []
    for run in group:
        found = re.match(r"translate\((\S+) (\S+)\) scale\((\S+) ", run.get("transform", ""))
        for use in run:
            x, y, scale = map(float, found.groups())
            (name,) = (value for key, value in use.attrib.items() if key.endswith("href"))
            assert f'id="{name[1:]}"' in svg, "the outline is in the file"
            letters.append((name[1:], x + scale * float(use.get("x")), y, scale))
    return group, letters


def width(text, face="regular", size=20):
    return sum(faces()[face].glyphs[char][0] for char in text) * size / faces()[face].units


def test_letters_stand_side_by_side_at_the_size_of_the_text():
    group, letters = drawn(
        f'<text class="a" transform="rotate(-90,1,2)" x="5" y="7" style="{LOOK}">ab</text>'
    )
    assert [letter[0] for letter in letters] == ["regular-61", "regular-62"]
    assert [letter[1] for letter in letters] == pytest.approx([5, 5 + width("a")], abs=0.01)
    assert [letter[2] for letter in letters] == [7, 7]
    assert [letter[3] for letter in letters] == pytest.approx([20 / 2048] * 2, abs=1e-5)
    assert (group.get("class"), group.get("transform")) == ("a", "rotate(-90,1,2)")
    assert (group.get("style"), group.get("aria-label")) == ("fill: rgb(1, 2, 3)", "ab")


@pytest.mark.parametrize(("anchor", "share"), [("start", 0), ("middle", 0.5), ("end", 1)])
def test_a_text_is_anchored_by_its_width(anchor, share):
    _, letters = drawn(f'<text text-anchor="{anchor}" x="100" y="0" style="{LOOK}">NVFP4</text>')
    assert letters[0][1] == pytest.approx(100 - share * width("NVFP4"), abs=0.7), "but for the kerning"


def test_pairs_are_kerned_and_digits_are_not():
    _, letters = drawn(f'<text x="0" y="0" style="{LOOK}">AV11</text>')
    assert letters[1][1] < width("A") - 1
    assert letters[3][1] - letters[2][1] == pytest.approx(width("1"), abs=0.01)


def test_bold_is_bold():
    for weight in ("600", "700", "bold"):
        _, letters = drawn(f'<text x="0" y="0" style="{LOOK}; font-weight: {weight}">a</text>')
        assert letters[0][0] == "bold-61"
    assert drawn(f'<text x="0" y="0" style="{LOOK}; font-weight: normal">a</text>')[1][0][0] == "regular-61"


def test_an_exponent_is_small_and_raised_and_what_follows_is_not():
    # as plotly writes 10 to the power of 4, with zero-width spaces around it
    power = '10\u200b<tspan style="font-size:70%" dy="-0.6em">4</tspan><tspan dy="0.42em">\u200b</tspan>x'
    group, letters = drawn(f'<text x="0" y="50" style="{LOOK}">{power}</text>')
    assert [round(20 / 2048 / letter[3] * 100) for letter in letters] == [
        100,
        100,
        pytest.approx(143, abs=1),
        100,
    ]
    assert [letter[2] for letter in letters] == pytest.approx([50, 50, 50 - 0.6 * 14, 50], abs=0.02)
    assert letters[3][1] == pytest.approx(width("10") + width("4", size=14), abs=0.05)
    assert group.get("aria-label").startswith("10")


def test_lines_begin_where_they_are_put():
    lines = '<tspan class="line" dy="0em" x="3" y="9">a</tspan><tspan class="line" dy="1.3em" x="3" y="9">b</tspan>'
    _, letters = drawn(f'<text x="3" y="9" style="{LOOK}">{lines}</text>')
    assert [letter[1:3] for letter in letters] == [(3, 9), (3, 35)]


def test_what_cannot_be_drawn_stays_text_in_a_font_that_every_machine_has():
    group, _ = drawn(f'<text x="0" y="0" style="{LOOK}">模型 a</text>')
    assert group.tag.endswith("text")
    assert group.text == "模型 a"
    assert "font-family: sans-serif" in group.get("style")


def test_every_character_of_our_figures_can_be_drawn():
    sources = [*ROOT.glob("hswq_lab/plots/*.py"), ROOT / "tools" / "draw_concepts.py"]
    assert len(sources) > 8
    used = set("".join(path.read_text(encoding="utf-8") for path in sources)) - {"\n"}
    assert used <= set(faces()["regular"].glyphs)
    assert faces()["regular"].glyphs.keys() == faces()["bold"].glyphs.keys()


@pytest.mark.browser
@pytest.mark.skipif(export.why_no_static_export() is not None, reason=str(export.why_no_static_export()))
def test_the_outlines_lie_where_the_browser_writes_the_text(tmp_path):
    cairosvg = pytest.importorskip("cairosvg")
    figure = go.Figure(go.Bar(x=["Linear", "AVAVAV", "Σσ ≥ ½"], y=[1e-4, 1e-2, 1.0], text=["a", "b", "c"]))
    figure.update_layout(
        title={"text": "<b>To be</b> measured: 10<sup>−3</sup>"}, font={"family": FAMILY}, height=400,
        yaxis={"type": "log", "exponentformat": "power", "title": {"text": "impact"}},
    )  # fmt: skip
    with export.static_export():
        seen = Image.open(export.save_figure(figure, tmp_path / "x.png", width=600)).convert("L")
        svg = export.save_figure(figure, tmp_path / "x.svg", width=600).read_text(encoding="utf-8")

    def distance(content):
        picture = Image.open(io.BytesIO(cairosvg.svg2png(content.encode(), scale=2))).convert("L")
        blurred = (np.asarray(each.filter(ImageFilter.GaussianBlur(3)), float) for each in (picture, seen))
        return float(np.abs(next(blurred) - next(blurred)).max())

    assert distance(svg) < 0.25 * distance(re.sub(r"<use [^>]*>", "", svg)), "against no text at all"
