"""The tensors and metadata of a LoRA file, read on demand, and the check that they are finite numbers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hswq_lab.checkpoint.header import DTYPES
from hswq_lab.checkpoint.source import FileSource
from hswq_lab.errors import HswqError
from hswq_lab.json_file import read_json
from hswq_lab.lora.settings import ADAPTER_CONFIG, PEFT_METADATA

if TYPE_CHECKING:
    from pathlib import Path

ADAPTER_WEIGHTS = "adapter_model.safetensors"
CONVERTED_KEY, MERGED_KEY = "hswq.converted_from", "hswq.merged_from"
"""Metadata of a LoRA that this package wrote: names and hashes of those that it was made of."""
FLOATS = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
)


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by key, read afresh from an open file at each access; shapes and dtypes are the header's."""

    def __init__(self, source: FileSource) -> None:
        self._source = source

    def __getitem__(self, key: str) -> Tensor:
        return self._source.read(self._source.header.tensors[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.header.tensors)

    def __len__(self) -> int:
        return len(self._source.header.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._source.header.tensors[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return DTYPES[self._source.header.tensors[key].dtype]


class HeldTensors(Mapping[str, Tensor]):
    """The same for tensors in memory, copied: they stay what their digest says."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._tensors[key].shape)

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._tensors[key].dtype


@dataclass(frozen=True, eq=False)
class RawLora:
    """A LoRA file before anything in it is understood.

    Attributes:
        path: the file; None for tensors in memory.
        sha256: of the file, or of names, dtypes, shapes and bytes in memory, hexadecimal.
        metadata: of the header, as text.
        adapter_config: content of PEFT's adapter_config.json where it belongs to this file, else empty.
    """

    path: Path | None
    name: str
    sha256: str
    tensors: StoredTensors | HeldTensors
    metadata: dict[str, str]
    adapter_config: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_raw(path: Path) -> RawLora:
    """Opens a LoRA file, or a folder in PEFT's layout.

    Raises:
        HswqError: no such file, no safetensors, or settings beside it that cannot be read.
    """
    if path.is_dir():
        path = path / ADAPTER_WEIGHTS
    source = FileSource(path)
    tensors = StoredTensors(source)
    config, warnings = _adapter_config(path)
    name = path.parent.name if path.name == ADAPTER_WEIGHTS else path.stem
    return RawLora(path, name, source.sha256(), tensors, dict(source.header.metadata), config, warnings)


def raw_from_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], name: str) -> RawLora:
    """The same from tensors in memory."""
    held = HeldTensors(tensors)
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for key in sorted(held):
        value = held[key].contiguous()
        digest.update(f"{key}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return RawLora(None, name, digest.hexdigest(), held, dict(metadata))


def identity(raw: RawLora, reading: str) -> str:
    """SHA-256 of a LoRA as it was understood, hexadecimal: the file's own where nothing outside it matters.

    Args:
        raw: the file; settings in its header win over an adapter_config.json, which then does not count.
        reading: how its scales were read where that was chosen, else empty.
    """
    config = {} if PEFT_METADATA in raw.metadata else raw.adapter_config
    if not config and not reading:
        return raw.sha256
    return hashlib.sha256(json.dumps([raw.sha256, config, reading], sort_keys=True).encode()).hexdigest()


def made_of(metadata: Mapping[str, str]) -> frozenset[str]:
    """SHA-256 of every LoRA that a converted or merged one was made of, and of those that these were made of."""
    told = " ".join(metadata.get(key, "") for key in (CONVERTED_KEY, MERGED_KEY))
    return frozenset(re.findall(r"\bsha256=([0-9a-f]{64})\b", told))


def check_values(tensors: StoredTensors | HeldTensors, path: Path | None) -> None:
    """Refuses an integer tensor, an empty one, a NaN or an infinity; reads one tensor at a time."""
    for key in tensors:
        if tensors.dtype(key) not in FLOATS:
            raise HswqError(
                "a LoRA tensor is not of a floating-point kind",
                file=path,
                tensor=key,
                found=str(tensors.dtype(key)),
                expected="float32, float16, bfloat16 or float8",
            )
        value = tensors[key].float()
        if value.numel() == 0:
            raise HswqError("a LoRA tensor is empty", file=path, tensor=key, found=tuple(value.shape))
        if not torch.isfinite(value).all():
            found = "NaN" if torch.isnan(value).any() else "infinity"
            raise HswqError(
                "a LoRA tensor is damaged", file=path, tensor=key, found=found, expected="finite numbers only"
            )


def _adapter_config(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """PEFT's settings beside the file, if they are this file's: it has PEFT's name, or is alone there."""
    config_path = path.parent / ADAPTER_CONFIG
    if not config_path.is_file():
        return {}, ()
    others = [p.name for p in path.parent.glob("*.safetensors") if p.name != path.name]
    if path.name != ADAPTER_WEIGHTS and others:
        return {}, (f"{ADAPTER_CONFIG} beside the file is not used: it may belong to {others[0]}",)
    content = read_json(config_path)
    if not isinstance(content, dict):
        raise HswqError(
            "the adapter's settings are not a JSON object", file=config_path, found=type(content).__name__
        )
    return content, ()
