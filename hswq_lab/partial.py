"""A file that appears under its name whole or not at all."""

from __future__ import annotations

import errno
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hswq_lab.errors import HswqError
from hswq_lab.owned import lock, remove_leftovers

if TYPE_CHECKING:
    from types import TracebackType

_SUFFIX = ".hswq-partial"
_LONGEST_NAME = 255  # bytes, on every usual file system
_CHUNK = 64 * 2**20
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # some network file systems sync no folders
_PATIENCE = 0.3  # seconds: someone who writes a few lines, or looks whether this is a leftover, is soon done


def write_whole(path: Path, data: bytes) -> None:
    """Writes a small file whole or not at all, and the folders that lead to it; a link there is replaced.

    Raises:
        HswqError: it cannot be written; what was there before is still there (but see `PartialFile.commit`).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error
    with PartialFile(path) as file:
        file.write(data, 0)
        file.sync()
        file.commit()


class PartialFile:
    """A hidden file beside the target that takes its place on `commit` and is removed if anything goes wrong.

    A run that was killed leaves a hidden file and nothing under the target's name; the next run that writes
    into the folder, whatever its target, removes it. Two runs with one target: the second is refused.

    Args:
        target: where the file is to appear; its folder must exist. A link there is replaced, never written through.

    Raises:
        HswqError: the target is a folder, cannot be written, or is being written by another run.
    """

    def __init__(self, target: Path) -> None:
        # A link at this name is replaced, and what it leads to stays as it is: it may be part of something else.
        self.target = Path(os.path.realpath(target.parent), target.name)
        self._path = self.target.with_name(_hidden(self.target.name))
        if self.target.is_dir():
            raise HswqError("the target is a folder", file=target, fix="name a file in it")
        if self.target.exists() and not self.target.is_file():
            raise HswqError("the target is no ordinary file", file=target, fix="write under another name")
        if not self.target.parent.is_dir():
            raise HswqError(
                "the target's folder does not exist", file=target, fix=f"create {self.target.parent}"
            )
        remove_leftovers(self.target.parent, f".*{_SUFFIX}")
        try:
            self._handle = self._open()
        except OSError as error:
            raise _refused(self.target, error) from error

    def _open(self) -> int:
        last = time.monotonic() + _PATIENCE
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            try:
                # Another run may have renamed or removed this file in between: then take a new one.
                if lock(handle) and self._has(handle):
                    os.ftruncate(handle, 0)
                    return handle
            except OSError:
                os.close(handle)
                raise
            os.close(handle)
            if time.monotonic() > last:
                raise HswqError(
                    "another run is writing this file",
                    file=self.target,
                    fix="wait for it or choose another name",
                )
            time.sleep(0.01)

    def _has(self, handle: int) -> bool:
        """Whether the hidden name belongs to an open file."""
        try:
            return os.path.samestat(os.fstat(handle), self._path.stat())
        except FileNotFoundError:
            return False

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
            raise _refused(self.target, error) from error

    def shift(self, begin: int, size: int, by: int) -> None:
        """Move `size` bytes from `begin` on towards the end of the file by `by` bytes."""
        try:
            for start in reversed(range(0, size, _CHUNK)):
                data = os.pread(self._handle, min(_CHUNK, size - start), begin + start)
                self.write(data, begin + start + by)
        except OSError as error:
            raise _refused(self.target, error) from error

    def rename_to(self, target: Path) -> None:
        """Choose another name for `commit`, in the same folder."""
        self.target = self.target.with_name(target.name)

    def sync(self) -> None:
        """Make the bytes durable; raises HswqError if the disk refuses."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise _refused(self.target, error) from error

    def commit(self) -> None:
        """Give the bytes the target's name.

        Raises:
            HswqError: the disk refuses, and the target is what it was; or, as the message then says, the file is
                there, but the folder's entry may not be durable.
        """
        try:
            self._path.replace(self.target)
        except OSError as error:
            raise _refused(self.target, error) from error
        try:
            _sync_folder(self.target.parent)
        except OSError as error:
            raise HswqError(
                "the file is written under its name, but a power cut now may undo that: its folder cannot be synced",
                file=self.target,
                found=error,
                fix="check the disk, and that the file is there after the next start",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a commit the hidden name is gone already.
        if self._has(self._handle):
            self._path.unlink()
        os.close(self._handle)


def _refused(target: Path, error: OSError) -> HswqError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HswqError(
            "the disk is full", file=target, found=error, fix="free space or choose another disk"
        )
    return HswqError("the file cannot be written", file=target, found=error, fix="choose another place")


def _sync_folder(folder: Path) -> None:
    """Makes a folder's entries durable, where its file system knows how to."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def _hidden(name: str) -> str:
    """The name of the hidden file; of a name that leaves no room for more, a hash."""
    whole = f".{name}{_SUFFIX}"
    return (
        whole
        if len(os.fsencode(whole)) <= _LONGEST_NAME
        else f".{sha256(os.fsencode(name)).hexdigest()}{_SUFFIX}"
    )
