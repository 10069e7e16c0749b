"""LoraReport: what is in a LoRA file, module by module, and where each goes or why not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pandas as pd

from hswq_lab.results import Result


@dataclass(frozen=True)
class LoraRow:
    """One module of the file.

    Attributes:
        module: its name as the file spells it; `keys` are the file's keys that make it up.
        layer: the model's layer, None if it goes nowhere.
        rows: the layer's rows that it touches, "0:256".
        kind: LoRA, LoKr, LoHa, full delta, …; "DoRA of …" with a magnitude.
        rank: of a factored delta.
        scale: effective factor at strength 1; `rule` says where it comes from, `alternative` what some tools
            would use.
        norm: ‖ΔW‖ at strength 1; None where it depends on a weight that was not given.
        status: "matched", "unmatched", "wrong shape", "conflict", "text encoder" or "not readable"; "read"
            where no model was given.
        why_not: empty for "matched".
        nearest: for "unmatched": the layer with the most similar name.
    """

    module: str
    keys: tuple[str, ...]
    kind: str
    status: str
    layer: str | None = None
    rows: str = ""
    rank: int | None = None
    scale: float | None = None
    rule: str = ""
    alternative: float | None = None
    norm: float | None = None
    why_not: str = ""
    nearest: str = ""


@dataclass(frozen=True, repr=False)
class LoraReport(Result):
    """A LoRA file against a model's layers."""

    lora: str
    path: str
    sha256: str
    rows: list[LoraRow]
    warnings: list[str] = field(default_factory=list)

    def to_frame(self) -> pd.DataFrame:
        """One row a module; keys joined by spaces."""
        return pd.DataFrame([{**vars(row), "keys": " ".join(row.keys)} for row in self.rows])

    @property
    def unmatched(self) -> list[LoraRow]:
        """The modules that go nowhere although they should."""
        return [row for row in self.rows if row.status not in ("matched", "text encoder", "read")]

    @property
    def layers(self) -> list[str]:
        """The layers that the file touches, in the file's order."""
        return list(dict.fromkeys(row.layer for row in self.rows if row.layer and row.status == "matched"))

    def __repr__(self) -> str:
        """A summary for a console."""
        kinds = Counter((row.kind, row.status) for row in self.rows)
        where = f" on {len(self.layers)} layers" if self.layers else ""
        lines = [f"{self.lora}: {len(self.rows)} modules{where}"]
        lines += [f"  {count:4d} × {kind}: {status}" for (kind, status), count in sorted(kinds.items())]
        for row in self.unmatched[:10]:
            hint = f" (nearest layer: {row.nearest})" if row.nearest else ""
            lines.append(f"  {row.module}: {row.status}: {row.why_not}{hint}")
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])
