"""Entries matched against a model's layers: each gets a target, or a status and a reason why it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hswq_lab.errors import HswqError
from hswq_lab.models.foreign import model_of_width

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from hswq_lab.lora.entries import Entry
    from hswq_lab.lora.targets import Target, TargetIndex


_LOST = ("unmatched", "not readable")


class Match(NamedTuple):
    """An entry and where it belongs: a target, or a status and a reason why there is none."""

    entry: Entry
    target: Target | None
    status: str = "matched"
    why_not: str = ""


@dataclass(frozen=True)
class Coverage:
    """How much of a LoRA file a model has layers for; what is for a text encoder does not count.

    Attributes:
        lora: the file's name.
        modules: of the file.
        left_out: the names, as the file spells them, of those that match no layer.
    """

    lora: str
    modules: int
    left_out: tuple[str, ...]

    @property
    def in_words(self) -> str:
        """As in "1 of 70 modules"; empty where none is left out."""
        return f"{self.modules - len(self.left_out)} of {self.modules} modules" if self.left_out else ""

    @property
    def warning(self) -> str:
        """A sentence with the first names; empty where none is left out."""
        if not self.left_out:
            return ""
        more = ", …" if len(self.left_out) > 3 else ""
        names = ", ".join(self.left_out[:3]) + more
        match = "matches" if len(self.left_out) == 1 else "match"
        return f"{self.lora}: {self.in_words} applied; {len(self.left_out)} {match} no layer: {names}"


def coverage_of(lora: str, matches: Sequence[Match]) -> Coverage:
    """What was matched and what was not."""
    lost = tuple(match.entry.module for match in matches if match.status in _LOST)
    return Coverage(lora, len(lost) + sum(match.target is not None for match in matches), lost)


def match_entries(entries: Iterable[Entry], index: TargetIndex) -> list[Match]:
    """Each entry with its target or the reason why it has none; raises nothing."""
    return _without_conflicts([_match(entry, index) for entry in entries])


def refuse_mismatches(
    matches: Sequence[Match], index: TargetIndex, file: str | os.PathLike[str], *, allow_unmatched: bool
) -> None:
    """Raises for the worst problem among the matches.

    Raises:
        HswqError: a conflict or a wrong shape, an unmatched entry unless allowed, or nothing matched at all.
    """
    for status in ("conflict", "wrong shape"):
        bad = [match for match in matches if match.status == status]
        if bad:
            raise HswqError(
                f"{status}: {bad[0].why_not}"
                + (f" (and {len(bad) - 1} more such modules)" if len(bad) > 1 else ""),
                file=file,
                tensor=next(iter(bad[0].entry.keys.values())),
                found=list(bad[0].entry.shape or ()),
                fix="use a LoRA that was made for this model",
            )
    lost = [match.entry for match in matches if match.status in _LOST]
    applied = any(match.target is not None for match in matches)
    if applied and (allow_unmatched or not lost):
        return
    names = [f"{entry.module} (nearest layer: {index.nearest(entry.module)})" for entry in lost[:5]]
    problem = f"{len(lost)} of {len(matches)} modules of this LoRA match no layer of the model"
    raise HswqError(
        problem if lost else "this LoRA is for a text encoder only, which the checkpoint does not hold",
        file=file,
        tensor=next(iter(lost[0].keys.values())) if lost else None,
        found=", ".join(names) + (", …" if len(lost) > 5 else "") if names else None,
        expected="names of the model's Linears",
        fix="use allow_unmatched=True (--allow-unmatched on the command line) to leave them out"
        if applied
        else "use a LoRA that was made for this model",
    )


def unplaced(entry: Entry) -> Match:
    """An entry before a model's layers are known."""
    status = {"text encoder": "text encoder", "unknown": "not readable"}.get(entry.kind, "read")
    return Match(entry, None, status, entry.why_not)


def _match(entry: Entry, index: TargetIndex) -> Match:
    read = unplaced(entry)
    if read.status != "read":
        return read
    target = index.find(entry.module)
    if target is None:
        return Match(entry, None, "unmatched", "the model has no such Linear")
    n, k = entry.shape or (0, None)
    rows = target.stop - target.start
    if n != rows or k not in (None, target.k):
        why = f"{target.layer} takes [{rows}, {target.k}], the file has [{n}, {k if k is not None else '—'}]"
        if k not in (None, target.k) and k is not None and n * target.k == rows * k:
            why += f"; this LoRA looks made for {model_of_width(k)}"
        return Match(entry, None, "wrong shape", why)
    return Match(entry, target)


def _without_conflicts(matches: list[Match]) -> list[Match]:
    """Marks entries whose rows another entry of the file has claimed (fused and split, or two spellings)."""
    taken: dict[str, list[tuple[Target, Entry]]] = {}
    checked = []
    for match in matches:
        target = match.target
        if target is not None:
            others = taken.setdefault(target.layer, [])
            clash = next((e for t, e in others if t.start < target.stop and target.start < t.stop), None)
            others.append((target, match.entry))
            if clash is not None:
                why = f"{match.entry.module} and {clash.module} both change {target.layer}"
                checked.append(Match(match.entry, None, "conflict", why))
                continue
        checked.append(match)
    return checked
