"""Make a Z-Image checkpoint with the real names and shapes and made-up weights, at any size.

    python tools/synth_zimage.py OUT.safetensors --size toy            # all 208 Linears, width 64, 12 MB
    python tools/synth_zimage.py OUT.safetensors --size full           # 12.3 GB, streamed
    python tools/synth_zimage.py OUT.safetensors --size full --empty   # the header and a hole: no disk space
    python tools/synth_zimage.py FOLDER --size full --layout diffusers # split q, k, v; parts with an index

Weights follow what trained transformers show, so that quantisers meet realistic work: normal values whose
    rows and
columns have log-normal sizes (which makes the tails heavy), a few large input channels, gain by kind of layer
and falling with depth, adaLN modulations small with large biases, norms near 1. Every tensor is seeded by the
run's seed and its own name, so the same seed gives the same bytes in any layout and order.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from hswq_lab.checkpoint import write
from hswq_lab.checkpoint.header import TensorInfo, encode_header
from hswq_lab.checkpoint.prefixes import DEFAULT_PREFIX
from hswq_lab.errors import HswqError
from hswq_lab.models.names import diffusers_names
from hswq_lab.models.zimage import FULL, MINI, ZImage, ZImageConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

# The real block counts, so the real list of 208 Linears, at a width that a test can afford.
TOY = ZImageConfig(
    dim=64, n_layers=30, n_refiners=2, head_dim=16, ffn_dim=128, cap_dim=80, time_dim=64, time_hidden=128
)
SIZES = {"full": FULL, "mini": MINI, "toy": TOY}
PART_BYTES = 5 * 10**9
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


def tensors(config: ZImageConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Native name and bf16 values of every parameter, one at a time."""
    for name, shape in shapes(config).items():
        yield name, _values(name, shape, config, seed).bfloat16()


def _values(name: str, shape: tuple[int, ...], config: ZImageConfig, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
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


def in_diffusers_names(items: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same values under diffusers' names, fused rows split into q, k, v."""
    for name, value in items:
        names = diffusers_names(name)
        yield from zip(names, value.chunk(len(names)), strict=True)


def write_empty(path: Path, config: ZImageConfig, prefix: str) -> Path:
    """A file with the right header whose data are one hole: zeros that take no disk space."""
    infos, position = [], 0
    for name, shape in shapes(config).items():
        end = position + 2 * torch.Size(shape).numel()
        infos.append(TensorInfo(prefix + name, "BF16", shape, position, end))
        position = end
    header = encode_header(infos, {})
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + position)
    return path


def write_diffusers(folder: Path, config: ZImageConfig, seed: int, part_bytes: int = PART_BYTES) -> Path:
    """A diffusers model folder: `transformer/` with configuration, parts and index."""
    target = folder / "transformer"
    target.mkdir(parents=True, exist_ok=True)
    description = {
        "_class_name": "ZImageTransformer2DModel",
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_refiner_layers": config.n_refiners,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_heads,
        "cap_feat_dim": config.cap_dim,
        "in_channels": config.in_channels,
        "axes_dims": list(config.axes_dims),
    }
    (target / "config.json").write_text(json.dumps(description, indent=2))
    return write(
        target / "diffusion_pytorch_model.safetensors",
        in_diffusers_names(tensors(config, seed)),
        {"format": "pt"},
        "",
        max_shard_bytes=part_bytes,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="the file to write, or the folder for --layout diffusers")
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--layout", choices=("comfy", "diffusers"), default="comfy")
    parser.add_argument("--prefix", default=DEFAULT_PREFIX, help=f"comfy names (default {DEFAULT_PREFIX})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--empty", action="store_true", help="header only, the data are a hole (comfy)")
    args = parser.parse_args(arguments)
    config = SIZES[args.size]
    if args.empty and args.layout == "diffusers":
        parser.error("--empty writes one file in the comfy layout")
    try:
        if args.empty:
            written = write_empty(args.out, config, args.prefix)
        elif args.layout == "diffusers":
            written = write_diffusers(args.out, config, args.seed)
        else:
            written = write(args.out, tensors(config, args.seed), {"synthetic": str(args.seed)}, args.prefix)
    except HswqError as error:
        print(error, file=sys.stderr)
        return 2
    count = sum(torch.Size(shape).numel() for shape in shapes(config).values())
    print(f"{written}: {count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
