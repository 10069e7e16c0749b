"""Traces: measures in fp64 of the states after each step, drops and bifurcations, refusals."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hswq_lab.errors import HswqError
from hswq_lab.models.sampler import Step, euler, sigmas, starting_noise
from hswq_lab.trajectory import pictures
from hswq_lab.trajectory.compare import compare_runs
from hswq_lab.trajectory.pictures import PictureDistance, distance, lpips_available, psnr, ssim
from hswq_lab.trajectory.trace import SeedTrace, cosines, squared_errors, trace

NONE = PictureDistance()


def traced(cosine, **fields):
    count = len(cosine)
    given = SeedTrace("v", 1, "p", list(cosine), [1.0] * count, [0.0] * count, [0.0] * count, NONE)
    return replace(given, **fields)


def test_measures_are_those_of_numpy_in_fp64():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 2, 4, 4, generator=generator)
    b = a + 1e-4 * torch.randn(a.shape, generator=generator)
    x, y = a.double().flatten(1).numpy(), b.double().flatten(1).numpy()
    expected = [float(u @ v / ((u @ u) * (v @ v)) ** 0.5) for u, v in zip(x, y, strict=True)]
    assert cosines(a, b) == pytest.approx(expected, abs=1e-15)
    assert 0 < 1 - cosines(a, b)[0] < 1e-6, "fp32 could not tell this from 1"
    assert squared_errors(a, b) == pytest.approx(((x - y) ** 2).mean(1).tolist(), rel=1e-12)


@given(st.floats(1e-18, 1e18), st.integers(0, 99))
def test_cosine_knows_no_scale(factor, seed):
    a = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed))
    b = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed + 1))
    assert cosines(a * factor, b) == pytest.approx(cosines(a, b), abs=1e-6)
    assert cosines(a, -a) == pytest.approx([-1.0])


def test_steps_compared_are_the_states_after_each_step_first_and_last_included():
    """E1: euler's callback sees the latent after the step; the last one is the result."""
    seen: list[Step] = []
    noise = starting_noise((2, 4, 4), 3)
    final = euler(lambda latent, sigma: 0.5 * latent, noise, sigmas(5, 2.0), seen.append)
    assert [step.index for step in seen] == [0, 1, 2, 3, 4]
    assert not torch.equal(seen[0].latent, noise)
    assert torch.equal(seen[-1].latent, final)


def test_every_step_is_in_the_trace(make_run):
    reference, other = make_run(steps=8), make_run(steps=8, error=0.1)
    found = trace(reference, other, "v", NONE)
    assert len(found.cos_latent) == len(found.cos_x0) == len(found.mse_latent) == len(found.mse_x0) == 8
    assert found.mse_latent[0] > 0
    assert found.final_cos == cosines(other.final[None], reference.final[None])[0] < 1
    # The last step ends at sigma 0, where the latent is the predicted clean latent itself.
    assert found.cos_latent[-1] == pytest.approx(found.cos_x0[-1])


def test_unrelated_pictures_from_one_noise_show_in_x0_from_the_first_step(make_run):
    """E2: early latents are nearly all noise and prove nothing; x0 tells at once."""
    reference = make_run(seed=42)
    stranger = make_run(seed=42)
    clean = starting_noise((16, 4, 4), 999)
    levels = reference.sigmas[1:]
    latents = torch.stack([s * starting_noise((16, 4, 4), 42) + (1 - s) * clean for s in levels])
    found = trace(reference, replace(stranger, latents=latents, x0=clean.expand(8, -1, -1, -1)), "v", NONE)
    assert found.cos_latent[0] > 0.95
    assert max(map(abs, found.cos_x0)) < 0.3
    assert found.final_cos < 0.3
    assert not found.same_image
    assert found.bifurcated


@pytest.mark.parametrize(
    ("cosine", "max_drop", "step"),
    [
        ([1.0, 0.99, 0.98], 0.01, None),
        ([1.0, 0.95, 0.9], 0.05, None),  # exactly the limit, within rounding of it, is not beyond it
        ([0.99, 0.93, 0.95], 0.06, 1),
        ([0.99, 0.98, 0.90, 0.80], 0.10, 2),
        ([0.5, 0.6, 0.7], 0.5, 0),  # both start from one noise: the first step alone parted them
        ([0.9], 0.1, 0),
        ([1.0], 0.0, None),
    ],
)
def test_drops_and_bifurcations(cosine, max_drop, step):
    cosine = [value + 1e-12 * place for place, value in enumerate(cosine)]
    found = traced(cosine)
    assert found.max_drop == pytest.approx(max_drop, abs=1e-9)
    assert found.bifurcation_step == step
    assert found.bifurcated == (step is not None)


@pytest.mark.parametrize(
    ("steps", "window"), [(1, 1), (4, 1), (12, 1), (13, 2), (24, 2), (25, 3), (28, 3), (50, 5)]
)
def test_more_than_twelve_steps_are_looked_at_in_windows_of_a_twelfth(steps, window):
    found = traced([1 - 0.03 * k for k in range(steps)])
    assert found.window == window
    assert found.max_drop == pytest.approx(0.03 * min(window, steps - 1))
    assert found.bifurcation_step == (None if window == 1 else 2)


def test_a_window_forgives_no_fall_that_a_single_step_shows():
    """It had come closer before it fell, so that both ends of the window are alike."""
    assert traced([0.96, 0.96, 1.0, 0.94, *[0.94] * 10]).bifurcation_step == 3


