"""Open safetensors files: tensors are read from one file handle, on demand, into memory of their own."""

from __future__ import annotations

import hashlib
import os
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hswq_lab.checkpoint.header import DTYPES, Header, TensorInfo, header_of, open_regular
from hswq_lab.checkpoint.sniff import PICKLE_SUFFIXES
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK = 64 * 2**20


class FileSource:
    """One safetensors file, open for reading.

    Header and data are read through one handle, so a file that is replaced by a rename (as our writer
    does) keeps serving the old content; a file that is changed in place is noticed and refused. No memory
    map: a map of a file that shrinks kills the process, and its pages count as the process's own.

    Args:
        path: the file.

    Raises:
        HswqError: whatever `read_header` raises, or the file is being written.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise HswqError(
                f"{path.suffix} files are Python pickles, which could run code; they are never loaded",
                file=path,
                fix="convert it to .safetensors where you trust it",
            )
        self.path = path
        self._handle = open_regular(path)
        weakref.finalize(self, os.close, self._handle)
        self._stamp = self._state()
        self.header: Header = header_of(self._handle, path)
        if self._state() != self._stamp:
            raise HswqError("the file changed while it was opened", file=path, fix="try again")

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns

    def is_file(self, path: Path) -> bool:
        """Whether a path names the file that is open here."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except OSError:
            return False

    @property
    def current(self) -> bool:
        """Whether what is under the path now is the file that was opened, unchanged."""
        return self.is_file(self.path) and self._state() == self._stamp

    def read(self, info: TensorInfo) -> Tensor:
        """Read one tensor, shape and dtype as stored.

        Raises:
            HswqError: the file changed since it was opened, or cannot be read.
        """
        buffer = torch.empty(info.nbytes, dtype=torch.uint8)
        self._fill(buffer.numpy().data, info.begin, info.name)
        return buffer.view(DTYPES[info.dtype]).reshape(info.shape)

    def _fill(self, view: memoryview, offset: int, name: str | None) -> None:
        if self._state() != self._stamp:
            raise HswqError(
                "the file changed since it was opened", file=self.path, tensor=name, fix="open it again"
            )
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._handle, [view[done : done + _CHUNK]], offset + done)
            except OSError as error:
                raise HswqError(
                    "the file cannot be read", file=self.path, tensor=name, found=error
                ) from error
            if count == 0:
                raise HswqError(
                    "the file ended while a tensor was read", file=self.path, tensor=name, fix="open it again"
                )
            done += count

    def sha256(self) -> str:
        """SHA-256 of the whole file, hexadecimal."""
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_CHUNK, self.header.file_size)))
        for offset in range(0, self.header.file_size, _CHUNK):
            part = buffer[: min(_CHUNK, self.header.file_size - offset)]
            self._fill(part, offset, None)
            digest.update(part)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not yet read."""

    source: FileSource
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""
        return self.info.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype as stored."""
        return DTYPES[self.info.dtype]

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return self.info.nbytes

    @property
    def path(self) -> Path:
        """The file that holds it."""
        return self.source.path

    def read(self) -> Tensor:
        """The tensor, fresh memory."""
        return self.source.read(self.info)

    def read_rows(self, count: int) -> Tensor:
        """The first `count` rows (all, if there are fewer); the others are not read."""
        rows = min(count, self.shape[0])
        end = self.info.begin + (self.nbytes // self.shape[0] * rows if self.shape[0] else 0)
        return self.source.read(replace(self.info, shape=(rows, *self.shape[1:]), end=end))
