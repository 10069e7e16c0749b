"""Figures: safe values and names, gaps, colours, what each figure shows, and how they reach a file."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

from hswq_lab import export
from hswq_lab.bench import GemmBench, GemmRow, ModelBench, ModelRow, Roofline
from hswq_lab.bench.gemm import ALONE, WHOLE
from hswq_lab.checkpoint import Checkpoint, diff, inspect
from hswq_lab.effect import EffectReport, LayerEffect
from hswq_lab.errors import HswqError
from hswq_lab.lora import BakeReport, LayerEvidence, LoraReport, LoraRow
from hswq_lab.plots import (
    divergence_figure,
    figure_of,
    has_figure,
    impact_figure,
    layer_map_figure,
    pareto_figure,
    ranges_figure,
    retention_figure,
    roofline_figure,
    style,
)
from hswq_lab.plots.pack import place_of
from hswq_lab.quantize import (
    CalibrationReport,
    ImpactReport,
    LayerActivations,
    LayerImpact,
    ParetoPoint,
    ParetoReport,
)
from hswq_lab.report import LayerRow, LoadReport
from hswq_lab.results import Result
from hswq_lab.trajectory import SeedTrace, TrajectoryReport
from hswq_lab.trajectory.pictures import PictureDistance

EVIL = "<img src=x onerror=alert(1)>"


def trace(variant, seed, cosines, prompt="a thing"):
    zeros = [0.0] * len(cosines)
    return SeedTrace(
        variant, seed, prompt, list(cosines), list(cosines), zeros, zeros, PictureDistance(0.9, 30.0)
    )


def trajectories(*traces):
    variants = list(dict.fromkeys(t.variant for t in traces))
    seeds = list(dict.fromkeys(t.seed for t in traces))
    steps = len(traces[0].cos_latent)
    levels = [1 - k / steps for k in range(steps + 1)]
    return TrajectoryReport(
        "mini", variants, seeds, ["a thing"] * len(seeds), steps, 2.5, 1.5, (64, 64), levels, [], list(traces)
    )


def impacts(values, form="nvfp4"):
    rows = [LayerImpact(name, form, 64, 64, [value, 1.1 * value]) for name, value in values.items()]
    return ImpactReport("mini", "", ["a", "b"], [1, 2], 4, 2.5, 1.5, (64, 64), "rtn", rows)


def layer_row(name, form="nvfp4", **fields):
    return LayerRow(name, form, 256, 64, 32, "parity", "because", fields.pop("bytes", 2**20), True, **fields)


def evidence(name, retained, form="nvfp4"):
    return LayerEvidence(
        layer=name,
        way="bake",
        kind="nvfp4",
        format=form,
        group=256,
        rows=64,
        delta_norm=1.0,
        ratio=0.1,
        retained=retained,
        retained_se=0.01,
        added_error=0.3,
        unrotated=True,
        rerotated=True,
        verdict="OK",
    )


def named(figure, name):
    return [item for item in figure.data if item.name == name]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
)
def test_a_tensor_of_any_dtype_is_plotted_by_its_values(dtype):
    assert style.numbers(torch.tensor([1.0, -2.0, 0.5]).to(dtype)) == pytest.approx(
        [1.0, -2.0, 0.0 if dtype == torch.int8 else 0.5]
    )


def test_nan_and_infinity_are_gaps_and_a_log_axis_gets_no_zero():
    assert style.numbers([1, None, math.nan, math.inf, -math.inf, np.float32(2)]) == [
        1,
        None,
        None,
        None,
        None,
        2,
    ]
    assert style.positive([1.0, 0.0, -1.0, math.nan]) == [1.0, None, None, None]
    assert style.positive([1.0, 0.0, math.nan], floor=1e-8) == [1.0, 1e-8, None]


def test_known_modes_keep_their_colours_and_no_two_variants_share_one():
    colors = style.variant_colors(["mine", "tc", "parity", "other"])
    assert colors["tc"] == style.VERMILION
    assert colors["parity"] == style.BLUE
    assert len(set(colors.values())) == 4


def seen_by_a_deuteranope(color):
    """Viénot, Brettel and Mollon 1999, on linear RGB."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2
    red_green = 0.29275 * rgb[0] + 0.70725 * rgb[1]
    return np.array([red_green, red_green, -0.02234 * rgb[0] + 0.02234 * rgb[1] + rgb[2]])


def test_formats_and_modes_can_be_told_apart_without_red_and_green():
    for colors in ((style.VERMILION, style.BLUE, style.GREY), style.CYCLE[:3]):
        for a, b in itertools.combinations(colors, 2):
            assert np.linalg.norm(seen_by_a_deuteranope(a) - seen_by_a_deuteranope(b)) > 0.1


