"""hswq-lab compare, bench: trajectories against a reference with the gate, and times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

import hswq_lab as hl
from hswq_lab.cli.common import bar, finish, load, say, table, workers
from hswq_lab.errors import HswqError
from hswq_lab.modes import SWITCHES
from hswq_lab.session import warn_once
from hswq_lab.tables import verdict_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from hswq_lab.model import Model


def compare(args: argparse.Namespace) -> int:
    """Runs the seeds through the reference and every variant; fails if a variant fails the gate."""
    model = load(args.model, args)
    with bar("comparing") as progress, workers(args.workers, str(model.device)) as executor:
        report = hl.compare(
            model,
            _variants(args),
            seeds=_seeds(args.seeds),
            prompts=args.prompt,
            steps=args.steps,
            cfg=args.cfg,
            progress=progress,
            executor=executor,
        )
    say(report)
    say(table(verdict_table(report)))
    return finish(args, report, passed=report.verdict.passed)


def _seeds(text: str) -> tuple[int, ...]:
    """The first N of the twenty for "N"; the seeds themselves for a list with commas."""
    try:
        numbers = tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        numbers = ()
    if numbers and "," in text:
        return numbers
    if not numbers or not 1 <= numbers[0] <= len(hl.SEEDS_20):
        raise HswqError(
            "--seeds is a number of seeds, or a list",
            found=text,
            expected=f"1 to {len(hl.SEEDS_20)}, or e.g. 42,43 (a single seed: 42,)",
        )
    return hl.SEEDS_20[: numbers[0]]


def _variants(args: argparse.Namespace) -> dict[str, Model]:
    """Every pack in every mode, under a name that tells them apart."""
    variants: dict[str, Model] = {}
    packs = [load(path, args) for path in args.packs]
    for pack, told in zip(packs, _distinct_names(packs, args.packs), strict=True):
        for mode in args.modes.split(","):
            # "auto" stays what the environment resolved at load; a mode that is named wins over the environment.
            if mode != "auto":
                _note_overruled(pack, mode)
            variant = pack if mode == "auto" else pack.in_mode(mode, args.uncalibrated)
            name = variant.request.mode if len(args.packs) == 1 else f"{told} {variant.request.mode}"
            if name in variants:
                raise HswqError("the same variant is named twice", found=name)
            variants[name] = variant
    return variants


def _distinct_names(packs: Sequence[Model], paths: Sequence[str]) -> list[str]:
    """The packs' names, with as many of their folders before them as tell files of one name apart."""
    full = [(*Path(path).resolve().parent.parts, pack.name) for pack, path in zip(packs, paths, strict=True)]
    return [str(Path(*mine[-_telling(mine, full) :])) for mine in full]


def _telling(mine: tuple[str, ...], every: Sequence[tuple[str, ...]]) -> int:
    """How many of the last parts of a path tell it from all other ones."""
    others = [path for path in every if path != mine]
    enough = (
        count for count in range(1, len(mine)) if all(path[-count:] != mine[-count:] for path in others)
    )
    return next(enough, len(mine))


def _note_overruled(pack: Model, mode: str) -> None:
    if pack.request.origin.startswith(SWITCHES) and pack.request.mode != mode:
        warn_once(f"--modes {mode} wins over {pack.request.origin}")


def bench(args: argparse.Namespace) -> int:
    """Times products, or whole pictures if models are named."""
    if args.models:
        models = {path: load(path, args) for path in args.models}
        with bar("benchmark") as progress:
            pictures = hl.bench_model(models, steps=args.steps, repeats=args.repeats or 3, progress=progress)
        say(pictures)
        return finish(args, pictures)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [tuple(shape) for shape in args.shape] if args.shape else None
    with bar("benchmark") as progress:
        products = hl.bench_gemm(
            shapes, args.rows, device=device, repeats=args.repeats or 20, progress=progress
        )
    say(products)
    return finish(args, products)
