"""Temporary files and folders that belong to a run: what a killed one leaves behind is known and removed.

A run locks what it owns (flock) for as long as it lives, however it ends. So whatever bears our name and can
be locked belongs to nobody any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no advisory locks, so nobody can tell what is still in use
    fcntl = None  # type: ignore[assignment]

_FOLDER_PREFIX = "hswq-spill-"


def lock(handle: int) -> bool:
    """Locks an open file or folder until the handle is closed; False if another run holds it.

    Raises:
        OSError: the file system knows no locks.
    """
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Removes the files and folders of dead runs; what cannot be opened, locked or removed stays.

    Args:
        folder: where to look.
        pattern: glob that only names of our own match.
    """
    for path in folder.glob(pattern) if fcntl is not None else ():
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # What has another content by now was given its final name, and a living run made a new one.
                if lock(handle) and os.path.samestat(os.fstat(handle), path.stat()):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(handle)


def remove_temporary_leftovers() -> None:
    """Removes the temporary folders of dead runs."""
    remove_leftovers(Path(tempfile.gettempdir()), f"{_FOLDER_PREFIX}*")


def temporary_folder() -> tuple[Path, int | None]:
    """A new folder of this run and the handle that keeps it its own; leftovers of dead runs are removed first.

    Raises:
        OSError: it cannot be made.
    """
    remove_temporary_leftovers()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        if os.name == "nt":  # folders cannot be opened there
            return folder, None
        # Another run may take it for a leftover before it is locked; then there is a next one.
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                if lock(handle) and folder.exists():
                    return folder, handle
            except OSError:  # NFS locks no folders: nobody can take it for a leftover there, either
                os.close(handle)
                return folder, None
            os.close(handle)
