"""Distances of decoded pictures: SSIM, PSNR, and LPIPS where its package is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from hswq_lab.errors import HswqError
from hswq_lab.models.sampler import Run

SSIM_PARAMETERS: Final[dict[str, Any]] = {
    "gaussian_weights": True,
    "sigma": 1.5,
    "use_sample_covariance": False,
    "data_range": 1.0,
    "channel_axis": 2,
}
"""Arguments of `skimage.metrics.structural_similarity`: those of Wang et al. 2004, on RGB in 0 … 1."""

SSIM_WINDOW: Final = 11
"""Side of the Gaussian window in pixels; a smaller picture has no SSIM."""


@dataclass(frozen=True)
class PictureDistance:
    """How alike two decoded pictures are; NaN where there are no pictures to compare.

    Attributes:
        ssim: structural similarity, 1 for equal pictures; see `SSIM_PARAMETERS`.
        psnr: peak signal-to-noise ratio in dB over all RGB values, infinite for equal pictures.
        lpips: learned perceptual distance (AlexNet), 0 for equal pictures; None where it is not installed.
    """

    ssim: float = math.nan
    psnr: float = math.nan
    lpips: float | None = None


def distance(reference: Run, other: Run) -> PictureDistance:
    """Compares the final pictures of two runs as 8-bit RGB; all NaN where there is none (no codec, NaN)."""
    runs = (reference, other)
    if any(run.codec is None or not bool(torch.isfinite(run.final).all()) for run in runs):
        return PictureDistance()
    a, b = (run.pixels().astype(np.float64) / 255 for run in runs)
    return PictureDistance(ssim(a, b), psnr(a, b), lpips_distance(a, b) if lpips_available() else None)


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity of two [H,W,3] pictures in 0 … 1; NaN below 11 pixels a side."""
    # Half a second to import, and most uses of this package compare nothing.
    from skimage.metrics import structural_similarity  # noqa: PLC0415

    if min(a.shape[:2]) < SSIM_WINDOW:
        return math.nan
    value = structural_similarity(a, b, **SSIM_PARAMETERS)  # type: ignore[no-untyped-call]  # skimage has no types
    return float(value)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """10·log10(1 / MSE) of two [H,W,3] pictures in 0 … 1, in dB."""
    error = float(np.mean((a - b) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error)


def lpips_available() -> bool:
    """Whether the package lpips is installed (it brings torchvision, and fetches AlexNet's weights once)."""
    return importlib.util.find_spec("lpips") is not None


@cache
def _lpips_network() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    import lpips  # noqa: PLC0415  # optional

    try:
        network: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lpips.LPIPS(net="alex", verbose=False)
    except OSError as error:
        raise HswqError(
            "LPIPS is installed but its AlexNet weights cannot be had",
            found=error,
            fix="fetch them once where there is a network, or uninstall lpips",
        ) from error
    return network


def lpips_distance(a: np.ndarray, b: np.ndarray) -> float:
    """LPIPS (Zhang et al. 2018, AlexNet) of two [H,W,3] pictures in 0 … 1."""
    x, y = (torch.from_numpy(picture).permute(2, 0, 1)[None].float() * 2 - 1 for picture in (a, b))
    with torch.no_grad():
        return float(_lpips_network()(x, y))
