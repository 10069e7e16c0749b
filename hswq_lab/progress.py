"""How long work reports progress and is told to stop: one contract for library, jobs, widgets and shell."""

from __future__ import annotations

from typing import Protocol

from hswq_lab.errors import HswqError


class Progress(Protocol):
    """Called between two units of work; raises `Cancelled` when the user has asked to stop.

    Args:
        done: units finished so far, 0 at the start.
        total: units in all; constant within one piece of work.
        label: what is being worked on, for a person to read.
    """

    def __call__(self, done: int, total: int, label: str) -> None:
        """See the class."""


def silent(done: int, total: int, label: str) -> None:
    """The progress of a caller who did not ask for any."""


def progress_of(value: Progress | None) -> Progress:
    """The progress that a caller gave, or a silent one.

    Raises:
        HswqError: it cannot be called.
    """
    if value is None:
        return silent
    if not callable(value):
        raise HswqError(
            "progress is a function that is told how far the work is",
            found=repr(value)[:80],
            expected="progress(done, total, label), or None",
        )
    return value


def part(progress: Progress, first: int, last: int, whole: int, name: str | None = None) -> Progress:
    """The progress of a sub-task that fills units `first` to `last` of a larger task's `whole`.

    A `name` stands for the labels of the sub-task's own units.
    """

    def inner(done: int, total: int, label: str) -> None:
        units = (last - first) * done // max(total, 1)
        progress(first + units, whole, label if name is None else name)

    return inner
