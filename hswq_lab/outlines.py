"""Text of an SVG as outlines: it looks the same on every machine and in every program, whatever fonts are there.

An SVG of a browser only names its fonts. Embedding them (`@font-face`) helps in browsers alone: Inkscape, LaTeX's
converters and office programs leave embedded fonts out. Outlines are also what matplotlib writes by default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias
from xml.etree.ElementTree import Element, SubElement, fromstring, register_namespace, tostring

from hswq_lab.shipped import asset

FAMILY: Final = "Arimo, 'Liberation Sans', Arial, Helvetica, sans-serif"
"""Fonts as wide as the outlines, in one of which a browser must have laid the text out."""

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_UNSEEN = "\u200b\n"  # plotly puts zero-width spaces around exponents
_KEPT = {"class", "transform", "opacity"}
_OF_FONTS = re.compile(r"font|white-space|text-anchor")
_ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}
_BOLD = 600
Style: TypeAlias = dict[str, str]


class Face(NamedTuple):
    """One weight of the font: character → (advance, path with y upwards), pair → kerning, in 1/units of its size."""

    name: str
    units: int
    glyphs: dict[str, tuple[int, str]]
    kerning: dict[str, int]


class Glyph(NamedTuple):
    """A character of a line: x from where the line begins, y from its baseline, in pixels; scale: of a unit."""

    face: Face
    char: str
    scale: float
    x: float
    y: float


@dataclass
class Line:
    """Glyphs on one baseline, which stands at y; x is where its anchor is."""

    x: float
    y: float
    glyphs: list[Glyph] = field(default_factory=list)
    width: float = 0.0

    def add(self, text: str, style: Style, shift: float) -> None:
        """Appends text, `shift` below the baseline."""
        face, before = _face_of(style), ""
        scale = _size(style) / face.units
        for char in text:
            if char not in _UNSEEN:
                self.width += face.kerning.get(before + char, 0) * scale
                self.glyphs.append(Glyph(face, char, scale, self.width, shift))
                self.width += face.glyphs[char][0] * scale
                before = char


def outlined(svg: str) -> str:
    """The same picture with every text drawn; what it says stays as its label.

    A text with a character that the outlines lack (they have Latin, Greek, Cyrillic and mathematics) stays text.

    Args:
        svg: from plotly, laid out in one of `FAMILY`.
    """
    register_namespace("", _SVG)
    register_namespace("xlink", _LINK)
    root = fromstring(svg)  # noqa: S314 - made here, by our own browser
    used: dict[str, str] = {}
    for parent in list(root.iter()):
        for place, child in enumerate(parent):
            if child.tag == f"{{{_SVG}}}text":
                parent[place] = _drawn(child, used)
    shapes = Element(f"{{{_SVG}}}defs")
    for name, path in used.items():
        SubElement(shapes, f"{{{_SVG}}}path", {"id": name, "d": path})
    root.insert(0, shapes)
    return tostring(root, encoding="unicode")


@cache
def faces() -> dict[str, Face]:
    """The font by weight, "regular" and "bold"; both have the same characters."""
    content = json.loads(asset("arimo.json").read_text(encoding="utf-8"))
    return {
        name: Face(name, content["units"], content[name]["glyphs"], content[name]["kerning"])
        for name in ("regular", "bold")
    }


def _drawn(text: Element, used: dict[str, str]) -> Element:
    style, said = _style_of(text), "".join(text.itertext()).strip(_UNSEEN)
    if not set(said) <= {*faces()["regular"].glyphs, *_UNSEEN}:
        text.set("style", _as_css(style | {"font-family": "sans-serif"}))
        return text
    kept = {str(name): value for name, value in text.attrib.items() if name in _KEPT}
    look = _as_css({name: value for name, value in style.items() if not _OF_FONTS.match(name)})
    drawn = Element(f"{{{_SVG}}}g", {**kept, "style": look, "aria-label": said})
    anchor = _ANCHORS[text.get("text-anchor", "start")]
    for line in _lines(text, style):
        left = line.x - anchor * line.width
        for (y, scale), glyphs in groupby(line.glyphs, lambda glyph: (glyph.y, glyph.scale)):
            place = f"translate({left:.2f} {line.y + y:.2f}) scale({scale:.5f} {-scale:.5f})"
            run = SubElement(drawn, f"{{{_SVG}}}g", {"transform": place})
            for glyph in glyphs:
                name, path = f"{glyph.face.name}-{ord(glyph.char):x}", glyph.face.glyphs[glyph.char][1]
                if path:
                    used[name] = path
                    x = f"{glyph.x / scale:.0f}"
                    SubElement(run, f"{{{_SVG}}}use", {f"{{{_LINK}}}href": f"#{name}", "x": x})
    return drawn


def _lines(text: Element, style: Style) -> list[Line]:
    """The lines of a text; a part of it with an x of its own begins one."""
    lines, shift = [], 0.0
    for begun, content, look in _pieces(text, style):
        if begun is not None and (begun is text or "x" in begun.attrib):
            lines.append(Line(_number(begun, "x"), _number(begun, "y") + _shift(begun, look)))
            shift = 0.0
        elif begun is not None:
            shift += _shift(begun, look)
        lines[-1].add(content, look, shift)
    return lines


def _pieces(element: Element, style: Style) -> Iterator[tuple[Element | None, str, Style]]:
    """Stretches of text in one style, each with the element that begins with it."""
    yield element, element.text or "", style
    for child in element:
        own = _style_of(child)
        if "font-size" in own:
            own["font-size"] = f"{_size(own, _size(style))}px"
        yield from _pieces(child, style | own)
        yield None, child.tail or "", style


def _style_of(element: Element) -> Style:
    pairs = (part.split(":", 1) for part in element.get("style", "").split(";") if ":" in part)
    return {name.strip(): value.strip() for name, value in pairs}


def _as_css(style: Style) -> str:
    return "; ".join(f"{name}: {value}" for name, value in style.items())


def _face_of(style: Style) -> Face:
    weight = style.get("font-weight", "normal")
    heavy = int(weight) >= _BOLD if weight.isdigit() else weight.startswith("bold")
    return faces()["bold" if heavy else "regular"]


def _size(style: Style, around: float = 1.0) -> float:
    """font-size in pixels, inside text of another size."""
    size = style["font-size"]
    if size.endswith("%"):
        return around * float(size[:-1]) / 100
    return around * float(size[:-2]) if size.endswith("em") else float(size.removesuffix("px"))


def _number(element: Element, name: str) -> float:
    return float(element.get(name, "0"))


def _shift(element: Element, style: Style) -> float:
    """dy in pixels."""
    asked = element.get("dy", "0")
    return float(asked[:-2]) * _size(style) if asked.endswith("em") else float(asked)
