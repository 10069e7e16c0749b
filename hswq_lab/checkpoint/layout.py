"""The format doctor: which NVFP4 layout a file really has, told from its 16-bit source, else from statistics.

With a source every reading is tried and the one whose values match is believed. Without one:
* shapes tell where padding makes them differ;
* real weights have rows and columns of different size, so log block scales in the right order are explained by
  row and column means far better than in a wrong order (on Gaussian weights without such structure neither is:
  undetermined);
* a global scale times 2688 is the largest weight: below 0.05 it can only be a multiplier, above 20 only a
  divisor;
* the nibble order cannot be told: swapping neighbours changes no statistic of scales or rows.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

import pandas as pd
import torch

from hswq_lab.checkpoint.closeness import closeness
from hswq_lab.checkpoint.findings import Finding
from hswq_lab.checkpoint.readings import PRODUCERS, Reading
from hswq_lab.checkpoint.slots import block_scales, scalar
from hswq_lab.formats import decode_e2m1, group_for, rotate_fp32, unpack_nibbles, unswizzle
from hswq_lab.results import Result

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.checkpoint.findings import Severity
    from hswq_lab.checkpoint.slots import PackedSlot

TILE = 128  # rows of one swizzled tile: the first ones of a layer can be read alone, whatever the order
STATISTICS_ROWS = 1024
UNDETERMINED = "undetermined"


@dataclass(frozen=True)
class LayerLayout:
    """What is believed about one layer.

    Attributes:
        even: nibble of the even column: "high", "low" or "undetermined".
        scales: order of the block scales: "swizzled", "linear" or "undetermined".
        factor: sense of the global scale: "multiplier", "divisor" or "undetermined".
        group: rotation of the stored values, "undetermined" without a source.
        read: how the file is read, without the doctor.
        marked: rotation that the marker gives.
        how: what it rests on: "source", "shape", "statistics" or "nothing".
        cosine: of the best reading and the source, over the layer's first rows; None without a source.
        runner_up: the best cosine of a reading that differs.
        part: the file's own name where it keeps q, k and v apart, so that a layer has several rows here.
    """

    layer: str
    even: str
    scales: str
    factor: str
    group: int | str | None
    read: Reading
    marked: int | None
    how: str
    cosine: float | None = None
    runner_up: float | None = None
    part: str = ""


@dataclass(frozen=True)
class LayoutReport(Result):
    """The layout of a file's NVFP4 layers."""

    layers: list[LayerLayout] = field(repr=False)

    def to_frame(self) -> pd.DataFrame:
        """One row a layer."""
        return pd.DataFrame([vars(layer) | {"read": str(layer.read)} for layer in self.layers])

    def believed(self, what: Literal["even", "scales", "factor"]) -> tuple[str, float]:
        """The answer of most layers that have one, and the share of them that agree (0 if none has one)."""
        answers = Counter(getattr(layer, what) for layer in self.layers)
        answers.pop(UNDETERMINED, None)
        if not answers:
            return UNDETERMINED, 0.0
        answer, count = answers.most_common(1)[0]
        return answer, count / answers.total()

    @property
    def reading(self) -> Reading | None:
        """The layout of the whole file, None where a part of it is undetermined."""
        known = {what: self.believed(what)[0] for what in ("even", "scales", "factor")}
        return None if UNDETERMINED in known.values() else Reading(**known)  # type: ignore[arg-type]

    def bases(self) -> dict[str, int | None]:
        """Layer → rotation group, where every part of it tells the same one."""
        told: dict[str, set[int | str | None]] = {}
        for layer in self.layers:
            told.setdefault(layer.layer, set()).add(layer.group)
        groups = {name: found.pop() for name, found in told.items() if len(found) == 1}
        return {name: group for name, group in groups.items() if isinstance(group, int | None)}

    def __str__(self) -> str:
        """What is believed, and how sure it is, for a console."""
        if not self.layers:
            return "no NVFP4 layers"
        words = {"even": "even column in the nibble", "scales": "block scales", "factor": "global scale"}
        lines = []
        for what, label in words.items():
            answer, share = self.believed(what)  # type: ignore[arg-type]
            basis = Counter(layer.how for layer in self.layers if getattr(layer, what) == answer).most_common(
                1
            )
            sure = (
                "" if answer == UNDETERMINED else f" ({share:.0%} of the layers that tell, by {basis[0][0]})"
            )
            lines.append(f"{label}: {answer}{sure}")
        producer = next((name for name, reading in PRODUCERS.items() if reading == self.reading), None)
        return "\n".join(lines + ([f"the layout of {producer}"] if producer else []))


