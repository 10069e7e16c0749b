"""Open the files of a checkpoint together: merge shards, take off the prefix, sort into slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hswq_lab.checkpoint.files import CONTENT_KEY, FileSet, locate
from hswq_lab.checkpoint.findings import Finding, warning_texts
from hswq_lab.checkpoint.index import Index, build_index
from hswq_lab.checkpoint.markers import METADATA_KEY, merge_metadata
from hswq_lab.checkpoint.native import make_native
from hswq_lab.checkpoint.prefixes import DEFAULT_PREFIX, Naming, find_prefix
from hswq_lab.checkpoint.producer import find_producer
from hswq_lab.checkpoint.readings import PRODUCERS, Reading
from hswq_lab.checkpoint.source import FileSource, Stored
from hswq_lab.errors import HswqError
from hswq_lab.models.foreign import looks_like_lora

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Opened:
    """What `open_files` found; see the attributes of `Checkpoint`."""

    sources: tuple[FileSource, ...]
    index: Index
    metadata: dict[str, str]
    naming: Naming
    warnings: list[str]


def open_files(
    path: Path, reading: Reading | None = None, shapes: Mapping[str, tuple[int, int]] | None = None
) -> Opened:
    """Open whatever `path` stands for; broken layers become findings of the index.

    Raises:
        HswqError: the files themselves cannot be used (missing, damaged, contradicting each other).
    """
    files = locate(path)
    sources = tuple(FileSource(file) for file in files.files)
    _refuse_mixture(sources, files, path)
    tensors = _merge(sources, files, path)
    metadata = _merge_metadata(sources, path)
    prefix = find_prefix(tensors)
    foreign = frozenset(name for name in tensors if not name.startswith(prefix))
    stored = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if len(stored) != len(tensors):
        twice = next(name for name in foreign if prefix + name in tensors)
        raise HswqError(
            "a tensor is there with and without prefix",
            file=path,
            tensor=twice,
            found=f"{twice} and {prefix}{twice}",
        )
    producer = find_producer(files.files, metadata)
    index = build_index(stored, metadata, reading, shapes, None if producer is None else PRODUCERS[producer])
    if looks_like_lora(tensors):
        index.findings.insert(0, _a_lora(tensors))
    if make_native(index, foreign) and not prefix:
        prefix = DEFAULT_PREFIX  # a diffusers layout has none; what is saved is a native one
    warnings = files.warnings + warning_texts(index.findings)
    return Opened(sources, index, metadata, Naming(prefix, foreign), warnings)


def _a_lora(names: Iterable[str]) -> Finding:
    return Finding(
        "error",
        "kind",
        "this is a LoRA, not a checkpoint of a model",
        found=next(iter(names)),
        expected="the weights of a model",
        fix="open it with hl.load_lora and attach it to a model; hswq-lab inspect says what is in it",
    )


def _refuse_mixture(sources: tuple[FileSource, ...], files: FileSet, path: Path) -> None:
    """A save over an older one that was killed leaves parts of both, whose names and shapes may fit."""
    told = {source.path.name: source.header.metadata.get(CONTENT_KEY) for source in sources}
    if files.content is not None:
        told["the index"] = files.content
    if len(set(told.values())) > 1:
        raise HswqError(
            "the parts of the checkpoint are of different saves",
            file=path,
            found=", ".join(f"{name}: {(digest or 'none')[:12]}" for name, digest in told.items())[:500],
            expected=f"one {CONTENT_KEY} in all of them",
            fix="a save over older parts was interrupted; save it again",
        )


def _merge(sources: tuple[FileSource, ...], files: FileSet, path: Path) -> dict[str, Stored]:
    """All files' tensors by name, file by file in the order of their data."""
    tensors: dict[str, Stored] = {}
    for source in sources:
        for name, info in source.header.tensors.items():
            if name in tensors:
                found = f"{tensors[name].path.name} and {source.path.name}"
                raise HswqError(
                    "two parts of the checkpoint hold the same tensor", file=path, tensor=name, found=found
                )
            tensors[name] = Stored(source, info)
    if files.index is not None:
        _check_index(files.index, tensors, path)
    return tensors


def _check_index(index: Mapping[str, Path], tensors: Mapping[str, Stored], path: Path) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].path != file:
            raise HswqError(
                "the index names a tensor that its part does not hold",
                file=path,
                tensor=name,
                expected=file.name,
            )
    extra = next((name for name in tensors if name not in index), None)
    if extra is not None:
        raise HswqError(
            "a part holds a tensor that the index does not name",
            file=path,
            tensor=extra,
            found=tensors[extra].path.name,
        )


def _merge_metadata(sources: tuple[FileSource, ...], path: Path) -> dict[str, str]:
    """The parts' metadata as one: layer lists are joined, anything else must agree.

    The digest of the content stays out: what is made from these values is another content.
    """
    merged: dict[str, str] = {}
    for source in sources:
        for key, value in source.header.metadata.items():
            if key == CONTENT_KEY:
                continue
            if key == METADATA_KEY and key in merged:
                merged[key] = merge_metadata(merged[key], value)
            elif merged.setdefault(key, value) != value:
                raise HswqError(
                    "two parts of the checkpoint disagree in their metadata",
                    file=path,
                    tensor=key,
                    found=f"{merged[key][:80]!r} and {value[:80]!r}",
                )
    return merged
