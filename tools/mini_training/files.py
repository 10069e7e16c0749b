"""Writing and reading what training produces: weights in two shards, adapters, figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "mini_zimage.safetensors.index.json"
SHARDS = ("mini_zimage-00001-of-00002.safetensors", "mini_zimage-00002-of-00002.safetensors")
METADATA = {"format": "pt", "hswq.model": "mini-zimage"}


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Two shards of about equal size and their index; native names without prefix, in the order given."""
    total = sum(w.nbytes for w in weights.values())
    shards: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    written = 0
    for name, value in weights.items():
        shards[0 if written + value.nbytes <= total / 2 else 1][name] = value.cpu().contiguous()
        written += value.nbytes
    for file, tensors in zip(SHARDS, shards, strict=True):
        save_file(tensors, folder / file, metadata=METADATA)
    places = {name: file for file, tensors in zip(SHARDS, shards, strict=True) for name in tensors}
    index = {"metadata": {**METADATA, "total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of both shards."""
    return load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Write measured figures as JSON and show them."""
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures), flush=True)
