"""Figures that explain: values where they belong, marks on logarithmic axes, names as plain text, pictures in place."""

from __future__ import annotations

import math

import pytest
from PIL import Image

from hswq_lab.plots import ranges_figure
from hswq_lab.plots.explain import bars_figure, block_figure, lines_figure, proxies_figure, strip_figure
from hswq_lab.quantize import CalibrationReport, ImpactReport, LayerActivations, LayerImpact

EVIL = "<a href='https://evil.example'>x</a>"
SAFE = "&lt;a href='https://evil.example'&gt;x&lt;/a&gt;"


def impacts(values):
    rows = [
        LayerImpact(f"layers.{i}.w", "nvfp4", 4, 16, [value], 0.1 + i, 0.2 + i, 0.3 - i / 100, 0.5 + i)
        for i, value in enumerate(values)
    ]
    return ImpactReport("mini", "0", ["a"], [1], 1, 1.0, 3.0, (64, 64), "rtn", rows)


def test_bars_carry_their_values_and_a_legend_only_where_there_is_a_choice():
    one = bars_figure("t", "s", {"a": {"x": 1.234, EVIL: 2.0}}, "dB")
    assert list(one.data[0].text) == ["1.23", "2.00"]
    assert list(one.data[0].x) == ["x", SAFE]
    assert one.data[0].showlegend is False
    two = bars_figure("t", "s", {"a": {"x": 1.0}, "b": {"x": 2.0}}, "dB", log=True)
    assert all(bars.showlegend for bars in two.data)
    assert two.layout.yaxis.type == "log"


def test_a_logarithmic_axis_gets_gaps_for_zeros_and_its_mark_at_the_exponent():
    figure = lines_figure(
        "t", "s", {"a": ([1, 10, 100], [0.0, 1.0, 2.0])}, ("x", "y"), log="xy", mark=(10, "here")
    )
    assert list(figure.data[0].y) == [None, 1.0, 2.0]
    assert figure.layout.annotations[-1].x == pytest.approx(1.0)
    assert figure.layout.shapes[0].x0 == 10
    plain = lines_figure("t", "s", {"a": ([1, 10], [0.0, 1.0])}, ("x", "y"), mark=(10, "here"))
    assert list(plain.data[0].y) == [0.0, 1.0]
    assert plain.layout.annotations[-1].x == 10


def test_a_block_shows_every_level_and_both_values():
    figure = block_figure([1.0, -2.0], [1.0, -1.5], [0.0, 1.0, 1.5, -1.5], "t", "s")
    assert [shape.y0 for shape in figure.layout.shapes] == [0.0, 1.0, 1.5, -1.5]
    assert [list(trace.y) for trace in figure.data] == [[1.0, -2.0], [1.0, -1.5]]


def test_proxies_have_a_panel_each_with_their_rank_correlation():
    figure = proxies_figure(impacts([1e-4, 1e-3, 1e-2]))
    titles = [note.text for note in figure.layout.annotations]
    assert titles[0] == "weight error: ρ = 1.00"
    assert titles[2] == "relative output error: ρ = -1.00"
    assert [list(trace.y) for trace in figure.data] == [[1e-4, 1e-3, 1e-2]] * 4
    assert math.isclose(figure.data[3].x[2], 2.5)


def test_pictures_stand_in_their_row_and_column():
    pictures = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    figure = strip_figure("t", ["one", EVIL], {"16 bit": pictures, "tc": pictures})
    places = [(image.x, image.y) for image in figure.layout.images]
    assert len(set(places)) == 4
    assert places[0][1] == places[1][1] < places[2][1]
    assert figure.layout.images[0].source == figure.layout.images[2].source
    assert figure.layout.images[0].source != figure.layout.images[1].source
    assert SAFE in [note.text for note in figure.layout.annotations]


@pytest.mark.parametrize(("largest", "ticks"), [(5.0, "D2"), (5000.0, 1)])
def test_ranges_within_a_decade_still_have_ticks(largest, ticks):
    rows = [
        LayerActivations(f"l{i}", None, 4, amax, amax, amax / 2688, None)
        for i, amax in enumerate((2.0, largest))
    ]
    figure = ranges_figure(CalibrationReport("mini", "16-bit", ["a"], [1], 2, 2.5, [], rows))
    assert figure.layout.yaxis.dtick == ticks