def test_divergence_is_one_minus_cosine_with_a_gap_at_nan_and_a_floor_at_equality():
    figure = divergence_figure(trajectories(trace("tc", 1, [1.0, math.nan, 0.9])))
    assert named(figure, "each seed")[0].y == pytest.approx((1e-8, None, 0.1, None))
    assert figure.layout.yaxis.type == "log"


def test_the_worst_seed_is_emphasised_unless_another_is_chosen():
    report = trajectories(trace("tc", 1, [0.99, 0.98]), trace("tc", 2, [0.99, 0.90]))
    assert named(divergence_figure(report), "worst seed")[0].customdata[0][0] == "2"
    assert named(divergence_figure(report, seed=1), "seed 1")[0].customdata[0][0] == "1"


@pytest.mark.parametrize(("steps", "within"), [(12, "in a step"), (50, "within 5 steps")])
def test_the_legend_says_within_how_many_steps_a_fall_counts(steps, within):
    figure = divergence_figure(trajectories(trace("tc", 1, [0.9] * steps)))
    assert named(figure, f"bifurcation (cos falls by > 0.05 {within})")


def test_bifurcations_are_marked_where_the_verdict_puts_them_and_only_on_the_latent():
    figure = divergence_figure(
        trajectories(trace("tc", 1, [0.99, 0.98, 0.80]), trace("tc", 2, [0.99, 0.98, 0.97]))
    )
    marks = [item for item in figure.data if str(item.name).startswith("bifurcation")]
    assert [mark.x for mark in marks] == [(2,)]
    calm = divergence_figure(trajectories(trace("tc", 2, [0.99, 0.98, 0.97])))
    assert not [item for item in calm.data if str(item.name).startswith("bifurcation")]


def test_divergence_has_a_column_a_variant_and_each_legend_entry_once():
    figure = divergence_figure(trajectories(trace("parity", 1, [0.99, 0.98]), trace("tc", 1, [0.99, 0.98])))
    titles = [note.text for note in figure.layout.annotations]
    assert titles[:2] == ["parity", "tc"]
    entries = [item.name for item in figure.data if item.showlegend]
    assert len(entries) == len(set(entries)) == 3


def test_impact_bars_are_sorted_and_coloured_by_the_plan():
    report = impacts({"c": 1e-2, "a": 1e-5, "b": 1e-3})
    figure = impact_figure(report, report.plan(nvfp4=2))
    assert figure.layout.xaxis.categoryarray == ("a", "b", "c")
    assert figure.layout.yaxis.type == "log"
    colors = {name: bar.marker.color for bar in figure.data for name in bar.x}
    assert colors == {"a": style.VERMILION, "b": style.VERMILION, "c": style.BLUE}
    assert "2 layers" in figure.data[0].name


def test_impact_has_intervals_that_start_at_the_bar():
    bar = impact_figure(impacts({"a": 1e-3})).data[0]
    low, high = impacts({"a": 1e-3}).of("a").interval
    assert bar.y[0] + bar.error_y.array[0] == pytest.approx(high)
    assert bar.y[0] - bar.error_y.arrayminus[0] == pytest.approx(low)


def test_a_single_sample_has_no_interval_and_the_figure_says_so():
    report = impacts({"a": 1e-3})
    rows = [replace(row, samples=row.samples[:1]) for row in report.rows]
    figure = impact_figure(replace(report, prompts=["a"], seeds=[1], rows=rows))
    bar = figure.data[0]
    assert not bar.error_y.visible
    assert bar.customdata[0][2] == "no interval"
    assert "1 seed, 4 steps: no interval from a single sample" in figure.layout.title.subtitle.text
    assert impact_figure(report).data[0].customdata[0][2].startswith("[4.15e-04, ")


@pytest.mark.parametrize("nvfp4", [0, 1, 2])
def test_a_plan_of_one_format_is_named_in_the_legend_too(nvfp4):
    report = impacts({"a": 1e-5, "b": 1e-3})
    assert impact_figure(report, report.plan(nvfp4=nvfp4)).layout.showlegend


def test_many_layers_lose_their_labels_not_their_bars():
    figure = impact_figure(impacts({f"layer{i}": 1e-3 for i in range(200)}))
    assert not figure.layout.xaxis.showticklabels
    assert len(figure.data[0].x) == 200


