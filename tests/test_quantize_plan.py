"""Plans: which layer gets which format, by hand and by impact; budgets hold."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hswq_lab import packing
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight
from hswq_lab.quantize import ImpactReport, LayerImpact, Plan
from hswq_lab.quantize.choose import Option, within_budget
from hswq_lab.quantize.plan import layer_format, packed_nbytes

LAYERS = {
    "x_embedder": (64, 16),
    "layers.0.attention.qkv": (192, 64),
    "layers.0.feed_forward.w1": (256, 64),
    "layers.1.attention.qkv": (192, 64),
    "layers.1.feed_forward.w1": (256, 64),
}


def report(impacts: dict[str, float], shapes=None, int8: float | None = None) -> ImpactReport:
    shapes = shapes or dict.fromkeys(impacts, (64, 64))
    rows = []
    for layer, impact in impacts.items():
        rows.append(LayerImpact(layer, "nvfp4", *shapes[layer], samples=[impact * 0.5, impact * 1.5]))
        if int8 is not None:
            rows.append(LayerImpact(layer, "int8_tensorwise", *shapes[layer], samples=[impact * int8] * 2))
    return ImpactReport("m", "sha", ["a", "b"], [1, 2], 4, 2.5, 1.5, (16, 16), "sweep", rows)


def test_the_last_matching_entry_wins_and_an_unmatched_layer_stays():
    plan = Plan({"layers.*": "int8", "*.qkv": "nvfp4", "layers.1.attention.qkv": "16-bit"})
    formats = plan.for_layers(LAYERS)
    assert formats["layers.0.feed_forward.w1"] == ("int8_tensorwise", 64, 0)
    assert formats["layers.0.attention.qkv"] == ("nvfp4", 64, 0)
    assert formats["layers.1.attention.qkv"] == ("16-bit", None, 0)
    assert formats["x_embedder"] == ("16-bit", None, 0)


def test_unrotated_formats_and_groups():
    assert layer_format("nvfp4", 3840) == ("nvfp4", 256, 0)
    assert layer_format("nvfp4-unrotated", 3840) == ("nvfp4", None, 0)
    assert layer_format("int8_tensorwise", 40) == ("int8_tensorwise", 4, 0)
    assert layer_format("nvfp4", 63) == ("nvfp4", None, 0)
    assert layer_format("float8_e4m3fn", 256) == ("float8_e4m3fn", None, 0)


def test_names_that_end_in_weight_are_matched():
    plan = Plan({"layers.0.attention.qkv.weight": "nvfp4", "*.w1.weight": "int8"})
    assert plan["layers.0.attention.qkv"] == "nvfp4"
    assert plan.count("int8", LAYERS) == 2


def test_an_unmatched_entry_names_the_nearest_layer():
    with pytest.raises(HswqError, match=r"layers\.0\.attention\.to_q.*0 of 5.*layers\.0\.attention\.qkv"):
        Plan({"layers.0.attention.to_q": "nvfp4"}).for_layers(LAYERS)
    with pytest.raises(HswqError, match="0 of 5 layers match"):
        Plan({"blocks.*": "nvfp4"}).nbytes(LAYERS)


def test_unknown_format_is_refused():
    with pytest.raises(HswqError, match=r"unknown format.*layers.*nf4"):
        Plan({"layers.*": "nf4"})


def test_json_round_trip_is_readable(tmp_path):
    plan = Plan({"*": "int8", "layers.*": "nvfp4"}, "by hand")
    path = plan.save(tmp_path / "plan.json")
    assert json.loads(path.read_text())["formats"] == {"*": "int8_tensorwise", "layers.*": "nvfp4"}
    again = Plan.load(path)
    assert again == plan
    assert again.note == "by hand"
    assert list(again) == list(plan)  # order decides which entry wins
    assert Plan.from_dict({"*": "nvfp4"}) == Plan({"*": "nvfp4"})
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        '{"formats": ["nvfp4"]}',
        '{"formats": {"*": 4}}',
        "{",
        '"nvfp4"',
        '{"formats": {"*": "nvfp5"}}',
        '{"formats": {"*": "nvfp4"}, "keep": {"a": "int8"}}',
        '{"a": "nvfp4", "*": "int8", "a": "nvfp4"}',
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(HswqError, match=r"plan\.json"):
        Plan.load(path)


def test_a_layer_that_is_named_twice_is_what_its_last_entry_says():
    plan = Plan({"a.weight": "nvfp4", "*": "int8", "a": "nvfp4"})
    assert dict(plan.for_layers({"a": (64, 64)})) == {"a": ("nvfp4", 64, 0)}
    assert list(plan) == ["*", "a"]


def test_order_is_part_of_a_plan():
    assert Plan({"a": "nvfp4", "*": "int8"}) != Plan({"*": "int8", "a": "nvfp4"})


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 300), k=st.integers(1, 300), form=st.sampled_from(["nvfp4+r5", "int8", *packing.FORMATS])
)
def test_planned_bytes_are_those_of_the_packed_weight(n, k, form):
    plan = Plan({"*": form})
    stored, group, rank = plan.for_layers({"layer": (n, k)})["layer"]
    weight = packing.pack_weight(torch.randn(n, k), stored, group)
    if isinstance(weight, Nvfp4Weight):
        basis = torch.zeros(rank, k).to(torch.float8_e4m3fn) if rank else None
        weight = replace(weight, input_scale=torch.tensor(1.0), basis=basis)
    assert plan.nbytes({"layer": (n, k)}) == weight.nbytes
    assert plan.bits({"layer": (n, k)}) == pytest.approx(weight.bits_per_weight)


def test_nvk_takes_the_k_least_sensitive_and_int8_for_the_rest():
    impact = report({"a": 3e-3, "b": 1e-3, "c": 2e-3, "d": 4e-3})
    plan = impact.plan(nvfp4=2)
    assert dict(plan) == {"a": "int8_tensorwise", "b": "nvfp4", "c": "nvfp4", "d": "int8_tensorwise"}
    assert impact.ranking() == ["b", "c", "a", "d"]


def test_pins_win_and_count():
    impact = report({"a.x": 3e-3, "b.x": 1e-3, "c.x": 2e-3, "d.y": 4e-3})
    plan = impact.plan(nvfp4=2, keep={"d.*": "nvfp4", "b.x.weight": "16-bit"})
    assert dict(plan) == {"a.x": "int8_tensorwise", "b.x": "16-bit", "c.x": "nvfp4", "d.y": "nvfp4"}
    with pytest.raises(HswqError, match=r"not possible.*4.*1 to 3.*1 are pinned"):
        impact.plan(nvfp4=4, keep={"d.*": "nvfp4", "b.x": "16-bit"})
    with pytest.raises(HswqError, match="nearest"):
        impact.plan(nvfp4=1, keep={"e.*": "16-bit"})


@pytest.mark.parametrize("goal", [{}, {"nvfp4": 1, "bits": 5.0}, {"bits": None}])
def test_exactly_one_goal(goal):
    with pytest.raises(HswqError, match="exactly one goal"):
        report({"a": 1e-3}).plan(**goal)


@pytest.mark.parametrize(
    ("goal", "match"),
    [
        ({"final_cos": 2}, r"final_cos.*found: 2.*from 0 to 1"),
        ({"final_cos": "0.9"}, "from 0 to 1"),
        ({"bits": float("nan")}, "no plan can have this bits"),
        ({"bits": -1.0}, "number from 0"),
        ({"nvfp4": 1.5}, "whole number"),
        ({"nvfp4": True}, "whole number"),
        ({"budget_bytes": "1e6"}, "whole number"),
    ],
)
def test_impossible_goals(goal, match):
    with pytest.raises(HswqError, match=match):
        report({"a": 1e-3}).plan(**goal)


def test_ranks_in_a_plan():
    plan = Plan({"a": "nvfp4+r016", "b": "nvfp4-unrotated+r4", "c": "nvfp4+r99"})
    assert dict(plan) == {"a": "nvfp4+r16", "b": "nvfp4-unrotated+r4", "c": "nvfp4+r99"}
    formats = plan.for_layers({"a": (64, 64), "b": (64, 64), "c": (64, 64)})
    assert formats["a"] == ("nvfp4", 64, 16)
    assert formats["b"] == ("nvfp4", None, 4)
    assert formats["c"].rank == 64
    assert plan.count("nvfp4", {"a": (64, 64), "b": (64, 64), "c": (64, 64)}) == 3
    for wrong in ("nvfp4+r", "nvfp4+r0", "nvfp4+r-1", "nvfp4+rx", "int8+r4", "16-bit+r4", "nvfp4+4"):
        with pytest.raises(HswqError, match=r"unknown format.*nvfp4\+r16"):
            Plan({"a": wrong})


def test_an_option_that_is_larger_and_worse_is_never_chosen():
    """A small layer's NVFP4 scales are padded to 128 rows: with a basis it outgrows INT8."""
    small = [Option("int8", 90, 0.0), Option("nvfp4", 80, 0.5), Option("nvfp4+r32", 100, 0.4)]
    other = [Option("int8", 200, 0.0), Option("nvfp4", 110, 0.1)]
    for limit in range(200, 320, 10):
        assert within_budget({"small": small, "other": other}, limit, 100)["small"] == "int8"


