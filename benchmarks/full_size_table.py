"""The table of `full_size.py` in README.md, from its stored JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
STEPS = (
    "One step, 4096 image and 256 caption tokens at full size; rates are of Linears and attention, and the share is "
    "of the bf16 product above."
)
HEAD = (
    "| step | ms | faster than bf16 | asked | | peak GiB | of bf16 | asked | | TFLOP/s, clock | share "
    "| over kernel time | share |"
)
MARKS = ("<!-- full_size begin -->", "<!-- full_size end -->")


def write_table(path: Path) -> None:
    """Replaces what stands between the marks."""
    content = json.loads(path.read_text(encoding="utf-8"))
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    README.write_text(f"{before}{MARKS[0]}\n{table(content)}\n{MARKS[1]}{after}", encoding="utf-8")


def table(content: dict[str, Any]) -> str:
    """Markdown: the machine, every figure, where the time goes, what failed."""
    facts = content["facts"]
    machine = facts["machine"]
    lines = [
        f"{machine['name']}, torch {machine['torch']}. `python benchmarks/full_size.py`",
        "",
        "| section | figure | value | bf16 | ratio | asked | |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    lines += [_row(row) for row in content["rows"] if row["section"] != "step"]
    lines += ["", *_steps([row for row in content["rows"] if row["section"] == "step"])]
    if facts.get("kernels"):
        lines += [
            "",
            "Where a step's time on the card goes, ms by kind of kernel, and the Linears' calls:",
            "",
        ]
        kinds = list(dict.fromkeys(kind for each in facts["kernels"].values() for kind in each["kinds"]))
        lines += [f"| step | {' | '.join(kinds)} | hits |", "|---|" + "---:|" * len(kinds) + "---|"]
        for name, each in facts["kernels"].items():
            shares = " | ".join(f"{each['kinds'].get(kind, 0):.1f}" for kind in kinds)
            hits = ", ".join(f"{count} {mode}" for mode, count in each["hits"].items())
            lines.append(f"| {name} | {shares} | {hits} |")
        lines += ["", f"Fallbacks: {facts['fallbacks'] or 'none'}."]
    lines += ["", *(f"* {note}" for note in facts.get("notes", []))]
    troubles = {**facts.get("failed", {}), **{f"peer {k}": v for k, v in facts.get("peers", {}).items()}}
    lines += [f"\nNot measured: {name}: {why}" for name, why in troubles.items()]
    return "\n".join(lines)


def _steps(rows: list[dict[str, Any]]) -> list[str]:
    """A line a way to run a step, from its rows."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        label, figure = row["what"].rsplit(": ", 1)
        found.setdefault(label, {})[figure] = row
    lines = [STEPS, "", HEAD, "|---|---:|---:|---|---|---:|---:|---|---|---:|---:|---:|---:|"]
    for label, figures in found.items():
        cells = [label]
        for figure in ("time", "peak memory"):
            row = figures.get(figure)
            cells += [""] * 4 if row is None else [_number(row["value"]), *_verdict(row)]
        for figure in ("rate on the clock", "rate over kernel time"):
            row = figures.get(figure)
            cells += [""] * 2 if row is None else [_number(row["value"]), f"{row['ratio']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _verdict(row: dict[str, Any]) -> list[str]:
    met = {None: "", True: "reached", False: "**not reached**"}[row["met"]]
    return ["" if row["ratio"] is None else f"{row['ratio']:.3f}", row["target"], met]


def _row(row: dict[str, Any]) -> str:
    value = f"{_number(row['value'])} {row['unit']}".strip()
    return f"| {' | '.join([row['section'], row['what'], value, _number(row['bf16']), *_verdict(row)])} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
