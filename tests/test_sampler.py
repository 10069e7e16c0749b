"""The Euler sampler: schedule, integration, what a callback sees, noise."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hswq_lab.errors import HswqError
from hswq_lab.models.sampler import Run, Step, euler, noise_hash, sigmas, starting_noise


@pytest.mark.parametrize("shift", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 12])
def test_schedule_runs_from_one_to_zero_without_rest(steps: int, shift: float) -> None:
    levels = sigmas(steps, shift)
    assert len(levels) == steps + 1
    assert (levels[0], levels[-1]) == (1.0, 0.0)
    assert all(a > b for a, b in pairwise(levels))


def test_shift_moves_steps_to_the_noisy_end() -> None:
    assert sigmas(4, 1.0) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert sigmas(2, 3.0)[1] == pytest.approx(0.75)  # 3·½ / (1 + 2·½)


def test_constant_velocity_is_integrated_exactly() -> None:
    """With the true straight-line velocity x0 − ε every step predicts the same x0 and the end is x0."""
    noise, target = torch.randn(2, 3, 3), torch.randn(2, 3, 3)
    seen: list[Step] = []
    final = euler(lambda x, sigma: target - noise, noise, sigmas(7, 1.5), seen.append)
    assert torch.allclose(final, target, atol=1e-5)
    assert all(torch.allclose(step.x0, target, atol=1e-5) for step in seen)


def test_callback_sees_the_latent_after_each_step_first_and_last_included() -> None:
    noise = torch.randn(1, 2, 2)
    seen: list[Step] = []
    final = euler(lambda x, sigma: torch.ones_like(x), noise, sigmas(3, 1.0), seen.append)
    assert [step.index for step in seen] == [0, 1, 2]
    assert torch.allclose(seen[0].latent, noise + 1 / 3)
    assert torch.equal(seen[-1].latent, final)
    assert [step.sigma for step in seen] == sigmas(3, 1.0)[:-1]


def test_noise_depends_on_the_seed_alone() -> None:
    a, b = starting_noise((4, 8, 8), 9517038246), starting_noise((4, 8, 8), 9517038246)
    assert noise_hash(a) == noise_hash(b) != noise_hash(starting_noise((4, 8, 8), 42))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "7"])
def test_a_bad_seed_is_refused(seed: object) -> None:
    with pytest.raises(HswqError, match="whole number"):
        starting_noise((1,), seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "shift"), [(0, 1.0), (-3, 1.0), (4, 0.0), (4, float("nan"))])
def test_an_impossible_schedule_is_refused(steps: int, shift: float) -> None:
    with pytest.raises(HswqError):
        sigmas(steps, shift)


def run_of(latents: torch.Tensor, codec: object) -> Run:
    return Run(
        model="m", mode="auto", prompt="p", seed=1, steps=1, cfg=1.0, shift=1.0, size=(2, 2),
        sigmas=[1.0, 0.0], noise_hash="", latents=latents, x0=latents, codec=codec,  # type: ignore[arg-type]
    )  # fmt: skip


class GreyCodec:
    """Takes the first channel as grey."""

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return latent[:1].expand(3, -1, -1)


def test_a_picture_is_rounded_and_clamped() -> None:
    run = run_of(torch.tensor([[[[0.0, 2.0], [0.5, -1.0]]]]), GreyCodec())
    assert run.pixels()[..., 0].tolist() == [[0, 255], [128, 0]]
    assert run.image.size == (2, 2)


def test_no_codec_and_nan_give_an_error_and_no_picture() -> None:
    with pytest.raises(HswqError, match="no latent codec"):
        run_of(torch.zeros(1, 1, 2, 2), None).pixels()
    with pytest.raises(HswqError, match="NaN"):
        run_of(torch.full((1, 1, 2, 2), float("nan")), GreyCodec()).pixels()
