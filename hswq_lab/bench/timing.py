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


def nothing() -> None:
    """What happens between two calls unless somebody wants to know."""


def seconds_per_call(
    call: Callable[[], object],
    device: torch.device,
    repeats: int,
    between: Callable[[], object] = nothing,
) -> float:
    """Median time of `call` in seconds.

    On a card each call is timed by events, after the cache was overwritten; on a CPU by the clock.

    Args:
        call: what is timed.
        device: where it runs.
        repeats: timed calls.
        between: called before every call, outside its time; may raise to stop.
    """
    timer = _on_card if device.type == "cuda" else _on_cpu
    for _ in range(WARM_UP):
        between()
        call()
    seconds = []
    for _ in range(repeats):
        between()
        seconds.append(timer(call))
    return statistics.median(seconds)


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
