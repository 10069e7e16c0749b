"""hl.bench_gemm: one Linear in every mode and back end, with and without rotation and quantisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pandas as pd
import torch
from torch import Tensor

from hswq_lab import ops
from hswq_lab.arguments import device_of, whole
from hswq_lab.bench.machine import Roofline, describe, measure_roofline, memory_of
from hswq_lab.bench.timing import seconds_per_call
from hswq_lab.errors import HswqError
from hswq_lab.formats.rotation import group_for
from hswq_lab.progress import Progress, progress_of
from hswq_lab.results import Result

TORCH: Final = "torch"
ALONE: Final = "product alone"
WHOLE: Final = "with rotation and quantisation"

SHAPES_CARD: Final = ((3840, 3840), (11520, 3840), (10240, 3840), (3840, 10240))
"""(N, K) of the Linears of Z-Image's 6 B network."""
SHAPES_CPU: Final = ((768, 256), (256, 768))
"""(N, K) of mini-zimage's."""
ROWS_CARD: Final = (1, 16, 4096)
ROWS_CPU: Final = (1, 16, 192)


@dataclass(frozen=True)
class GemmRow:
    """One way to multiply x [M, K] by W [N, K]ᵀ.

    Attributes:
        op: "torch bfloat16" (the peer), "w4a16", "w4a4", "w4a8" or "int8".
        stage: whether the rotation and quantisation of x are in the time.
        backend: what really ran: "torch", "reference", "cpu" or "cuda".
        seconds: median of a call.
        tflops: 2·M·N·K / seconds / 10¹².
        gb_per_s: least traffic (x, W and y once, as stored) / seconds / 10⁹.
        of_roofline: least time (measured copy and matrix product) / seconds; exceeds 1 where arithmetic is
            narrower than the measured product's, or data stays in a CPU's cache.
        speedup: peer's seconds / seconds.
        error: ‖y − x·Wᵀ‖ / ‖x·Wᵀ‖ against fp32 with the unquantised W.
        fallbacks: how many of the timed calls ran in the reference although nobody asked for that.
        why: the reason for the fallbacks.
    """

    op: str
    stage: str
    backend: str
    m: int
    n: int
    k: int
    seconds: float
    tflops: float
    gb_per_s: float
    of_roofline: float
    speedup: float
    error: float
    fallbacks: int = 0
    why: str = ""


@dataclass(frozen=True)
class GemmBench(Result):
    """Rows of `bench_gemm`, and the machine they were measured on."""

    machine: dict[str, str]
    roofline: Roofline
    dtype: str
    repeats: int
    rows: list[GemmRow] = field(repr=False)

    def to_frame(self) -> pd.DataFrame:
        """One row a measurement."""
        return pd.DataFrame([vars(row) for row in self.rows])

    def __str__(self) -> str:
        copy, product = self.roofline.copy / 1e9, self.roofline.matmul / 1e12
        head = f"{self.machine['name']}: copy {copy:.1f} GB/s, {self.dtype} product {product:.3g} TFLOP/s"
        fallbacks = sum(row.fallbacks for row in self.rows)
        whys = "; ".join({row.why: None for row in self.rows if row.why})
        tail = f"{fallbacks} calls fell back to the reference: {whys}" if fallbacks else "no fallbacks"
        return "\n".join([head, *map(_line, self.rows), tail])


def _line(row: GemmRow) -> str:
    size = f"{row.m}×{row.n}×{row.k}"
    return (
        f"  {size:>16}  {row.op:<15} {row.stage:<31} {row.backend:<10} {row.seconds * 1e6:>10.1f} µs "
        f"{row.tflops:>8.3g} TFLOP/s  {row.speedup:>6.2f}× {100 * row.of_roofline:>4.0f} %"
    )


@dataclass(frozen=True)
class _Case:
    """One call to time, and the bytes that it cannot avoid to move."""

    op: str
    stage: str
    call: Callable[[], Tensor]
    traffic: int


def bench_gemm(
    shapes: Sequence[tuple[int, int]] | None = None,
    rows: Sequence[int] | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    backends: Sequence[ops.BackendName] | None = None,
    repeats: int = 20,
    progress: Progress | None = None,
) -> GemmBench:
    """Times every mode of a Linear beside torch's own product in the same dtype.

    Args:
        shapes: (N, K) of the weights; default: Z-Image's on a card, mini-zimage's on a CPU.
        rows: values of M.
        device: "cpu", "cuda", …
        dtype: of x, bf16 or fp32 (fp16 is possible too).
        backends: those to compare; default: whatever the device's ops take by themselves.
        repeats: calls for each median.
        progress: told before every call, so that it can cancel at once; a unit is one (M, N, K).

    Raises:
        HswqError: a back end that cannot be used here, impossible shapes, or more than the memory holds.
    """
    device = device_of(device)
    on_card = device.type == "cuda"
    shapes = shapes or (SHAPES_CARD if on_card else SHAPES_CPU)
    rows = rows or (ROWS_CARD if on_card else ROWS_CPU)
    for shape in shapes:
        if len(shape) != 2:
            raise HswqError("a weight's shape is (N, K)", found=shape)
    for value in (*rows, *(side for shape in shapes for side in shape), repeats):
        whole(value, "a size or a number of repeats")
    tell = progress_of(progress)
    found: list[GemmRow] = []
    cases = [(m, n, k) for n, k in shapes for m in rows]
    for case in cases:
        _check_room(*case, device)
    limits = partial(tell, 0, len(cases), "what the machine can do")
    roofline = measure_roofline(device, dtype, limits)
    for done, (m, n, k) in enumerate(cases):
        between = partial(tell, done, len(cases), f"{m}×{n}×{k}")
        found += _measure(m, n, k, device, dtype, backends, repeats, roofline, between)
    tell(len(cases), len(cases), "done")
    return GemmBench(describe(device), roofline, str(dtype).removeprefix("torch."), repeats, found)


