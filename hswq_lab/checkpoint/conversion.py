"""convert: files of other producers into our layout, and ours into one that a stock ComfyUI understands."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import pandas as pd
from torch import Tensor

from hswq_lab import packing
from hswq_lab.checkpoint.anything import as_checkpoint
from hswq_lab.checkpoint.checking import check
from hswq_lab.checkpoint.checkpoint import Checkpoint
from hswq_lab.checkpoint.closeness import closeness, dense
from hswq_lab.checkpoint.readings import PRODUCERS
from hswq_lab.checkpoint.writer import write
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight
from hswq_lab.results import Result

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from hswq_lab.checkpoint.anything import Anything
    from hswq_lab.checkpoint.checking import CheckReport
    from hswq_lab.checkpoint.readings import Reading
    from hswq_lab.checkpoint.slots import Value
    from hswq_lab.formats import Method, PackedWeight
    from hswq_lab.progress import Progress

Target = Literal["hswq", "comfy"]
Action = Literal["kept", "unrotated", "basis corrected"]
CONVERT_KEY = "hswq.convert"


@dataclass(frozen=True)
class ConvertRow:
    """What became of one packed layer.

    Attributes:
        action: "kept", "unrotated" (packed again in the plain basis), or "basis corrected" (the same bytes
            under a marker that names the basis that they are in, as the source proves).
        sqnr_db: of the new weight against the old one; infinite where it was kept.
        cosine: of both.
        source_before_db: SQNR of the old weight against the 16-bit source; None without a source.
        source_after_db: SQNR of the new one.
        lost: what the layer had and has no more, e.g. its input_scale.
    """

    layer: str
    action: Action
    sqnr_db: float
    cosine: float
    source_before_db: float | None = None
    source_after_db: float | None = None
    lost: str = ""


@dataclass(frozen=True)
class ConvertReport(Result):
    """A conversion, and what it cost.

    Attributes:
        path: the new file (or index).
        read_as: how the NVFP4 layers of the old file were read.
    """

    path: str
    to: str
    read_as: str
    rows: list[ConvertRow] = field(repr=False)
    warnings: list[str] = field(default_factory=list)

    def to_frame(self) -> pd.DataFrame:
        """One row a packed layer."""
        columns = list(ConvertRow.__dataclass_fields__)
        return pd.DataFrame([vars(row) for row in self.rows], columns=columns)

    def __str__(self) -> str:
        """A summary for a console."""
        counts = Counter(row.action for row in self.rows)
        told = ", ".join(f"{count} layers {action}" for action, count in counts.most_common())
        lines = [f"{self.path}: {told or 'no packed layers'}; read as: {self.read_as}"]
        changed = [row for row in self.rows if row.action == "unrotated"]
        if changed:
            worst = min(changed, key=lambda row: row.sqnr_db)
            mean = sum(row.sqnr_db for row in changed) / len(changed)
            lines.append(
                f"SQNR to the old weights: mean {mean:.2f} dB, worst {worst.sqnr_db:.2f} dB ({worst.layer})"
            )
        known = [
            row for row in changed if row.source_before_db is not None and row.source_after_db is not None
        ]
        if known:
            before, after = (
                sum(values) / len(known)
                for values in zip(
                    *((row.source_before_db, row.source_after_db) for row in known), strict=True
                )
            )
            lines.append(f"SQNR to the source: mean {before:.2f} dB before, {after:.2f} dB now")
        lost = sum(bool(row.lost) for row in self.rows)
        if lost:
            lines.append(
                f"{lost} layers lost their input_scale: it belongs to rotated activations; calibrate again"
            )
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Target = "hswq",
    producer: str | None = None,
    source: Anything | None = None,
    scales: Method = "sweep",
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write a checkpoint in another layout, layer by layer.

    Args:
        path: a file, index or folder: of ComfyUI, ModelOpt or compressed-tensors, or a diffusers folder.
        out: the new file.
        to: "hswq" keeps every layer as it is packed (nibbles, scales and names in our layout); "comfy" also
            packs rotated NVFP4 layers again without rotation, because a stock ComfyUI ignores `convrot` on
            NVFP4 and makes noise. That costs a second rounding, unless there is a source.
        producer: a key of `PRODUCERS`, where the file does not tell.
        source: the 16-bit weights: they decide how the file is read, and unrotated layers are packed from
            them.
        scales: block scales of layers that are packed again.
        max_shard_bytes: see `write`.
        progress: called before each name.

    Raises:
        HswqError: unknown options, a layout that can be neither known nor found out, or whatever
            `Checkpoint.open` and `write` raise.
    """
    if to not in get_args(Target):
        raise HswqError("unknown layout to convert to", found=to, expected=", ".join(get_args(Target)))
    if producer is not None and producer not in PRODUCERS:
        raise HswqError("unknown producer", found=producer, expected=", ".join(PRODUCERS))
    origin = None if source is None else as_checkpoint(source)
    reading = None if producer is None else PRODUCERS[producer]
    bases: dict[str, int | None] = {}
    if producer is None or origin is not None:
        layout = check(path, origin, reading=reading)
        reading = reading or _believed(layout)
        bases = layout.layout.bases()
    checkpoint = Checkpoint.open(path, reading=reading)
    rows: list[ConvertRow] = []
    items = _items(checkpoint, _Choices(origin, to, scales, bases), rows)
    told = {"to": to, "read_as": str(reading or "as marked")}
    metadata = checkpoint.metadata | {CONVERT_KEY: json.dumps(told)}
    written = write(
        path=out,
        items=items,
        metadata=metadata,
        progress=progress,
        source=checkpoint,
        max_shard_bytes=max_shard_bytes,
    )
    return ConvertReport(str(written), to, told["read_as"], rows, list(checkpoint.warnings))


