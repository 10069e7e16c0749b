"""A file that appears under its name whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; two runs with one target are the user's own affair there
    fcntl = None  # type: ignore[assignment]

_CHUNK = 64 * 2**20


class PartialFile:
    """A hidden file beside the target that takes its place on `commit` and is removed if anything goes wrong.

    A run that was killed leaves `.NAME.partial` and nothing under the target's name; the next run starts it
    afresh. Two runs with one target: the second is refused.

    Args:
        target: where the file is to appear; its folder must exist.

    Raises:
        HswqError: the target is a folder, cannot be written, or is being written by another run.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(os.path.realpath(target))  # a link keeps being a link, its file is replaced
        self._path = self.target.with_name(f".{self.target.name}.partial")
        if self.target.is_dir():
            raise HswqError("the target is a folder", file=target, fix="name a file in it")
        if not self.target.parent.is_dir():
            raise HswqError(
                "the target's folder does not exist", file=target, fix=f"create {self.target.parent}"
            )
        try:
            self._handle = self._open()
        except OSError as error:
            raise self._refused(error) from error

    def _open(self) -> int:
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            try:
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The run that held the lock may have renamed this file to its target in between: then take a
                # new one.
                if self._path.exists() and os.path.samestat(os.fstat(handle), self._path.stat()):
                    os.ftruncate(handle, 0)
                    return handle
            except BlockingIOError as error:
                os.close(handle)
                raise HswqError(
                    "another run is writing this file",
                    file=self.target,
                    fix="wait for it or choose another name",
                ) from error
            except OSError:
                os.close(handle)
                raise
            os.close(handle)

    def _refused(self, error: OSError) -> HswqError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return HswqError(
                "the disk is full", file=self.target, found=error, fix="free space or choose another disk"
            )
        return HswqError(
            "the file cannot be written", file=self.target, found=error, fix="choose another place"
        )

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write bytes at a position.

        Raises:
            HswqError: the disk is full or refuses otherwise.
        """
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.pwrite(self._handle, view[done : done + _CHUNK], offset + done)
        except OSError as error:
            raise self._refused(error) from error

    def shift(self, begin: int, size: int, by: int) -> None:
        """Move `size` bytes from `begin` on towards the end of the file by `by` bytes."""
        try:
            for start in reversed(range(0, size, _CHUNK)):
                data = os.pread(self._handle, min(_CHUNK, size - start), begin + start)
                self.write(data, begin + start + by)
        except OSError as error:
            raise self._refused(error) from error

    def rename_to(self, target: Path) -> None:
        """Choose another name for `commit`, in the same folder."""
        self.target = self.target.with_name(target.name)

    def commit(self) -> None:
        """Make the bytes durable and give them the target's name.

        Raises:
            HswqError: the disk refuses; the target is then what it was.
        """
        try:
            os.fsync(self._handle)
            self._path.replace(self.target)
            _sync_folder(self.target.parent)
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a commit the hidden name is gone already.
        if self._path.exists() and os.path.samestat(os.fstat(self._handle), self._path.stat()):
            self._path.unlink()
        os.close(self._handle)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
