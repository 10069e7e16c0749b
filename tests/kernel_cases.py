"""Inputs on which kernels are compared with the definition, and what "the same" means; for CPU and card."""

from __future__ import annotations

import torch

from hswq_lab import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 16), (33, 48), (17, 20), (130, 80), (5, 256), (16, 272), (3, 768), (7, 1), (0, 64)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(width), b.contiguous().view(width))
    )


def gaussian(rows: int, cols: int, dtype=torch.float32, seed=0, spread=0.0) -> torch.Tensor:
    """Normal values; with a spread, blocks of 16 columns differ by that many orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g)
    if spread:
        blocks = -(-cols // 16)
        x *= (10 ** (spread * (torch.rand(rows, blocks, generator=g) - 0.5))).repeat_interleave(16, 1)[
            :, :cols
        ]
    return x.to(dtype)


def awkward() -> dict[str, torch.Tensor]:
    """Inputs where a careless kernel differs: each [40, 272], fp32."""
    g = torch.Generator().manual_seed(1)
    base = torch.randn(40, 272, generator=g)
    steps = torch.randint(-60, 60, (40, 272), generator=g)
    zeros = base.clone()
    zeros[:, 32:64] = 0
    zeros[3] = -0.0
    zeros[:, 100:116] = -0.0
    zeros[5, 7] = -0.0
    outliers = base.clone()
    outliers[7, 33] = 3e4
    outliers[8, 200] = -3e38
    holes = base.clone()
    holes[2, 5], holes[9, 100], holes[11, 270] = torch.nan, torch.inf, -torch.inf
    return {
        "ties": steps / 8,
        "eighths": steps.float() / 4,
        "zeros": zeros,
        "all_zero": torch.zeros(40, 272),
        "minus_zero": torch.full((40, 272), -0.0),
        "subnormal": base * 1e-41,
        "around_subnormal": base * 1e-37,
        "tiny": base * 1e-35,
        "huge": base * 5e37,
        "constant": torch.ones(40, 272),
        "outliers": outliers,
        "mixed": base * 10.0 ** torch.randint(-38, 30, (40, 272), generator=g).float(),
        "nonfinite": holes,
    }


AWKWARD = awkward()


def quantizers(x: torch.Tensor, s: torch.Tensor) -> dict:
    h = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(3)) + 0.01
    return {
        "rtn": lambda: ops.quantize_nvfp4(x, s),
        "stochastic": lambda: ops.quantize_nvfp4(x, s, seed=2**64 - 5),
        "four_six": lambda: ops.quantize_nvfp4(x, s, "four_six"),
        "sweep": lambda: ops.quantize_nvfp4(x, s, "sweep"),
        "sweep_h": lambda: ops.quantize_nvfp4(x, s, "sweep", h, seed=11),
        "four_six_h": lambda: ops.quantize_nvfp4(x, s, "four_six", h),
    }


def both(call):
    """What the kernel says, and what the definition says."""
    mine = call()
    with ops.use_backend("reference"):
        return mine, call()


def assert_same(call) -> None:
    mine, theirs = both(call)
    if isinstance(mine, torch.Tensor):
        mine, theirs = (mine,), (theirs,)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert same_bits(a, b), f"result {i}: {(a.float() != b.float()).sum()} of {a.numel()} differ"