def examine(layer: str, slot: PackedSlot, read: Reading, source: Tensor | None = None) -> LayerLayout:
    """Find the layout of one NVFP4 layer; `TILE` rows of codes and `STATISTICS_ROWS` of scales are read.

    Args:
        layer: its name, for the result.
        slot: its stored parts.
        read: how the file is read, to compare with.
        source: its 16-bit weight [N, K] (or the first rows of it), unrotated; AWQ's factors are in it.
    """
    statistics = _by_statistics(layer, slot, read)
    return statistics if source is None else _by_source(statistics, slot, source)


def _by_source(known: LayerLayout, slot: PackedSlot, source: Tensor) -> LayerLayout:
    k = slot.entry.shape[1]
    rows = min(TILE, source.shape[0], slot.parts["weight"].shape[0])
    groups = dict.fromkeys([None, slot.entry.group, group_for(k)])
    wanted = source[:rows].float()
    if slot.channels is not None:
        wanted = wanted / slot.channels.read().float().reshape(1, -1)
    targets = {group: rotate_fp32(wanted, group) for group in groups}
    codes = slot.parts["weight"].read_rows(rows)
    found: dict[tuple[str, str, int | None], tuple[float, float]] = {}
    for even, order in product(("high", "low"), _possible_orders(slot)):
        values = _unscaled(codes, slot, even, order)[:, :k]
        for group, target in targets.items():
            match = closeness(values, target)
            found[even, order, group] = (match.cosine if math.isfinite(match.cosine) else 0.0, match.gain)
    best = max(found, key=lambda key: found[key][0])
    cosine, gain = found[best]
    if cosine < 0.9:
        return replace(known, cosine=cosine)

    def told(axis: int) -> bool:
        """Whether the source tells this part of the layout: no other choice comes near."""
        rivals = [found[key][0] for key in found if key[axis] != best[axis]]
        return all(1 - rival > 1.5 * (1 - cosine) for rival in rivals)

    stored = float(scalar(slot.parts["weight_scale_2"]))
    ratios = {"multiplier": gain / stored, "divisor": gain * stored} if stored > 0 else {}
    fitting = [factor for factor, ratio in ratios.items() if 0.8 < ratio < 1.25]
    return LayerLayout(
        known.layer,
        best[0] if told(0) else UNDETERMINED,
        best[1] if told(1) else UNDETERMINED,
        fitting[0] if len(fitting) == 1 else UNDETERMINED,
        best[2] if told(2) else UNDETERMINED,
        known.read,
        slot.entry.group,
        "source",
        cosine,
        max((value for key, (value, _) in found.items() if key != best), default=None),
    )


