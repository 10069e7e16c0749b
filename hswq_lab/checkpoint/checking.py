"""check: every rule applied to a file as a named finding; each layer compared with the 16-bit source."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
import torch
from torch import Tensor

from hswq_lab.checkpoint.anything import as_checkpoint
from hswq_lab.checkpoint.checkpoint import Checkpoint
from hswq_lab.checkpoint.closeness import dense
from hswq_lab.checkpoint.completeness import completeness
from hswq_lab.checkpoint.findings import Finding, from_error
from hswq_lab.checkpoint.layout import LayerLayout, LayoutReport, examine, judge
from hswq_lab.checkpoint.opening import open_files
from hswq_lab.checkpoint.origin import LayerCheck, Origin
from hswq_lab.checkpoint.readings import COMFY, MODELOPT, Reading
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.progress import progress_of
from hswq_lab.results import Result
from hswq_lab.shipped import checkpoint_path

if TYPE_CHECKING:
    import os

    from hswq_lab.checkpoint.anything import Anything
    from hswq_lab.checkpoint.slots import Entry, Value
    from hswq_lab.progress import Progress


@dataclass(frozen=True)
class CheckReport(Result):
    """What the rules say about a file.

    Attributes:
        findings: errors first.
        layers: compared with the source; empty without one.
        layout: what the format doctor believes about the NVFP4 layers.
    """

    path: str
    source: str | None
    findings: list[Finding]
    layers: list[LayerCheck] = field(repr=False)
    layout: LayoutReport = field(repr=False)

    computed: ClassVar[tuple[str, ...]] = ("ok",)

    def to_frame(self) -> pd.DataFrame:
        """One row a finding."""
        columns = ["severity", "rule", "tensor", "problem", "found", "expected", "fix"]
        return pd.DataFrame([vars(finding) for finding in self.findings], columns=columns)

    @property
    def ok(self) -> bool:
        """Whether no rule is broken; warnings are no errors."""
        return not any(finding.severity == "error" for finding in self.findings)

    def __str__(self) -> str:
        """Every finding in a line, then the doctor's word and a verdict, for a console."""
        lines = [f"{finding.severity}: [{finding.rule}] {finding.error(None)}" for finding in self.findings]
        if self.layout.layers:
            lines.append(str(self.layout))
        if self.layers:
            worst = min(self.layers, key=lambda layer: layer.cosine)
            lines.append(f"{len(self.layers)} layers compared; worst {worst.name}: cosine {worst.cosine:.4f}")
        counts = Counter(finding.severity for finding in self.findings)
        return "\n".join([*lines, f"{self.path}: {counts['error']} errors, {counts['warning']} warnings"])


def check(
    path: str | os.PathLike[str],
    source: Anything | None = None,
    *,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Apply every rule to a file; a broken one is a finding, never an exception.

    Args:
        path: the file, index or folder.
        source: the 16-bit weights it was made from, to compare each layer with.
        reading: the NVFP4 layout that the file is supposed to have; see `Checkpoint.open`.
        progress: called before each name.

    Raises:
        HswqError: the source cannot be opened.
    """
    origin = None if source is None else as_checkpoint(source)
    told = None if origin is None else str(origin.path or "in memory")
    where = checkpoint_path(path)
    try:
        checker = _Checker(where, reading, origin)
    except HswqError as error:
        finding = from_error(error, "file")
        part = Path(error.file).name if error.file is not None else where.name
        if part != where.name:  # one of several: which one is the point
            finding = replace(finding, problem=f"{part}: {finding.problem}")
        return CheckReport(str(path), told, [finding], [], LayoutReport([]))
    checker.run(progress_of(progress))
    findings = checker.findings + judge(LayoutReport(checker.layouts))
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    return CheckReport(str(path), told, findings, checker.layers, LayoutReport(checker.layouts))


class _Checker:
    """Goes through a file name by name; every value is read once."""

    def __init__(self, path: Path, reading: Reading | None, origin: Checkpoint | None) -> None:
        opened = open_files(path, reading)
        index = opened.index
        # The doctor only looks at raw parts: it takes them from the reading that accepts the most shapes.
        raw = open_files(path, MODELOPT).index.slots
        self._slots = index.slots
        self._raw = {name: parts for name, slot in raw.items() if (parts := slot.stored_parts())}
        self._reading = reading or COMFY
        file = Checkpoint(self._slots, metadata=opened.metadata, naming=opened.naming, path=path)
        self._origin = Origin(origin, file)
        self.findings = list(index.findings)
        self.layouts: list[LayerLayout] = []

    def run(self, progress: Progress) -> None:
        names = list(dict.fromkeys([*self._slots, *self._raw]))
        for done, name in enumerate(names):
            progress(done, len(names), name)
            self._check(name)
        shapes = {name: slot.entry.shape for name, slot in self._slots.items()}
        self.findings += completeness(shapes)
        packed = [slot.entry for slot in self._slots.values() if slot.entry.format == "nvfp4"]
        missing = [entry.name for entry in packed if not entry.calibrated]
        if missing:
            problem = (
                f"{len(missing)} of {len(packed)} NVFP4 layers have no input_scale: they cannot run W4A4"
            )
            self.findings.append(Finding("info", "uncalibrated", problem, missing[0]))
        self.findings += self._origin.conclude()

    @property
    def layers(self) -> list[LayerCheck]:
        """What was compared with the source."""
        return self._origin.layers

    def _check(self, name: str) -> None:
        try:
            value = self._slots[name].load() if name in self._slots else None
            wanted = self._origin.wanted(name, value)
            if value is not None:
                self._check_value(self._slots[name].entry, value, wanted)
            self._examine(name, wanted)
        except Cancelled:
            raise
        except HswqError as error:
            self.findings.append(from_error(error, "values", name))

    def _examine(self, name: str, wanted: Tensor | None) -> None:
        """The doctor's look at a weight, or at each of the parts in which the file keeps its rows."""
        parts = self._raw.get(name, ())
        opened = self._slots[name].stored_parts() if name in self._slots else ()
        rows = [part.entry.shape[0] for part in parts]
        if wanted is not None and len(parts) > 1 and sum(rows) != wanted.shape[0]:
            wanted = None
        for number, part in enumerate(parts):
            if part.entry.format != "nvfp4":
                continue
            read = opened[number].reading if number < len(opened) else self._reading
            fits = wanted is not None and wanted.shape[1:] == part.entry.shape[1:]
            first = sum(rows[:number])
            source = wanted[first : first + rows[number]] if wanted is not None and fits else None
            layout = examine(name, part, read, source)
            self.layouts.append(replace(layout, part=part.entry.name if len(parts) > 1 else ""))

    def _check_value(self, entry: Entry, value: Value, wanted: Tensor | None) -> None:
        values = dense(value)
        if values.is_floating_point() and values.numel() and not _finite(values):
            problem = "the values hold NaN or infinity"
            self.findings.append(Finding("error", "not-finite", problem, entry.name))
        if wanted is not None:
            self._origin.compare(entry, value, wanted)


def _finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: with a NaN anywhere, smallest and largest are NaN."""
    extremes = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())
    return all(math.isfinite(float(value)) for value in extremes)
