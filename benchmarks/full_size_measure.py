"""What `full_size.py` measures with: time of a step, memory, where the time goes by kernel, rates of disk and bus."""

from __future__ import annotations

import gc
import os
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hswq_lab import Model
    from hswq_lab.models.zimage import ZImageConfig

# Kernels by name, the first that matches; what matches none is "rest" (norms, rotary positions, gates, copies).
KINDS = {
    "attention": r"flash|fmha|attention|sdpa",
    "decode weights": r"fp8_weight|sixteen_bits|expand",
    "GEMM": r"gemm|gemv|nvjet|cutlass|xmma|cublas|skinny|product_kernel|splitk",
    "rotate/quantise": r"hswq",
}


def sync(device: torch.device) -> None:
    """Waits for the card."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free() -> None:
    """Gives back the card's memory that nobody holds."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@dataclass
class Spent:
    """Seconds and peaks of a block of code, in bytes; memory counts from what was allocated at its start."""

    seconds: float = 0.0
    host: int = 0
    device: int = 0


@contextmanager
def spent(device: torch.device) -> Iterator[Spent]:
    """Measures a block: the clock, the growth of this process's own memory, and of the card's allocated memory."""
    free()
    found, done = Spent(), threading.Event()
    start_host, start_device = _own_bytes(), 0
    peak = [start_host]

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], _own_bytes())

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start_device = torch.cuda.memory_allocated(device)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    try:
        yield found
        sync(device)
    finally:
        found.seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        found.host = max(0, max(peak[0], _own_bytes()) - start_host)
        if device.type == "cuda":
            found.device = torch.cuda.max_memory_allocated(device) - start_device


def _own_bytes() -> int:
    """RssAnon of this process: what it allocated, without pages of files (Linux; 0 elsewhere)."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    sizes = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    return 1024 * sum(sizes)


def seconds(call: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 2) -> float:
    """Median seconds of a call on the clock, the card waited for: what a user waits, launches included."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        sync(device)
        start = time.perf_counter()
        call()
        sync(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass
class Step:
    """One denoising step of a model, measured.

    Attributes:
        seconds: median on the clock.
        peak: bytes on the card at most, weights included.
        flop: of Linears and attention.
        linear_flop: of the Linears alone, 2·M·N·K.
        hits: calls of Linears by the arithmetic that ran, in one step.
        kernels: milliseconds on the card by kind.
        top: the longest kernels, milliseconds by name.
    """

    seconds: float
    peak: int
    flop: int
    linear_flop: int
    hits: dict[str, int]
    kernels: dict[str, float] = field(default_factory=dict)
    top: dict[str, float] = field(default_factory=dict)

    @property
    def kernel_seconds(self) -> float:
        """Time on the card."""
        return sum(self.kernels.values()) / 1000


def one_step(model: Model, size: tuple[int, int], captions: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A call that evaluates the network once, on random latents, as in the middle of a run."""
    network = model.network()
    shape = (len(captions), *model.latent_shape(size))
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(shape, generator=generator).to(model.device, model.dtype)
    t = torch.full((len(captions),), 0.4, device=model.device)
    given = [caption.to(model.device, model.dtype) for caption in captions]

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return network(latents, t, given)

    return call


def measure_step(
    model: Model, size: tuple[int, int], captions: list[torch.Tensor], repeats: int, *, profile: bool
) -> Step:
    """Time, memory, counters and, where asked, the profiler's table of one step."""
    device = model.device
    call = one_step(model, size, captions)
    call()
    before = model.report()
    call()
    after = model.report()
    linear = sum(row.flop for row in after.layers) - sum(row.flop for row in before.layers)
    hits = {mode: count - before.hits().get(mode, 0) for mode, count in after.hits().items()}
    peak = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    median = seconds(call, device, repeats)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    flop = linear + attention_flop(model.config, size, model, captions)
    step = Step(median, peak, flop, linear, {mode: count for mode, count in hits.items() if count})
    if profile:
        step.kernels, step.top = kernel_times(call, device)
    return step


def attention_flop(
    config: ZImageConfig, size: tuple[int, int], model: Model, captions: list[torch.Tensor]
) -> int:
    """Operations of all attention products: 4 · tokens² · width a block (scores, and their product with v)."""
    _, height, width = model.latent_shape(size)
    image, text = (-(-n // 32) * 32 for n in (height * width // 4, len(captions[0])))
    tokens = config.n_layers * (image + text) ** 2 + config.n_refiners * (image**2 + text**2)
    return 4 * config.dim * tokens * len(captions)


def kernel_times(
    call: Callable[[], object], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of one call by kind of kernel, and the twelve longest kernels by name."""
    on_card = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_card else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
        sync(device)
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        took = (event.self_device_time_total if on_card else event.self_cpu_time_total) / 1000
        kinds[kind_of(event.key)] += took
        names[event.key[:90]] += took
    longest = sorted(names.items(), key=lambda item: -item[1])[:12]
    return dict(kinds), dict(longest)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "rest"
    )


def disk_rates(folder: Path, nbytes: int) -> tuple[float, float]:
    """Bytes a second of writing a file through to the disk, and of reading it with a cold cache."""
    path, block = folder / "rate.bin", os.urandom(min(nbytes, 1 << 26))
    start = time.perf_counter()
    with path.open("wb") as stream:
        for _ in range(nbytes // len(block)):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    wrote = nbytes / (time.perf_counter() - start)
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while stream.read(1 << 26):
            pass
        read = nbytes / (time.perf_counter() - start)
    path.unlink()
    return wrote, read


def bus_rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes a second between host and card, from pinned and from pageable memory."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.ones(nbytes, dtype=torch.uint8)
    pinned = here.pin_memory() if device.type == "cuda" else here
    calls = {
        "to the card, pinned": lambda: there.copy_(pinned, non_blocking=True),
        "to the card, pageable": lambda: there.copy_(here),
        "from the card, pageable": lambda: here.copy_(there),
    }
    return {name: nbytes / seconds(call, device, 3, 1) for name, call in calls.items()}
