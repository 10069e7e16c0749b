"""The one exception class of the package, and the one that a cancelled job raises."""

from __future__ import annotations

import os


class HswqError(Exception):
    """Something that cannot be done, said so that the reader knows what to change.

    Args:
        problem: what is wrong, in one sentence.
        file: the file concerned, if any.
        tensor: the tensor, layer or key concerned, if any.
        found: what was there.
        expected: what should have been there.
        fix: what the reader can do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        found: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = None if file is None else os.fspath(file)
        self.tensor = tensor
        self.found = found
        self.expected = expected
        self.fix = fix
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.problem]
        for label, value in (("file", self.file), ("tensor", self.tensor), ("found", self.found)):
            if value is not None:
                parts.append(f"{label}: {value}")
        if self.expected is not None:
            parts.append(f"expected: {self.expected}")
        if self.fix is not None:
            parts.append(f"to do: {self.fix}")
        # Names from files may hold lone surrogates, which can be neither printed nor written.
        return "; ".join(parts).encode("utf-8", errors="backslashreplace").decode("utf-8")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive pickling by themselves; workers send these errors back.
        fields = (self.problem, self.file, self.tensor, self.found, self.expected, self.fix)
        return (_rebuild, (type(self), *fields))


def _rebuild(
    kind: type[HswqError],
    problem: str,
    file: str | None,
    tensor: str | None,
    found: object,
    expected: object,
    fix: str | None,
) -> HswqError:
    return kind(problem, file=file, tensor=tensor, found=found, expected=expected, fix=fix)


class Cancelled(HswqError):  # noqa: N818 - it is no error
    """Raised between two units of work after the user asked to stop; nothing half-done is left behind."""
