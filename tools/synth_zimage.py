"""Make a Z-Image checkpoint with the real names and shapes and made-up weights, at any size.

    python tools/synth_zimage.py OUT.safetensors --size toy            # all 208 Linears, width 64, 12 MB
    python tools/synth_zimage.py OUT.safetensors --size full           # 12.3 GB, streamed
    python tools/synth_zimage.py OUT.safetensors --size full --layers 13   # 6.1 GB
    python tools/synth_zimage.py OUT.safetensors --size full --empty   # the header and a hole: no disk space
    python tools/synth_zimage.py FOLDER --size full --layout diffusers # split q, k, v; parts with an index

What the weights are like: `hswq_lab.models.synthetic`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from hswq_lab.checkpoint import write
from hswq_lab.checkpoint.header import TensorInfo, encode_header
from hswq_lab.checkpoint.prefixes import DEFAULT_PREFIX
from hswq_lab.errors import HswqError
from hswq_lab.models.names import diffusers_names
from hswq_lab.models.synthetic import TOY, shapes, tensors
from hswq_lab.models.zimage import FULL, MINI, ZImageConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SIZES = {"full": FULL, "mini": MINI, "toy": TOY}
PART_BYTES = 5 * 10**9


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


def write_diffusers(
    folder: Path, config: ZImageConfig, seed: int, part_bytes: int = PART_BYTES, device: str = "cpu"
) -> Path:
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
        in_diffusers_names(tensors(config, seed, device)),
        {"format": "pt"},
        "",
        max_shard_bytes=part_bytes,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="the file to write, or the folder for --layout diffusers")
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--layers", type=int, metavar="N", help="main blocks, other than the size's own")
    parser.add_argument("--layout", choices=("comfy", "diffusers"), default="comfy")
    parser.add_argument("--prefix", default=DEFAULT_PREFIX, help=f"comfy names (default {DEFAULT_PREFIX})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="where numbers are drawn: cuda takes seconds (default cpu)"
    )
    parser.add_argument("--empty", action="store_true", help="header only, the data are a hole (comfy)")
    args = parser.parse_args(arguments)
    config = SIZES[args.size]
    if args.layers is not None:
        config = replace(config, n_layers=args.layers)
    if args.empty and args.layout == "diffusers":
        parser.error("--empty writes one file in the comfy layout")
    try:
        if args.empty:
            written = write_empty(args.out, config, args.prefix)
        elif args.layout == "diffusers":
            written = write_diffusers(args.out, config, args.seed, device=args.device)
        else:
            items = tensors(config, args.seed, args.device)
            written = write(args.out, items, {"synthetic": str(args.seed)}, args.prefix)
    except HswqError as error:
        print(error, file=sys.stderr)
        return 2
    count = sum(torch.Size(shape).numel() for shape in shapes(config).values())
    print(f"{written}: {count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
