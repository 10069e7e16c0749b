"""Measured plans: the nvK curve, the greedy search, the front."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.model import Model
from hswq_lab.quantize import (
    ParetoPoint,
    ParetoReport,
    Plan,
    gather_moments,
    greedy,
    observe_for,
    pack,
    pareto,
    sensitivity,
    with_input_scales,
)
from hswq_lab.quantize.curve import _Curve
from hswq_lab.quantize.trial import Trial, TrialSettings

RUN = {"prompts": ["a thing", "another"], "seeds": [1, 2], "steps": 2}


@pytest.fixture(scope="module")
def impact(tiny_tensors, tiny_companion):
    model = Model(Checkpoint.from_mapping(tiny_tensors), name="tiny", companion=tiny_companion)
    return sensitivity(model, **RUN, scales="rtn")


def point(label: str, bits: float, mean: float, worst: float | None = None) -> ParetoPoint:
    low = mean if worst is None else worst
    return ParetoPoint(label, 1, bits, 100, [low, 2 * mean - low], 0.1, {"*": "nvfp4"})


def report(*points: ParetoPoint) -> ParetoReport:
    return ParetoReport("m", "0" * 64, "tc", "sweep", ["a", "b"], [1, 2], 4, 2.5, 1.5, (16, 16), list(points))


def test_the_front_is_what_nothing_beats():
    points = (("a", 8.0, 0.99), ("b", 6.0, 0.98), ("c", 6.5, 0.97), ("e", 5.0, 0.8), ("d", 5.0, 0.9))
    best = report(*(point(*each) for each in points))
    assert [p.label for p in best.front()] == ["d", "b", "a"]
    frame = best.to_frame().set_index("label")
    assert list(frame["on_front"]) == [True, True, False, False, True]
    assert frame.loc["b", "mean"] == pytest.approx(0.98)


def test_a_plan_from_the_front():
    measured = report(point("a", 8.0, 0.99), point("b", 6.0, 0.98), point("d", 5.0, 0.9))
    assert measured.plan(bits=7.0).note.startswith("b:")
    assert measured.plan(final_cos=0.95).note.startswith("b:")
    with pytest.raises(HswqError, match=r"no measured plan.*5\.000 bits at least, 0\.9900 at best"):
        measured.plan(final_cos=0.999)
    with pytest.raises(HswqError, match="exactly one goal"):
        measured.plan()


def test_worst_seed():
    assert point("a", 5.0, 0.9, worst=0.7).worst == pytest.approx(0.7)


def test_points_are_what_pack_calibrate_and_generate_give(tiny_model, impact):
    curve = pareto(tiny_model, impact, [12], **RUN)
    (measured,) = curve.points
    assert curve.sha256 == tiny_model.checkpoint.sha256
    assert (curve.shift, curve.size) == (tiny_model.default_shift, tiny_model.default_size)
    plan = impact.plan(nvfp4=12)
    assert measured.formats == dict(plan)
    assert measured.bits == pytest.approx(plan.bits(tiny_model.layers()))
    packed = pack(tiny_model, plan)
    packed = with_input_scales(packed, observe_for(packed, tiny_model, **RUN)).in_mode("tc")
    for cosine, prompt, seed in zip(measured.cosines, RUN["prompts"], RUN["seeds"], strict=True):
        a = tiny_model.generate(prompt, seed, steps=2).final.flatten().double()
        b = packed.generate(prompt, seed, steps=2).final.flatten().double()
        assert 1 - cosine == pytest.approx(1 - float(a @ b / (a.norm() * b.norm())), rel=0.05)


def test_the_default_curve_goes_from_none_to_all(tiny_model, impact):
    curve = pareto(tiny_model, impact, **RUN, scales="rtn")
    assert curve.points[0].nvfp4 == 0
    assert curve.points[-1].nvfp4 == len(tiny_model.layers())
    assert curve.points[0].mean > curve.points[-1].mean
    assert [p.bits for p in curve.points] == sorted((p.bits for p in curve.points), reverse=True)


def test_greedy_adds_one_layer_at_a_time_until_the_bits_are_reached(tiny_model, impact):
    found = greedy(tiny_model, impact, bits=7.5, width=2, **RUN, scales="rtn", keep={"final_layer.*": "int8"})
    assert found.points[-1].bits <= 7.5 < found.points[-2].bits
    for before, after in zip(found.points, found.points[1:], strict=False):
        different = [layer for layer in after.formats if after.formats[layer] != before.formats[layer]]
        assert different == [after.changed]
    assert not any(p.changed.startswith("final_layer") for p in found.points)
    assert found.plan(bits=7.5).bits(tiny_model.layers()) <= 7.5


def test_greedy_takes_the_best_of_its_candidates(tiny_model, impact):
    curve = _Curve(Trial(tiny_model, TrialSettings((("a thing", 1),), 2, 2.5, 1.5, (16, 16), "rtn")))
    formats = dict.fromkeys(tiny_model.layers(), "int8_tensorwise")
    curve.add("all INT8", formats)
    candidates = impact.ranking()[::-6]
    prices = {}
    for layer in candidates:
        n, k = tiny_model.layers()[layer]
        saved = Plan({layer: "int8"}).nbytes({layer: (n, k)}) - Plan({layer: "nvfp4"}).nbytes({layer: (n, k)})
        prices[layer] = (
            curve.measure("", {**formats, layer: "nvfp4"}).impact - curve.points[0].impact
        ) / saved
    layer, chosen = curve.best_next(formats, candidates)
    assert layer == chosen.changed == min(prices, key=prices.get)
    assert layer != candidates[0]


def test_greedy_stops_before_the_cosine_falls_below(tiny_model, impact):
    everything = greedy(tiny_model, impact, bits=6.5, width=1, **RUN, scales="rtn")
    goal = everything.points[len(everything.points) // 2].mean
    found = greedy(tiny_model, impact, final_cos=goal, width=1, **RUN, scales="rtn")
    assert all(p.mean >= goal for p in found.points)
    with pytest.raises(HswqError, match="no plan reaches"):
        greedy(tiny_model, impact, final_cos=0.9999999, width=1, **RUN, scales="rtn")


def test_goals_of_greedy(tiny_model, impact):
    with pytest.raises(HswqError, match="exactly one goal"):
        greedy(tiny_model, impact, **RUN)
    with pytest.raises(HswqError, match="no plan is that small"):
        greedy(tiny_model, impact, bits=3.0, width=1, **RUN, scales="rtn")


def test_gptq_weights_in_the_curve(tiny_model, impact):
    groups = {layer: 64 for layer in tiny_model.layers() if layer.startswith("layers.")}
    moments = gather_moments(tiny_model, groups, **RUN)
    keep = {"*": "int8", "layers.*": "nvfp4"}
    count = Plan(keep).count("nvfp4", tiny_model.layers())
    swept = pareto(tiny_model, impact, [count], **RUN, keep=keep).points[0]
    fitted = pareto(tiny_model, impact, [count], **RUN, keep=keep, moments=moments)
    assert fitted.scales == "gptq"
    asked = pareto(tiny_model, impact, [count], **RUN, keep=keep, moments=moments, scales="gptq")
    assert asked.points == fitted.points
    for search in (pareto, greedy):
        with pytest.raises(HswqError, match=r"GPTQ has to know.*gather_moments"):
            search(tiny_model, impact, **({"bits": 6.0} if search is greedy else {}), **RUN, scales="gptq")
    assert fitted.points[0].impact < swept.impact  # on the inputs it was fitted to, at least


def test_one_plan_counts_its_layers_and_passes_so_that_the_time_left_is_known(tiny_model, impact):
    told = []
    pareto(tiny_model, impact, [3, 5], **RUN, progress=lambda *tick: told.append(tick))
    done, totals, labels = zip(*told, strict=True)
    assert len(set(totals)) == 1
    assert list(done) == list(range(totals[0] + 1)), "every unit is told once, and the last is the end"
    assert list(dict.fromkeys(labels)) == ["nv3", "nv5", "done"]


def test_cancel_works_between_steps(tiny_model, impact, most_passes_untold):
    assert most_passes_untold(lambda tell: pareto(tiny_model, impact, [3], **RUN, progress=tell)) == 1
    assert most_passes_untold(lambda tell: greedy(tiny_model, impact, bits=8.0, **RUN, progress=tell)) == 1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda model, impact: pareto(model, impact, [], **RUN), "list of whole numbers"),
        (lambda model, impact: pareto(model, impact, 5, **RUN), "list of whole numbers"),
        (lambda model, impact: pareto(model, "impact.json", [1], **RUN), "no impact report"),
        (lambda model, impact: greedy(model, impact, bits=8.0, width=0, **RUN), "the width"),
        (lambda model, impact: greedy(model, impact, bits=8.0, width=-2, **RUN), "the width"),
        (lambda model, impact: greedy(model, impact, bits=8.0, keep={"nope*": "int8"}, **RUN), r"nope\*"),
    ],
)
def test_impossible_searches(tiny_model, impact, call, match):
    with pytest.raises(HswqError, match=match):
        call(tiny_model, impact)


@pytest.mark.parametrize("search", [pareto, greedy])
def test_an_impact_of_other_layers_is_refused_by_name(tiny_model, impact, search):
    other = replace(impact, rows=[*impact.rows, replace(impact.rows[0], layer="ghost")])
    with pytest.raises(HswqError, match=r"model of other layers.*ghost"):
        search(tiny_model, other, **RUN)
    with pytest.raises(HswqError, match=rf"model of other layers.*{impact.rows[-1].layer}"):
        search(tiny_model, replace(impact, rows=impact.rows[:-1]), **RUN)


def test_greedy_pins_layers_that_were_not_measured(tiny_model, impact):
    few = replace(
        impact, rows=impact.rows[:2], unmeasured={row.layer: (row.n, row.k) for row in impact.rows[2:]}
    )
    found = greedy(tiny_model, few, bits=12.0, width=1, keep={"layers.*": "nvfp4"}, **RUN).points[0]
    assert found.formats["layers.0.attention.qkv"] == "nvfp4"
