"""Writing checkpoints: streamed tensor by tensor, atomic, the same bytes for the same input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hswq_lab.arguments import path_of, whole
from hswq_lab.checkpoint.data_file import DataFile
from hswq_lab.checkpoint.files import CONTENT_KEY, INDEX_SUFFIX
from hswq_lab.checkpoint.header import metadata_text, read_header
from hswq_lab.checkpoint.markers import (
    MARKER_SUFFIX,
    METADATA_KEY,
    as_tensor,
    canonical,
    decode,
    metadata_json,
    same_meaning,
)
from hswq_lab.checkpoint.memory import give_back_freed
from hswq_lab.checkpoint.prefixes import Naming
from hswq_lab.checkpoint.raw import raw_bytes
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.progress import Progress, progress_of
from hswq_lab.results import write_text

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from hswq_lab.checkpoint.checkpoint import Checkpoint
    from hswq_lab.checkpoint.slots import Value

# Scales and markers up to this size are gathered at the end of the file, to be read at one go.
SMALL_BYTES = 256
LARGE_BYTES = 2**20  # what is worth tidying up after


def write(
    path: str | os.PathLike[str],
    items: Iterable[tuple[str, Value]],
    metadata: Mapping[str, object] | None = None,
    prefix: str | None = None,
    progress: Progress | None = None,
    *,
    source: Checkpoint | None = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write a checkpoint in the ComfyUI layout: tensors and markers of packed layers, and the header's list.

    Items are taken one by one and forgotten once written, so a generator streams a model of any size. The
    same items give the same bytes. A file appears under its name complete or not at all; what an earlier save had
    under this name, whole or split, goes once the new one is there. Links are replaced, never written through.

    Args:
        path: the file to write; with `max_shard_bytes` the name that the parts and the index are derived
            from.
        items: parameter names without prefix, and their values.
        metadata: for the header; None takes the source's. Values that are no text are written as JSON.
        prefix: in front of the names; None takes the source's, else "model.diffusion_model.".
        progress: called before each item.
        source: the checkpoint that the items come from: its markers are kept byte for byte where they still
            hold, names that had no prefix get none, and its own files are never overwritten.
        max_shard_bytes: split the output into parts of about this size, with an index. All of them name a digest
            of the whole: parts of two saves are not read together.

    Returns:
        The file, or the index of a split output.

    Raises:
        HswqError: the target is a file of `source`, a name occurs twice, or the disk refuses. Nothing is left
            behind.
    """
    target = path_of(path, "the file to write")
    if max_shard_bytes is not None:
        whole(max_shard_bytes, "the size of a part")
    if source is not None:
        _refuse_to_replace(source, [target, *_split_files(target)])
    if metadata is None:
        metadata = source.metadata if source is not None else {}
    text = {str(key): metadata_text(value) for key, value in metadata.items()}
    layout = _Layout(text, prefix, source)
    counted = _counted(items, source, progress_of(progress))
    if max_shard_bytes is None:
        return _write_one(target, counted, layout)
    return _write_shards(target, counted, layout, max_shard_bytes)


def _refuse_to_replace(source: Checkpoint, files: Iterable[Path]) -> None:
    """Refuses to write where the source lies: its values are read while the result is written."""
    for file in files:
        of_source = source.path is not None and file.resolve() == source.path.resolve()
        is_index = of_source and file.name.endswith(INDEX_SUFFIX)
        if is_index or any(opened.is_file(file) for opened in source.sources):
            raise HswqError(
                "the target is the file that is being read",
                file=file,
                fix="choose another name for the result",
            )


def _counted(
    items: Iterable[tuple[str, Value]], source: Checkpoint | None, progress: Progress
) -> Iterator[tuple[str, Value]]:
    """The items, with progress called before each and at the end."""
    total = len(items) if isinstance(items, Sized) else len(source) if source is not None else 0
    done = 0
    for done, (name, value) in enumerate(items, start=1):
        progress(min(done - 1, total), total, name)
        yield name, value
        if value.nbytes > LARGE_BYTES:
            del value
            give_back_freed()
    progress(total or done, total or done, "written")


def _write_one(target: Path, items: Iterable[tuple[str, Value]], layout: _Layout) -> Path:
    with DataFile(target) as file:
        for name, value in items:
            for stored, tensor, small in layout.tensors(name, value):
                file.add(stored, tensor, small=small)
        file.finish(layout.take_metadata())
        file.commit()
    _remove_split(target)
    return target


def _remove_split(target: Path) -> None:
    """Removes a split save of this name, if we wrote it: parts of others stay, and the folder is refused as ambiguous.

    A run that is killed in between leaves a folder that is refused, too; the next one removes the rest.
    """
    index, *parts = _split_files(target)
    if parts and all(map(_is_ours, parts)):
        for file in (index, *parts):
            file.unlink(missing_ok=True)


def _is_ours(part: Path) -> bool:
    try:
        return CONTENT_KEY in read_header(part).metadata
    except HswqError:
        return False