def _check_room(m: int, n: int, k: int, device: torch.device) -> None:
    """Refuses what cannot fit: a system that promises memory and lacks it ends the whole process."""
    needed, there = (
        4 * (m * k + n * k + 2 * m * n),
        memory_of(device),
    )  # in fp32, which the exact product needs
    if needed > there:
        raise HswqError(
            "this product does not fit into memory",
            found=f"M × N × K = {m:,} × {n:,} × {k:,}: at least {needed / 1e9:,.1f} GB",
            expected=f"at most the {there / 1e9:,.1f} GB of {device}",
            fix="take smaller sizes",
        )


def _measure(
    m: int,
    n: int,
    k: int,
    device: torch.device,
    dtype: torch.dtype,
    backends: Sequence[ops.BackendName] | None,
    repeats: int,
    roofline: Roofline,
    between: Callable[[], None],
) -> Iterator[GemmRow]:
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator).to(device, dtype)
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(device, dtype)
    exact = x.float() @ w.float().T
    flop = 2 * m * n * k

    def row(case: _Case, backend: str, peer: float | None, why: str) -> GemmRow:
        between()
        error = float((case.call().float() - exact).norm() / exact.norm())
        seconds = seconds_per_call(case.call, device, repeats, between)
        return GemmRow(
            op=case.op,
            stage=case.stage,
            backend=backend,
            m=m,
            n=n,
            k=k,
            seconds=seconds,
            tflops=flop / seconds / 1e12,
            gb_per_s=case.traffic / seconds / 1e9,
            of_roofline=roofline.seconds(flop, case.traffic) / seconds,
            speedup=1.0 if peer is None else peer / seconds,
            error=error,
            fallbacks=repeats if why else 0,
            why=why,
        )

    dense = (m * k + n * k + m * n) * x.element_size()
    peer = row(_Case(f"torch {str(dtype)[6:]}", WHOLE, lambda: x @ w.T, dense), TORCH, None, "")
    yield peer
    packed = list(_cases(x, w))
    for asked in backends or (None,):
        with nullcontext() if asked is None else ops.use_backend(asked):
            backend = ops.backend_for(device)
            why = fallback_reason(device) if asked is None else ""
            for case in packed:
                yield row(case, backend, peer.seconds, why)


def fallback_reason(device: torch.device) -> str:
    """Why the ops on this device run in the reference although nobody asked for that; "" if they do not."""
    if ops.backend_for(device) != "reference":
        return ""
    native = ops.backends().get(device.type)
    return f"no kernels for {device.type}" if native is None else native.why or "not wired up"


def _cases(x: Tensor, w: Tensor) -> Iterator[_Case]:
    """The packed modes of y = x·Wᵀ: NVFP4 weights with 16-, 8- and 4-bit activations, and INT8."""
    (m, k), n = x.shape, w.shape[0]
    group = group_for(k)
    rotated = ops.rotate(w.float(), group)
    w_scale = ops.tensor_scale(rotated)
    w_codes, w_scales = ops.quantize_nvfp4(rotated, w_scale)
    s_x = ops.tensor_scale(ops.rotate(x.float(), group))
    x_codes, x_scales = ops.rotate_quantize_nvfp4(x, s_x, group)
    alpha = s_x * w_scale
    ends = (m * k + m * n) * x.element_size()
    four_bit = w_codes.nbytes + w_scales.nbytes
    codes_only = x_codes.nbytes + x_scales.nbytes + m * n * x.element_size() + four_bit

    gemm = partial(ops.fp4_gemm, x_codes, x_scales, w_codes, w_scales, alpha, (m, n), None, x.dtype)
    yield _Case("w4a4", ALONE, gemm, codes_only)
    w4a4 = partial(ops.linear_w4a4, x, w_codes, w_scales, w_scale, s_x, group, n)
    yield _Case("w4a4", WHOLE, w4a4, ends + four_bit)
    w4a8 = partial(ops.linear_w4a8, x, w_codes, w_scales, w_scale, s_x, group, n)
    yield _Case("w4a8", WHOLE, w4a8, ends + four_bit)
    w4a16 = partial(ops.linear_w4a16, x, w_codes, w_scales, w_scale, group, n)
    yield _Case("w4a16", WHOLE, w4a16, ends + four_bit)
    turned = ops.rotate(x, group)
    w4a16_alone = partial(ops.linear_w4a16, turned, w_codes, w_scales, w_scale, None, n)
    yield _Case("w4a16", ALONE, w4a16_alone, ends + four_bit)
    q, s = ops.quantize_int8(w, group)
    yield _Case("int8", WHOLE, partial(ops.linear_int8, x, q, s, group), ends + q.nbytes + s.nbytes)