def test_a_budget_buys_a_basis_where_that_is_the_best_use_of_bytes():
    impact = report({"a": 1e-2, "b": 1e-3})
    ranked = [LayerImpact(layer, "nvfp4+r4", 64, 64, [x] * 2) for layer, x in (("a", 1e-3), ("b", 5e-4))]
    both = replace(impact, rows=[*impact.rows, *ranked])
    least = Plan({"*": "nvfp4"}).nbytes(both.layers)
    assert dict(both.plan(budget_bytes=least + 4 * 64)) == {"a": "nvfp4+r4", "b": "nvfp4"}
    assert dict(both.plan(budget_bytes=least + 2 * 4 * 64)) == {"a": "nvfp4+r4", "b": "nvfp4+r4"}
    assert set(both.plan(nvfp4=2).values()) == {"nvfp4"}


@settings(max_examples=60, deadline=None)
@given(
    impacts=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4),
    share=st.floats(0.0, 1.0),
)
def test_a_choice_of_several_ranks_keeps_its_budget_and_is_near_the_best(impacts, share):
    options = {
        str(i): [
            Option("int8", 100, 0.0),
            *(
                Option(f"r{n}", size, x)
                for n, size, x in zip((16, 4, 0), (70, 60, 50), of_layer, strict=True)
            ),
        ]
        for i, of_layer in enumerate(impacts)
    }
    limit = len(options) * 50 + int(share * len(options) * 50)
    sizes = {layer: {o.format: o.nbytes for o in of_layer} for layer, of_layer in options.items()}
    costs = {layer: {o.format: o.impact for o in of_layer} for layer, of_layer in options.items()}
    chosen = within_budget(options, limit, 100)
    total = sum(sizes[layer][form] for layer, form in chosen.items())
    assert total <= limit
    best = min(
        sum(costs[str(i)][o.format] for i, o in enumerate(each))
        for each in product(*options.values())
        if sum(o.nbytes for o in each) <= limit
    )
    found = sum(costs[layer][form] for layer, form in chosen.items())
    # Best impact per byte first is at most one step away from the best choice.
    assert best <= found <= best + 1


