"""What the ways of packing mini-zimage cost in the picture: bits a weight against the final latent.

    python benchmarks/quality.py            every row that is not there yet
    python benchmarks/quality.py --list     the rows
    python benchmarks/quality.py ROW …      these rows, again
    python benchmarks/quality.py --curve    nvK plans with a layer more or less than those of 5.0 bits

Twenty seeds, twelve steps, guidance 2.5, the model's own prompts. Whatever is fitted (impact, activation
ranges, bases and moments, channel factors) is fitted to captions and seeds that are not among these. Every
row is written as soon as it is measured; a row takes one to four minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hswq_lab as hl
from hswq_lab.formats import group_for
from hswq_lab.quantize import (
    CalibrationReport,
    ImpactReport,
    gather_bases,
    gather_moments,
    greedy,
    observe,
    observe_for,
    pareto,
    smooth,
    with_input_scales,
)
from hswq_lab.results import write_text
from hswq_lab.shipped import asset

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.formats import Method
    from hswq_lab.model import Model
    from hswq_lab.quantize import LayerMoments, Plan
    from hswq_lab.quantize.pack import Scales

RESULTS = Path(__file__).parent / "results" / "quality_mini.json"
FOLDER = Path("out/quality")
RANGES, BASES, MOMENTS, IMPACTS = 16, 32, 40, 4
"""Captions for activation ranges (12 steps each), bases (6), moments (4 or 5) and impact (4)."""

RANKS = (16, 32)
"""Ranks of input bases that a plan may buy."""

MIDDLE = 16
"""The rank that GPTQ reckons with in every layer of a row with bases: one gathering serves all plans."""


@dataclass(frozen=True)
class Row:
    """A way of packing.

    Attributes:
        scales: how NVFP4 weights are found.
        bits: asked for; None: NVFP4 everywhere.
        smoothed: whether channels are rescaled first.
        activations: how block scales of activations are found while running.
        rank: of the input bases if NVFP4 is everywhere; else 0: none, 1: those that the plan buys.
        greedy: plan by a greedy search that measures every step, not by impact alone.
    """

    scales: Scales
    bits: float | None = None
    smoothed: bool = False
    activations: Method = "rtn"
    rank: int = 0
    greedy: bool = False


ROWS = {
    "all rtn": Row("rtn"),
    "all four_six": Row("four_six"),
    "all sweep": Row("sweep"),
    "all gptq": Row("gptq"),
    "all smooth sweep": Row("sweep", smoothed=True),
    "all sweep, act four_six": Row("sweep", activations="four_six"),
    "all sweep, act sweep": Row("sweep", activations="sweep"),
    "all gptq, act sweep": Row("gptq", activations="sweep"),
    "all smooth gptq, act sweep": Row("gptq", smoothed=True, activations="sweep"),
    "all smooth sweep, act sweep": Row("sweep", smoothed=True, activations="sweep"),
    "all sweep, r16": Row("sweep", rank=16),
    "all gptq, act sweep, r16": Row("gptq", activations="sweep", rank=16),
    "all smooth gptq, act sweep, r16": Row("gptq", smoothed=True, activations="sweep", rank=16),
    "5.0 sweep": Row("sweep", 5.0),
    "5.0 greedy sweep": Row("sweep", 5.0, greedy=True),
    "5.5 sweep": Row("sweep", 5.5),
    "5.0 sweep, act sweep, bases": Row("sweep", 5.0, activations="sweep", rank=1),
    "5.0 gptq, act sweep, bases": Row("gptq", 5.0, activations="sweep", rank=1),
    "5.0 smooth gptq, act sweep, bases": Row("gptq", 5.0, smoothed=True, activations="sweep", rank=1),
    "5.5 sweep, act sweep, bases": Row("sweep", 5.5, activations="sweep", rank=1),
    "5.5 gptq, act sweep, bases": Row("gptq", 5.5, activations="sweep", rank=1),
}


class Bench:
    """What the rows share, made when a row needs it."""

    def __init__(self) -> None:
        self.model = hl.load("mini-zimage", device="cpu")
        own = set(self.model.prompts)
        captions = json.loads(asset("mini_contact.json").read_text())
        order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(0)).tolist()
        colours = ["", "", " on red", " on blue", "", " on green", " on yellow", " on pink", "", " on gray"]
        mixed = [captions[i] + colours[place % len(colours)] for place, i in enumerate(order)]
        self._bases: dict[str, dict[str, Tensor]] = {}
        self.captions = [caption for caption in mixed if caption not in own]

    def impact(self, row: Row) -> ImpactReport:
        """True impact, on captions of its own."""
        formats = ["nvfp4", *(f"nvfp4+r{rank}" for rank in RANKS if row.rank)]
        path = FOLDER / f"impact-{len(formats)}-{row.activations}-{self.model.checkpoint.sha256[:12]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        captions = self.captions[-IMPACTS:]
        return hl.sensitivity(
            self.model, captions, formats=formats, activation_scales=row.activations, resume=path
        )

    def bases(self, source: Model) -> dict[str, Tensor]:
        """Input bases of all layers."""
        if source.name not in self._bases:
            self._bases[source.name] = gather_bases(source, self.captions[:BASES], steps=6)
        return self._bases[source.name]

    def moments(self, source: Model, row: Row) -> dict[str, LayerMoments]:
        """Moments of all layers' inputs; kept in a file, since gathering them takes minutes."""
        rank = MIDDLE if row.rank else 0
        path = FOLDER / f"moments-r{rank}-{row.activations}-{source.checkpoint.sha256[:12]}.pt"
        if path.exists():
            kept: dict[str, LayerMoments] = torch.load(path, weights_only=False)
            return kept
        made = gather_moments(
            source,
            {layer: group_for(k) for layer, (_, k) in source.layers().items()},
            self.captions[:MOMENTS],
            bases={layer: found[:rank] for layer, found in self.bases(source).items()} if rank else None,
            activation_scales=row.activations,
            steps=4,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, path)
        return made

    @cached_property
    def smoothed(self) -> Model:
        """The model with rescaled channels."""
        unrotated = dict.fromkeys(self.model.layers())
        return smooth(self.model, observe(self.model, self.captions[:24], steps=6, groups=unrotated))

    def ranges(self, pack: Model, source: Model) -> CalibrationReport:
        """Activation ranges of the 16-bit source of a pack, each in the basis of the packed layer."""
        return observe_for(pack, source, self.captions[:RANGES])

    def plan(self, row: Row) -> Plan:
        """The row's plan; that of the plain model for the smoothed one too."""
        if row.bits is None:
            return hl.Plan({"*": f"nvfp4+r{row.rank}" if row.rank else "nvfp4"})
        impact = self.impact(row)
        if row.greedy:
            report = greedy(self.model, impact, bits=row.bits, prompts=self.captions[-IMPACTS:])
            return report.plan(bits=row.bits)
        return impact.plan(bits=row.bits)

    def curve(self) -> list[dict[str, float]]:
        """The nvK plans around that of the row "5.0 sweep", on captions of their own."""
        row = ROWS["5.0 sweep"]
        impact = self.impact(row)
        middle = impact.plan(bits=row.bits).count("nvfp4", self.model.layers())
        report = pareto(
            self.model, impact, range(middle - 4, middle + 5), prompts=self.captions[-16:-IMPACTS]
        )
        return [
            {"nvfp4": point.nvfp4, "bits": point.bits, "mean": point.mean, "min": point.worst}
            for point in report.points
        ]

    def measure(self, row: Row) -> dict[str, Any]:
        """Packs, calibrates and compares."""
        source = self.smoothed if row.smoothed else self.model
        plan = self.plan(row)
        moments = self.moments(source, row) if row.scales == "gptq" else None
        bases = self.bases(source) if row.rank else None
        started = time.process_time()
        pack = hl.pack(
            source, plan, row.scales, moments=moments, bases=bases, activation_scales=row.activations
        )
        seconds = time.process_time() - started
        pack = with_input_scales(pack, self.ranges(pack, source))
        report = hl.compare(self.model, {mode: pack.in_mode(mode) for mode in ("tc", "parity")})
        result: dict[str, Any] = {
            "bits": pack.report().bits_per_weight,
            "nvfp4_layers": plan.count("nvfp4", self.model.layers()),
            "scales": row.scales,
            "smoothed": row.smoothed,
            "activation_scales": row.activations,
            "ranks": dict(Counter(wanted.rank for wanted in plan.for_layers(source.layers()).values())),
            "pack_cpu_seconds": seconds,
        }
        summary = report.summary()
        for mode in ("tc", "parity"):
            verdict, rows = report.verdict[mode], summary[summary["variant"] == mode]
            result[mode] = {
                "mean": verdict.mean,
                "min": verdict.minimum,
                "bifurcated": len(verdict.bifurcated),
                "same_image": int(rows["same_image"].sum()),
                "ssim": float(rows["ssim"].mean()),
                "psnr": float(rows["psnr"].mean()),
            }
        return result


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help="rows to measure; default: those that are missing"
    )
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--curve", action="store_true", help="measure the nvK curve around 5.0 bits")
    options = parser.parse_args()
    if options.list:
        print("\n".join(ROWS))
        return
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are: {', '.join(ROWS)}")
    torch.set_num_threads(1)
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    bench = Bench()
    settings = {
        "model_sha256": bench.model.checkpoint.sha256,
        "seeds": len(hl.SEEDS_20),
        "steps": 12,
        "cfg": 2.5,
    }
    if done.get("settings", settings) != settings:
        parser.error(f"{RESULTS} was measured with {done['settings']}: delete it first")
    done["settings"] = settings
    if options.curve:
        done["curve"] = bench.curve()
        write_text(RESULTS, json.dumps(done, indent=1) + "\n")
        for point in done["curve"]:
            print(f"nv{point['nvfp4']:.0f}: {point['bits']:.3f} bits, mean {point['mean']:.4f}")
        return
    for name in options.rows or [name for name in ROWS if name not in done["rows"]]:
        result = bench.measure(ROWS[name])
        done["rows"][name] = result
        ordered = {key: done["rows"][key] for key in ROWS if key in done["rows"]}
        write_text(RESULTS, json.dumps({**done, "rows": ordered}, indent=1) + "\n")
        tc = result["tc"]
        print(
            f"{name:18s} {result['bits']:.3f} bits, tc mean {tc['mean']:.4f} min {tc['min']:.4f}", flush=True
        )


if __name__ == "__main__":
    main()
