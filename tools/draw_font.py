"""Draws hswq_lab/assets/arimo.json: the outlines of the letters that SVG exports are made of.

    python tools/draw_font.py Arimo-Regular.ttf Arimo-Bold.ttf

Needs fontTools, and the fonts (SIL OFL 1.1, see assets/OFL.txt; Debian has them in fonts-croscore). Arimo has the
widths of Arial and Liberation Sans, so a text that a browser has laid out in one of them fits.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

from fontTools.pens.svgPathPen import SVGPathPen
from fontTools.ttLib import TTFont

TARGET = Path(__file__).parents[1] / "hswq_lab" / "assets" / "arimo.json"
BLOCKS = (
    (0x20, 0x7F),  # ASCII
    (0xA0, 0x180),  # Latin-1, Latin Extended-A
    (0x370, 0x400),  # Greek
    (0x400, 0x460),  # Cyrillic
    (0x2010, 0x2040),  # dashes, quotes, dots
    (0x2070, 0x20A0),  # superscripts and subscripts
    (0x2190, 0x2200),  # arrows
    (0x2200, 0x2300),  # mathematics
    (0x25A0, 0x2600),  # geometric shapes
)


def outlines(font: TTFont) -> dict[str, object]:
    """Characters → [advance, path data, y upwards], and pairs → kerning, in units of the font."""
    names = font.getBestCmap()
    chars = {chr(code): names[code] for first, end in BLOCKS for code in range(first, end) if code in names}
    glyphs, drawn = font.getGlyphSet(), {}
    for char, name in chars.items():
        pen = SVGPathPen(glyphs, ntos=lambda value: str(round(value)))
        glyphs[name].draw(pen)
        drawn[char] = [font["hmtx"][name][0], pen.getCommands()]
    return {"glyphs": drawn, "kerning": kerning(font, chars)}


def kerning(font: TTFont, chars: dict[str, str]) -> dict[str, int]:
    """Pairs of characters whose distance is not the sum of their advances; digits stay as wide as each other."""
    gpos, pairs = font["GPOS"].table, {}
    kern = [record.Feature for record in gpos.FeatureList.FeatureRecord if record.FeatureTag == "kern"]
    for index in sorted({index for feature in kern for index in feature.LookupListIndex}):
        for table in gpos.LookupList.Lookup[index].SubTable:
            first = {char: name for char, name in chars.items() if name in table.Coverage.glyphs}
            for left, right in product(first, chars):
                value = adjustment(table, chars[left], chars[right])
                if value and not (left + right).isdigit():
                    pairs.setdefault(left + right, value)
    return dict(sorted(pairs.items()))


def adjustment(table: object, left: str, right: str) -> int:
    """What one subtable (PairPos, in either of its formats) adds to the advance of a pair's first glyph."""
    if table.Format == 1:
        records = table.PairSet[table.Coverage.glyphs.index(left)].PairValueRecord
        value = next((record.Value1 for record in records if record.SecondGlyph == right), None)
    else:
        row = table.Class1Record[table.ClassDef1.classDefs.get(left, 0)]
        value = row.Class2Record[table.ClassDef2.classDefs.get(right, 0)].Value1
    return getattr(value, "XAdvance", 0) if value else 0


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("regular", type=Path)
    parser.add_argument("bold", type=Path)
    args = parser.parse_args()
    fonts = {"regular": TTFont(args.regular), "bold": TTFont(args.bold)}
    content = {
        "units": fonts["regular"]["head"].unitsPerEm,
        **{name: outlines(font) for name, font in fonts.items()},
    }
    TARGET.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
