"""The load report: a row a layer, with its format, rotation, mode, why, and what it did so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pandas as pd

from hswq_lab.results import Result


@dataclass(frozen=True)
class LayerRow:
    """One Linear of a model.

    Attributes:
        group: rotation group of the stored weight, None if it is not rotated.
        mode: the mode it runs in; `why` gives the reason.
        bytes: of its packed tensors.
        calibrated: whether it carries an input_scale.
        loras: what is on it, e.g. "outline ×0.8 (branch)".
        arithmetic, fallback: what multiplies, and why not FP4 tensor cores: see `hswq_lab.modes.Resolved`.
        calls, rows, blocks, clipped: see `hswq_lab.layers.Counts`; zero while the network is not built.
    """

    layer: str
    format: str
    group: int | None
    n: int
    k: int
    mode: str
    why: str
    bytes: int
    calibrated: bool
    loras: str = ""
    arithmetic: str = ""
    fallback: str = ""
    calls: int = 0
    rows: int = 0
    blocks: int = 0
    clipped: int = 0

    @property
    def flop(self) -> int:
        """Floating-point operations so far, 2·M·N·K, unpadded."""
        return 2 * self.rows * self.n * self.k


@dataclass(frozen=True)
class Work:
    """What all layers of one kind of arithmetic did.

    Attributes:
        flop: 2·M·N·K over all calls, unpadded.
        fallbacks: calls that FP4 tensor cores were meant to do; `why` says why they did not.
    """

    arithmetic: str
    layers: int
    calls: int
    flop: int
    fallbacks: int
    why: str

    @classmethod
    def of(cls, kind: str, rows: list[LayerRow]) -> Work:
        """The sums over these layers."""
        fallen = [row for row in rows if row.fallback]
        why = "; ".join(dict.fromkeys(row.fallback for row in fallen))
        calls, flop = sum(row.calls for row in rows), sum(row.flop for row in rows)
        return cls(kind, len(rows), calls, flop, sum(row.calls for row in fallen), why)

    def __str__(self) -> str:
        """A line for a console."""
        fallen = f", {self.fallbacks} of them fallbacks: {self.why}" if self.fallbacks else ""
        return f"{self.arithmetic}: {self.calls} calls, {self.flop / 1e12:.3g} TFLOP{fallen}"


@dataclass(frozen=True)
class LoadReport(Result):
    """What a model is made of and how it runs here.

    Attributes:
        loras: a line each: name, strength, way, layers, and the verdict of the evidence when it was attached.
        baked: LoRAs that the file's metadata say are in its weights.
    """

    model: str
    source: str
    device: str
    dtype: str
    requested_mode: str
    layers: list[LayerRow] = field(repr=False)
    warnings: list[str] = field(default_factory=list)
    loras: list[str] = field(default_factory=list)
    baked: list[str] = field(default_factory=list)

    def to_frame(self) -> pd.DataFrame:
        """One row a layer."""
        return pd.DataFrame([vars(row) for row in self.layers])

    @property
    def bits_per_weight(self) -> float:
        """Mean over the Linears' weights, scales included."""
        return 8 * sum(row.bytes for row in self.layers) / max(1, sum(row.n * row.k for row in self.layers))

    def hits(self) -> dict[str, int]:
        """Calls by the mode that ran: the GEMM hit counts."""
        hits: Counter[str] = Counter()
        for row in self.layers:
            hits[row.mode] += row.calls
        return dict(hits)

    def work(self) -> list[Work]:
        """What the layers did so far, by kind of arithmetic."""
        kinds = dict.fromkeys(row.arithmetic for row in self.layers)
        return [Work.of(kind, [row for row in self.layers if row.arithmetic == kind]) for kind in kinds]

    def __str__(self) -> str:
        """A short summary for a console."""
        kinds = Counter((row.format, row.mode) for row in self.layers)
        lines = [f"{self.model} ({self.source}) on {self.device} in {self.dtype}, mode {self.requested_mode}"]
        lines += [
            f"  {count:4d} layers {form} run as {mode}" for (form, mode), count in sorted(kinds.items())
        ]
        lines.append(f"  {self.bits_per_weight:.2f} bits a weight over {len(self.layers)} Linears")
        lines += [f"  LoRA {text}, baked into the file" for text in self.baked]
        lines += [f"  LoRA {text}" for text in self.loras]
        lines += [f"  {work}" for work in self.work() if work.calls]
        clipped, blocks = sum(row.clipped for row in self.layers), sum(row.blocks for row in self.layers)
        if blocks:
            lines.append(f"  {clipped} of {blocks} activation blocks clipped by a static scale")
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])
