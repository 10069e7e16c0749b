"""Baking a rank-16 LoRA into layers of the real Z-Image shapes, against torch + comfy-kitchen's eager back end.

    python benchmarks/lora.py [--rounds 3] [--threads 2] [--json benchmarks/results/lora.json] [--readme]

The other side does the same work with the parts that are at hand there: dequantise (comfy-kitchen, eager), rotate back
(a matrix product with H), add B·A, rotate (again a product), quantise (comfy-kitchen, eager). Ours rounds
stochastically and keeps the pack's scales, which the other side does for INT8 only. Rounds are interleaved in one
process; a time is the median of the rounds. Two times are taken: on the clock, which counts whatever else the machine
does, and CPU time of this process. The peer is no dependency: pip install comfy-kitchen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from comfy_kitchen.backends.eager import quantization as eager
from torch import Tensor

from hswq_lab import ops
from hswq_lab.formats import Int8Weight, Nvfp4Weight, PackedWeight
from hswq_lab.formats.rotation import hadamard
from hswq_lab.lora import LayerDelta, bake_in_place, measure, put_in_place
from hswq_lab.lora.parts import LowRank
from hswq_lab.packing import pack_weight

GROUP, RANK, ASKED = 256, 16, 8.0
# Six Linears of a main block of Z-Image (D = 3840, F = 10240), in the formats of a hybrid.
LAYERS: dict[str, tuple[int, int, str]] = {
    "layers.0.attention.qkv": (11520, 3840, "nvfp4"),
    "layers.0.attention.out": (3840, 3840, "nvfp4"),
    "layers.0.feed_forward.w1": (10240, 3840, "nvfp4"),
    "layers.0.feed_forward.w2": (3840, 10240, "nvfp4"),
    "layers.0.feed_forward.w3": (10240, 3840, "int8_tensorwise"),
    "layers.0.adaLN_modulation.0": (15360, 256, "int8_tensorwise"),
}
RESULTS = Path(__file__).parent / "results" / "lora.json"
README = Path(__file__).parent / "README.md"
MARKS = ("<!-- lora begin -->", "<!-- lora end -->")


@dataclass(frozen=True)
class Seconds:
    """A call's time on the clock and on the CPU (all threads together)."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Row:
    """One layer: medians over the rounds; `ratio` is other / bake, `ratio_with_evidence` other / bake + evidence."""

    layer: str
    shape: tuple[int, int]
    format: str
    bake: Seconds
    with_evidence: Seconds
    other: Seconds
    ratio: float
    ratio_with_evidence: float


