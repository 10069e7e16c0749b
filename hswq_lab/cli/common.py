"""What the verbs share: lines and tables, progress bars, workers, loading, writing the result."""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hswq_lab.checkpoint.files import INDEX_SUFFIX, locate
from hswq_lab.cli import GATE_FAILED, GOOD
from hswq_lab.executors import local_pool
from hswq_lab.results import write_text
from hswq_lab.session import bar, open_model, warn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from concurrent.futures import Executor

    import pandas as pd

    from hswq_lab.model import Model
    from hswq_lab.results import Result

__all__ = ["bar", "finish", "load", "say", "say_written", "table", "telling", "workers"]


def say(text: object = "") -> None:
    """A line for the reader, on stdout."""
    sys.stdout.write(f"{text}\n")


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
def workers(count: int, device: str = "cpu") -> Iterator[Executor | None]:
    """A pool of worker processes; None, meaning this process, for 0.

    Whatever ends the verb early ends the workers too: a pool alone would wait for the units that have begun.
    """
    if count == 0:
        yield None
        return
    with local_pool(count, device) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextmanager
def telling() -> Iterator[None]:
    """Within it, what the library warns of is said at once, as the verbs say their own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: warn(message)
        yield


def load(path: str, args: argparse.Namespace) -> Model:
    """Loads a model in the mode that the environment asks for, with --device."""
    if getattr(args, "captions", None) is None and getattr(args, "vae", None) is None:
        return open_model(path, args.device)
    return open_model(path, args.device, args.captions, tuple(args.size), args.vae)


def say_written(path: Path) -> None:
    """Where the result is, and how large."""
    files = locate(path).files
    parts = f" in {len(files)} parts" if path.name.endswith(INDEX_SUFFIX) else ""
    say(f"written: {path} ({sum(file.stat().st_size for file in files):,} bytes{parts})")
