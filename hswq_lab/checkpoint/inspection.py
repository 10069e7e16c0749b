"""What is in a checkpoint: a row for each name, from headers and scales, never from whole weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd
import torch

from hswq_lab.checkpoint.anything import as_checkpoint
from hswq_lab.checkpoint.baked import baked_in_words
from hswq_lab.formats import unswizzle
from hswq_lab.formats._rows import ceil_to
from hswq_lab.results import Result

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.checkpoint.anything import Anything
    from hswq_lab.checkpoint.slots import Entry, Slot


@dataclass(frozen=True)
class ScaleStatistics:
    """The scales of one packed weight.

    Attributes:
        tensor: the tensor scale; None where the format has none.
        smallest, median, largest: of the block or row scales that are not 0; None where there are none.
        zero_share: share of blocks whose scale is 0.
        saturated_share: share of blocks at the largest scale of the format (448 for NVFP4).
        input_scale: of the activations, None before calibration.
    """

    tensor: float | None = None
    smallest: float | None = None
    median: float | None = None
    largest: float | None = None
    zero_share: float | None = None
    saturated_share: float | None = None
    input_scale: float | None = None


@dataclass(frozen=True)
class InspectRow:
    """One name of a checkpoint; the attributes are those of `Entry`.

    Attributes:
        bits: on disk for each logical value.
    """

    name: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    group: int | None
    calibrated: bool
    nbytes: int
    bits: float
    scales: ScaleStatistics | None = None
    rank: int = 0
    activation_scales: str = "rtn"


@dataclass(frozen=True)
class InspectReport(Result):
    """A checkpoint's contents.

    Attributes:
        path: of the file, "in memory" for one without.
        prefix: in front of the names in the file.
        matched: layers that the header's quantisation metadata names; `unmatched` its names that fit no
            layer.
        metadata: the header's.
        loras: those that the metadata say are baked into the weights.
    """

    path: str
    prefix: str
    matched: int
    unmatched: list[str]
    warnings: list[str]
    metadata: dict[str, str] = field(repr=False)
    rows: list[InspectRow] = field(repr=False)
    loras: list[str] = field(default_factory=list)

    def to_frame(self) -> pd.DataFrame:
        """One row a name; scale statistics in columns of their own."""
        return pd.DataFrame([_flat(row) for row in self.rows])

    def bytes_by_format(self) -> dict[str, int]:
        """Bytes on disk by format, the largest first."""
        total: Counter[str] = Counter()
        for row in self.rows:
            total[row.format if row.format != "16-bit" else row.dtype] += row.nbytes
        return dict(total.most_common())

    @property
    def bits_per_weight(self) -> float:
        """Mean over the matrices named `….weight`, scales included; NaN without any."""
        rows = [row for row in self.rows if row.name.endswith(".weight") and len(row.shape) == 2]
        weights = sum(row.shape[0] * row.shape[1] for row in rows)
        return 8 * sum(row.nbytes for row in rows) / weights if weights else float("nan")

    def __str__(self) -> str:
        """A summary for a console."""
        kinds = Counter(_kind(row) for row in self.rows if row.scales is not None)
        lines = [f"{self.path}: {len(self.rows)} names, prefix {self.prefix or 'none'!r}"]
        lines += [f"  {count:4d} layers {kind}" for kind, count in sorted(kinds.items())]
        lines.append(f"  {len(self.rows) - sum(kinds.values()):4d} tensors not packed")
        lines += [f"  {size / 1e6:12.3f} MB {name}" for name, size in self.bytes_by_format().items()]
        lines.append(f"  {self.bits_per_weight:.3f} bits a weight over all matrices")
        lines += [f"  LoRA {text}, baked into the weights" for text in self.loras]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])


def inspect(checkpoint: Anything) -> InspectReport:
    """Look into a checkpoint: headers, markers and scales are read, codes and 16-bit tensors are not.

    Args:
        checkpoint: a Checkpoint, a Model, or a path.

    Raises:
        HswqError: the file cannot be opened; see `Checkpoint.open`.
    """
    checkpoint = as_checkpoint(checkpoint)
    return InspectReport(
        path=str(checkpoint.path or "in memory"),
        prefix=checkpoint.prefix,
        matched=checkpoint.index.matched,
        unmatched=list(checkpoint.index.unmatched),
        warnings=list(checkpoint.warnings),
        metadata=dict(checkpoint.metadata),
        rows=[_row(slot) for slot in checkpoint.slots()],
        loras=baked_in_words(checkpoint.metadata),
    )


def _kind(row: InspectRow) -> str:
    words = [row.format, "not rotated" if row.group is None else f"rotated by {row.group}"]
    words += ["calibrated"] if row.calibrated else []
    words += [f"input basis of rank {row.rank}"] if row.rank else []
    words += [] if row.activation_scales == "rtn" else [f"activations by {row.activation_scales}"]
    return ", ".join(words)


def _row(slot: Slot) -> InspectRow:
    entry = slot.entry
    values = torch.Size(entry.shape).numel()
    return InspectRow(
        name=entry.name,
        format=entry.format,
        dtype=str(entry.dtype).removeprefix("torch."),
        shape=entry.shape,
        group=entry.group,
        calibrated=entry.calibrated,
        nbytes=entry.nbytes,
        bits=8 * entry.nbytes / values if values else 0.0,
        scales=_statistics(entry, slot.scales()) if entry.packed else None,
        rank=entry.rank,
        activation_scales=entry.activation_scales,
    )


def _statistics(entry: Entry, scales: dict[str, Tensor]) -> ScaleStatistics:
    found = scales.get("weight_scale")
    tensor, inputs = scales.get("weight_scale_2"), scales.get("input_scale")
    one = found is not None and found.numel() == 1
    fixed = ScaleStatistics(
        tensor=float(tensor) if tensor is not None else float(found) if one and found is not None else None,
        input_scale=None if inputs is None else float(inputs),
    )
    if found is None or one:
        return fixed
    values = _block_values(entry, found)
    used = values[values > 0]
    return ScaleStatistics(
        tensor=fixed.tensor,
        smallest=float(used.min()) if used.numel() else None,
        median=float(used.median()) if used.numel() else None,
        largest=float(used.max()) if used.numel() else None,
        zero_share=float((values == 0).double().mean()),
        saturated_share=float((values == 448).double().mean()) if entry.format == "nvfp4" else None,
        input_scale=fixed.input_scale,
    )


def _block_values(entry: Entry, stored: Tensor) -> Tensor:
    """Scales as fp32, without the padding of swizzled ones."""
    block = {"nvfp4": 16, "mxfp8": 32}.get(entry.format)
    if block is None:
        return stored.float().reshape(-1)
    return unswizzle(stored, entry.shape[0], ceil_to(entry.shape[1], block) // block).float()


def _flat(row: InspectRow) -> dict[str, object]:
    flat: dict[str, object] = {key: value for key, value in vars(row).items() if key != "scales"}
    flat["shape"] = "×".join(map(str, row.shape))
    return flat | {f"scale_{key}": value for key, value in vars(row.scales or ScaleStatistics()).items()}