shapes_and_impacts = st.dictionaries(
    st.sampled_from([f"layer{i}" for i in range(9)]),
    st.tuples(st.integers(1, 400), st.integers(1, 400), st.floats(0, 1)),
    min_size=1,
)


@settings(max_examples=200, deadline=None)
@given(rows=shapes_and_impacts, share=st.floats(0, 1.2))
def test_a_plan_never_exceeds_its_budget(rows, share):
    impact = report(
        {name: row[2] for name, row in rows.items()}, {name: row[:2] for name, row in rows.items()}, int8=0.01
    )
    layers = impact.layers
    least = sum(min(packed_nbytes("nvfp4", s), packed_nbytes("int8_tensorwise", s)) for s in layers.values())
    budget = math.floor(share * sum(packed_nbytes("int8_tensorwise", s) for s in layers.values()))
    if budget < least:
        with pytest.raises(HswqError, match=f"at least {least} bytes"):
            impact.plan(budget_bytes=budget)
        return
    plan = impact.plan(budget_bytes=budget)
    assert plan.nbytes(layers) <= budget
    bits = 8 * budget / sum(n * k for n, k in layers.values())
    # The number of bits came from whole bytes; a little more makes up for its own rounding.
    assert impact.plan(bits=bits * (1 + 1e-12)).bits(layers) <= bits * (1 + 1e-12)


def test_a_budget_is_spent_where_impact_per_byte_is_lowest():
    # "big" saves as much as "b" and "c" together, for more impact than either but less than both.
    shapes = {"big": (256, 128), "b": (128, 128), "c": (128, 128)}
    impact = report({"big": 2e-3, "b": 1.5e-3, "c": 1.5e-3}, shapes)
    budget = packed_nbytes("nvfp4", (256, 128)) + 2 * packed_nbytes("int8_tensorwise", (128, 128)) + 16
    assert dict(impact.plan(budget_bytes=budget)) == {
        "big": "nvfp4",
        "b": "int8_tensorwise",
        "c": "int8_tensorwise",
    }


def test_what_fits_back_is_given_back():
    impact = report({"a": 1e-3, "b": 2e-3, "c": 8e-3}, {"a": (128, 128), "b": (128, 128), "c": (512, 128)})
    # Prices per byte order a, b, c; the budget needs c shrunk, after which a and b fit back as INT8.
    budget = packed_nbytes("nvfp4", (512, 128)) + 2 * packed_nbytes("int8_tensorwise", (128, 128))
    assert dict(impact.plan(budget_bytes=budget)) == {
        "a": "int8_tensorwise",
        "b": "int8_tensorwise",
        "c": "nvfp4",
    }


