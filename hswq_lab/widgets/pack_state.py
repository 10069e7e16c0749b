"""What a PackExplorer shows, without widgets: an open checkpoint, its rows filtered and sorted, one layer's detail."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hswq_lab.checkpoint import Checkpoint, CheckReport, InspectReport, check, inspect
from hswq_lab.checkpoint.anything import Anything, as_checkpoint
from hswq_lab.detail import LayerDetail, layer_detail
from hswq_lab.errors import HswqError
from hswq_lab.plots.detail import closeness_text

if TYPE_CHECKING:
    from hswq_lab.checkpoint.inspection import InspectRow
    from hswq_lab.progress import Progress

ORDERS: Final = ("file", "name", "format", "bytes", "bits a weight")


class PackState:
    """An open checkpoint.

    Attributes:
        checkpoint: None until something is opened.
        report: what is in it.
        checked: what `check` found in it; None until it was asked.
        source: 16-bit weights to compare with, if any.
    """

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None
        self.source: Checkpoint | None = None
        self.report: InspectReport | None = None
        self.checked: CheckReport | None = None

    def open(self, what: Anything, source: Anything | None, progress: Progress) -> InspectReport:
        """Opens a path, a Checkpoint or a Model, and its source; keeps the old one if that fails."""
        progress(0, 2, f"opening {what if isinstance(what, str | Path) else 'the object'}")
        checkpoint = as_checkpoint(what)
        other = None if source is None else as_checkpoint(source)
        progress(1, 2, "reading scales")
        report = inspect(checkpoint)
        progress(2, 2, "opened")
        self.checkpoint, self.source, self.report, self.checked = checkpoint, other, report, None
        return report

    def rows(self, pattern: str = "", order: str = "file", *, descending: bool = False) -> list[InspectRow]:
        """The names that match a glob (or contain the text), in an order of `ORDERS`."""
        if self.report is None:
            return []
        wanted = pattern.strip() or "*"
        if not re.search(r"[*?\[]", wanted):
            wanted = f"*{wanted}*"
        found = [row for row in self.report.rows if fnmatchcase(row.name, wanted)]
        keys = {
            "name": lambda row: _natural(row.name),
            "format": lambda row: (row.format, row.dtype),
            "bytes": lambda row: row.nbytes,
            "bits a weight": lambda row: row.bits,
        }
        if order in keys:
            return sorted(found, key=keys[order], reverse=descending)
        return found[::-1] if descending else found

    def matrices(self, rows: list[InspectRow]) -> list[str]:
        """The names among rows that have a detail."""
        return [row.name for row in rows if len(row.shape) == 2]

    def first_to_show(self, rows: list[InspectRow]) -> str | None:
        """The first packed layer among rows, which has more to show than another; else the first weight or matrix."""
        names = self.matrices(rows)
        packed = {row.name for row in rows if row.format != "16-bit"}
        weights = (name for name in names if name.endswith(".weight"))
        return next((name for name in names if name in packed), next(weights, names[0] if names else None))

    def detail(self, name: str, progress: Progress) -> LayerDetail:
        """One layer; compared with the source if there is one that has it."""
        checkpoint = self._opened()
        progress(0, 1, f"reading {name}")
        source = self.source if self.source is not None and name in self.source else None
        found = layer_detail(checkpoint, name, source)
        progress(1, 1, name)
        return found

    def closeness(self, detail: LayerDetail) -> str:
        """How close a layer is to its source, or why that is not known."""
        if self.source is not None and detail.name not in self.source:
            return "the source has no such layer"
        return closeness_text(detail)

    @property
    def opened(self) -> dict[str, str]:
        """What is open and what it is compared with, in words; empty before."""
        if self.report is None:
            return {}
        names = [row.name for row in self.report.rows]
        told = {"open": f"{self.report.path}, {len(names)} names"}
        if self.source is not None:
            found = sum(name in self.source for name in names)
            told["source"] = f"{self.source.path or 'in memory'}, has {found} of these names"
        return told

    @property
    def replaced(self) -> bool:
        """Whether the file under the path is another one than that which is open, or none."""
        return not all(source.current for source in self._opened().sources)

    def check(self, progress: Progress) -> CheckReport:
        """Every rule on the whole file.

        Raises:
            HswqError: it is no file, or another one by now.
        """
        checkpoint = self._opened()
        if checkpoint.path is None:
            raise HswqError("only a file can be checked", fix="save it first, then open the file")
        self._refuse_replaced(checkpoint.path)
        checked = check(checkpoint.path, self.source, progress=progress)
        self._refuse_replaced(checkpoint.path)
        self.checked = checked
        return checked

    def _refuse_replaced(self, path: Path) -> None:
        if self.replaced:
            raise HswqError(
                "the file was replaced, changed or removed since it was opened; what is shown is the old one",
                file=path,
                fix="press Open to read it again",
            )

    def findings_of(self, name: str) -> str:
        """What the check said of a layer's own tensors, in words."""
        if self.checked is None:
            return "not checked yet (tab “findings”)"
        layer = f"{name.removesuffix('.weight')}."
        mine = [
            f"{f.severity}: {f.problem}" + (f", found: {f.found}" if f.found else "")
            for f in self.checked.findings
            if (f.tensor or "").startswith(layer)
        ]
        return "; ".join(mine) or "none"

    def _opened(self) -> Checkpoint:
        if self.checkpoint is None:
            raise HswqError("nothing is open", fix="choose a file and press Open")
        return self.checkpoint


def _natural(name: str) -> list[str | int]:
    """A key that puts layers.2 before layers.10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
