"""The table of benchmarks/README.md from a stored run of benchmarks/gpu_kernels.py: figures, targets, side by side.

python benchmarks/gpu_table.py [benchmarks/results/gpu_kernels_nvidia_h200.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE / "README.md"
MARKS = ("<!-- gpu_kernels begin -->", "<!-- gpu_kernels end -->")
Row = dict[str, Any]
# Kernel, rows, columns → asked share of the copy rate.
OF_COPY = {(4096, 10240): 0.70, (16384, 3840): 0.70, (4096, 3840): 0.60}
# Mode → M → asked speed-up over bf16 cuBLAS.
SPEEDUPS = {
    "w4a16": {1: 2.2, 16: 2.2, 64: 1.8, 256: 0.85, 1024: 0.92, 4096: 0.93, 16384: 0.93},
    "w4a4": {4096: 0.84, 16384: 0.88},
    "w4a8 kept": {4096: 1.65, 16384: 1.65},
    "w4a8": {4096: 1.5, 16384: 1.5},
    "int8": {4096: 1.0, 16384: 1.0},
}
PEERS = {"w4a16": ("w4a16, humming", "w4a16, comfy-kitchen"), "int8": ("int8, comfy-kitchen",)}


def table(content: Row) -> str:
    """The section."""
    rows = content["rows"]
    head = (
        f"{content['machine']['name']}, torch {content['machine']['torch']}; copy {content['copy_gb_per_s']:.0f} GB/s, "
        f"bf16 product {content['bf16_tflops']:.0f} TFLOP/s in the same run. **Bold** reaches what was asked."
    )
    others = [f"Not of that one run: {told}." for label, told in content.get("runs", {}).items() if label]
    return "\n".join([head, *others, "", *kernel_lines(rows), "", *linear_lines(rows), "", *lora_lines(rows)])


def kernel_lines(rows: list[Row]) -> list[str]:
    """rotate_quantize beside the copy rate and the peer."""
    lines = [
        "| rotate 256 + quantise | µs | of the copy rate | asked | comfy-kitchen: product with H, quantise, µs | × |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    found = {(row["kernel"], row["rows"], row["cols"]): row for row in rows if row.get("group") == 256}
    for (m, k), asked in OF_COPY.items():
        row = found["rotate_quantize", m, k]
        peer = found.get(("rotate_quantize, comfy-kitchen", m, k))
        theirs = f"{peer['us']:.0f} | {peer['us'] / row['us']:.1f}" if peer else "not measured |"
        share = marked(f"{row['of_copy']:.0%}", reached=row["of_copy"] >= asked)
        lines.append(f"| {m} × {k} | {row['us']:.1f} | {share} | {asked:.0%} | {theirs} |")
    return lines


def linear_lines(rows: list[Row]) -> list[str]:
    """Speed-ups over bf16 cuBLAS on the four shapes, one cell a size and mode, and the peers' own."""
    found = {(row["linear"], row["m"], row["n"], row["k"]): row for row in rows if "linear" in row}
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows if "linear" in row))
    lines = [
        "Speed over bf16 cuBLAS on N × K = " + ", ".join(f"{n} × {k}" for n, k in shapes) + "; rotation and "
        "quantisation of x included (humming-kernels and comfy-kitchen's W4A16 do not rotate):",
        "",
        "| mode | M | ours | asked | peers |",
        "|---|---:|---|---:|---|",
    ]
    for mode, asked in SPEEDUPS.items():
        for m, wanted in asked.items():
            ours = speeds(found, mode, m, shapes)
            cells = " / ".join(marked(f"{v:.2f}", reached=v >= wanted) for v in ours)
            peers = "; ".join(
                f"{peer.rpartition(', ')[2]} " + " / ".join(f"{v:.2f}" for v in theirs) + part(theirs, shapes)
                for peer in PEERS.get(mode, ())
                if (theirs := speeds(found, peer, m, shapes))
            )
            lines.append(
                f"| {mode.upper().replace('KEPT', 'kept')} | {m} | {cells} | {wanted:.2f} | {peers} |"
            )
    return lines


def speeds(
    found: dict[tuple[str, int, int, int], Row], mode: str, m: int, shapes: list[tuple[int, int]]
) -> list[float]:
    """The speed-ups of a mode at M, by shape; those that were measured."""
    return [found[mode, m, n, k]["speedup"] for n, k in shapes if (mode, m, n, k) in found]


def part(theirs: list[float], shapes: list[tuple[int, int]]) -> str:
    """Says where a peer was not measured on all shapes."""
    return "" if len(theirs) == len(shapes) else f" (the first {len(theirs)})"


def lora_lines(rows: list[Row]) -> list[str]:
    """Bake and branch."""
    lines = ["| LoRA | measured | asked |", "|---|---|---:|"]
    for row in rows:
        if row.get("lora") == "bake":
            seconds = marked(f"{row['s']:.2f} s", reached=row["s"] <= 1.0)
            lines.append(f"| bake of rank {row['rank']} into {row['layers']} layers | {seconds} | ≤ 1.0 s |")
    added: dict[str, list[float]] = {}
    for row in rows:
        if "added" in row:
            added.setdefault(f"{row['lora']}, rank {row['rank']}, {row['m']} tokens", []).append(row["added"])
    for name, shares in added.items():
        cells = " / ".join(marked(f"{share:.0%}", reached=share <= 0.15) for share in shares)
        lines.append(f"| {name} | + {cells} | ≤ 15 % |")
    return lines


def marked(text: str, *, reached: bool) -> str:
    """Bold where what was asked is reached."""
    return f"**{text}**" if reached else text


def main() -> None:
    """Puts the section between its marks."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / "gpu_kernels_nvidia_h200.json"
    begin, end = MARKS
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    text = table(json.loads(path.read_text(encoding="utf-8")))
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
