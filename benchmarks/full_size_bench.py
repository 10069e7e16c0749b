"""The run of `full_size.py`: its figures, its models, where they are stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import hswq_lab as hl
from hswq_lab.model import Model
from hswq_lab.models.synthetic import TOY
from hswq_lab.models.zimage import FULL

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
# All six Linears of the fifteen middle blocks: made-up weights have no sensitivity that could choose them.
NV90 = range(8, 23)


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        section: the part of the run.
        what: which figure.
        value: measured.
        unit: of the value.
        bf16: the same of the 16-bit model in this run; None where there is none.
        ratio: what the target is about, usually value / bf16 or bf16 / value.
        target: in words, "" without one.
        met: whether the target is reached; None without one.
    """

    section: str
    what: str
    value: float
    unit: str
    bf16: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


@dataclass
class Bench:
    """The run: where, how large, and what was found."""

    device: torch.device
    folder: Path
    toy: bool
    deadline: float
    out: Path
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = replace(TOY, n_layers=4, n_refiners=1) if self.toy else FULL
        self.size = (64, 64) if self.toy else (1024, 1024)
        self.repeats = 2 if self.toy else 10
        self.source = self.folder / "synthetic.safetensors"

    @property
    def plans(self) -> dict[str, hl.Plan]:
        """The packs by name."""
        blocks = range(1, 3) if self.toy else NV90
        hybrid = {"*": "int8"} | {f"layers.{block}.*": "nvfp4" for block in blocks}
        return {"nv90": hl.Plan(hybrid), "all": hl.Plan({"*": "nvfp4"})}

    def add(self, section: str, what: str, value: float, unit: str, **more: Any) -> None:  # noqa: ANN401 - of a Row
        """One figure more."""
        row = Row(section, what, value, unit, **more)
        self.rows.append(row)
        beside = "" if row.bf16 is None else f"   bf16 {row.bf16:.4g}"
        ratio = "" if row.ratio is None else f"   ratio {row.ratio:.3f}"
        met = {None: "", True: "   reached", False: "   NOT reached"}[row.met]
        print(
            f"{section:<10} {what:<52} {value:>10.4g} {unit:<8}{beside}{ratio} {row.target}{met}", flush=True
        )

    def save(self) -> None:
        """Writes what is there."""
        content = {"facts": self.facts, "rows": [asdict(row) for row in self.rows]}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def captions(self) -> list[torch.Tensor]:
        """Features as a text encoder gives them: a few channels far larger than the others."""
        generator = torch.Generator().manual_seed(1)
        width, tokens = self.config.cap_dim, 20 if self.toy else 256
        large = torch.ones(width)
        large[torch.randperm(width, generator=generator)[: width // 256 + 1]] = 20.0
        return [torch.randn(tokens, width, generator=generator) * large for _ in range(21)]
