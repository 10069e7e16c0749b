"""Findings: what a rule said about a file, as an error, a warning or a remark."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One rule's word on one tensor or on the whole file.

    Attributes:
        rule: the rule's name, e.g. "scale-dtype"; stable, for filtering.
        tensor: the tensor or layer, None for the whole file.
    """

    severity: Severity
    rule: str
    problem: str
    tensor: str | None = None
    found: str | None = None
    expected: str | None = None
    fix: str | None = None

    def error(self, file: str | os.PathLike[str] | None) -> HswqError:
        """The exception that says this finding."""
        return HswqError(
            self.problem,
            file=file,
            tensor=self.tensor,
            found=self.found,
            expected=self.expected,
            fix=self.fix,
        )


def from_error(error: HswqError, rule: str, tensor: str | None = None) -> Finding:
    """An exception of ours as a finding; `tensor` stands in where the exception names none."""
    found = None if error.found is None else str(error.found)
    expected = None if error.expected is None else str(error.expected)
    return Finding("error", rule, error.problem, error.tensor or tensor, found, expected, error.fix)


def warning_texts(findings: Iterable[Finding]) -> list[str]:
    """One sentence for each kind of warning, with the number of tensors and the first of them."""
    warnings = [finding for finding in findings if finding.severity == "warning"]
    counts = Counter(finding.problem for finding in warnings)
    first: dict[str, Finding] = {}
    for finding in warnings:
        first.setdefault(finding.problem, finding)
    texts = []
    for problem, finding in first.items():
        where = "" if finding.tensor is None else f" ({finding.tensor})"
        if counts[problem] > 1:
            where = f" ({counts[problem]} times, first: {finding.tensor})"
        found = "" if finding.found is None else f"; found: {finding.found}"
        texts.append(f"{problem}{where}{found}" + (f"; to do: {finding.fix}" if finding.fix else ""))
    return texts
