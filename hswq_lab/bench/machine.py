"""What this machine can do at most, measured: bytes a second by a copy, operations by a matrix product."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hswq_lab.bench.timing import nothing, seconds_per_call

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Roofline:
    """Measured limits of a device.

    Attributes:
        copy: bytes per second of a large copy, read and written bytes both counted.
        matmul: floating-point operations per second of a large matrix product in `dtype`.
        dtype: e.g. "bfloat16".
    """

    copy: float
    matmul: float
    dtype: str

    def seconds(self, flop: float, traffic: float) -> float:
        """The least time for so many operations and so many bytes (Williams et al. 2009)."""
        return max(flop / self.matmul, traffic / self.copy)


def measure_roofline(
    device: torch.device, dtype: torch.dtype, between: Callable[[], object] = nothing
) -> Roofline:
    """Measures a device; takes a second or two.

    Args:
        device: CPU or card.
        dtype: of the matrix product.
        between: called before every timed call; may raise to stop.
    """
    on_card = device.type == "cuda"
    source = torch.ones((2**30 if on_card else 2**26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 8192 if on_card else 1024
    a = torch.randn(side, side, device=device).to(dtype)
    copy = seconds_per_call(lambda: target.copy_(source), device, 9, between)
    product = seconds_per_call(lambda: a @ a, device, 9, between)
    return Roofline(2 * source.numel() / copy, 2 * side**3 / product, str(dtype).removeprefix("torch."))


def memory_of(device: torch.device) -> int:
    """Bytes of memory of a card, or of the whole machine for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(device: torch.device) -> dict[str, str]:
    """Device, versions and threads: what a stored result is compared by."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name = f"{card.name} (capability {card.major}.{card.minor})"
    else:
        name = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {
        "device": str(device),
        "name": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "threads": str(torch.get_num_threads()),
        # Without the kernel's release, which may name a company's own build: results are made to be shared.
        "platform": "-".join([platform.system(), platform.machine(), *platform.libc_ver()]),
    }
