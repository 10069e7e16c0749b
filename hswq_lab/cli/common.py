"""What the verbs share: lines and tables, progress bars, workers, loading, writing the result."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from typing import TYPE_CHECKING, Never

import torch
from tqdm import tqdm

from hswq_lab.cli import GATE_FAILED, GOOD
from hswq_lab.errors import HswqError
from hswq_lab.loading import load as load_model
from hswq_lab.modes import request_from_environment
from hswq_lab.results import write_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd

    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.results import Result

_LOG_INTERVAL = 5.0  # seconds between lines of a bar that goes into a log instead of a terminal


def say(text: object = "") -> None:
    """A line for the reader, on stdout."""
    sys.stdout.write(f"{text}\n")


def warn(text: object) -> None:
    """A warning, on stderr."""
    sys.stderr.write(f"hswq-lab: warning: {text}\n")


def table(frame: pd.DataFrame, digits: int = 5) -> str:
    """A frame as aligned text."""
    return frame.to_string(index=False, float_format=lambda value: f"{value:.{digits}g}", na_rep="–")


def finish(args: argparse.Namespace, result: Result, *, passed: bool = True) -> int:
    """Writes the files that --json and --save ask for; the exit code that follows from a gate."""
    if args.json is not None:
        write_text(args.json, json.dumps(result.to_dict(), indent=1, allow_nan=False))
    for path in args.save:
        result.save(path)
    return GOOD if passed else GATE_FAILED


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """A progress bar with time left on stderr, as the `progress` of a library call."""
    interval = 0.1 if sys.stderr.isatty() else _LOG_INTERVAL
    drawn: tqdm[Never] = tqdm(
        desc=f"{title:<12}",
        mininterval=interval,
        dynamic_ncols=True,
        bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}",
    )

    def progress(done: int, total: int, label: str) -> None:
        drawn.total = total
        drawn.set_postfix_str(label[-40:], refresh=False)
        drawn.update(done - drawn.n)

    with drawn:
        yield progress


def workers(count: int) -> AbstractContextManager[Executor | None]:
    """A pool of worker processes; None, meaning this process, for 0."""
    # Spawned, not forked: torch's threads do not survive a fork.
    return nullcontext() if count == 0 else ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def load(path: str, args: argparse.Namespace) -> Model:
    """Loads a model in the mode that the environment asks for, and passes warnings on."""
    torch.set_num_threads(args.threads)
    request, warning = request_from_environment(os.environ)
    if warning is not None:
        warn(warning)
    model = load_model(
        path,
        device=args.device,
        mode=request.mode,
        uncalibrated=request.uncalibrated,
        origin=request.origin,
    )
    for text in model.checkpoint.warnings:
        warn(text)
    return model


def refuse_to_overwrite(path: Path, *, force: bool) -> None:
    """Raises HswqError, before any work is done, if the target exists and that was not allowed."""
    if path.exists() and not force:
        raise HswqError("the target exists already", file=path, fix="choose another name, or add --force")
