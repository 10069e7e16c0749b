"""hswq-lab demo: the whole path on the small model, into one folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hswq_lab.cli import GATE_FAILED, GOOD
from hswq_lab.cli.common import bar, say, table, workers
from hswq_lab.demo import run_demo
from hswq_lab.demo_report import write_all
from hswq_lab.tables import verdict_table

if TYPE_CHECKING:
    import argparse


def demo(args: argparse.Namespace) -> int:
    """Runs the path with a bar a stage, writes the files, ends with the verdict."""
    torch.set_num_threads(1)  # more only spin on a model this small
    with workers(args.workers) as executor:
        made = run_demo(args.out, stage=bar, executor=executor)
    with bar("report") as progress:
        no_plots = write_all(made, args.out, progress)
    if no_plots is not None:
        say(f"plots as PNG and SVG were left out: {no_plots}; report.html has them all")
    say(
        f"open {args.out / 'report.html'}; beside it: {', '.join(sorted(p.name for p in args.out.iterdir()))}"
    )
    say()
    say(table(verdict_table(made.trajectories)))
    return GOOD if made.trajectories.verdict.passed else GATE_FAILED
