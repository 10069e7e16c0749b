"""diff: what differs between two checkpoints, name by name, in values and in bytes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import pandas as pd
import torch
from torch import Tensor

from hswq_lab.checkpoint.anything import as_checkpoint
from hswq_lab.checkpoint.closeness import closeness, dense
from hswq_lab.checkpoint.raw import raw_bytes
from hswq_lab.formats import Nvfp4Weight, PackedWeight, unpack_nibbles
from hswq_lab.progress import progress_of
from hswq_lab.results import Result

if TYPE_CHECKING:
    from hswq_lab.checkpoint.anything import Anything
    from hswq_lab.checkpoint.slots import Entry, Value
    from hswq_lab.progress import Progress

Status = Literal["same", "changed", "other format", "other shape", "only in a", "only in b"]


_NEGATIVE_ZERO = 8  # E2M1's


@dataclass(frozen=True)
class DiffRow:
    """One name of two checkpoints.

    Attributes:
        format_a, format_b: with the rotation group, e.g. "nvfp4/256"; None where the name is missing.
        bytes_a, bytes_b: on disk.
        sqnr_db: of b against a, in the unrotated basis; infinite where the values are equal; None if not
            comparable.
        cosine: of b and a.
        changed_codes: number of codes that differ, where format, rotation and shape are the same; the sign
            of a zero does not count.
        codes: number of codes in all.
    """

    name: str
    status: Status
    format_a: str | None
    format_b: str | None
    bytes_a: int
    bytes_b: int
    sqnr_db: float | None = None
    cosine: float | None = None
    changed_codes: int | None = None
    codes: int | None = None


@dataclass(frozen=True)
class DiffReport(Result):
    """Two checkpoints beside each other.

    Attributes:
        metadata: header entries that differ: key → (value in a, value in b), None where it is missing.
    """

    a: str
    b: str
    rows: list[DiffRow] = field(repr=False)
    metadata: dict[str, tuple[str | None, str | None]] = field(repr=False)

    computed: ClassVar[tuple[str, ...]] = ("same",)

    def to_frame(self) -> pd.DataFrame:
        """One row a name."""
        return pd.DataFrame([vars(row) for row in self.rows])

    @property
    def same(self) -> bool:
        """Whether every value is the same, bit for bit; metadata aside."""
        return all(row.status == "same" for row in self.rows)

    def __str__(self) -> str:
        """A summary for a console, with the name whose values are furthest apart."""
        counts = Counter(row.status for row in self.rows)
        told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        sizes = (sum(row.bytes_a for row in self.rows), sum(row.bytes_b for row in self.rows))
        text = f"{self.a} ({sizes[0] / 1e6:.3f} MB) and {self.b} ({sizes[1] / 1e6:.3f} MB): {told}"
        apart = {row.name: row.sqnr_db for row in self.rows if row.sqnr_db not in (None, math.inf)}
        if apart:
            name = min(apart, key=apart.__getitem__)
            text += f"; furthest apart: {name}, {apart[name]:.1f} dB"
        return text


def diff(a: Anything, b: Anything, progress: Progress | None = None) -> DiffReport:
    """Compare two checkpoints name by name; one pair of values is in memory at a time.

    Args:
        a: a Checkpoint, a Model, or a path.
        b: the other one.
        progress: called before each name.

    Raises:
        HswqError: a file cannot be opened, or a value breaks a rule of its format.
    """
    one, other = as_checkpoint(a), as_checkpoint(b)
    names = list(dict.fromkeys([*one, *other]))
    rows = []
    for done, name in enumerate(names):
        progress_of(progress)(done, len(names), name)
        if name not in one or name not in other:
            rows.append(
                _alone(
                    name,
                    one.entry(name) if name in one else None,
                    other.entry(name) if name in other else None,
                )
            )
        else:
            rows.append(_pair(one.entry(name), other.entry(name), one[name], other[name]))
    keys = sorted(one.metadata.keys() | other.metadata.keys())
    metadata = {
        key: (one.metadata.get(key), other.metadata.get(key))
        for key in keys
        if one.metadata.get(key) != other.metadata.get(key)
    }
    return DiffReport(str(one.path or "in memory"), str(other.path or "in memory"), rows, metadata)


def _alone(name: str, a: Entry | None, b: Entry | None) -> DiffRow:
    return DiffRow(
        name,
        "only in a" if b is None else "only in b",
        None if a is None else _format(a),
        None if b is None else _format(b),
        0 if a is None else a.nbytes,
        0 if b is None else b.nbytes,
    )


def _format(entry: Entry) -> str:
    if not entry.packed:
        return str(entry.dtype).removeprefix("torch.")
    return entry.format if entry.group is None else f"{entry.format}/{entry.group}"


def _pair(entry_a: Entry, entry_b: Entry, a: Value, b: Value) -> DiffRow:
    comparable = entry_a.shape == entry_b.shape
    alike = comparable and _format(entry_a) == _format(entry_b)
    if alike and _same(a, b):
        status: Status = "same"
    elif not comparable:
        status = "other shape"
    else:
        status = "changed" if alike else "other format"
    measured = closeness(dense(b), dense(a)) if comparable else None
    codes = _codes(a), _codes(b)
    return DiffRow(
        entry_a.name,
        status,
        _format(entry_a),
        _format(entry_b),
        entry_a.nbytes,
        entry_b.nbytes,
        measured.sqnr_db if measured else None,
        measured.cosine if measured else None,
        int((codes[0] != codes[1]).sum()) if alike else None,
        codes[0].numel() if alike else None,
    )


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, PackedWeight) and isinstance(b, PackedWeight):
        return a.same_bits(b)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and raw_bytes(a) == raw_bytes(b)


def _codes(value: Value) -> Tensor:
    """What counts as codes: the logical ones of a packed weight, the bit patterns of a tensor."""
    if isinstance(value, Nvfp4Weight):
        codes = unpack_nibbles(value.codes)[: value.shape[0], : value.shape[1]]
        return torch.where(codes == _NEGATIVE_ZERO, 0, codes)
    stored = value.disk_tensors()["weight"] if isinstance(value, PackedWeight) else value
    stored = stored[: value.shape[0], : value.shape[1]] if isinstance(value, PackedWeight) else stored
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[stored.dtype.itemsize]
    codes = stored.contiguous().view(bits)
    return torch.where(codes << 1 == 0, 0, codes) if stored.is_floating_point() else codes
