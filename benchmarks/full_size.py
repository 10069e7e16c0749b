"""Z-Image at full size on one card: pack, load, step, LoRA, calibrate, compare; all beside bf16 in the same run.

    python benchmarks/full_size.py --folder DIR   # 30 GB free, a card with 40 GB; to results/full_size_<card>.json
    python benchmarks/full_size.py --toy          # the same calls at toy size on a CPU: what tests run
    python benchmarks/full_size.py --readme       # the table in README.md from the stored JSON

Real weights are not at hand: the checkpoint is made here, with the real names and shapes and realistic statistics
(`hswq_lab.models.synthetic` says which), so times and sizes mean something and pictures do not. The fifteen blocks
whose Linears become NVFP4 in "nv90" are the middle ones: made-up weights have no sensitivity that could choose them.
A section that fails is recorded with its error and the others go on; the JSON is written after each.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402 - the source tree must be found first

import full_size_files as files
import full_size_steps as steps
import torch
from full_size_bench import RESULTS, Bench
from full_size_measure import free
from full_size_table import write_table

from hswq_lab import ops
from hswq_lab.bench.machine import describe

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "ceilings": files.ceilings,
    "checkpoint": files.checkpoint,
    "pack": files.pack,
    "load": files.load,
    "calibrate": files.calibrate,
    "step": steps.step,
    "peers": steps.peers,
    "graphs": steps.graphs,
    "lora": steps.lora,
    "compare": steps.compare,
    "compiled": steps.compiled,
}


def run(bench: Bench, skip: list[str]) -> None:
    """Every section; a failure is recorded and the next begins."""
    bench.facts |= {"machine": describe(bench.device), "backends": ops.describe_backends(), "failed": {}}
    for name, section in SECTIONS.items():
        start = time.monotonic()
        if start > bench.deadline:
            bench.facts["failed"][name] = "not run: out of time"
            continue
        if name in skip or (name == "graphs" and bench.device.type != "cuda"):
            bench.facts["failed"][name] = "not run: left out" if name in skip else "not run: no card"
            continue
        try:
            section(bench)
        except Exception as error:  # noqa: BLE001 - told, stored, and the other sections are still worth their time
            traceback.print_exc()
            bench.facts["failed"][name] = f"{type(error).__name__}: {error}"[:600]
        free()
        print(f"-- {name}: {time.monotonic() - start:.1f} s", flush=True)
        bench.save()
    bench.save()


def main(arguments: list[str] | None = None) -> int:
    """Runs the sections, or writes the table; 1 if a section failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/full_size"), help="where 30 GB fit")
    parser.add_argument("--toy", action="store_true", help="toy size")
    parser.add_argument("--device", help="default: cuda; at toy size cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no section after this time")
    parser.add_argument("--skip", nargs="+", default=[], choices=SECTIONS, help="leave these sections out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true", help="only write the table from the stored result")
    args = parser.parse_args(arguments)
    if args.readme:
        write_table(args.out or RESULTS / "full_size_nvidia_h200.json")
        return 0
    device = torch.device(args.device or ("cpu" if args.toy else "cuda"))
    card = "toy" if args.toy else torch.cuda.get_device_name()
    out = args.out or RESULTS / f"full_size_{re.sub(r'[^a-z0-9]+', '_', card.lower())}.json"
    if args.toy:
        torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(device, args.folder, args.toy, time.monotonic() + args.seconds, out)
    run(bench, args.skip)
    failed = {name: why for name, why in bench.facts["failed"].items() if not why.startswith("not run")}
    print(json.dumps(bench.facts["failed"], indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
