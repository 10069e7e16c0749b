"""CPU kernels against comfy-kitchen's eager back end, interleaved in one process, one thread each; the floor beside.

    python benchmarks/cpu_kernels.py [--rounds 5] [--readme]

W is 4096x3840 and x 1024x3840, bf16. Times are CPU time of this process (other load on the machine does not count), the
least of the rounds. The floor of a row is the bytes that it must read and write over the copy rate measured in the same
rounds. The peer is no dependency of the package: pip install comfy-kitchen.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import comfy_kitchen
import torch
from torch import Tensor
from torch.nn.functional import linear

from hswq_lab import formats, ops
from hswq_lab._backends import native

N, K, M, GROUP = 4096, 3840, 1024, 256
RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"


@dataclass(frozen=True)
class Case:
    """One comparison: what ours and the other one do, and what is asked of the ratio of their times."""

    name: str
    ours: Callable[[], object]
    other_name: str
    other: Callable[[], object]
    bytes_moved: float
    least_ratio: float  # of other / ours


@dataclass
class Row:
    """A case, measured."""

    name: str
    ours_ms: float
    other: str
    other_ms: float
    ratio: float
    asked: float
    floor_ms: float


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def cases() -> list[Case]:
    """The rows of the table."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(N, K, generator=generator).bfloat16()
    x = torch.randn(M, K, generator=generator).bfloat16()
    s_w, s_x = ops.tensor_scale(w), ops.tensor_scale(x)
    wc, ws = ops.quantize_nvfp4(w, s_w)
    xc, xs = ops.quantize_nvfp4(x, s_x)
    rc, rs = ops.rotate_quantize_nvfp4(w, s_w, GROUP)
    q, q_s = ops.quantize_int8(w, GROUP)
    h = formats.hadamard(GROUP).bfloat16()
    peer_w, peer_x = comfy_kitchen.quantize_nvfp4(w, s_w), comfy_kitchen.quantize_nvfp4(x, s_x)
    packed, dense = 0.5625, 2.0  # bytes an element
    w_size, y_size = N * K, M * N

    def peer_quantize(t: Tensor, s: Tensor) -> Callable[[], object]:
        return lambda: comfy_kitchen.quantize_nvfp4(t, s)

    def peer_dequantize(t: tuple[Tensor, Tensor], s: Tensor) -> Tensor:
        return comfy_kitchen.dequantize_nvfp4(t[0], s, t[1])

    def peer_rotate_quantize() -> object:
        return comfy_kitchen.quantize_nvfp4((w.reshape(-1, GROUP) @ h).reshape(N, K), s_w)

    def peer_w4a16() -> Tensor:
        return linear(x, peer_dequantize(peer_w, s_w))

    def peer_both() -> Tensor:
        return linear(peer_dequantize(peer_x, s_x), peer_dequantize(peer_w, s_w))

    def peer_w4a4() -> Tensor:
        quantised = comfy_kitchen.quantize_nvfp4(x, s_x)
        return linear(peer_dequantize(quantised, s_x), peer_dequantize(peer_w, s_w))

    def plain() -> Tensor:
        return linear(x, w)

    def w4a4() -> Tensor:
        return ops.linear_w4a4(x, rc, rs, s_w, s_x, GROUP, N)

    def quantize() -> object:
        return ops.quantize_nvfp4(w, s_w)

    gemm_bytes = w_size * packed + M * K * dense + y_size * dense
    return [
        Case("quantise", quantize, "peer", peer_quantize(w, s_w), w_size * (dense + packed), 40),
        Case(
            "rotate 256 + quantise",
            lambda: ops.rotate_quantize_nvfp4(w, s_w, GROUP),
            "peer: matmul with H, quantise",
            peer_rotate_quantize,
            w_size * (dense + packed),
            40,
        ),
        Case(
            "quantise, scales by sweep",
            lambda: ops.quantize_nvfp4(w, s_w, "sweep"),
            "ours, plain",
            quantize,
            w_size * (dense + packed),
            1 / 12,
        ),
        Case(
            "quantise, stochastic",
            lambda: ops.quantize_nvfp4(w, s_w, seed=1),
            "ours, plain",
            quantize,
            w_size * (dense + packed),
            0,
        ),
        Case(
            "dequantise to bf16",
            lambda: ops.dequantize_nvfp4(wc, ws, s_w, (N, K)),
            "peer",
            lambda: peer_dequantize(peer_w, s_w),
            w_size * (dense + packed),
            10,
        ),
        Case(
            "W4A16 linear",
            lambda: ops.linear_w4a16(x, wc, ws, s_w, None, N),
            "peer: dequantise, linear",
            peer_w4a16,
            gemm_bytes,
            3.2,
        ),
        Case(
            "W4A16 linear, x rotated",
            lambda: ops.linear_w4a16(x, rc, rs, s_w, GROUP, N),
            "plain bf16 linear",
            plain,
            gemm_bytes,
            0,
        ),
        Case("W4A4 linear, x rotated", w4a4, "plain bf16 linear", plain, gemm_bytes, 1 / 2),
        Case(
            "W4A4 linear, x rotated",
            w4a4,
            "peer: quantise x, dequantise both, linear",
            peer_w4a4,
            gemm_bytes,
            6,
        ),
        Case(
            "W4A4 GEMM of codes",
            lambda: ops.fp4_gemm(xc, xs, wc, ws, s_x * s_w, (M, N)),
            "peer: dequantise both, linear",
            peer_both,
            (w_size + M * K) * packed + y_size * dense,
            0,
        ),
        Case(
            "INT8 linear, x rotated",
            lambda: ops.linear_int8(x, q, q_s, GROUP),
            "plain bf16 linear",
            plain,
            w_size + M * K * dense + y_size * dense,
            0,
        ),
    ]


