"""Impact reports: intervals, correlations, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hswq_lab.errors import HswqError
from hswq_lab.quantize import ImpactReport, LayerImpact
from hswq_lab.quantize.statistics import mean_interval, spearman, t_95


def report() -> ImpactReport:
    rows = [
        LayerImpact("a", "nvfp4", 64, 64, [1e-3, 3e-3], 0.01, 5.0, 0.02, 3.0),
        LayerImpact("b", "nvfp4", 32, 16, [4e-3, 4e-3], 0.02, 4.0, 0.05, 9.0),
        LayerImpact("c", "nvfp4", 32, 16, [9e-3, 9e-3], 0.03, 3.0, 0.04, math.nan),
    ]
    return ImpactReport("m", "sha", ["x", "y"], [1, 2], 4, 2.5, 1.5, (16, 16), "sweep", rows, 2.5)


@pytest.mark.parametrize("degrees", [1, 2, 5, 10, 11, 19, 63, 500])
def test_t_quantile(degrees):
    assert t_95(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3)


def test_interval_is_students():
    samples = [1.0, 2.0, 4.0, 4.5]
    expected = stats.t.interval(0.95, 3, np.mean(samples), stats.sem(samples))
    assert mean_interval(samples) == pytest.approx(expected, abs=1e-3)
    assert mean_interval([1.0]) == (-math.inf, math.inf)
    assert mean_interval([1.0, math.inf]) == (-math.inf, math.inf)


def test_interval_of_an_impact_is_cut_at_zero():
    row = report().of("a")
    assert row.impact == pytest.approx(2e-3)
    low, high = row.interval
    assert low == 0.0
    assert high > 3e-3


def test_spearman_with_ties():
    a, b = [1, 2, 2, 4, 5, 9], [3.0, 1.0, 4.0, 4.0, 8.0, 2.0]
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert math.isnan(spearman([1.0, 1.0], [1.0, 2.0]))


def test_correlations_are_against_the_truth():
    correlations = report().correlations()
    assert correlations["weight_error"] == pytest.approx(1.0)
    assert correlations["weight_power"] == pytest.approx(-1.0)
    assert correlations["output_error"] == pytest.approx(0.5)


def test_frame_has_a_row_a_layer_and_format():
    frame = report().to_frame()
    assert list(frame["layer"]) == ["a", "b", "c"]
    assert frame.loc[0, "group"] == 64
    assert {"impact", "low", "high", "output_error"} <= set(frame.columns)


def test_file_round_trip(tmp_path):
    path = report().save(tmp_path / "impact.json")
    again = ImpactReport.load(path)
    assert again.to_frame().equals(report().to_frame())
    assert again.size == (16, 16)
    assert again.seconds == 2.5


def test_names_that_end_in_weight_are_matched(tmp_path):
    path = report().save(tmp_path / "impact.json")
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["layer"] += ".weight"
    path.write_text(json.dumps(content))
    assert ImpactReport.load(path).of("a.weight").layer == "a"


def test_a_lost_latent_survives_the_file_as_infinite(tmp_path):
    row = LayerImpact("a", "nvfp4", 64, 64, [1.0, math.inf])
    path = ImpactReport("m", "s", ["x", "y"], [1, 2], 4, 2.5, 1.5, (16, 16), "rtn", [row]).save(
        tmp_path / "i.json"
    )
    assert ImpactReport.load(path).of("a").impact == math.inf


@pytest.mark.parametrize("text", ["{}", "[]", '{"rows": 3}', '{"rows": [{"layer": "a"}]}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "impact.json"
    path.write_text(text)
    with pytest.raises(HswqError, match=r"no impact report.*impact\.json"):
        ImpactReport.load(path)


def test_layers_that_were_not_measured_survive_the_file(tmp_path):
    part = replace(report(), unmeasured={"d": (16, 48)})
    assert ImpactReport.load(part.save(tmp_path / "i.json")).unmeasured == {"d": (16, 48)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda content: content["rows"][0].update(format="nvfp5"), "unknown format"),
        (lambda content: content["rows"][0].update(samples=[1.0, -0.1]), "never negative"),
        (lambda content: content["rows"].append(content["rows"][0]), "twice"),
        (
            lambda content: content["rows"].append({**content["rows"][0], "format": "int8", "n": 3}),
            "two sizes",
        ),
        (lambda content: content.update(prompts=["x"]), "prompt for each seed"),
        (lambda content: content.update(unmeasured={"d": [0, 4]}), "no layer has this size"),
        (lambda content: content.update(unmeasured={"d": 4}), "wrong kind"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(tmp_path, change, match):
    path = report().save(tmp_path / "impact.json")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(HswqError, match=rf"no impact report.*impact\.json.*{match}"):
        ImpactReport.load(path)


def test_a_format_has_one_spelling(tmp_path):
    path = report().save(tmp_path / "impact.json")
    path.write_text(path.read_text().replace('"nvfp4"', '"int8"'))
    assert ImpactReport.load(path).formats == ["int8_tensorwise"]


def test_unknown_layer_and_format():
    with pytest.raises(HswqError, match="nearest"):
        report().of("aa")
    with pytest.raises(HswqError, match="not measured"):
        report().ranking("int8")


def test_a_report_in_words_begins_with_the_largest():
    rows = [LayerImpact(f"layer.{i}", "nvfp4", 8, 16, [i / 100]) for i in range(7)]
    report = ImpactReport("model", "0" * 64, ["a"], [1], 4, 2.5, 3.0, (64, 64), "sweep", rows)
    head, *lines = str(report).splitlines()
    assert head.startswith("impact of 7 layers of model (nvfp4)")
    assert lines == [f"  0.0{i}  layer.{i} (nvfp4)" for i in (6, 5, 4, 3, 2)]