def _believed(report: CheckReport) -> Reading | None:
    """The reading that the doctor believes, None where the file's own word is good.

    Raises:
        HswqError: the file contradicts how it would be read, or does not say it, and a part of its layout is unknown.
    """
    doubts = [
        finding
        for finding in report.findings
        if finding.rule in ("layout", "no-producer") and finding.severity != "info"
    ]
    if not doubts:
        return None
    if report.layout.reading is not None:
        return report.layout.reading
    raise HswqError(
        "the layout of this file is not the expected one, or not stated, and cannot be told completely",
        file=report.path,
        found=str(report.layout).replace("\n", ", "),
        expected="a 16-bit source to compare with, or the producer",
        fix=f"give the source, or one of the producers {', '.join(PRODUCERS)}",
    )


@dataclass(frozen=True)
class _Choices:
    """What `convert` was asked for, and the bases that the source proved."""

    origin: Checkpoint | None
    to: Target
    scales: Method
    bases: dict[str, int | None]


def _items(checkpoint: Checkpoint, choices: _Choices, rows: list[ConvertRow]) -> Iterator[tuple[str, Value]]:
    """The names with their new values; a row is added for each packed one."""
    for name in checkpoint:
        old = checkpoint[name]
        if isinstance(old, Tensor):
            yield name, old
            continue
        action: Action = "kept"
        if isinstance(old, Nvfp4Weight) and choices.bases.get(name, old.group) != old.group:
            old, action = replace(old, group=choices.bases[name]), "basis corrected"
        new, row = _converted(name, old, action, choices)
        rows.append(row)
        yield name, new


def _converted(
    name: str, old: PackedWeight, action: Action, choices: _Choices
) -> tuple[PackedWeight, ConvertRow]:
    origin = choices.origin
    wanted = dense(origin[name]) if origin is not None and name in origin else None
    if choices.to == "comfy" and isinstance(old, Nvfp4Weight) and old.group is not None:
        values = dense(old)
        new = packing.pack_weight(
            values if wanted is None else wanted, "nvfp4", None, choices.scales, name=name
        )
        match = closeness(dense(new), values)
        left = {"input_scale": old.input_scale, "input_basis": old.basis}
        lost = ", ".join(name for name, value in left.items() if value is not None)
        row = ConvertRow(name, "unrotated", match.sqnr_db, match.cosine, lost=lost)
    else:
        new, row = old, ConvertRow(name, action, math.inf, 1.0)
    if wanted is not None:
        before, after = (closeness(dense(value), wanted).sqnr_db for value in (old, new))
        row = replace(row, source_before_db=before, source_after_db=after)
    return new, row
