"""What the ways of packing mini-zimage cost in the picture: bits a weight against the final latent.

    python benchmarks/quality.py            every row that is not there yet
    python benchmarks/quality.py --list     the rows
    python benchmarks/quality.py ROW …      these rows, again

Twenty seeds, twelve steps, guidance 2.5, the model's own prompts. Whatever is fitted (impact, activation
ranges and moments, channel factors) is fitted to captions and seeds that are not among these. Every row is
written as soon as it is measured; a row takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hswq_lab as hl
from hswq_lab.formats import group_for
from hswq_lab.models.mini import asset
from hswq_lab.quantize import (
    CalibrationReport,
    ImpactReport,
    gather_moments,
    observe,
    smooth,
    with_input_scales,
)
from hswq_lab.results import write_text

if TYPE_CHECKING:
    from hswq_lab.model import Model
    from hswq_lab.quantize import LayerMoments, Plan
    from hswq_lab.quantize.pack import Scales

RESULTS = Path(__file__).parent / "results" / "quality_mini.json"
IMPACT = Path("out/quality/impact.json")
MOMENTS_FOLDER = Path("out/quality")
RANGES, MOMENTS, IMPACTS = 16, 96, 4
"""Captions for activation ranges (12 steps each), for moments (4 or 5 steps) and for impact (4 steps)."""


@dataclass(frozen=True)
class Row:
    """A way of packing: how NVFP4 weights are found, bits asked for (None: NVFP4 everywhere), smoothed or not."""

    scales: Scales
    bits: float | None = None
    smoothed: bool = False


ROWS = {
    "all rtn": Row("rtn"),
    "all four_six": Row("four_six"),
    "all sweep": Row("sweep"),
    "all gptq": Row("gptq"),
    "all smooth sweep": Row("sweep", smoothed=True),
    "5.0 sweep": Row("sweep", 5.0),
    "5.0 gptq": Row("gptq", 5.0),
    "5.5 sweep": Row("sweep", 5.5),
    "5.5 gptq": Row("gptq", 5.5),
    "6.0 gptq": Row("gptq", 6.0),
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
        self.captions = [caption for caption in mixed if caption not in own]

    @cached_property
    def impact(self) -> ImpactReport:
        """True impact, on captions of its own."""
        IMPACT.parent.mkdir(parents=True, exist_ok=True)
        return hl.sensitivity(self.model, self.captions[-IMPACTS:], resume=IMPACT)

    @cached_property
    def moments(self) -> dict[str, LayerMoments]:
        """Moments of all layers' inputs; kept in a file, since gathering them takes two minutes."""
        path = MOMENTS_FOLDER / f"moments-{self.model.checkpoint.sha256[:12]}.pt"
        if path.exists():
            kept: dict[str, LayerMoments] = torch.load(path, weights_only=False)
            return kept
        groups = {layer: group_for(k) for layer, (_, k) in self.model.layers().items()}
        made = gather_moments(self.model, groups, self.captions[:MOMENTS], steps=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, path)
        return made

    @cached_property
    def smoothed(self) -> Model:
        """The model with rescaled channels."""
        unrotated = dict.fromkeys(self.model.layers())
        return smooth(self.model, observe(self.model, self.captions[:24], steps=6, groups=unrotated))

    def ranges(self, model: Model) -> CalibrationReport:
        """Activation ranges of a 16-bit model in the rotated basis."""
        return observe(model, self.captions[:RANGES])

    def plan(self, row: Row) -> Plan:
        """The row's plan."""
        return hl.Plan({"*": "nvfp4"}) if row.bits is None else self.impact.plan(bits=row.bits)

    def measure(self, row: Row) -> dict[str, Any]:
        """Packs, calibrates and compares."""
        source = self.smoothed if row.smoothed else self.model
        moments = self.moments if row.scales == "gptq" else None
        plan, started = self.plan(row), time.process_time()
        pack = hl.pack(source, plan, row.scales, moments=moments)
        seconds = time.process_time() - started
        pack = with_input_scales(pack, self.ranges(source))
        report = hl.compare(self.model, {mode: pack.in_mode(mode) for mode in ("tc", "parity")})
        result: dict[str, Any] = {
            "bits": pack.report().bits_per_weight,
            "nvfp4_layers": plan.count("nvfp4", self.model.layers()),
            "scales": row.scales,
            "smoothed": row.smoothed,
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