@pytest.mark.parametrize(("final", "same"), [(0.98, True), (0.9799999, False), (1.0, True)])
def test_same_image_begins_at_98_hundredths(final, same):
    assert traced([0.5, final]).same_image == same


def test_nan_in_one_step_fails_the_seed_wherever_it_is():
    """E3: also when the last step is finite again, and also when only x0 holds it."""
    assert traced([1.0, math.nan, 1.0]).failed_step == 1
    assert not traced([1.0, math.nan, 1.0]).same_image
    assert traced([1.0, 1.0, 1.0], mse_x0=[0.0, 0.0, math.inf]).failed_step == 2
    assert traced([1.0, 1.0]).failed_step is None


def test_a_seed_that_failed_may_have_bifurcated_and_only_a_seen_bifurcation_is_said():
    lost = traced([1.0, math.nan, 1.0])
    assert (lost.bifurcated, lost.bifurcation_step) == (None, None)
    assert math.isnan(lost.max_drop)
    before = traced([1.0, 0.9, math.nan])
    assert (before.bifurcated, before.bifurcation_step) == (True, 1)
    assert math.isnan(before.max_drop)


def test_a_nan_step_becomes_a_nan_measure_and_no_picture(make_run):
    reference, broken = make_run(), make_run()
    broken.latents[3, 0, 0, 0] = math.nan
    found = trace(reference, broken, "v", distance(reference, broken))
    assert found.failed_step == 3
    assert found.picture.ssim == 1
    broken.latents[-1, 0, 0, 0] = math.nan
    assert math.isnan(distance(reference, broken).ssim)
    assert math.isnan(distance(reference, broken).psnr)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sigmas": [1.0] * 9}, "noise levels"),
        ({"noise_hash": "other"}, "starting noise"),
        ({"prompt": "another"}, "prompt"),
        ({"cfg": 1.0}, "guidance"),
        ({"seed": 43}, "seed"),
        ({"latents": torch.zeros(8, 16, 2, 8)}, "latent shape"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(make_run, change, what):
    with pytest.raises(HswqError, match=what) as caught:
        trace(make_run(), replace(make_run(), **change), "tc", NONE)
    assert "tc" in caught.value.tensor


def test_traces_of_8_and_9_steps_are_refused(make_run):
    """E3"""
    with pytest.raises(HswqError, match="number of steps") as caught:
        trace(make_run(steps=8), make_run(steps=9), "tc", NONE)
    assert caught.value.found == 9
    assert str(caught.value.expected).startswith("8")


def test_picture_distances(make_run):
    reference, near, far = make_run(), make_run(error=0.02), make_run(error=1.0)
    same, close, away = (distance(reference, run) for run in (make_run(), near, far))
    assert (same.ssim, same.psnr) == (1, math.inf)
    assert 1 > close.ssim > away.ssim
    assert close.psnr > away.psnr > 0
    assert (same.lpips is not None) == lpips_available()
    a, b = (run.pixels().astype("float64") / 255 for run in (reference, near))
    assert close.psnr == pytest.approx(10 * math.log10(1 / ((a - b) ** 2).mean()))
    assert close.psnr == psnr(a, b)


def test_ssim_is_the_formula_of_wang_et_al():
    """Two flat pictures: only the luminance term is left, (2ab + C1) / (a² + b² + C1) with C1 = 0.01²."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.ones(16, 16, 3).double().numpy()
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert ssim(0.2 * flat, 0.6 * flat) == pytest.approx(expected, rel=1e-6)
    small = torch.rand(8, 16, 3, generator=generator).double().numpy()
    assert math.isnan(ssim(small, small)), "smaller than the window"


def test_without_a_codec_there_are_no_pictures(make_run):
    found = distance(make_run(codec=False), make_run())
    assert math.isnan(found.ssim)
    assert found.lpips is None


class FakeLpips:
    """Stands for the package: mean absolute difference of what it is handed, which must lie in −1 … 1."""

    def __init__(self, net, verbose):
        assert (net, verbose) == ("alex", False)

    def __call__(self, a, b):
        assert a.shape == (1, 3, 16, 16)
        assert a.min() >= -1
        assert a.min() < 0
        return (a - b).abs().mean()


@pytest.fixture
def lpips(monkeypatch):
    module = ModuleType("lpips")
    module.__spec__ = ModuleSpec("lpips", None)
    module.LPIPS = FakeLpips
    monkeypatch.setitem(sys.modules, "lpips", module)
    pictures._lpips_network.cache_clear()
    yield module
    pictures._lpips_network.cache_clear()


def test_lpips_is_measured_where_its_package_is(make_run, lpips):
    reference, other = make_run(), make_run(error=0.5)
    found = distance(reference, other).lpips
    a, b = (run.pixels().astype("float64") / 255 for run in (reference, other))
    assert found == pytest.approx(2 * abs(a - b).mean(), rel=1e-5)
    report = compare_runs([reference], {"v": [other]})
    assert list(report.summary()["lpips"]) == [found]
    assert report.to_dict()["summary"][0]["lpips"] == found


def test_lpips_without_its_weights_is_one_clear_message(make_run, lpips, monkeypatch):
    def offline(net, verbose):
        raise OSError("no network")

    monkeypatch.setattr(lpips, "LPIPS", offline)
    with pytest.raises(HswqError, match="AlexNet weights") as caught:
        distance(make_run(), make_run())
    assert "uninstall lpips" in caught.value.fix
