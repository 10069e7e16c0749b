"""The 20-seed gate at full size through a Dask cluster: on one card, and on all of this machine's; the same bits?

    python benchmarks/full_size_gate.py --folder DIR [--steps 4] [--out FILE]     # needs two cards, and distributed
    python benchmarks/full_size_gate.py --toy                                     # two workers on a CPU

Each worker is a process that sees one card alone. Both times are of warm workers: models are built before the clock
starts, as they are in the second of two gates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402 - the source tree must be found first

import full_size_files as files
import torch
from distributed import Client, Nanny, Scheduler, SpecCluster
from full_size_bench import RESULTS, Bench

import hswq_lab as hl
from hswq_lab.bench.machine import describe
from hswq_lab.model import Model
from hswq_lab.quantize import pack_to_file

ASKED = 1.8


def cluster(workers: int, *, cards: bool) -> SpecCluster:
    """Worker processes of one thread, each with a card of its own."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    options = [
        {"nthreads": 1, "env": paths | ({"CUDA_VISIBLE_DEVICES": str(number)} if cards else {})}
        for number in range(workers)
    ]
    specs = {number: {"cls": Nanny, "options": each} for number, each in enumerate(options)}
    local = {"cls": Scheduler, "options": {"dashboard": False, "port": 0, "host": "127.0.0.1"}}
    return SpecCluster(scheduler=local, workers=specs)


def gate(model: Model, pack: Model, workers: int, seeds: tuple[int, ...], steps: int) -> tuple[float, Any]:
    """Seconds of the gate on so many workers, and its report."""
    with ExitStack() as stack:
        started = stack.enter_context(cluster(workers, cards=model.device.type == "cuda"))
        client = stack.enter_context(Client(started))
        client.wait_for_workers(workers)
        executor = client.get_executor()
        variants = {"tc8": pack}
        # As many seeds as workers: each builds both models.
        for _ in range(2):
            hl.compare(model, variants, hl.SEEDS_20[: 2 * workers], steps=1, cfg=2.5, executor=executor)
        start = time.perf_counter()
        report = hl.compare(model, variants, seeds, steps=steps, cfg=2.5, executor=executor)
        return time.perf_counter() - start, report


def main(arguments: list[str] | None = None) -> int:
    """Runs the gate twice; 1 if it is not as fast as asked, or the bits differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/full_size"))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS / "full_size_gate.json")
    args = parser.parse_args(arguments)
    device = torch.device("cpu" if args.toy else "cuda")
    count = 2 if args.toy else torch.cuda.device_count()
    if args.toy:
        torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(device, args.folder, args.toy, float("inf"), args.out)
    files.checkpoint(bench)
    model = files.opened(bench, bench.source)
    path = bench.folder / "all_rtn.safetensors"
    pack_to_file(model, path, bench.plans["all"], "rtn")
    pack = files.opened(bench, path).in_mode("tc8", "dynamic")
    torch.cuda.empty_cache()
    seeds, steps = (hl.SEEDS_20[:4], 1) if args.toy else (hl.SEEDS_20, args.steps)
    found: dict[int, tuple[float, Any]] = {}
    for workers in (count, 1):
        found[workers] = gate(model, pack, workers, seeds, steps)
        print(f"{workers} workers: {found[workers][0]:.1f} s", flush=True)
    (many, report), (one, alone) = found[count], found[1]
    same = report.to_dict() == alone.to_dict()
    content = {
        "machine": describe(device), "cards": count, "seeds": len(seeds), "steps": steps, "seconds_one": one,
        "seconds_all": many, "faster": one / many, "asked": ASKED, "same_bits": same,
    }  # fmt: skip
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(content, indent=1))
    return 0 if same and (args.toy or one / many >= ASKED) else 1


if __name__ == "__main__":
    sys.exit(main())
