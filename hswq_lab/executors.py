"""Many units of work on any concurrent.futures executor: a pool of processes, a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hswq_lab.errors import HswqError
from hswq_lab.progress import Progress, progress_of

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

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
        HswqError: no executor, one that is shut down, or a pool's worker died (a Dask cluster starts the unit
            again elsewhere instead).
        Exception: whatever a unit raised; the others are cancelled.
    """
    if not isinstance(executor, Executor):
        raise HswqError(
            "work runs on an executor",
            found=repr(executor)[:80],
            expected="a concurrent.futures.Executor, say ProcessPoolExecutor() or Dask's client.get_executor()",
            fix="leave it out to run here",
        )
    tell = progress_of(progress)
    futures: list[Future[T]] = []
    try:
        futures.extend(_submitted(executor, work, unit) for unit in units)
        names = dict(zip(futures, labels, strict=True))
        pending, label = set(futures), "waiting for the first worker"
        while pending:
            tell(len(futures) - len(pending), len(futures), label)
            ended, pending = wait(pending, timeout=HEARTBEAT, return_when=FIRST_COMPLETED)
            # A pool that is shut down cancels what it has not begun and tells nobody who waits.
            if any(future.cancelled() for future in (*ended, *pending)):
                raise HswqError(
                    "the executor was shut down before all was done", found=f"{label} was the last"
                )
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


def _submitted(executor: Executor, work: Callable[..., T], unit: tuple[Any, ...]) -> Future[T]:
    try:
        return executor.submit(work, *unit)
    except BrokenExecutor:
        raise
    except RuntimeError as error:
        raise HswqError(
            "the executor takes no work", found=error, fix="give one that is not shut down"
        ) from error


def local_pool(workers: int | None = None, device: str | torch.device = "cpu") -> ProcessPoolExecutor:
    """A pool of fresh processes on this machine, to be used as `executor=`; a context manager.

    For models on a card each process sees one card alone, as its first; they must be on "cuda" or "cuda:0".

    Each process computes with as many torch threads as this one, so that results have the same bits. On a CPU set
    them first, `torch.set_num_threads(1)`: more threads than cores spin, and a comparison took ten times as long.

    Args:
        workers: processes; default: one a core that this process may use, or one a card.
        device: of the models that are to run there.

    Raises:
        HswqError: no worker, or cards are asked for and there are none.
    """
    cards = _cards() if torch.device(device).type == "cuda" else []
    if torch.device(device).type == "cuda" and not cards:
        raise HswqError("there is no card for the processes of a pool", found="torch sees no CUDA device")
    count = (len(cards) or _cores()) if workers is None else workers
    if count < 1:
        raise HswqError("a pool needs at least one process", found=count)
    context = multiprocessing.get_context("spawn")
    places: SimpleQueue[str] = context.SimpleQueue()
    for number in range(count):
        places.put(cards[number % len(cards)] if cards else "")
    return ProcessPoolExecutor(count, context, _take_place, (places,))


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cards() -> list[str]:
    """How CUDA_VISIBLE_DEVICES names each card that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def _take_place(places: SimpleQueue[str]) -> None:
    """Runs first in a worker, before it touches CUDA: from here on it sees its own card alone."""
    card = places.get()
    if card:
        os.environ["CUDA_VISIBLE_DEVICES"] = card