def test_the_front_is_joined_and_every_point_is_there():
    points = [
        ParetoPoint("small", 9, 4.5, 10, [0.9, 0.8], 0.1, {}),
        ParetoPoint("beaten", 8, 5.0, 11, [0.7, 0.7], 0.2, {}),
        ParetoPoint("large", 0, 8.0, 20, [0.99, 0.98], 0.01, {}),
    ]
    figure = pareto_figure(
        ParetoReport("mini", "0" * 64, "tc", "rtn", ["a"], [1], 4, 2.5, 1.5, (64, 64), points)
    )
    assert named(figure, "front")[0].x == (4.5, 8.0)
    assert named(figure, "mean of the seeds")[0].y == pytest.approx((0.15, 0.3, 0.015))
    assert named(figure, "worst seed")[0].y == pytest.approx((0.2, 0.3, 0.02))


@pytest.mark.parametrize(
    ("layer", "block", "kind"),
    [
        ("layers.3.attention.qkv", "layers.3", "attention.qkv"),
        ("context_refiner.0.feed_forward.w1", "context_refiner.0", "feed_forward.w1"),
        ("t_embedder.mlp.0", "", "t_embedder.mlp.0"),
        ("x_embedder", "", "x_embedder"),
    ],
)
def test_a_layer_has_one_place_on_the_map(layer, block, kind):
    assert place_of(layer) == (block, kind)


def test_the_map_shows_every_layer_in_its_format_and_the_bytes_add_up():
    rows = [
        layer_row("layers.0.a"),
        layer_row("layers.1.a", "int8_tensorwise"),
        layer_row("x_embedder", "16-bit"),
    ]
    figure = layer_map_figure(LoadReport("mini", "", "cpu", "float32", "auto", rows))
    inside, outside = figure.data[0], figure.data[1]
    formats = sorted({row.format for row in rows})
    assert [formats[code] for code in inside.z[0]] == ["nvfp4", "int8_tensorwise"]
    assert formats[outside.z[0][0]] == "16-bit"
    assert sum(bar.x[0] for bar in figure.data[2:]) == pytest.approx(3.0)


def test_the_blocks_of_the_map_are_in_order_however_the_file_lists_them():
    names = ["layers.10", "layers.2", "noise_refiner.0", "layers.1", "head"]
    weights = Checkpoint.from_mapping({f"{name}.weight.weight": torch.ones(16, 16) for name in names})
    heat = inspect(weights).figure().data[0]
    assert list(heat.x) == ["layers.1", "layers.2", "layers.10", "noise_refiner.0"]


def test_calibration_marks_what_exceeds_its_scale():
    rows = [
        LayerActivations("good", 256, 10, 1.0, 0.9, 1 / 2688, 2 / 2688),
        LayerActivations("clips", 256, 10, 3.0, 0.9, 3 / 2688, 2 / 2688),
        LayerActivations("unreached", 256, 0, 0.0, 0.0, None, None),
    ]
    figure = ranges_figure(CalibrationReport("mini", "16-bit", ["a"], [1], 2, 2.5, [], rows))
    assert named(figure, "clipped")[0].x == ("clips",)
    assert named(figure, "limit of the present scale")[0].y == pytest.approx((2.0, 2.0, None))
    assert named(figure, "largest value")[0].y == (1.0, 3.0, None)


def test_retention_shows_the_share_with_two_standard_errors_and_the_added_error():
    figure = retention_figure(
        {"bake": BakeReport([evidence("a", 0.97), evidence("b", None)], ("style ×1 (bake)",))}
    )
    bars = named(figure, "retained, NVFP4")[0]
    assert bars.y == (0.97, None)
    assert bars.error_y.array == pytest.approx((0.02, 0.02))
    assert named(figure, "added error ‖W′−W−ΔW‖ / ‖ΔW‖")[0].y == (0.3, 0.3)


def every_figure():
    rows = [LayerActivations(EVIL, 256, 10, 1.0, 0.9, 1 / 2688, 2 / 2688)]
    yield divergence_figure(trajectories(trace(EVIL, 1, [0.9, 0.8], prompt=EVIL)))
    yield impact_figure(impacts({EVIL: 1e-3}))
    yield layer_map_figure(
        LoadReport(EVIL, "", "cpu", "float32", "auto", [layer_row(EVIL), layer_row(f"layers.0.{EVIL}")])
    )
    yield ranges_figure(CalibrationReport(EVIL, "16-bit", ["a"], [1], 2, 2.5, [], rows))
    yield retention_figure({EVIL: BakeReport([evidence(EVIL, 0.9)], (EVIL,))})


@pytest.mark.parametrize(
    "figure", list(every_figure()), ids=["divergence", "impact", "map", "ranges", "retention"]
)
def test_a_name_with_markup_is_shown_as_text(figure):
    """Plotly reads markup in any text, so every name must arrive escaped."""
    assert "&lt;img" in figure.to_json().replace("\\u003c", "<").replace("\\u0026", "&")
    assert not re.search(r"<img", figure.to_json().replace("\\u003c", "<"))


