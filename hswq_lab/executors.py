"""Many units of work on any concurrent.futures executor: a pool of processes, a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any, TypeVar

from hswq_lab.errors import HswqError
from hswq_lab.progress import Progress, silent

T = TypeVar("T")

HEARTBEAT = 0.2
"""Seconds after which the progress callback is called again although nothing ended, so that it can cancel."""


def gather(
    executor: Executor,
    work: Callable[..., T],
    units: Sequence[tuple[Any, ...]],
    labels: Sequence[str],
    progress: Progress | None = None,
    on_result: Callable[[T], None] | None = None,
) -> list[T]:
    """Runs `work(*unit)` for every unit on an executor.

    Args:
        executor: any; where its workers are processes, `work` and the units are pickled.
        work: a function of a module.
        units: its arguments, one tuple a unit.
        labels: what to call each unit.
        progress: told when a unit ends, and several times a second so that it can cancel. A cancel stops what
            has not begun; what a worker is in the middle of ends unheard.
        on_result: gets each result as soon as it is there, in the order in which the units end.

    Returns:
        The results in the order of the units, whatever order they ended in.

    Raises:
        HswqError: a pool's worker died (a Dask cluster starts the unit again elsewhere instead).
        Exception: whatever a unit raised; the others are cancelled.
    """
    tell = progress or silent
    futures: list[Future[T]] = []
    try:
        futures += [executor.submit(work, *unit) for unit in units]
        names = dict(zip(futures, labels, strict=True))
        pending, label = set(futures), "waiting for the first worker"
        while pending:
            tell(len(futures) - len(pending), len(futures), label)
            ended, pending = wait(pending, timeout=HEARTBEAT, return_when=FIRST_COMPLETED)
            for future in ended:
                result = future.result()
                label = names[future]
                if on_result is not None:
                    on_result(result)
        tell(len(futures), len(futures), label)
        return [future.result() for future in futures]
    except BrokenExecutor as error:
        raise HswqError(
            "a worker process died",
            found=error,
            fix="give it more memory, use fewer workers, or use a Dask cluster, which starts lost work again",
        ) from error
    finally:
        for future in futures:
            future.cancel()