def measure(rounds: int) -> tuple[list[Row], float]:
    """All rows, and the copy rate in GB/s."""
    todo = cases()
    source = torch.ones(N, K, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    best: dict[tuple[int, str], float] = {}
    for _ in range(rounds + 1):  # the first touches memory and builds plans; it can only be slower
        for i, case in enumerate(todo):
            for who, call in (
                ("ours", case.ours),
                ("other", case.other),
                ("copy", lambda: target.copy_(source)),
            ):
                best[i, who] = min(best.get((i, who), float("inf")), milliseconds(call))
    rate = 2 * source.nbytes / min(t for (_, who), t in best.items() if who == "copy") / 1e6
    rows = []
    for i, case in enumerate(todo):
        ours, other = best[i, "ours"], best[i, "other"]
        floor = case.bytes_moved / rate / 1e6
        rows.append(Row(case.name, ours, case.other_name, other, other / ours, case.least_ratio, floor))
    return rows, rate


def machine() -> dict[str, str]:
    """What the figures depend on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "instruction set": native.isa() if native else "none",
        "torch": torch.__version__,
        "comfy-kitchen": metadata.version("comfy-kitchen"),
        "python": platform.python_version(),
    }


def asked(ratio: float) -> str:
    """The target of a row in words."""
    if ratio == 0:
        return ""
    return f"≥ {ratio:g}×" if ratio >= 1 else f"≤ {1 / ratio:g}× its time"


def table(rows: list[Row], rate: float, facts: dict[str, str]) -> str:
    """Markdown."""
    lines = [
        ", ".join(f"{name} {value}" for name, value in facts.items())
        + f"; one thread; copy {rate:.1f} GB/s (bytes read and written).",
        "",
        "| | ours ms | compared with | ms | ratio | asked | floor ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.ours_ms:.1f} | {r.other} | {r.other_ms:.1f} "
        f"| {r.ratio:.2f}× | {asked(r.asked)} | {r.floor_ms:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def write_readme(text: str, isa: str) -> None:
    """Puts the table between the marks of its instruction set."""
    begin, end = (f"<!-- cpu_kernels {isa} {side} -->" for side in ("begin", "end"))
    before, rest = README.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> int:
    """Prints the table; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/cpu_kernels_ISA.json")
    parser.add_argument(
        "--readme", action="store_true", help="also replace the table in benchmarks/README.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    with comfy_kitchen.use_backend("eager"), torch.inference_mode():
        rows, rate = measure(arguments.rounds)
    text = table(rows, rate, facts)
    print(text)
    isa = facts["instruction set"]
    target = arguments.json or RESULTS / f"cpu_kernels_{isa}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "copy_gb_s": rate, "rows": [asdict(row) for row in rows]}
    target.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.readme:
        write_readme(text, isa)
    return int(any(row.ratio < row.asked for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