def test_final_cos_gives_the_smallest_plan_that_is_predicted_to_reach_it():
    impact = report({"a": 1e-4, "b": 1e-2, "c": 1e-1}, int8=0.0)
    plan = impact.plan(final_cos=0.99)
    assert plan.count("nvfp4", impact.layers) == 2
    assert impact.predicted_cos(plan) >= 0.99 > impact.predicted_cos(Plan({"*": "nvfp4"}))
    with pytest.raises(HswqError, match="no plan reaches"):
        report({"a": 1e-4}, int8=5.0).plan(final_cos=0.9999)


SHAPES = {"a": (256, 64), "b": (64, 64), "rest.c": (192, 64), "rest.d": (64, 128)}


def partly_measured() -> ImpactReport:
    measured = report({"a": 1e-3, "b": 2e-3}, shapes=SHAPES)
    return replace(measured, unmeasured={layer: SHAPES[layer] for layer in ("rest.c", "rest.d")})


def test_a_budget_is_of_the_whole_model_though_few_layers_were_measured():
    impact = partly_measured()
    smallest = Plan({"a": "nvfp4", "b": "nvfp4"})
    plan = impact.plan(budget_bytes=smallest.nbytes(SHAPES))
    assert plan == smallest
    assert "2 layers were not measured" in plan.note
    with pytest.raises(HswqError, match=r"no plan is that small.*5\.\d+ bits.*at least.*bits.*not"):
        impact.plan(bits=5.5)
    with pytest.raises(HswqError, match="no plan is that small"):
        impact.plan(budget_bytes=smallest.nbytes(SHAPES) - 1)


def test_pins_reach_layers_that_were_not_measured():
    plan = partly_measured().plan(bits=5.5, keep={"rest.*": "nvfp4"})
    assert plan.form_of("rest.c") == "nvfp4"
    assert plan.bits(SHAPES) <= 5.5
    assert partly_measured().plan(nvfp4=3, keep={"rest.c": "nvfp4"}).count("nvfp4", SHAPES) == 3


def test_a_plan_needs_something_measured():
    with pytest.raises(HswqError, match="no layer was measured"):
        replace(partly_measured(), rows=[]).plan(nvfp4=0)


@pytest.mark.parametrize("goal", [{"bits": 7.0}, {"nvfp4": 1}, {"nvfp4": 0}, {"final_cos": 0.5}])
def test_lost_latents_are_nothing_to_plan_by(goal):
    """∞ says that something overflowed, and not how much worse one layer is than another."""
    lost = report({"b": 1e-3, "a": math.inf, "c": 2e-3})
    with pytest.raises(HswqError, match=r"impact of nvfp4 on this layer is not finite.*tensor: a;.*pin"):
        lost.plan(**goal)
    with pytest.raises(HswqError, match="not finite"):
        lost.plan(**goal, keep={"a": "nvfp4"})


def test_a_layer_whose_latent_was_lost_can_be_pinned_out_of_the_way():
    lost = report({"b": 1e-3, "a": math.inf, "c": 2e-3})
    plan = lost.plan(nvfp4=1, keep={"a": "int8"})
    assert dict(plan) == {"b": "nvfp4", "a": "int8_tensorwise", "c": "int8_tensorwise"}


def test_kin_of_nvfp4_that_were_not_measured_are_predicted_to_cost_as_much():
    impact = report({"a": 2e-3, "b": 1e-3})
    plain = impact.predicted_cos(Plan({"a": "nvfp4", "b": "int8"}))
    assert plain < 1
    assert impact.predicted_cos(Plan({"a": "nvfp4-unrotated", "b": "int8"})) == plain


def test_predicted_cos_adds_up_impacts_of_each_sample():
    impact = report({"a": 0.1, "b": 0.2})
    expected = (1 / math.sqrt(1 + 0.15) + 1 / math.sqrt(1 + 0.45)) / 2
    assert impact.predicted_cos(Plan({"*": "nvfp4"})) == pytest.approx(expected)
    assert impact.predicted_cos(Plan({"*": "int8"})) == 1.0


def test_rotation_is_chosen_by_output_error_where_both_were_measured():
    rows = []
    for layer, rotated, unrotated in (("a", 0.02, 0.01), ("b", 0.01, 0.02)):
        rows.append(LayerImpact(layer, "nvfp4", 64, 64, [1e-3], output_error=rotated))
        rows.append(LayerImpact(layer, "nvfp4-unrotated", 64, 64, [1e-3], output_error=unrotated))
    both = ImpactReport("m", "sha", ["x"], [1], 4, 2.5, 1.5, (16, 16), "sweep", rows)
    assert dict(both.plan(nvfp4=2)) == {"a": "nvfp4-unrotated", "b": "nvfp4"}
    assert both.plan(nvfp4=2).for_layers(both.layers)["a"] == ("nvfp4", None, 0)
    assert both.plan(nvfp4=2).count("nvfp4", both.layers) == 2
