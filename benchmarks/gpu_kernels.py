"""Times the CUDA kernels on this machine's card, beside a copy, torch's bf16 product and peers, in one run.

Medians of CUDA graph replays, each after the second-level cache was overwritten; everything on random data. Peers
(benchmarks/gpu_peers.py) are measured where they are installed. Results go to
benchmarks/results/gpu_kernels_<card>.json; benchmarks/gpu_table.py makes the table of benchmarks/README.md of them.

    python benchmarks/gpu_kernels.py [--repeats 15] [--only kernels|linears|lora] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_lora
import gpu_peers
import torch

from hswq_lab import ops
from hswq_lab.bench.machine import describe, measure_roofline

DEVICE = torch.device("cuda")
ACTIVATIONS = [(4096, 3840), (4096, 10240), (16384, 3840)]
WEIGHTS = [(3840, 3840), (11520, 3840), (10240, 3840), (3840, 10240)]
ROWS = [1, 16, 64, 256, 1024, 4096, 16384]
Row = dict[str, Any]


def seconds(call: Callable[[], object], flush: torch.Tensor, repeats: int) -> float:
    """Median time of the call's work on the card."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    graph.replay()
    times = []
    for _ in range(repeats):
        flush.fill_(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def elementwise(x: torch.Tensor, group: int | None) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name → bytes that cannot be avoided, per element of x, and the call."""
    s = torch.tensor(0.002, device=DEVICE)
    codes, scales = ops.rotate_quantize_nvfp4(x, s, group)
    q, qs = ops.quantize_int8(x, group)
    shape = (x.shape[0], x.shape[1])
    return {
        "rotate_quantize": (2.5625, lambda: ops.rotate_quantize_nvfp4(x, s, group)),
        "rotate": (4.0, lambda: ops.rotate(x, group)),
        "tensor_scale": (2.0, lambda: ops.tensor_scale(x)),
        "quantize_int8": (3.0, lambda: ops.quantize_int8(x, group)),
        "sweep": (2.5625, lambda: ops.quantize_nvfp4(x, s, "sweep")),
        "stochastic": (2.5625, lambda: ops.quantize_nvfp4(x, s, seed=1)),
        "dequantize": (2.5625, lambda: ops.dequantize_nvfp4(codes, scales, s, shape, x.dtype)),
        "dequantize_int8": (3.0, lambda: ops.dequantize_int8(q, qs, group, x.dtype)),
    }


def measure_elementwise(copy: float, flush: torch.Tensor, repeats: int) -> Iterator[Row]:
    """Rotation, quantisation and their inverses: time and bandwidth."""
    for rows, cols in ACTIVATIONS:
        x = torch.randn(rows, cols, device=DEVICE, dtype=torch.bfloat16)
        for group in (256, 64, None) if (rows, cols) == ACTIVATIONS[0] else (256,):
            calls = elementwise(x, group)
            if group == 256:
                s = torch.tensor(0.002, device=DEVICE)
                calls |= {name: (2.5625, call) for name, call in gpu_peers.quantize_peers(x, s)}
            for name, (traffic, call) in calls.items():
                took = seconds(call, flush, repeats)
                rate = traffic * x.numel() / took
                yield {
                    "kernel": name,
                    "rows": rows,
                    "cols": cols,
                    "group": group,
                    "us": took * 1e6,
                    "gb_per_s": rate / 1e9,
                    "of_copy": rate / copy,
                }


def linears(m: int, n: int, k: int) -> dict[str, Callable[[], object]]:
    """Every mode of a Linear, rotation and quantisation of the activations included, and bf16."""
    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=DEVICE) / k**0.5
    w16 = w.bfloat16()
    s = ops.tensor_scale(w)
    s_x = ops.tensor_scale(x)
    codes, scales = ops.rotate_quantize_nvfp4(w, s, 256)
    q, qs = ops.quantize_int8(w, 256)
    w8, rows = ops.fp8_weight(codes, scales, (n, k))
    return {
        "bf16": lambda: x @ w16.t(),
        "w4a16": lambda: ops.linear_w4a16(x, codes, scales, s, 256, n),
        "w4a4": lambda: ops.linear_w4a4(x, codes, scales, s, s_x, 256, n),
        "w4a8": lambda: ops.linear_w4a8(x, codes, scales, s, s_x, 256, n),
        "w4a8 kept": lambda: ops.linear_fp8(x, w8, rows, s, s_x, 256, n),
        "int8": lambda: ops.linear_int8(x, q, qs, 256),
        **dict(gpu_peers.linear_peers(x, w16, q, qs)),
    }


def measure_linears(flush: torch.Tensor, repeats: int) -> Iterator[Row]:
    """Every mode at every size: time, rate, and speed-up over bf16."""
    for n, k in WEIGHTS:
        for m in ROWS:
            took = {name: seconds(call, flush, repeats) for name, call in linears(m, n, k).items()}
            for name, time in took.items():
                yield {
                    "linear": name,
                    "m": m,
                    "n": n,
                    "k": k,
                    "us": time * 1e6,
                    "tflops": 2 * m * n * k / time / 1e12,
                    "speedup": took["bf16"] / time,
                }


def show(row: Row) -> None:
    """Prints a row."""
    print(
        "  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
    )


def main() -> None:
    """Measures, prints a line a figure, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=("kernels", "linears", "lora"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = describe(DEVICE)
    roofline = measure_roofline(DEVICE, torch.bfloat16)
    print(ops.describe_backends())
    print(f"copy {roofline.copy / 1e9:.0f} GB/s, bf16 product {roofline.matmul / 1e12:.0f} TFLOP/s")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    rows: list[Row] = []
    if args.only in (None, "kernels"):
        rows += measure_elementwise(roofline.copy, flush, args.repeats)
    if args.only in (None, "linears"):
        rows += measure_linears(flush, args.repeats)
    if args.only in (None, "lora"):
        rows += gpu_lora.measure(lambda call: seconds(call, flush, args.repeats))
    for row in rows:
        show(row)
    name = re.sub(r"\W+", "_", torch.cuda.get_device_name()).lower()
    out = args.out or Path(__file__).parent / "results" / f"gpu_kernels_{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    head = {"machine": machine, "copy_gb_per_s": roofline.copy / 1e9, "bf16_tflops": roofline.matmul / 1e12}
    out.write_text(json.dumps({**head, "backends": ops.describe_backends(), "rows": rows}, indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
