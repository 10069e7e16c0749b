"""check: every rule applied to a file as a named finding; each layer compared with the 16-bit source."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from hswq_lab.checkpoint.anything import as_checkpoint
from hswq_lab.checkpoint.baked import baked_in_words, baked_layers
from hswq_lab.checkpoint.closeness import Closeness, closeness, dense
from hswq_lab.checkpoint.completeness import completeness
from hswq_lab.checkpoint.findings import Finding, from_error
from hswq_lab.checkpoint.layout import LayerLayout, LayoutReport, examine, judge
from hswq_lab.checkpoint.opening import open_files
from hswq_lab.checkpoint.readings import COMFY, MODELOPT, Reading
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.progress import silent
from hswq_lab.results import Result
from hswq_lab.shipped import checkpoint_path

if TYPE_CHECKING:
    import os

    from hswq_lab.checkpoint.anything import Anything
    from hswq_lab.checkpoint.checkpoint import Checkpoint
    from hswq_lab.checkpoint.findings import Severity
    from hswq_lab.checkpoint.slots import Slot, Value
    from hswq_lab.progress import Progress

LEAST_COSINE = 0.9  # the worst right reading of a real layer is above 0.98, a wrong one below 0.7
LEAST_COSINE_BAKED = (
    0.5  # of a layer with LoRAs in it: less means that they are 1.7 times as large as the weight
)


@dataclass(frozen=True)
class LayerCheck:
    """One weight beside its source, unrotated.

    Attributes:
        sqnr_db, cosine: see `Closeness`.
        gain: factor that fits it to the source best; far from 1 says that the tensor scale is wrong.
    """

    name: str
    format: str
    group: int | None
    sqnr_db: float
    cosine: float
    gain: float


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
    checker.run(progress or silent)
    findings = checker.findings + judge(LayoutReport(checker.layouts))
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    return CheckReport(str(path), told, findings, checker.layers, LayoutReport(checker.layouts))


class _Checker:
    """Goes through a file name by name; every value is read once."""

    def __init__(self, path: Path, reading: Reading | None, origin: Checkpoint | None) -> None:
        opened = open_files(path, reading)
        index = opened.index
        shared = [] if origin is None else baked_in_words(origin.metadata)
        self._loras = [lora for lora in baked_in_words(opened.metadata) if lora not in shared]
        self._baked = baked_layers(opened.metadata)
        # The doctor only looks at raw parts: it takes them from the reading that accepts the most shapes.
        raw = open_files(path, MODELOPT).index.slots
        self._slots = index.slots
        self._raw = {name: parts for name, slot in raw.items() if (parts := slot.stored_parts())}
        self._reading = reading or COMFY
        self._origin = origin
        self.findings = list(index.findings)
        self.layers: list[LayerCheck] = []
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
            self._find("info", "uncalibrated", problem, missing[0])

        if self._loras:
            self._tell_loras()

    def _tell_loras(self) -> None:
        differing = sum(self._has_loras(layer.name) and layer.sqnr_db != math.inf for layer in self.layers)
        problem = "LoRAs are baked into the weights"
        if self._origin is not None:
            problem += f", so {differing} layers differ from the source by them as well as by rounding"
        self.findings.append(Finding("info", "loras", problem, found=", ".join(self._loras)))

    def _has_loras(self, name: str) -> bool:
        """Whether LoRAs are baked into a weight; into any, where the file does not say which."""
        return bool(self._loras) and (self._baked is None or name.removesuffix(".weight") in self._baked)

    def _find(
        self,
        severity: Severity,
        rule: str,
        problem: str,
        name: str,
        found: object = None,
        expected: object = None,
    ) -> None:
        texts = [None if value is None else str(value) for value in (found, expected)]
        self.findings.append(Finding(severity, rule, problem, name, *texts))

    def _check(self, name: str) -> None:
        try:
            wanted = self._wanted(name)
            if name in self._slots:
                self._check_value(self._slots[name], self._slots[name].load(), wanted)
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

    def _wanted(self, name: str) -> Tensor | None:
        """The source's values for a weight."""
        if self._origin is None or not name.endswith(".weight"):
            return None
        if name in self._origin:
            return dense(self._origin[name])
        self._find("warning", "source", "the source does not have this layer", name)
        return None

    def _check_value(self, slot: Slot, value: Value, wanted: Tensor | None) -> None:
        entry = slot.entry
        values = dense(value)
        if values.is_floating_point() and values.numel() and not _finite(values):
            self._find("error", "not-finite", "the values hold NaN or infinity", entry.name)
        if wanted is None:
            return
        if tuple(wanted.shape) != entry.shape:
            problem = "the source has another shape"
            self._find("error", "source", problem, entry.name, list(entry.shape), list(wanted.shape))
            return
        match = closeness(values, wanted)
        self.layers.append(
            LayerCheck(entry.name, entry.format, entry.group, match.sqnr_db, match.cosine, match.gain)
        )
        if match.sqnr_db == math.inf:
            return
        if self._has_loras(entry.name):
            self._compare_with_loras(entry.name, match)
        elif not match.cosine >= LEAST_COSINE:
            problem = "the layer does not look like its source: wrong layout, wrong rotation or another model"
            found, expected = f"cosine {match.cosine:.4f}", f"at least {LEAST_COSINE}"
            self._find("error", "source", problem, entry.name, found, expected)
        elif not 0.8 < match.gain < 1.25:
            problem = "the layer has its source's direction but not its size: a scale is wrong"
            self._find("error", "source", problem, entry.name, f"source = {match.gain:.4g} × layer")

    def _compare_with_loras(self, name: str, match: Closeness) -> None:
        """The source is still in the layer, once and whole: what LoRAs add is hardly ever along it."""
        share = match.cosine**2 / match.gain if match.gain else math.nan  # ⟨layer, source⟩ / ⟨source, source⟩
        if match.cosine >= LEAST_COSINE_BAKED and 0.5 < share < 2:
            return
        problem = "the layer does not hold its source, which the LoRAs in it do not explain"
        found = f"cosine {match.cosine:.4f}, {share:.4g} × the source in it"
        self._find("error", "source", problem, name, found, f"at least {LEAST_COSINE_BAKED}, and 1 ×")


def _finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: with a NaN anywhere, smallest and largest are NaN."""
    extremes = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())
    return all(math.isfinite(float(value)) for value in extremes)
