"""The verdict: the reference gate, the same image, the worst seed by name, an interval that repeats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hswq_lab.errors import HswqError
from hswq_lab.trajectory import SEEDS_20, SeedTrace, Verdict
from hswq_lab.trajectory.gate import bootstrap_interval, judge
from hswq_lab.trajectory.pictures import PictureDistance


def traced(seed, final, *, drop=0.0, failed=False, steps=12):
    """Falls evenly from 1 to `final`, but for a last step that costs `drop` alone."""
    slope = (1 - final - drop) / (steps - 1)
    cosine = [1 - slope * k for k in range(1, steps)] + [final]
    ones, zeros = [1.0] * steps, [0.0] * steps
    mse = [*zeros[1:], math.nan] if failed else zeros
    return SeedTrace("tc", seed, "p", cosine, ones, mse, zeros, PictureDistance())


def test_the_seeds_are_the_published_twenty():
    assert len(SEEDS_20) == len(set(SEEDS_20)) == 20
    assert (SEEDS_20[0], SEEDS_20[9], SEEDS_20[-1]) == (42, 9517038246, 7913680256)
    assert sum(place * seed for place, seed in enumerate(SEEDS_20, start=1)) == 763_346_571_777


def test_the_gate_is_a_mean_of_95_hundredths():
    assert judge("tc", [traced(1, 0.93), traced(2, 0.97)]).passed
    below = judge("tc", [traced(1, 0.93), traced(2, 0.969)])
    assert not below.passed
    assert "the mean is below 0.95" in below.text
    assert "fails the reference gate" in below.text


def test_one_bifurcation_fails_whatever_the_mean():
    """A mean hides the worst seed."""
    verdict = judge("tc", [traced(seed, 0.999) for seed in range(19)] + [traced(5517, 0.93, drop=0.06)])
    assert verdict.mean > 0.99
    assert not verdict.passed
    assert verdict.bifurcated == {5517: 11}
    assert "bifurcation in seed 5517 (step 11)" in verdict.text
    assert verdict.worst_seed == 5517


def test_same_image_needs_every_seed():
    good = judge("tc", [traced(1, 0.98), traced(2, 1.0)])
    assert good.same_image
    assert "same image on every seed" in good.text
    nearly = judge("tc", [traced(1, 0.9799), traced(2, 1.0)])
    assert nearly.passed
    assert not nearly.same_image
    assert "same image" not in nearly.text
    assert "worst seed 1," in nearly.text


def test_nineteen_good_seeds_and_one_that_failed():
    """E3: the verdict fails and names the seed; the mean is said to be over nineteen."""
    verdict = judge("tc", [traced(seed, 0.99) for seed in range(19)] + [traced(137, math.nan, failed=True)])
    assert not verdict.passed
    assert not verdict.same_image
    assert verdict.failed == {137: 0}
    assert verdict.worst_seed == 137
    assert verdict.mean == pytest.approx(0.99)
    assert "NaN or infinity in seed 137 (step 0)" in verdict.text
    assert "over 19 seeds" in verdict.text


def test_a_seed_that_failed_in_the_middle_and_recovered_still_fails():
    verdict = judge("tc", [traced(1, 0.99), traced(2, 0.99, failed=True)])
    assert verdict.failed == {2: 11}
    assert not verdict.passed


def test_the_lowest_cosine_is_not_said_to_be_that_of_a_failed_seed():
    verdict = judge("tc", [traced(1, 0.9948), traced(7, math.nan, failed=True)])
    assert "min 0.9948 among them, worst seed 7, which failed, 0 of 2 bifurcated" in verdict.text


def test_a_seed_that_ended_elsewhere_is_named_even_where_the_gate_passes():
    """Twenty steps and more hide one bad seed in the mean; the reader is told what it is."""
    fine = [traced(seed, 0.999) for seed in range(19)]
    verdict = judge("tc", [*fine, traced(5517, 0.6)])
    assert verdict.passed
    assert verdict.astray == {5517: 0.6}
    assert "passes the reference gate, but seed 5517 (0.6000) ended at another picture" in verdict.text
    assert "worst seed 5517" in verdict.text
    several = judge("tc", [*fine * 2, traced(1, 0.89), traced(2, 0.7)])
    assert "but seeds 2 (0.7000), 1 (0.8900) ended at another picture" in several.text
    assert "another picture" not in judge("tc", [*fine, traced(5517, 0.9)]).text


def test_a_fall_over_a_twelfth_of_the_way_is_a_bifurcation_however_many_steps_that_takes():
    """50 steps, none of which costs more than 0.02."""
    fine = [traced(seed, 0.999, steps=50) for seed in range(19)]
    verdict = judge("tc", [*fine, traced(5517, 0.05, steps=50)])
    assert verdict.mean > 0.95
    assert not verdict.passed
    assert verdict.bifurcated == {5517: 2}
    assert "1 of 20 bifurcated (a fall within 5 steps)" in verdict.text
    assert judge("tc", [*fine, traced(5517, 0.7, steps=50)]).passed


def test_every_seed_failed():
    verdict = judge("tc", [traced(1, math.nan, failed=True)])
    assert not verdict.passed
    assert math.isnan(verdict.mean)
    assert "below" not in verdict.text
    assert verdict.text.endswith("; final cosine not known, bifurcations not known")
    assert verdict.worst_seed == 1


def test_of_a_failed_seed_it_is_not_said_that_it_did_not_bifurcate():
    lost, turned = traced(3, math.nan, failed=True), traced(2, 0.9, drop=0.06)
    assert judge("tc", [traced(1, 0.99), turned]).text.endswith("1 of 2 bifurcated")
    assert judge("tc", [traced(1, 0.99), turned, lost]).text.endswith("1 of 3 bifurcated, not known of 1")


def test_nothing_to_judge_is_an_error():
    with pytest.raises(HswqError, match="no seed was run"):
        judge("tc", [])


def test_all_variants_must_pass():
    good, bad = judge("good", [traced(1, 1.0)]), judge("bad", [traced(1, 0.5)])
    assert Verdict([good]).passed
    assert Verdict([good]).same_image
    both = Verdict([good, bad])
    assert not both.passed
    assert not both.same_image
    assert both["bad"] is bad
    assert str(both).splitlines() == [good.text, bad.text]
    with pytest.raises(HswqError, match="no such variant") as caught:
        both["other"]
    assert caught.value.expected == "good, bad"


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
def test_the_interval_repeats_and_holds_the_mean(values):
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12


def test_the_interval_is_that_of_the_central_limit():
    values = np.random.default_rng(0).normal(0.95, 0.02, 400).tolist()
    low, high = bootstrap_interval(values)
    half = 1.96 * np.std(values) / 20
    assert low == pytest.approx(np.mean(values) - half, abs=3e-4)
    assert high == pytest.approx(np.mean(values) + half, abs=3e-4)
    assert all(map(math.isnan, bootstrap_interval([])))


def test_one_seed_has_no_interval_and_is_not_called_several():
    verdict = judge("one", [traced(1, 0.97)])
    assert all(map(math.isnan, verdict.interval))
    assert "over 1 seed, min" in verdict.text
    assert "[" not in verdict.text