def _unscaled(codes: Tensor, slot: PackedSlot, even: str, order: str) -> Tensor:
    """Codes times block scales, fp32 [rows, K'], without the global scale, for one way to read both."""
    nibbles = unpack_nibbles(codes)
    if even == "low":
        nibbles = nibbles.reshape(codes.shape[0], -1, 2).flip(-1).reshape(codes.shape[0], -1)
    rows, blocks = nibbles.shape[0], -(-nibbles.shape[1] // 16)
    scales = _ordered(slot, order, rows, blocks).float()
    values = torch.nn.functional.pad(decode_e2m1(nibbles), (0, 16 * blocks - nibbles.shape[1]))
    return (values.reshape(rows, blocks, 16) * scales[..., None]).reshape(rows, -1)


def _ordered(slot: PackedSlot, order: str, rows: int, blocks: int) -> Tensor:
    """The first block scales [rows, blocks], read in one of the two orders."""
    stored = slot.parts["weight_scale"]
    count = min(-(-rows // TILE) * TILE, stored.shape[0]) if order == "swizzled" else rows
    part = block_scales(stored, count)
    return unswizzle(part, rows, blocks) if order == "swizzled" else part[:, :blocks]


def _possible_orders(slot: PackedSlot) -> list[str]:
    """Orders that the stored shape allows: swizzled scales are padded to whole tiles."""
    rows, columns = slot.parts["weight_scale"].shape
    tiles = rows % TILE == 0 and columns % 4 == 0
    exact = (rows, columns) == (slot.parts["weight"].shape[0], -(-slot.parts["weight"].shape[1] // 8))
    return [*(["swizzled"] if tiles else []), *(["linear"] if exact or not tiles else [])]


def _by_statistics(layer: str, slot: PackedSlot, read: Reading) -> LayerLayout:
    orders = _possible_orders(slot)
    order, how = (orders[0], "shape") if len(orders) == 1 else (_order_by_structure(slot), "statistics")
    factor = _factor_by_size(float(scalar(slot.parts["weight_scale_2"])))
    if order == factor == UNDETERMINED:
        how = "nothing"
    elif order == UNDETERMINED:
        how = "statistics"
    return LayerLayout(layer, UNDETERMINED, order, factor, UNDETERMINED, read, slot.entry.group, how)


def _factor_by_size(stored: float) -> str:
    if 0 < stored < 0.05:
        return "multiplier"
    return "divisor" if stored > 20 else UNDETERMINED


def _order_by_structure(slot: PackedSlot) -> str:
    """The order in which row and column means explain the log scales clearly better, by more than chance."""
    stored_rows, half = slot.parts["weight"].shape
    rows, blocks = min(STATISTICS_ROWS, stored_rows), -(-half // 8)
    explained = {
        order: _explained(_ordered(slot, order, rows, blocks).float()) for order in ("swizzled", "linear")
    }
    chance = math.sqrt(2 * (rows + blocks)) / (rows * blocks)
    best = max(explained, key=lambda order: explained[order])
    other = min(explained.values())
    return best if explained[best] > max(5 * chance, 2 * other) else UNDETERMINED


def _explained(scales: Tensor) -> float:
    """Share of the variance of log scales that row and column means explain, less that by chance."""
    logs = scales.clamp_min(2.0**-9).log().double()
    rows, columns = logs.shape
    centred = logs - logs.mean()
    total = float((centred**2).sum())
    if total == 0 or rows * columns < 2:
        return 0.0
    by_rows = float((centred.mean(1) ** 2).sum()) * columns
    by_columns = float((centred.mean(0) ** 2).sum()) * rows
    return (by_rows + by_columns) / total - (rows + columns - 2) / (rows * columns - 1)


def judge(report: LayoutReport) -> list[Finding]:
    """Findings where what is believed differs from how the file is read, or cannot be known."""
    findings: list[Finding] = []
    labels = {
        "even": "nibble that holds the even column",
        "scales": "order of the block scales",
        "factor": "sense of the global scale",
    }
    for what, label in labels.items() if report.layers else ():
        telling = [layer for layer in report.layers if getattr(layer, what) != UNDETERMINED]
        wrong = [layer for layer in telling if getattr(layer, what) != getattr(layer.read, what)]
        sure = [layer for layer in wrong if layer.how in ("source", "shape")]
        if not telling:
            read = getattr(report.layers[0].read, what)
            problem = f"the {label} cannot be told from this file; taken to be {read}"
            findings.append(Finding("info", "layout", problem, fix="compare with the 16-bit file: --source"))
        elif sure or 2 * len(wrong) > len(telling):
            first = (sure or wrong)[0]
            problem = f"the {label} is read wrongly in {len(wrong)} of the {len(telling)} layers that tell"
            found, expected = getattr(first, what), getattr(first.read, what)
            fix = "hswq-lab convert, with the producer that wrote the file"
            severity: Severity = "error" if sure else "warning"
            name = first.part or first.layer
            findings.append(Finding(severity, "layout", problem, name, found, expected, fix))
    for layer in report.layers:
        if layer.how == "source" and layer.group not in (layer.marked, UNDETERMINED):
            problem = "the stored values are in another basis than the marker says"
            found, expected = (f"rotation group {group}" for group in (layer.group, layer.marked))
            name = layer.part or layer.layer
            findings.append(Finding("error", "rotation", problem, name, found, expected))
    return findings
