"""Time of one call: medians of calls measured one by one, with a cold cache on a card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch

WARM_UP = 2
FLUSHED_BYTES = 256 * 2**20
"""More than any card's second-level cache: weights are read from memory, as in a model of many layers."""


def seconds_per_call(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `call` in seconds.

    On a card each call is timed by events, after the cache was overwritten; on a CPU by the clock.
    """
    for _ in range(WARM_UP):
        call()
    timer = _on_card if device.type == "cuda" else _on_cpu
    return statistics.median(timer(call) for _ in range(repeats))


def _on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _on_card(call: Callable[[], object]) -> float:
    _flush_buffer(torch.cuda.current_device()).zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


@cache
def _flush_buffer(device: int) -> torch.Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
