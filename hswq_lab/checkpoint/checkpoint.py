"""Checkpoint: a lazy mapping from parameter names to tensors and packed weights, from files or memory."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

from hswq_lab.arguments import path_of
from hswq_lab.checkpoint.header import metadata_text
from hswq_lab.checkpoint.index import Index
from hswq_lab.checkpoint.markers import canonical
from hswq_lab.checkpoint.opening import open_files
from hswq_lab.checkpoint.prefixes import DEFAULT_PREFIX, Naming
from hswq_lab.checkpoint.raw import raw_bytes
from hswq_lab.checkpoint.readings import COMFY, Reading
from hswq_lab.checkpoint.slots import Entry, Slot, Value, memory_slot
from hswq_lab.checkpoint.writer import write
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.progress import Progress, progress_of
from hswq_lab.shipped import checkpoint_path

if TYPE_CHECKING:
    import os

    from hswq_lab.checkpoint.source import FileSource


Default = TypeVar("Default")


class Checkpoint(Mapping[str, Value]):
    """Parameters by native name without prefix, e.g. "layers.0.attention.qkv.weight"; read when asked for.

    A weight in a number format is one `PackedWeight`; its scales and marker have no key of their own.
    Everything else, biases and tensors that nobody knows included, is a tensor under its name. Immutable;
    nothing that was read is kept.

    Attributes:
        path: of the file, index or folder; None in memory.
        metadata: the header's, as text.
        warnings: what the reader should know, one sentence each.
        reading: how it was opened, so that another process can open it in the same way.
        stated_shapes: likewise.
        naming: how names are written in a file.
        sources: the files that values are read from.
        index: what was found out about the files' layers.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        *,
        metadata: Mapping[str, str],
        naming: Naming,
        path: Path | None = None,
        sources: tuple[FileSource, ...] = (),
        index: Index | None = None,
        warnings: list[str] | None = None,
        reading: Reading | None = None,
        stated_shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._slots = dict(slots)
        self.metadata = dict(metadata)
        self.naming = naming
        self.path = path
        self.sources = sources
        self.index = index or Index()
        self.warnings = list(warnings or ())
        self.reading = reading
        self.stated_shapes = dict(stated_shapes or {})

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        reading: Reading | None = None,
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> Checkpoint:
        """Open a .safetensors file, a `*.index.json` with its parts, or a (diffusers) folder; headers only.

        Args:
            path: what to open.
            reading: how NVFP4 tensors are laid out, where their names do not tell; None believes markers,
                then the producer that the file names, else takes ComfyUI's layout.
            shapes: logical (N, K) by layer name where they are known from the model; markers say it too.

        Raises:
            HswqError: a file is missing, damaged or of another kind, or a layer's tensors break a rule.
        """
        opened = open_files(checkpoint_path(path), reading, shapes)
        errors = [finding for finding in opened.index.findings if finding.severity == "error"]
        if errors:
            raise errors[0].error(path)
        return cls(
            opened.index.slots,
            metadata=opened.metadata,
            naming=opened.naming,
            path=path_of(path, "a checkpoint"),
            sources=opened.sources,
            index=opened.index,
            warnings=opened.warnings,
            reading=reading,
            stated_shapes=shapes,
        )

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Value],
        metadata: Mapping[str, object] | None = None,
        prefix: str = DEFAULT_PREFIX,
    ) -> Checkpoint:
        """A checkpoint of values in memory.

        Args:
            mapping: parameter name without prefix → tensor or packed weight; not copied. Whoever changes one of them
                in place later, or gives it other memory (`t.data = …`), finds the checkpoint refusing that name.
                Changes that torch does not count go unnoticed: through `.data` (`t.data.mul_`), through a NumPy array
                on the same memory, by fused optimizers, and of tensors made in inference mode. Give clones where
                such changes may come.
            metadata: for the header; what is not text becomes JSON.
            prefix: what a file writes in front of the names.
        """
        text = {str(key): metadata_text(value) for key, value in (metadata or {}).items()}
        slots = {name: memory_slot(name, value) for name, value in mapping.items()}
        return cls(slots, metadata=text, naming=Naming(prefix))

    def __getitem__(self, name: str) -> Value:
        """The value, read now; raises HswqError where its bytes break a rule of its format."""
        return self._slot(name).load()

    @overload
    def get(self, name: str, /) -> Value | None: ...
    @overload
    def get(self, name: str, /, default: Value | Default) -> Value | Default: ...
    def get(self, name: str, /, default: object = None) -> object:
        """The value, or a default where there is no such name; it does not look for similar names first."""
        return self[name] if name in self._slots else default

    def __iter__(self) -> Iterator[str]:
        """Names in the order of the data."""
        return iter(self._slots)

    def __len__(self) -> int:
        """Number of names."""
        return len(self._slots)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a parameter; reads nothing."""
        return name in self._slots

    def __repr__(self) -> str:
        packed = sum(slot.entry.packed for slot in self._slots.values())
        return f"<Checkpoint {self.path or 'in memory'}: {len(self)} tensors, {packed} of them packed>"

    def _slot(self, name: str) -> Slot:
        # Not a KeyError only: a missing name in a file is a matter for the reader of the message.
        if name not in self._slots:
            near = difflib.get_close_matches(name, self._slots, n=1)
            raise UnknownNameError(
                "the checkpoint has no such tensor",
                file=self.path,
                tensor=name,
                fix=f"did you mean {near[0]}?" if near else None,
            )
        return self._slots[name]

    @property
    def prefix(self) -> str:
        """What the file writes in front of the names; used again for saving."""
        return self.naming.prefix

    def entry(self, name: str) -> Entry:
        """What a name holds, from header and marker alone; raises HswqError for an unknown name."""
        return self._slot(name).entry

    def entries(self) -> Iterator[Entry]:
        """All entries in order; reads nothing."""
        return (slot.entry for slot in self._slots.values())

    def slots(self) -> Iterator[Slot]:
        """All slots in order: entries with access to single parts."""
        return iter(self._slots.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → logical shape."""
        return {name: slot.entry.shape for name, slot in self._slots.items()}

    def with_values(
        self, values: Mapping[str, Value], metadata: Mapping[str, object] | None = None
    ) -> Checkpoint:
        """A checkpoint in which some names have other values (or are new); this one does not change.

        Args:
            values: by parameter name.
            metadata: entries to set in the header's metadata.
        """
        text = {str(key): metadata_text(value) for key, value in (metadata or {}).items()}
        return Checkpoint(
            self._slots | {name: memory_slot(name, value) for name, value in values.items()},
            metadata=self.metadata | text,
            naming=self.naming,
            sources=self.sources,
            index=self.index,
            warnings=self.warnings,
        )

    def rewritten(self, values: Mapping[str, Value], metadata: Mapping[str, str]) -> Checkpoint:
        """A checkpoint of these values alone, in memory, which a file names as it does those of this one."""
        slots = {name: memory_slot(name, value) for name, value in values.items()}
        return Checkpoint(slots, metadata=dict(metadata), naming=self.naming, index=self.index)

    def in_memory(self) -> Checkpoint:
        """The same with every value read now and kept on the CPU: nothing that happens to the file matters."""
        slots = {name: memory_slot(name, slot.load()) for name, slot in self._slots.items()}
        return Checkpoint(
            slots, metadata=self.metadata, naming=self.naming, index=self.index, warnings=self.warnings
        )

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str | None = None,
        progress: Progress | None = None,
        max_shard_bytes: int | None = None,
    ) -> Path:
        """Writes this checkpoint in the ComfyUI layout, whole or not at all.

        What an earlier save had under this name, whole or split, goes; a link there is replaced, never written through.

        Args:
            path: the file; with `max_shard_bytes` the name that the parts and the index are derived from.
            prefix: what to write in front of the names; None: as it was read.
            progress: told of every tensor.
            max_shard_bytes: splits the file into parts of about this size, with an index.

        Returns:
            The file, or the index of a split one.

        Raises:
            HswqError: the target, or a part of a split file of its name, is being read, or cannot be written.
        """
        return write(path, self.items(), None, prefix, progress, source=self, max_shard_bytes=max_shard_bytes)

    def verify(self, progress: Progress | None = None) -> None:
        """Read every packed weight once, so that damage is found now and not in the middle of a job.

        Raises:
            HswqError: a scale is NaN, or another rule is broken.
        """
        packed = [name for name, slot in self._slots.items() if slot.entry.packed]
        for done, name in enumerate(packed):
            progress_of(progress)(done, len(packed), name)
            self._slots[name].load()

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content: of the file it comes from, else over its files or over its values.

        Where bytes were not read as ComfyUI reads them (another producer's layout, shapes that the caller stated), over
        that, too: the values are others.
        """
        stored = [part for slot in self._slots.values() for part in slot.stored_parts()]
        readings = {
            str(part.reading) for part in stored if part.entry.format == "nvfp4" and part.reading != COMFY
        }
        if not readings and not self.stated_shapes:
            return self._sha256()
        told = json.dumps([self._sha256(), sorted(readings), self.stated_shapes], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    def _sha256(self) -> str:
        if self.path is not None and len(self.sources) == 1:
            return self.sources[0].sha256()
        digest = hashlib.sha256()
        if self.path is not None:
            for source in self.sources:
                digest.update(source.sha256().encode())
            return digest.hexdigest()
        for name in sorted(self):
            digest.update(name.encode())
            for part in _digest_parts(self[name]):
                digest.update(part)
        return digest.hexdigest()


class UnknownNameError(HswqError, KeyError):
    """A name that the checkpoint does not have; a KeyError too, as Mapping's own methods expect."""

    def __str__(self) -> str:
        return self._message()


def _digest_parts(value: Value) -> Iterator[bytes | memoryview]:
    tensors = value.disk_tensors() if isinstance(value, PackedWeight) else {"": value}
    if isinstance(value, PackedWeight):
        yield canonical(value.marker() | {"orig_shape": list(value.shape)})
    for suffix, tensor in tensors.items():
        yield f"{suffix}:{tensor.dtype}:{list(tensor.shape)}".encode()
        yield raw_bytes(tensor)
