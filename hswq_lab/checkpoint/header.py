"""The header of a safetensors file: read with every rule checked, written deterministically.

Layout (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON
object name → {dtype, shape, data_offsets} with an optional `__metadata__` of strings, then the tensors' bytes
without holes.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hswq_lab.checkpoint.sniff import what_it_is
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_DIMS = 32
MAX_ELEMENTS = 2**50  # far above any file; keeps absurd shapes away from torch's 64-bit strides

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in a file.

    Attributes:
        dtype: safetensors' code, a key of `DTYPES`.
        begin: first byte, counted from the start of the file.
        end: one past the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: tensors in the order of their data, metadata as text."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_size: int


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; no tensor data is touched.

    Raises:
        HswqError: the file is missing, of another kind, truncated, or its header breaks a rule of the format.
    """
    handle = open_regular(path)
    try:
        return header_of(handle, path)
    finally:
        os.close(handle)


def open_regular(path: Path) -> int:
    """A handle for reading an ordinary file.

    Raises:
        HswqError: there is no such file, it cannot be opened, or it is a folder, a pipe, or a device.
    """
    try:
        # A pipe that nobody writes into would keep a blocking open waiting.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        raise HswqError("the file does not exist", file=path, fix="check the name and the folder") from error
    except OSError as error:
        raise HswqError("the file cannot be read", file=path, found=error) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise HswqError("this is not a regular file", file=path, fix="give a .safetensors file")
    return handle


def header_of(handle: int, path: Path) -> Header:
    """As `read_header`, of a file that is open: whoever keeps the handle reads header and data of one file."""
    try:
        size = os.fstat(handle).st_size
        with open(handle, "rb", closefd=False) as stream:
            start = stream.read(512)
            length = _header_length(path, start, size)
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        raise HswqError("the file cannot be read", file=path, found=error) from error
    if len(text) < length:
        raise _truncated(path, 8 + length, 8 + len(text))
    return _parse(path, text, size)


def _header_length(path: Path, start: bytes, size: int) -> int:
    """The header's length, after everything that the first bytes can tell has been told."""
    length = int.from_bytes(start[:8], "little")
    if size >= 9 and length <= MAX_HEADER_BYTES and start[8:9] == b"{":
        if 8 + length > size:
            raise _truncated(path, 8 + length, size)
        return length
    kind = what_it_is(start, size)
    if kind is not None:
        raise HswqError(
            f"this is {kind}, not a safetensors file", file=path, fix="fetch or convert the real file"
        )
    if size < 9:
        raise HswqError(
            "truncated: too short to be a safetensors file",
            file=path,
            found=f"{size} bytes",
            expected="at least 10",
        )
    if length > MAX_HEADER_BYTES:
        raise HswqError(
            "this is not a safetensors file: absurd header length",
            file=path,
            found=f"{length} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
        )
    raise HswqError(
        "this is not a safetensors file: the header does not begin with '{'",
        file=path,
        found=repr(start[8:24]),
    )


def _truncated(path: Path, wanted: int, size: int) -> HswqError:
    return HswqError(
        f"truncated: header wants {wanted} bytes, file has {size}",
        file=path,
        fix="download or copy the file again",
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the name {twice!r} occurs twice")
    return content


def _parse(path: Path, text: bytes, size: int) -> Header:
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
        # Lone surrogates pass JSON, as escapes, but can be neither printed nor written again.
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        problem = "the JSON is nested too deeply" if isinstance(error, RecursionError) else error
        raise HswqError("the header is not valid JSON", file=path, found=str(problem)[:200]) from error
    if not isinstance(content, dict):
        raise HswqError("the header is not a JSON object", file=path, found=type(content).__name__)
    metadata = _metadata(path, content.pop("__metadata__", None))
    data_start = 8 + len(text)
    infos = [_tensor_info(path, name, record, data_start) for name, record in content.items()]
    infos.sort(key=lambda info: (info.begin, info.end))
    _check_layout(path, infos, data_start, size)
    return Header({info.name: info for info in infos}, metadata, size)


def _metadata(path: Path, raw: object) -> dict[str, str]:
    """Metadata as text; producers also write null, numbers and nested objects."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise HswqError("the header's __metadata__ is not a JSON object", file=path, found=type(raw).__name__)
    return {key: metadata_text(value) for key, value in raw.items()}


def metadata_text(value: object) -> str:
    """A metadata value as the string that the format asks for: text as it is, anything else as its JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _tensor_info(path: Path, name: str, record: object, data_start: int) -> TensorInfo:
    if not isinstance(record, dict) or not {"dtype", "shape", "data_offsets"} <= record.keys():
        raise HswqError("a header entry lacks dtype, shape or data_offsets", file=path, tensor=name)
    code, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise HswqError(
            "unknown dtype in the header",
            file=path,
            tensor=name,
            found=repr(code)[:80],
            expected=", ".join(DTYPES),
        )
    if not _counts(shape) or len(shape) > MAX_DIMS or math.prod(filter(None, shape)) > MAX_ELEMENTS:
        raise HswqError("impossible shape in the header", file=path, tensor=name, found=repr(shape)[:80])
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HswqError(
            "impossible data_offsets in the header", file=path, tensor=name, found=repr(offsets)[:80]
        )
    begin, end = offsets
    wanted = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != wanted:
        raise HswqError(
            "the header's shape and data_offsets contradict each other",
            file=path,
            tensor=name,
            found=f"{end - begin} bytes",
            expected=f"{wanted} bytes for {code} {shape}",
        )
    return TensorInfo(name, code, tuple(shape), data_start + begin, data_start + end)


def _counts(values: object) -> bool:
    """Whether this is a list of whole numbers, 0 or more (True and 1.0 are none)."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(path: Path, infos: list[TensorInfo], data_start: int, size: int) -> None:
    """Tensors lie one after the other, without overlap or hole, and end where the file ends."""
    wanted = max((info.end for info in infos), default=data_start)
    if wanted > size:
        raise _truncated(path, wanted, size)
    position = data_start
    for info in infos:
        if info.begin != position:
            problem = (
                "tensors overlap in the file" if info.begin < position else "there is a hole before a tensor"
            )
            raise HswqError(problem, file=path, tensor=info.name, found=info.begin, expected=position)
        position = info.end
    if position != size:
        raise HswqError(
            "the file goes on after its last tensor",
            file=path,
            found=f"{size} bytes",
            expected=f"{position} bytes",
        )


def encode_header(
    tensors: Iterable[TensorInfo], metadata: Mapping[str, str], *, minimum: int = 0, data_start: int = 0
) -> bytes:
    """A header's bytes, length in front, filled with spaces to a multiple of 8 and to `minimum` bytes.

    Args:
        tensors: in the order of their data; offsets are written relative to `data_start`.
        metadata: written first, if not empty.
        minimum: the least number of bytes, length included; reserves room for a header that is written last.
        data_start: where `begin` of the first tensor counts from.
    """
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for info in tensors:
        content[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [info.begin - data_start, info.end - data_start],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    room = max(-(-len(text) // 8) * 8, minimum - 8)
    return room.to_bytes(8, "little") + text.ljust(room, b" ")
