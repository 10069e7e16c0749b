"""Who wrote a file, where it says so: the layout of its NVFP4 tensors follows from that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hswq_lab.checkpoint.markers import METADATA_KEY
from hswq_lab.checkpoint.readings import COMFY, PRODUCERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_CONFIGS = ("config.json", "hf_quant_config.json")
_CONFIG_KEYS = ("quantization_config", "quantization", "producer", "quant_method")
_MAX_CONFIG_BYTES = 10_000_000


def find_producer(files: Iterable[Path], metadata: Mapping[str, str]) -> str | None:
    """The producer, a key of `PRODUCERS`, that the header's metadata or a configuration names.

    Args:
        files: of the checkpoint.
        metadata: of its header.

    Returns:
        None where nothing says it.
    """
    if METADATA_KEY in metadata:
        return "comfy"
    texts = [metadata[key] for key in _CONFIG_KEYS if key in metadata]
    texts += [text for folder in {file.parent for file in files} for text in _configurations(folder)]
    for text in texts:
        for name, reading in PRODUCERS.items():
            if reading != COMFY and name in text.lower():
                return name
    return None


def _configurations(folder: Path) -> list[str]:
    """What the configurations of a folder say about quantisation; broken ones say nothing."""
    texts = []
    for name in _CONFIGS:
        file = folder / name
        try:
            if not file.is_file() or file.stat().st_size > _MAX_CONFIG_BYTES:
                continue
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            # A configuration is no part of the checkpoint: an unreadable one names no producer.
            continue
        if isinstance(content, dict):
            texts.append(json.dumps({key: content[key] for key in _CONFIG_KEYS if key in content}))
    return texts
