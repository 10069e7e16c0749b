"""One piece of work at a time, the newest request wins: what stands between a slider and slow work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hswq_lab.jobs import Job


@dataclass(frozen=True)
class Request:
    """Work, and what is to happen with its result.

    Attributes:
        work: takes `progress=`.
        then: called with the result, in the worker thread.
    """

    work: Callable[..., Any]
    then: Callable[[Any], None]


class Latest:
    """Runs requests in Jobs, one at a time; a newer one cancels what runs and replaces what waits.

    Args:
        on_change: called with the job at every tick and at its end, unless a newer request has replaced it.
        delay: seconds to wait for a still newer request before starting.
    """

    def __init__(self, on_change: Callable[[Job[Any]], None], delay: float = 0.15) -> None:
        self._on_change = on_change
        self._delay = delay
        self._lock = threading.RLock()
        self._idle = threading.Event()
        self._idle.set()
        self._waiting: Request | None = None
        self._running: Request | None = None
        self._job: Job[Any] | None = None
        self._timer: threading.Timer | None = None

    def request(self, work: Callable[..., Any], then: Callable[[Any], None]) -> None:
        """Asks for work; returns at once."""
        with self._lock:
            self._idle.clear()
            self._waiting = Request(work, then)
            if self._job is not None:
                self._job.cancel()
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._delay, self._start)
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """Forgets what waits and stops what runs."""
        with self._lock:
            self._waiting = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._job is not None:
                self._job.cancel()
            else:
                self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether something runs or waits. Work that has ended and is being shown is over."""
        with self._lock:
            at_work = self._job is not None and self._job.state in ("idle", "running")
            return at_work or self._waiting is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing runs or waits; False if that took too long."""
        return self._idle.wait(timeout)

    def _start(self) -> None:
        with self._lock:
            self._timer = None
            if self._waiting is None or self._job is not None:
                return
            self._running, self._waiting = self._waiting, None
            self._job = Job(self._running.work, self._changed)
            job = self._job
        job.start()

    def _changed(self, job: Job[Any]) -> None:
        with self._lock:
            replaced = self._waiting is not None
            request = self._running
        if not replaced:
            self._on_change(job)
        if job.state == "running":
            return
        if job.state == "done" and not replaced and request is not None:
            request.then(job.wait())
        with self._lock:
            self._job = self._running = None
            if self._waiting is None:
                self._idle.set()
                return
        self._start()
