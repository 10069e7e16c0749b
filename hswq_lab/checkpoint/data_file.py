"""One safetensors file in the making: data first, header last, memory bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from hswq_lab.checkpoint.header import DTYPE_CODES, MAX_HEADER_BYTES, TensorInfo, encode_header
from hswq_lab.checkpoint.raw import raw_bytes
from hswq_lab.errors import HswqError
from hswq_lab.partial import PartialFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

HOLD_BYTES = 64 * 2**20
RESERVED_BYTES = 2**20
ALIGNMENT = 8  # the widest dtype; readers view the bytes in place


class DataFile:
    """Takes tensors one by one and becomes a safetensors file.

    The header lies in front of the data but is known last. Up to `HOLD_BYTES` of tensors wait in memory, so
    that a small file gets a header that fits exactly; beyond that `RESERVED_BYTES` are kept free for it and
    filled with spaces, as the format allows. Tensors whose size would misalign what follows, and those that
    the caller calls small, go to the end of the file, the widest dtype first, then by name.

    Args:
        target: see `PartialFile`.
    """

    def __init__(self, target: Path) -> None:
        self._file = PartialFile(target)
        self._infos: list[TensorInfo] = []
        self._held: list[memoryview] = []
        self._tail: list[tuple[str, Tensor]] = []
        self._reserved: int | None = None  # bytes kept for the header; None while everything is held
        self._position = 0  # counted from the first byte of data

    @property
    def nbytes(self) -> int:
        """Bytes of data so far."""
        return self._position + sum(tensor.nbytes for _, tensor in self._tail)

    def add(self, name: str, tensor: Tensor, *, small: bool = False) -> None:
        """Append a tensor.

        Raises:
            HswqError: a dtype that the format does not know, or the disk refuses.
        """
        if tensor.dtype not in DTYPE_CODES or tensor.layout != torch.strided or tensor.is_meta:
            kind = "no data (meta)" if tensor.is_meta else f"{tensor.dtype} {tensor.layout}"
            raise HswqError("this tensor cannot be stored", tensor=name, found=kind)
        if small or tensor.nbytes % ALIGNMENT:
            self._tail.append((name, tensor))
        else:
            self._append(name, tensor)

    def _append(self, name: str, tensor: Tensor) -> None:
        begin, self._position = self._position, self._position + tensor.nbytes
        self._infos.append(
            TensorInfo(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape), begin, self._position)
        )
        data = raw_bytes(tensor)
        if self._reserved is not None:
            self._file.write(data, self._reserved + begin)
            return
        self._held.append(data)
        if self._position > HOLD_BYTES:
            self._reserved = RESERVED_BYTES
            self._flush()

    def _flush(self) -> None:
        position = self._reserved or 0
        for data in self._held:
            self._file.write(data, position)
            position += len(data)
        self._held.clear()

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write what waited and the header; the file is complete and durable but not yet under its name.

        A finished file can be finished again with other metadata.
        """
        for name, tensor in sorted(self._tail, key=lambda item: (-item[1].dtype.itemsize, item[0])):
            self._append(name, tensor)
        self._tail.clear()
        header = encode_header(self._infos, metadata, minimum=self._reserved or 0)
        if len(header) - 8 > MAX_HEADER_BYTES:
            raise HswqError("the header would be too long", file=self._file.target, found=len(header))
        if self._reserved is None:
            self._reserved = len(header)
            self._flush()
        elif len(header) > self._reserved:
            self._file.shift(self._reserved, self._position, len(header) - self._reserved)
            self._reserved = len(header)
        self._file.write(header, 0)
        self._file.sync()  # here and not in commit: the parts of a split file take their names at one go

    def commit(self, target: Path | None = None) -> None:
        """Give the finished file its name (or another one in the same folder)."""
        if target is not None:
            self._file.rename_to(target)
        self._file.commit()

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.clear()
        self._tail.clear()
        self._file.__exit__(kind, error, trace)