def _write_shards(target: Path, items: Iterable[tuple[str, Value]], layout: _Layout, limit: int) -> Path:
    """Parts that all name the digest of the whole, under their final names only once all are complete."""
    shards: list[DataFile] = []
    headers: list[dict[str, str]] = []
    weight_map: dict[str, int] = {}
    digest = sha256()
    with ExitStack() as stack:
        for name, value in items:
            if not shards or shards[-1].nbytes >= limit:
                if shards:  # the digest is known last; until then its place is kept, and nothing in memory
                    headers.append(layout.take_metadata())
                    shards[-1].finish(headers[-1] | {CONTENT_KEY: "0" * 2 * digest.digest_size})
                part = target.with_name(f"{_stem(target)}-{len(shards) + 1:05d}.safetensors")
                shards.append(stack.enter_context(DataFile(part)))
            for stored, tensor, small in layout.tensors(name, value):
                shards[-1].add(stored, tensor, small=small)
                weight_map[stored] = len(shards)
                digest.update(f"{len(shards)}:{stored}:{tensor.dtype}:{list(tensor.shape)}".encode())
                digest.update(raw_bytes(tensor))
        if not shards:
            raise HswqError("there is nothing to write", file=target)
        headers.append(layout.take_metadata())
        digest.update(json.dumps(headers, sort_keys=True).encode())
        for shard, header in zip(shards, headers, strict=True):
            shard.finish(header | {CONTENT_KEY: digest.hexdigest()})
        return _publish(target, shards, weight_map, digest.hexdigest())


def _publish(target: Path, shards: list[DataFile], weight_map: Mapping[str, int], content: str) -> Path:
    """Gives finished parts their names, then writes the index, then removes what an earlier save of this name had.

    A run that is killed in between leaves parts of two saves: their digests differ, so nobody reads the mixture.
    """
    names = [
        f"{_stem(target)}-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for shard, name in zip(shards, names, strict=True):
        shard.commit(target.with_name(name))
    told = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards), CONTENT_KEY: content},
        "weight_map": {stored: names[number - 1] for stored, number in sorted(weight_map.items())},
    }
    index, *parts = _split_files(target)
    write_text(index, json.dumps(told, indent=1))
    for old in (*parts, target):  # the index that named them is gone; a whole file of this name is older
        if old.name not in names and not old.is_dir():
            old.unlink(missing_ok=True)
    return index


def _stem(target: Path) -> str:
    return target.name.removesuffix(".safetensors")


def _split_files(target: Path) -> list[Path]:
    """The index and all parts that are there of a split file of this name; writing it again replaces them all."""
    part = re.compile(rf"{re.escape(_stem(target))}-\d{{5}}-of-\d{{5}}\.safetensors")
    folder = target.parent
    parts = [path for path in folder.iterdir() if part.fullmatch(path.name)] if folder.is_dir() else []
    return [target.with_name(f"{_stem(target)}{INDEX_SUFFIX}"), *parts]


class _Layout:
    """How values become stored tensors; remembers what was stored."""

    def __init__(self, metadata: dict[str, str], prefix: str | None, source: Checkpoint | None) -> None:
        self._metadata = metadata
        naming = source.naming if source is not None else Naming()
        self._naming = naming if prefix is None else replace(naming, prefix=prefix)
        self._markers = source.index.markers if source is not None else {}
        self._names: set[str] = set()
        self._layers: dict[str, dict[str, Any]] = {}  # of the file that is being written

    def take_metadata(self) -> dict[str, str]:
        """The header's metadata for the layers stored since the last call."""
        metadata = {key: value for key, value in self._metadata.items() if key != METADATA_KEY}
        if self._layers:
            metadata[METADATA_KEY] = metadata_json(self._layers, self._metadata.get(METADATA_KEY))
            self._layers = {}
        return metadata

    def tensors(self, name: str, value: Value) -> Iterable[tuple[str, Tensor, bool]]:
        """(stored name, tensor, whether it is small) for each stored tensor of a value."""
        for part, tensor, small in self._parts(name, value):
            stored = self._naming.stored(part)
            if stored in self._names or part == "__metadata__":
                raise HswqError("two values claim the same tensor name", tensor=stored)
            self._names.add(stored)
            yield stored, tensor, small

    def _parts(self, name: str, value: Value) -> Iterable[tuple[str, Tensor, bool]]:
        layer = name.removesuffix(".weight")
        raw = self._markers.get(layer)
        if not isinstance(value, PackedWeight):
            yield name, value, False
            if name.endswith(".weight") and raw is not None and decode(raw, layer) is None:
                yield f"{layer}.{MARKER_SUFFIX}", as_tensor(raw), True
            return
        if layer == name:
            raise HswqError("a packed weight's name does not end in .weight", tensor=name)
        marker = value.marker()
        if raw is None or not same_meaning(raw, marker):
            raw = canonical(marker)
        said = decode(raw, layer)
        self._layers[self._naming.stored(layer)] = dict(said.fields) if said is not None else marker
        for suffix, tensor in value.disk_tensors().items():
            yield f"{layer}.{suffix}", tensor, suffix != "weight" and tensor.nbytes <= SMALL_BYTES
        yield f"{layer}.{MARKER_SUFFIX}", as_tensor(raw), True
