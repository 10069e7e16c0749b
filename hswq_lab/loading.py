"""`hl.load` and `hl.save`: models from files and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch

from hswq_lab.arguments import device_of, path_of
from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.checkpoint.baked import LORAS_KEY, SEEDS_KEY, baked_seeds
from hswq_lab.checkpoint.slots import located
from hswq_lab.declared import Attachment
from hswq_lab.errors import HswqError
from hswq_lab.model import Model, check_model
from hswq_lab.models.companion import Companion
from hswq_lab.models.families import architecture_of
from hswq_lab.models.mini import mini_companion
from hswq_lab.modes import Fp8Weights, ModeRequest, Requested, Uncalibrated
from hswq_lab.packing import layer_seed
from hswq_lab.progress import Progress
from hswq_lab.shipped import MINI_NAME, checkpoint_path

MODEL_KEY = "hswq.model"
Keep = Literal["file", "memory"]


def load(
    model: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    mode: Requested = "auto",
    uncalibrated: Uncalibrated | None = None,
    fp8_weights: Fp8Weights = "per_call",
    origin: str | None = None,
    keep: Keep = "file",
) -> Model:
    """Opens a model; packed weights are read once to verify them; they come again when needed.

    Args:
        model: "mini-zimage" (ships with the package), a .safetensors file, its index.json, or a diffusers folder;
            16-bit or packed.
        device: default: "cuda" if there is one, else "cpu".
        dtype: of activations and unpacked weights; default bf16 on a GPU, fp32 on a CPU.
        mode: "auto", "parity" (W4A16), "tc" (W4A4) or "tc8" (W4A8).
        uncalibrated: what to do with layers without input_scale in tc and tc8: None refuses, "dynamic" or "unit".
        fp8_weights: how tc8 multiplies on a card: "per_call" converts the NVFP4 weights at every call, "keep" holds
            them in FP8 as well: faster, one byte more a weight, the same numbers.
        origin: who asked for this mode, for the report; default: "default" or "asked for".
        keep: where the pristine weights are, to which taking a LoRA off returns: "file" reads a layer again when it is
            needed, and refuses if the file was changed since; "memory" holds a copy of all of them on the CPU, whatever
            becomes of the file.

    Raises:
        HswqError: no such file, a damaged one, not a known model family, or a mode that a layer cannot run in.
    """
    path, name = checkpoint_path(model), str(model)
    if not path.exists():
        raise HswqError(
            "there is no such model",
            file=path,
            expected=f"a file, a folder, or the name {MINI_NAME!r}",
            fix="check the path",
        )
    if keep not in get_args(Keep):
        raise HswqError(
            "unknown place for the weights", found=repr(keep), expected=" or ".join(get_args(Keep))
        )
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()  # a damaged scale is refused now, not in the middle of a picture
    if keep == "memory":
        checkpoint = checkpoint.in_memory()
    where = device_of(device)
    origin = origin or ("default" if mode == "auto" and uncalibrated is None else "asked for")
    return Model(
        checkpoint,
        name=MINI_NAME if name == MINI_NAME else path.name,
        companion=companion_for(checkpoint),
        device=where,
        dtype=dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32),
        request=ModeRequest(mode, uncalibrated, origin, fp8_weights),
    )


def companion_for(checkpoint: Checkpoint) -> Companion | None:
    """Text encoder and codec of a checkpoint, if the package has them.

    Known by the metadata that our packs carry, else by the network's sizes.
    """
    if checkpoint.metadata.get(MODEL_KEY) == MINI_NAME:
        return mini_companion()
    return architecture_of(checkpoint.shapes(), checkpoint.path).companion()


def save(
    model: Model,
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Writes a model's weights in the ComfyUI layout, whole or not at all.

    LoRAs that are baked become part of the file; its metadata name them with strength and way, and the seeds of the
    rounding. What an earlier save had under this name, whole or split, goes; a link there is replaced.

    Args:
        model: what to write.
        path: the file, which ends in .safetensors; with `max_shard_bytes` the name that parts and index are derived
            from.
        progress: told of every tensor.
        max_shard_bytes: splits the file into parts of about this size, with an index.

    Returns:
        The file, or the index of a split one.

    Raises:
        HswqError: a LoRA is attached as a branch (a file cannot hold that), the target is the file that is being read,
            or it cannot be written.
    """
    check_model(model)
    if path_of(path, "a model").suffix != ".safetensors":
        raise HswqError(
            "a model is saved as safetensors", file=path, expected="a name that ends in .safetensors"
        )
    branches = [str(item) for item in model.loras if item.how == "branch"]
    if branches:
        raise HswqError(
            "a LoRA that is attached as a branch cannot be saved in the file",
            file=path,
            found=", ".join(branches),
            fix="attach it with how='bake' or 'bake_from_source', or detach it",
        )
    source = model.checkpoint
    metadata = dict(source.metadata)
    if model.loras:
        told = [_told(item, model.layers()) for item in model.loras]
        metadata[LORAS_KEY] = json.dumps([*json.loads(metadata.get(LORAS_KEY, "[]")), *told])
        seeds = {layer: layer_seed(layer) for layer in model.baked_layers}
        try:
            metadata[SEEDS_KEY] = json.dumps(baked_seeds(metadata) | seeds)
        except HswqError as error:
            raise located(error, source.path, SEEDS_KEY) from error
    return write(
        path,
        model.effective_items(),
        metadata,
        None,
        progress,
        source=source,
        max_shard_bytes=max_shard_bytes,
    )


def _told(item: Attachment, layers: Mapping[str, tuple[int, int]]) -> dict[str, object]:
    lora = item.lora
    told: dict[str, object] = {
        "name": lora.name,
        "sha256": lora.sha256,
        "strength": item.strength,
        "how": item.how,
    }
    if lora.made_of:
        told["made_of"] = sorted(lora.made_of)
    applied = lora.coverage(layers).in_words
    return told | ({"applied": applied} if applied else {})