@pytest.mark.parametrize(
    "figure", list(every_figure()), ids=["divergence", "impact", "map", "ranges", "retention"]
)
def test_legends_stay_clear_of_the_data(figure):
    legend = figure.layout.legend
    assert legend.orientation == "h"
    assert legend.y > 1 or (legend.yref, legend.y, legend.yanchor) == ("container", 0, "bottom")


def test_a_result_becomes_its_figure_and_an_unknown_one_is_refused():
    assert isinstance(figure_of(impacts({"a": 1e-3})), go.Figure)
    assert isinstance(impacts({"a": 1e-3}).figure(), go.Figure)
    with pytest.raises(HswqError, match="no figure"):
        figure_of(pd.DataFrame())


def test_html_is_whole_and_offline(tmp_path):
    path = export.save_figure(impact_figure(impacts({"a": 1e-3})), tmp_path / "x.html")
    text = path.read_text(encoding="utf-8")
    assert "Plotly.newPlot" in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_without_a_browser_is_refused_and_html_is_named(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(export, "find_browser", lambda: None)
    with pytest.raises(HswqError, match="html") as caught:
        export.save_figure(impact_figure(impacts({"a": 1e-3})), tmp_path / f"x{suffix}")
    assert "Chromium" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_form_is_refused(tmp_path):
    with pytest.raises(HswqError, match=r"\.html, \.png"):
        export.save_figure(impact_figure(impacts({"a": 1e-3})), tmp_path / "x.gif")


@pytest.mark.browser
@pytest.mark.skipif(export.why_no_static_export() is not None, reason=str(export.why_no_static_export()))
def test_pictures_through_a_browser(tmp_path):
    figure = impact_figure(impacts({"a": 1e-3, "b": 1e-2}))
    with export.static_export():
        png = export.save_figure(figure, tmp_path / "x.png").read_bytes()
        svg = export.save_figure(figure, tmp_path / "x.svg").read_text(encoding="utf-8")
        pdf = export.save_figure(figure, tmp_path / "x.pdf").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert pdf.startswith(b"%PDF")
    assert "<svg" in svg
    assert 'aria-label="Impact of each layer in NVFP4"' in svg
    assert "font" not in svg, "its text is outlines: no font is asked of the machine that shows it"
    assert "<text" not in svg


def test_a_file_is_shown_as_the_map_of_its_matrices(tiny_pack):
    report = inspect(tiny_pack.checkpoint)
    figure = figure_of(report)
    matrices = [row for row in report.rows if row.name.endswith(".weight") and len(row.shape) == 2]
    cells = sum(code is not None for trace in figure.data[:2] for line in trace.z for code in line)
    assert cells == len(matrices)
    assert sum(bar.x[0] for bar in figure.data[2:]) == pytest.approx(
        sum(row.nbytes for row in matrices) / 2**20
    )


def test_what_is_not_packed_and_not_in_16_bits_says_so():
    one = torch.ones(16, 16)
    tensors = {"a.weight": one, "b.weight": one.bfloat16(), "c.weight": one.half(), "d.weight": one.double()}
    figure = figure_of(inspect(Checkpoint.from_mapping(tensors)))
    legend = {trace.name: trace.marker.color for trace in figure.data if trace.type == "bar"}
    assert set(legend) == {"FP32: 1 layer", "16 bit: 2 layers", "float64: 1 layer"}
    assert len(set(legend.values())) == 3
    notes = [note for trace in figure.data[:2] for line in trace.customdata for note in line]
    assert any("FP32, 16 × 16" in note for note in notes)


def test_a_lora_in_an_unpacked_layer_has_the_colour_of_unpacked_layers():
    row = evidence("a", 0.9, "bfloat16")
    bar = retention_figure({"bake": BakeReport([row], ("style",))}).data[0]
    assert (bar.name, bar.marker.color) == ("retained, BF16", style.format_color("16-bit"))


def test_a_difference_shows_what_differs_and_leaves_out_what_does_not(tiny_model, tiny_pack):
    figure = figure_of(diff(tiny_model, tiny_pack))
    shown = {name for bar in figure.data for name in bar.x}
    assert shown == set(tiny_model.layers())
    assert figure_of(diff(tiny_pack, tiny_pack)).data == ()


def test_a_lora_shows_its_modules_by_what_became_of_them():
    rows = [
        LoraRow("a", ("k",), "LoRA", "matched", "layers.0.x", norm=2.0, rank=4),
        LoraRow("b", ("k",), "LoRA", "unmatched", why_not="no such layer", norm=1.0),
    ]
    figure = figure_of(LoraReport("style", "", "", rows))
    assert {(bar.name, bar.x, bar.y) for bar in figure.data} == {
        ("matched", ("a",), (2.0,)),
        ("unmatched", ("b",), (1.0,)),
    }


def test_products_have_a_panel_a_size_and_the_roofline_of_the_peer():
    rows = [
        GemmRow("torch bfloat16", WHOLE, "torch", m, 64, 32, 1e-3, 2.0, 1.0, 0.5, 1.0, 0.0) for m in (1, 16)
    ] + [GemmRow("w4a4", ALONE, "cpu", m, 64, 32, 1e-3, 4.0, 1.0, 0.9, 2.0, 0.1, 3, "why") for m in (1, 16)]
    report = GemmBench({"name": "here"}, Roofline(1e9, 1e12, "bfloat16"), "bfloat16", 3, rows)
    figure = figure_of(report)
    assert [note.text for note in figure.layout.annotations] == ["M = 1", "M = 16"]
    roofs = [item for item in figure.data if item.name == "roofline in bfloat16"]
    assert [roof.y for roof in roofs] == [(4.0,), (4.0,)]
    assert "6 calls fell back" in figure.layout.title.subtitle.text


def test_every_symbol_has_its_word_and_no_two_packages_look_alike():
    rows = [
        GemmRow("w4a16", WHOLE, backend, m, 64, 32, 1e-3, 2.0, 1.0, 0.5, 1.0, 0.0)
        for backend in ("torch", "cuda", "comfy-kitchen", "humming") for m in (1, 2, 3, 4, 5)
    ]  # fmt: skip
    report = GemmBench({"name": "here"}, Roofline(1e9, 1e12, "bfloat16"), "bfloat16", 3, rows)
    bars = [bar for bar in figure_of(report).data if bar.type == "bar" and bar.showlegend]
    assert len({bar.marker.pattern.shape for bar in bars}) == 3, "ours plain, the others apart"
    points = {item.name: item.marker.symbol for item in roofline_figure(report).data}
    assert [points[f"M = {m}"] for m in (1, 2)] == list(points["w4a16 (cuda)"][:2])
    assert points["w4a16 (comfy-kitchen)"] != points["w4a16 (humming)"]


def test_the_right_column_of_an_odd_number_of_panels_has_its_labels():
    rows = [GemmRow("w4a16", WHOLE, "cpu", m, 64, 32, 1e-3, 2.0, 1.0, 0.5, 1.0, 0.0) for m in range(1, 6)]
    figure = figure_of(GemmBench({"name": "here"}, Roofline(1e9, 1e12, "fp32"), "float32", 3, rows))
    assert figure.layout.xaxis4.showticklabels, "the last one on the right"


def test_a_picture_bench_is_a_bar_a_model():
    row = ModelRow("tc", "tc", 2.0, 2.1, 1.5, 0.99, 0.9, 30.0, 2**20, None, 0.1, {"tc": 4}, 0, "", None)
    report = ModelBench({"name": "here"}, "a", 42, 4, 2.5, (64, 64), 3, [row])
    (bar,) = figure_of(report).data
    assert (bar.y, bar.x) == (("tc",), (2.0,))
    assert "1.50×" in bar.text[0]


def test_a_result_without_a_figure_is_a_page_with_its_table(tmp_path):
    class Plain(Result):
        def to_frame(self):
            return pd.DataFrame({"name": [EVIL]})

        def __str__(self):
            return EVIL

    assert not has_figure(Plain())
    text = Plain().save(tmp_path / "x.html").read_text(encoding="utf-8")
    assert "Plotly.newPlot" not in text
    assert EVIL not in text
    assert "&lt;img" in text


def test_an_effect_is_a_dot_a_layer_and_a_zero_effect_none():
    rows = [
        LayerEffect("a", "nvfp4", "nvfp4", "tc", 9, 0.1, 0.93, 0.99, 0.3),
        LayerEffect("b", "int8", "int8_tensorwise", "int8", 9, 0.1, 0.999, 1.0, 0.01),
        LayerEffect("c", "nvfp4", "nvfp4", "tc", 9, None, None, None, None),
    ]
    figure = figure_of(EffectReport("pack", ("style ×1 (bake)",), "mini (16-bit)", ["a"], [1], 2, rows))
    assert {(dots.name, dots.x, dots.y) for dots in figure.data} == {
        ("NVFP4", ("a",), (0.93,)),
        ("INT8", ("b",), (0.999,)),
    }
