"""Draws the figures of docs/concepts.md into docs/img, from the small model. Needs a Chromium.

python tools/draw_concepts.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import hswq_lab as hl
from hswq_lab.formats import Nvfp4Weight, decode_e2m1, rotate_fp32
from hswq_lab.packing import dequantize, layer_seed, pack_weight, requantize
from hswq_lab.plots.explain import block_figure, lines_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from torch import Tensor

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
LAYER = "layers.3.feed_forward.w1"
SIZES = (0.003, 0.006, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2)  # ‖ΔW‖ / ‖W‖


def block(w: Tensor) -> go.Figure:
    """The first sixteen weights, the levels of their scale, and what is kept."""
    packed = pack_weight(w, "nvfp4", None, name=LAYER, scales="rtn")
    assert isinstance(packed, Nvfp4Weight)  # noqa: S101 - for the type checker
    step = w[0, :16].abs().max() / 6
    magnitudes = decode_e2m1(torch.arange(8, dtype=torch.uint8))
    levels = torch.cat([-magnitudes[1:], magnitudes]) * step
    title = "Sixteen weights share a scale, and fifteen levels"
    return block_figure(w[0, :16], dequantize(packed)[0, :16], levels, title, f"{LAYER}, row 0")


def rotation() -> go.Figure:
    """A row with four outlier channels, before and after."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 256, generator=generator)
    x[0, [31, 90, 140, 222]] = torch.tensor([40.0, -35.0, 44.0, -30.0])
    places = list(range(256))
    return lines_figure(
        "Rotation spreads outliers over their group",
        f"largest magnitude {x.abs().max():.0f} before, {rotate_fp32(x, 256).abs().max():.0f} after",
        {"before": (places, x[0].tolist()), "after": (places, rotate_fp32(x, 256)[0].tolist())},
        ("channel", "activation"),
        mode="lines",
    )


def vanish(w: Tensor) -> go.Figure:
    """Retained share of rank-16 deltas of several sizes, by way."""
    packed = pack_weight(w, "nvfp4", 256, name=LAYER)
    pristine = dequantize(packed)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(w.shape[0], 16, generator=generator) @ torch.randn(
        16, w.shape[1], generator=generator
    )
    direction *= w.norm() / direction.norm()
    ways = {
        "branch": lambda delta: pristine + delta,
        "from the source": lambda delta: dequantize(pack_weight(w + delta, "nvfp4", 256, name=LAYER)),
        "in place, stochastic": lambda delta: dequantize(
            requantize(packed, pristine + delta, layer_seed(LAYER))
        ),
        "in place, to nearest (not offered)": lambda delta: dequantize(
            pack_weight(pristine + delta, "nvfp4", 256, scales="rtn")
        ),
    }

    def share(after: Tensor, delta: Tensor) -> float:
        return float(((after - pristine) * delta).sum() / delta.square().sum())

    lines = {
        way: (SIZES, [share(put(size * direction), size * direction) for size in SIZES])
        for way, put in ways.items()
    }
    return lines_figure(
        "What a four-bit weight keeps of a LoRA", LAYER, lines, ("‖ΔW‖ / ‖W‖", "retained share"), log="x"
    )


def main() -> int:
    """Writes the four figures; returns the exit code."""
    torch.set_num_threads(1)
    model = hl.load("mini-zimage", device="cpu")
    w = model.checkpoint[f"{LAYER}.weight"].float()
    figures = {
        "block": block(w),
        "rotation": rotation(),
        "vanish": vanish(w),
        "impact": hl.sensitivity(model).figure(),
    }
    for name, figure in figures.items():
        height = 620 if name == "impact" else 430  # names of layers hang below
        target = hl.save_figure(figure, IMAGES / f"concept_{name}.svg", width=900, height=height)
        print(f"{target.name}: {target.stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
