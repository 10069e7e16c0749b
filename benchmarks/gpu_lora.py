"""A LoRA on a card: baked into 180 layers of the real Z-Image shapes, and as a branch beside a layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hswq_lab import ops
from hswq_lab.formats import Nvfp4Weight, PackedWeight
from hswq_lab.lora import LayerDelta, put_in_place
from hswq_lab.lora.branch import BranchStack
from hswq_lab.lora.delta import Branch
from hswq_lab.lora.parts import LowRank
from hswq_lab.packing import pack_weight

DEVICE = torch.device("cuda")
GROUP, BLOCKS, BAKE_RANK, BRANCH_RANK, TOKENS = 256, 30, 16, 64, 4096
# The Linears of a main block (D = 3840, F = 10240) in the formats of a hybrid, 30 times: N, K, format.
LAYERS = [
    (11520, 3840, "nvfp4"),
    (3840, 3840, "nvfp4"),
    (10240, 3840, "nvfp4"),
    (3840, 10240, "nvfp4"),
    (10240, 3840, "int8_tensorwise"),
    (15360, 256, "int8_tensorwise"),
]
Row = dict[str, Any]
Call = Callable[[], object]


def measure(seconds: Callable[[Callable[[], object]], float]) -> list[Row]:
    """Seconds of a whole bake, and what a branch adds to a layer's time; `seconds` times a call on the card."""
    return [bake_all(), *branches(seconds)]


def bake_all(rounds: int = 3) -> Row:
    """Upload of the factors, change, rotation and stochastic rounding of all layers; the weights are on the card."""
    made = []
    for n, k, form in LAYERS:
        packed = pack_weight(torch.randn(n, k, device=DEVICE) * 0.02, form, GROUP)
        factors = torch.randn(BAKE_RANK, k) / k**0.5, torch.randn(n, BAKE_RANK) * 0.01
        made.append((packed, *factors))
    times = []
    for _ in range(rounds + 1):  # the first warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BLOCKS):
            for packed, down, up in made:
                bake(packed, down, up)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "lora": "bake",
        "layers": BLOCKS * len(LAYERS),
        "rank": BAKE_RANK,
        "s": statistics.median(times[1:]),
    }


def bake(packed: PackedWeight, down: torch.Tensor, up: torch.Tensor) -> object:
    """One layer."""
    part = LowRank("layer", 0, packed.shape[0], 1.0, down.to(DEVICE), up.to(DEVICE))
    return put_in_place(packed, [(LayerDelta("layer", packed.shape, (part,)), 1.0)], "layer").after


def branches(seconds: Callable[[Callable[[], object]], float]) -> Iterator[Row]:
    """Time with a branch over time without, for every W4 mode."""
    for n, k, form in LAYERS[:4]:
        for mode, (plain, beside) in layer_calls(n, k, form).items():
            before, after = seconds(plain), seconds(beside)
            size = {"rank": BRANCH_RANK, "m": TOKENS, "n": n, "k": k}
            times = {"us": before * 1e6, "us_with": after * 1e6, "added": after / before - 1}
            yield {"lora": f"branch on {mode}", **size, **times}


def layer_calls(n: int, k: int, form: str) -> dict[str, tuple[Call, Call]]:
    """Mode → the layer's product, and the same with a branch."""
    w = pack_weight(torch.randn(n, k, device=DEVICE) * 0.02, form, GROUP)
    packed = (w.codes, w.scales, w.scale) if isinstance(w, Nvfp4Weight) else ()
    x = torch.randn(TOKENS, k, device=DEVICE, dtype=torch.bfloat16)
    s = ops.tensor_scale(x)
    factors = torch.randn(BRANCH_RANK, k) / k**0.5, torch.randn(n, BRANCH_RANK) * 0.01
    branch = Branch("layer", (n, k), *factors, torch.ones(BRANCH_RANK))
    stack = BranchStack({"lora": (branch, 0.8)}, device=DEVICE, dtype=x.dtype)

    def pair(call: Callable[[], torch.Tensor]) -> tuple[Call, Call]:
        return call, lambda: stack.add_to(x, call())  # as a layer does

    return {
        "w4a16": pair(lambda: ops.linear_w4a16(x, *packed, GROUP, n)),
        "w4a4": pair(lambda: ops.linear_w4a4(x, *packed, s, GROUP, n)),
        "w4a8": pair(lambda: ops.linear_w4a8(x, *packed, s, GROUP, n)),
    }
