"""hswq-lab compare, bench: trajectories against a reference with the gate, and times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import hswq_lab as hl
from hswq_lab.cli.common import bar, finish, load, say, table, workers
from hswq_lab.errors import HswqError
from hswq_lab.tables import verdict_table

if TYPE_CHECKING:
    import argparse

    from hswq_lab.model import Model


def compare(args: argparse.Namespace) -> int:
    """Runs the seeds through the reference and every variant; fails if a variant fails the gate."""
    model = load(args.model, args)
    with bar("comparing") as progress, workers(args.workers, str(model.device)) as executor:
        report = hl.compare(
            model,
            _variants(args),
            seeds=hl.SEEDS_20[: args.seeds],
            prompts=args.prompt,
            steps=args.steps,
            cfg=args.cfg,
            progress=progress,
            executor=executor,
        )
    say(report.verdict.text)
    say(table(verdict_table(report)))
    return finish(args, report, passed=report.verdict.passed)


def _variants(args: argparse.Namespace) -> dict[str, Model]:
    """Every pack in every mode, under a name that tells them apart."""
    variants: dict[str, Model] = {}
    for path in args.packs:
        pack = load(path, args)
        for mode in args.modes.split(","):
            name = mode if len(args.packs) == 1 else f"{pack.name} {mode}"
            if name in variants:
                raise HswqError("the same variant is named twice", found=name)
            # "auto" stays what the environment resolved at load.
            variants[name] = pack if mode == "auto" else pack.in_mode(mode, args.uncalibrated)
    return variants


def bench(args: argparse.Namespace) -> int:
    """Times products, or whole pictures if models are named."""
    if args.models:
        models = {path: load(path, args) for path in args.models}
        with bar("benchmark") as progress:
            pictures = hl.bench_model(models, steps=args.steps, repeats=args.repeats or 3, progress=progress)
        say(pictures)
        return finish(args, pictures)
    torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [tuple(shape) for shape in args.shape] if args.shape else None
    with bar("benchmark") as progress:
        products = hl.bench_gemm(
            shapes, args.rows, device=device, repeats=args.repeats or 20, progress=progress
        )
    say(products)
    return finish(args, products)
