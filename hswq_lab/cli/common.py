"""What the verbs share: lines and tables, progress bars, workers, loading, writing the result."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Never

import torch
from tqdm import tqdm

from hswq_lab.cli import GATE_FAILED, GOOD
from hswq_lab.errors import HswqError
from hswq_lab.executors import local_pool
from hswq_lab.loading import load as load_model
from hswq_lab.modes import request_from_environment
from hswq_lab.results import write_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from concurrent.futures import Executor
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


@cache
def warn_once(text: str) -> None:
    """A warning that one process gives once, however many models it concerns."""
    warn(text)


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
    """A progress bar with time left on stderr, as the `progress` of a library call; lines in a log."""
    if not sys.stderr.isatty():
        yield from _lines(title)
        return
    drawn: tqdm[Never] = tqdm(
        desc=f"{title:<12}", dynamic_ncols=True, bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}"
    )

    def progress(done: int, total: int, label: str) -> None:
        drawn.total = total
        drawn.set_postfix_str(label[-40:], refresh=False)
        drawn.update(done - drawn.n)

    with drawn:
        yield progress
        progress(int(drawn.total or 0), int(drawn.total or 0), "done")


def _lines(title: str) -> Iterator[Progress]:
    """What a bar is where it cannot be repainted: a line now and then."""
    start = last = time.monotonic()

    def progress(done: int, total: int, label: str) -> None:
        nonlocal last
        if time.monotonic() - last > _LOG_INTERVAL:
            last = time.monotonic()
            sys.stderr.write(f"{title}: {100 * done // max(total, 1)} % ({label})\n")

    yield progress
    sys.stderr.write(f"{title}: done in {time.monotonic() - start:.1f} s\n")


def workers(count: int, device: str = "cpu") -> AbstractContextManager[Executor | None]:
    """A pool of worker processes; None, meaning this process, for 0."""
    return nullcontext() if count == 0 else local_pool(count, device)


def load(path: str, args: argparse.Namespace) -> Model:
    """Loads a model in the mode that the environment asks for, and passes warnings on."""
    torch.set_num_threads(args.threads)
    request, warning = request_from_environment(os.environ)
    if warning is not None:
        warn_once(warning)
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
