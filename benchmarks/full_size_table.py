"""The table of `full_size.py` in README.md, from its stored JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
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
    lines += [_row(row) for row in content["rows"]]
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


def _row(row: dict[str, Any]) -> str:
    numbers = [_number(row["bf16"]), "" if row["ratio"] is None else f"{row['ratio']:.3f}"]
    met = {None: "", True: "reached", False: "**not reached**"}[row["met"]]
    cells = [
        row["section"],
        row["what"],
        f"{_number(row['value'])} {row['unit']}",
        *numbers,
        row["target"],
        met,
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
