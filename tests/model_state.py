"""What a model's numbers are, as bytes: weights, evidence, picture; of a model here, or of one made anew elsewhere."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

import hswq_lab as hl
from hswq_lab.formats import PackedWeight
from hswq_lab.model import Model


@dataclass(frozen=True)
class Declared:
    """All that a model's numbers may depend on: file, mode, dtype, device, and LoRAs as (path, strength, how)."""

    file: str
    mode: str = "auto"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    loras: tuple[tuple[str, float, str], ...] = ()


def weight_bytes(model: Model) -> dict[str, bytes]:
    """Every byte of every Linear, branches' factors included."""

    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    found = {}
    for name, layer in model.linears().items():
        value = layer.weight
        parts = value.disk_tensors().values() if isinstance(value, PackedWeight) else [value]
        found[name] = b"".join(raw(part) for part in parts)
        if layer.branches is not None:
            found[name] += b"".join(raw(part) for part in layer.branches.buffers())
    return found


def fingerprints(model: Model) -> dict[str, str]:
    """Hashes of the model's weights, evidence and picture: a few bytes that travel between processes."""
    run = model.generate(torch.ones(3, model.config.cap_dim), seed=7, steps=2, cfg=1.0, size=(16, 16))
    parts = {
        "weights": b"".join(weight_bytes(model).values()),
        "evidence": json.dumps(model.bake_report().to_dict()).encode(),
        "picture": run.latents.numpy().tobytes(),
    }
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def fingerprints_made_anew(declared: Declared, source: str) -> dict[str, str]:
    """The same of a model that this process builds from files and declared state, keeping nothing."""
    torch.set_num_threads(1)
    model = hl.load(declared.file, declared.device, declared.dtype, mode=declared.mode)
    for path, strength, how in declared.loras:
        model.attach(hl.load_lora(path), strength, how, source=hl.load(source))
    return fingerprints(model)
