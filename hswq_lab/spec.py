"""ModelSpec: a few lines from which any process builds the same model; tasks carry it instead of a model."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from hswq_lab import ops
from hswq_lab.assembly import SharedWeights
from hswq_lab.checkpoint import Checkpoint, Reading
from hswq_lab.declared import Attachment, Way
from hswq_lab.errors import HswqError
from hswq_lab.lora import LoraFile, load_lora
from hswq_lab.model import Model, check_model
from hswq_lab.models.companion import Companion
from hswq_lab.modes import ModeRequest
from hswq_lab.owned import temporary_folder

if TYPE_CHECKING:
    from hswq_lab.lora.entries import FullLokrScale

CACHED_MODELS = 4
"""Models that one process keeps: a reference and three variants. Those of one file share its weights."""


@dataclass(frozen=True)
class FileSpec:
    """A checkpoint by its file (or index, or folder), the SHA-256 of its content, and how it was opened."""

    path: str
    sha256: str
    reading: Reading | None = None
    shapes: tuple[tuple[str, tuple[int, int]], ...] = ()

    def open(self) -> Checkpoint:
        """Opens it.

        Raises:
            HswqError: it is not there, or holds something else than it did when the spec was made.
        """
        checkpoint = Checkpoint.open(self.path, reading=self.reading, shapes=dict(self.shapes))
        _check_content(self.path, checkpoint.sha256, self.sha256)
        return checkpoint


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA on a model: its file and how it was attached."""

    path: str
    sha256: str
    full_lokr_scale: FullLokrScale
    strength: float
    how: Way
    source: FileSpec | None
    allow_unmatched: bool
    allow_baked: bool

    def attachment(self) -> Attachment:
        """Reads the file again; raises HswqError if it holds something else now."""
        lora = load_lora(self.path, full_lokr_scale=self.full_lokr_scale)
        _check_content(self.path, lora.sha256, self.sha256)
        source = None if self.source is None else _opened(self.source)[0]
        return Attachment(lora, self.strength, self.how, source, self.allow_unmatched, self.allow_baked)


@dataclass(frozen=True)
class ModelSpec:
    """Everything that a model's numbers depend on; picklable, and small.

    Attributes:
        file: the checkpoint.
        name: of the model.
        request: the mode asked for.
        loras: in the order in which they were attached.
        device: "cpu", "cuda", … ; "cuda" without a number is the worker's own first card.
        dtype: of activations.
        threads: of torch in the worker: sums may depend on it, and results are to be equal bit for bit.
        backend: what `ops.use_backend` asked for, None if nothing.
        companion: text encoder and codec.
        companion_identity: what stands for their content where specs are compared.
    """

    file: FileSpec
    name: str
    request: ModeRequest
    loras: tuple[LoraSpec, ...]
    device: str
    dtype: torch.dtype
    threads: int
    backend: ops.BackendName | None
    companion: Companion | None = field(compare=False, repr=False)
    companion_identity: str | None

    def model(self) -> Model:
        """The model, built in this process or taken from its cache of the last four.

        Raises:
            HswqError: a file is not there or has changed.
        """
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with _lock:
            if self not in _models:
                _models[self] = self._build()
            _models.move_to_end(self)
            while len(_models) > CACHED_MODELS:
                _models.popitem(last=False)
            return _models[self]

    def asked(self) -> AbstractContextManager[None]:
        """The context to use the model in: the back end that was asked for."""
        return nullcontext() if self.backend is None else ops.use_backend(self.backend)

    def _build(self) -> Model:
        checkpoint, shared = _opened(self.file)
        return Model(
            checkpoint,
            name=self.name,
            companion=self.companion,
            device=self.device,
            dtype=self.dtype,
            request=self.request,
            attachments=[lora.attachment() for lora in self.loras],
            shared=shared,
        )


_lock = threading.RLock()
_models: OrderedDict[ModelSpec, Model] = OrderedDict()
_files: weakref.WeakValueDictionary[FileSpec, Checkpoint] = weakref.WeakValueDictionary()
_weights: weakref.WeakValueDictionary[FileSpec, SharedWeights] = weakref.WeakValueDictionary()
_spilled: dict[int, FileSpec] = {}