def timed(call: Callable[[], object]) -> Seconds:
    """One call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def median(times: list[Seconds]) -> Seconds:
    """The medians of both clocks."""
    return Seconds(*(statistics.median(getattr(t, name) for t in times) for name in ("wall", "cpu")))


def other_bake(packed: PackedWeight, up: Tensor, down: Tensor, seed: int) -> object:
    """The same work as a sequence of eager operations."""
    h = hadamard(GROUP)

    def rotated(w: Tensor) -> Tensor:
        return (w.reshape(-1, GROUP) @ h).reshape(w.shape)

    match packed:
        case Nvfp4Weight():
            w = rotated(eager.dequantize_nvfp4(packed.codes, packed.scale, packed.scales, torch.float32))
            w = rotated(w + up @ down)
            return eager.quantize_nvfp4(w, w.abs().amax() / 2688.0)
        case Int8Weight():
            w = rotated(eager.dequantize_int8_simple(packed.q, packed.scale))
            w = rotated(w + up @ down)
            return eager.quantize_int8_rowwise(w, stochastic_rounding=seed)
    raise TypeError(type(packed))


def measure_layer(layer: str, n: int, k: int, form: str, rounds: int) -> Row:
    """Both sides on one layer, interleaved; one round before them does not count."""
    generator = torch.Generator().manual_seed(0)
    packed = pack_weight(torch.randn(n, k, generator=generator) * 0.02, form, GROUP)
    down = torch.randn(RANK, k, generator=generator) / k**0.5
    up = torch.randn(n, RANK, generator=generator) * 0.01
    deltas = [(LayerDelta(layer, (n, k), (LowRank(layer, 0, n, 1.0, down, up),)), 1.0)]
    calls: tuple[Callable[[], object], ...] = (
        lambda: put_in_place(packed, deltas, layer),
        lambda: bake_in_place(packed, deltas, layer),
        lambda: other_bake(packed, up, down, 7),
    )
    verdict = measure(put_in_place(packed, deltas, layer)).verdict
    if verdict != "OK":
        raise SystemExit(f"{layer}: {verdict}")
    calls[2]()
    times = [[timed(call) for call in calls] for _ in range(rounds)]
    bake, proven, other = (median([row[i] for row in times]) for i in range(len(calls)))
    return Row(layer, (n, k), form, bake, proven, other, other.wall / bake.wall, other.wall / proven.wall)


def table(content: dict) -> str:
    """The README's section."""
    told = "one round" if content["rounds"] == 1 else f"median of {content['rounds']} rounds"
    head = f"{content['machine']}, {content['threads']} threads, rank {RANK}, {told} (seconds on the clock)."
    lines = [
        f"{head} {content['command']}",
        "",
        "| layer | N × K | format | bake | bake + evidence | torch + comfy-kitchen eager | × | × with evidence |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in content["rows"]:
        n, k = row["shape"]
        times = " | ".join(f"{row[key]['wall']:.2f}" for key in ("bake", "with_evidence", "other"))
        lines.append(
            f"| {row['layer']} | {n} × {k} | {row['format']} | {times} | {row['ratio']:.1f} "
            f"| {row['ratio_with_evidence']:.1f} |"
        )
    total = content["total"]
    times = " | ".join(f"**{total[key]['wall']:.2f}**" for key in ("bake", "with_evidence", "other"))
    lines.append(f"| all six | | | {times} | **{total['ratio']:.1f}** | {total['ratio_with_evidence']:.1f} |")
    lines.append(
        f"\nIn CPU time, which other load on the machine touches less: {total['cpu_ratio']:.1f}× without and "
        f"{total['cpu_ratio_with_evidence']:.1f}× with evidence. Asked: {ASKED:.0f}×."
    )
    return "\n".join(lines)


def machine() -> str:
    """The processor's name and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def summed(rows: list[Row]) -> dict:
    """All layers together."""
    sums = {
        key: Seconds(*(sum(getattr(getattr(row, key), name) for row in rows) for name in ("wall", "cpu")))
        for key in ("bake", "with_evidence", "other")
    }
    bake, proven, other = sums.values()
    return {key: asdict(value) for key, value in sums.items()} | {
        "ratio": other.wall / bake.wall,
        "ratio_with_evidence": other.wall / proven.wall,
        "cpu_ratio": other.cpu / bake.cpu,
        "cpu_ratio_with_evidence": other.cpu / proven.cpu,
    }


def into_readme(text: str) -> None:
    """Puts the section between its marks, at the end of the file if they are not there yet."""
    page = README.read_text(encoding="utf-8") if README.exists() else "# Benchmarks\n"
    begin, end = MARKS
    if begin not in page:
        page += f"\n## Baking a LoRA\n\n{begin}\n{end}\n"
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--readme", action="store_true", help="write the table into benchmarks/README.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for layer, (n, k, form) in LAYERS.items():
        rows.append(measure_layer(layer, n, k, form, args.rounds))
        print(
            f"{layer}: {rows[-1].ratio:.1f}x, {rows[-1].ratio_with_evidence:.1f}x with evidence", flush=True
        )
    content = {
        "command": "`python benchmarks/lora.py`",
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "comfy-kitchen": metadata.version("comfy-kitchen"),
        "instruction set": ops.backends()["cpu"].active,
        "threads": args.threads,
        "rounds": args.rounds,
        "rank": RANK,
        "rows": [asdict(row) for row in rows],
        "total": summed(rows),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1))
    print(table(content))
    if args.readme:
        into_readme(table(content))


if __name__ == "__main__":
    main()
