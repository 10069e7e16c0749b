"""A piece of long work in a thread: progress, cancel, result, error; what widgets and scripts wait on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from hswq_lab.errors import Cancelled, HswqError

T = TypeVar("T")


class Job(Generic[T]):
    """Runs `work(progress=…)` in a thread, once.

    States: "idle" → "running" → one of "done", "failed", "cancelled". `work` must take a keyword `progress`
    (see `hswq_lab.progress`) and call it between units; that is where a cancel takes effect.

    Args:
        work: the function to run; its return value becomes `result`.
        on_change: called from the worker thread after each progress tick and state change, with the job.
    """

    def __init__(self, work: Callable[..., T], on_change: Callable[[Job[T]], None] | None = None) -> None:
        self._work = work
        self._on_change = on_change
        self._cancel = threading.Event()
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self.state = "idle"
        self.done, self.total, self.label = 0, 0, ""
        self.error: BaseException | None = None
        self._result: T | None = None
        self._started_at = 0.0

    def start(self) -> Job[T]:
        """Starts the thread; raises HswqError if this job was started before."""
        with self._lock:
            if self.state != "idle":
                raise HswqError(
                    "this job was started before",
                    found=self.state,
                    fix="make a new Job, or wait for this one",
                )
            self.state = "running"
        self._started_at = time.monotonic()
        threading.Thread(target=self._run, name="hswq-job", daemon=True).start()
        return self

    def cancel(self) -> None:
        """Asks the work to stop at its next unit. Does nothing once it has ended."""
        self._cancel.set()

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the end; returns the result, or raises what the work raised (`Cancelled` after a cancel).

        Raises:
            HswqError: the job was never started, or is still running after `timeout` seconds.
        """
        if self.state == "idle":
            raise HswqError("this job was never started", fix="call start() first")
        if not self._finished.wait(timeout):
            raise HswqError(f"the job is still running after {timeout} s", found=self.label)
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]  # set before _finished whenever there is no error

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end, from the mean speed so far; None before the first unit."""
        if self.state != "running" or self.done == 0:
            return None
        elapsed = time.monotonic() - self._started_at
        return elapsed / self.done * (self.total - self.done)

    def _progress(self, done: int, total: int, label: str) -> None:
        self.done, self.total, self.label = done, total, label
        self._changed()
        if self._cancel.is_set():
            raise Cancelled("cancelled by the user", found=f"{done} of {total}: {label}")

    def _run(self) -> None:
        try:
            self._result = self._work(progress=self._progress)
            state = "done"
        except Cancelled as error:
            self.error, state = error, "cancelled"
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits or watches
            self.error, state = error, "failed"
        self.state = state
        self._finished.set()
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self)