def spec_of(model: Model) -> ModelSpec:
    """The spec of a model. A checkpoint or LoRA that was never saved is written to a temporary file first.

    That file goes away with the checkpoint (or LoRA) that it was made from, so a spec is good for as long
    as the model lives. Workers on other machines need to see the same temporary folder (TMPDIR).

    Raises:
        HswqError: a temporary file cannot be written.
    """
    return ModelSpec(
        file=_file_of(model.checkpoint),
        name=model.name,
        request=model.request,
        loras=tuple(_lora_spec(attachment) for attachment in model.loras),
        device=str(model.device),
        dtype=model.dtype,
        threads=torch.get_num_threads(),
        backend=ops.asked_backend(),
        companion=model.companion,
        companion_identity=None if model.companion is None else model.companion.identity,
    )


def forget_models() -> None:
    """Drops the models that this process has built from specs."""
    with _lock:
        _models.clear()


def purge(*models: Model) -> None:
    """Drops every network and every cached model: what is used next is built anew from files and declared state.

    Args:
        models: those whose networks go; the models themselves, with mode and LoRAs, stay usable.

    Raises:
        HswqError: one of them is no loaded model; nothing is dropped then.
    """
    for model in models:
        check_model(model)
    for model in models:
        model.unload()
    forget_models()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _opened(spec: FileSpec) -> tuple[Checkpoint, SharedWeights]:
    with _lock:
        checkpoint = _files.get(spec) or spec.open()
        shared = _weights.get(spec) or SharedWeights()
        _files[spec], _weights[spec] = checkpoint, shared
        return checkpoint, shared


def _lora_spec(attachment: Attachment) -> LoraSpec:
    file = _lora_file(attachment.lora)
    return LoraSpec(
        path=file.path,
        sha256=file.sha256,
        full_lokr_scale=attachment.lora.full_lokr_scale,
        strength=attachment.strength,
        how=attachment.how,
        source=None if attachment.source is None else _file_of(attachment.source),
        allow_unmatched=attachment.allow_unmatched,
        allow_baked=attachment.allow_baked,
    )


def _file_of(checkpoint: Checkpoint) -> FileSpec:
    if checkpoint.path is not None:
        shapes = tuple(sorted(checkpoint.stated_shapes.items()))
        return FileSpec(str(checkpoint.path.resolve()), checkpoint.sha256, checkpoint.reading, shapes)

    def save(path: Path) -> str:
        checkpoint.save(path)
        return Checkpoint.open(path).sha256

    return _spill(checkpoint, save)


def _lora_file(lora: LoraFile) -> FileSpec:
    if lora.path is not None:
        return FileSpec(str(lora.path.resolve()), lora.sha256)

    def save(path: Path) -> str:
        save_file({key: value.contiguous() for key, value in lora.tensors.items()}, path, dict(lora.metadata))
        return load_lora(path, full_lokr_scale=lora.full_lokr_scale).sha256

    return _spill(lora, save)


def _spill(owner: Checkpoint | LoraFile, save: Callable[[Path], str]) -> FileSpec:
    """Writes an object to a temporary file, once, that is removed with the object."""
    with _lock:
        if id(owner) not in _spilled:
            folder, handle = temporary_folder()
            weakref.finalize(owner, _unspill, id(owner), folder, handle)
            path = folder / "unsaved.safetensors"
            _spilled[id(owner)] = FileSpec(str(path), save(path))
        return _spilled[id(owner)]


def _unspill(key: int, folder: Path, handle: int | None) -> None:
    _spilled.pop(key, None)
    shutil.rmtree(folder, ignore_errors=True)
    if handle is not None:
        os.close(handle)


def _check_content(path: str | os.PathLike[str], found: str, expected: str) -> None:
    if found != expected:
        raise HswqError(
            "the file holds something else than when this task was made",
            file=path,
            found=f"SHA-256 {found}",
            expected=expected,
            fix="make the comparison again, and leave its files alone while it runs",
        )
