"""Made-up weights in the real Z-Image layout, at any size: what tests, demonstrations and notebook 07 run on.

Weights follow what trained transformers show, so that quantisers meet realistic work: normal values whose rows and
columns have log-normal sizes (which makes the tails heavy), a few large input channels, gain by kind of layer and
falling with depth, adaLN modulations small with large biases, norms near 1. Every tensor is seeded by the run's seed
and its own name, so the same seed gives the same bytes in any layout and order. A card draws other numbers of
the same distributions, much faster.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from hswq_lab.models.zimage import ZImage, ZImageConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# The real block counts, so the real list of 208 Linears, at a width that a test can afford.
TOY = ZImageConfig(
    dim=64, n_layers=30, n_refiners=2, head_dim=16, ffn_dim=128, cap_dim=80, time_dim=64, time_hidden=128
)
# Standard deviation of a weight times sqrt(K): what its kind of layer has in trained models of this family,
# roughly.
GAINS = {
    "attention.qkv": 0.8,
    "attention.out": 0.6,
    "feed_forward.w2": 0.6,
    "feed_forward": 0.8,
    "adaLN": 0.15,
}


def shapes(config: ZImageConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the network: native name → shape."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in ZImage(config).state_dict().items()}


def tensors(
    config: ZImageConfig, seed: int = 0, device: str | torch.device = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Native name and bf16 values on the CPU of every parameter, one at a time; drawn on a device."""
    for name, shape in shapes(config).items():
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        with torch.device(device):
            values = _values(name, shape, config, generator).bfloat16()
        yield name, values.cpu()


def _values(name: str, shape: tuple[int, ...], config: ZImageConfig, generator: torch.Generator) -> Tensor:
    if len(shape) == 1 and not name.endswith("bias"):  # RMS norms
        return 1 + 0.25 * torch.randn(shape, generator=generator)
    if len(shape) == 1 or "pad_token" in name:
        return (0.3 if "adaLN" in name else 0.05) * torch.randn(shape, generator=generator)
    return _matrix(name, shape, config, generator)


def _matrix(name: str, shape: tuple[int, ...], config: ZImageConfig, generator: torch.Generator) -> Tensor:
    """Normal values; rows and columns of log-normal size; 3 in 1000 input channels 4 to 12 times larger."""
    n, k = shape
    gain = next((value for kind, value in GAINS.items() if kind in name), 0.7)
    depth = int(name.split(".")[1]) / config.n_layers if name.startswith("layers.") else 0.0
    columns = torch.exp(0.15 * torch.randn(1, k, generator=generator))
    large = torch.randperm(k, generator=generator)[: k * 3 // 1000]
    columns[0, large] *= 4 + 8 * torch.rand(len(large), generator=generator)
    rows = torch.exp(0.25 * torch.randn(n, 1, generator=generator))
    scale = gain * (1 - 0.3 * depth) / k**0.5
    return torch.randn(n, k, generator=generator).mul_(rows).mul_(scale * columns)
