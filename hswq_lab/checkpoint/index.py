"""From the stored tensors of files to the slots of a checkpoint; every broken rule becomes a finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hswq_lab.checkpoint.findings import Finding, from_error
from hswq_lab.checkpoint.kinds import CHANNEL_SCALE, FLOATS, INPUT_BASIS
from hswq_lab.checkpoint.layer_rules import Layer, packed_slot
from hswq_lab.checkpoint.markers import (
    MARKER_SUFFIX,
    MAX_MARKER_BYTES,
    METADATA_KEY,
    Marker,
    canonical,
    decode,
    parse_metadata,
)
from hswq_lab.checkpoint.prefixes import resolve_layer
from hswq_lab.checkpoint.readings import COMFY, COMPRESSED_TENSORS, Reading
from hswq_lab.checkpoint.slots import Slot, plain_slot
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.checkpoint.source import Stored

# Leaf of a tensor's name → its role beside a weight. The second and third group are those of old fp8 files
# and of compressed-tensors.
ROLES = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "input_scale": "input_scale",
    MARKER_SUFFIX: MARKER_SUFFIX,
    "scale_weight": "weight_scale",
    "scale_input": "input_scale",
    "weight_packed": "weight",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
    CHANNEL_SCALE: CHANNEL_SCALE,
    INPUT_BASIS: INPUT_BASIS,
}
OLD_FP8_MARKER = "scaled_fp8"


@dataclass
class Index:
    """What a checkpoint's files hold.

    Attributes:
        slots: in the order of the data.
        markers: raw bytes of the marker tensors, by layer.
        matched: number of layers that the header's quantisation metadata names and the file has.
        unmatched: names in that metadata that fit no layer.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    markers: dict[str, bytes] = field(default_factory=dict)
    matched: int = 0
    unmatched: list[str] = field(default_factory=list)


def build_index(
    stored: Mapping[str, Stored],
    metadata: Mapping[str, str],
    reading: Reading | None = None,
    shapes: Mapping[str, tuple[int, int]] | None = None,
    producer: Reading | None = None,
) -> Index:
    """Sort stored tensors into layers and the rest, and make a slot for each.

    Args:
        stored: tensors by name without prefix, in the order of the data.
        metadata: the header's.
        reading: how NVFP4 is laid out where names do not tell; None: as ComfyUI does where a marker stands,
            else as the producer does.
        shapes: logical (N, K) by layer, where the caller knows them from the model.
        producer: the layout of whoever wrote the file, None where nothing tells.

    Returns:
        The index; it holds an error finding for every layer that could not be read.
    """
    index = Index()
    layers = _layers(stored, shapes or {}, index)
    for layer in layers.values():
        if layer.stored_names["weight"].endswith(".weight_packed"):
            layer.reading = COMPRESSED_TENSORS
        else:
            told = reading or (COMFY if MARKER_SUFFIX in layer.parts else producer)
            layer.reading, layer.told = told or COMFY, told is not None
    header_markers = _header_markers(metadata, layers, index)
    packed: dict[str, Slot] = {}  # by the stored name of the weight
    consumed: set[str] = set()
    if OLD_FP8_MARKER in stored:
        consumed.add(OLD_FP8_MARKER)
        problem = "the old fp8 layout (scaled_fp8, scale_weight) is read; saving writes the new one"
        index.findings.append(Finding("warning", "old-fp8", problem))
    for layer in layers.values():
        slot = _layer_slot(layer, header_markers.get(layer.name), index)
        if slot is not None:
            packed[layer.stored_names["weight"]] = slot
        elif layer.name in index.markers and MARKER_SUFFIX in layer.parts:
            layer.used.add(MARKER_SUFFIX)  # an empty one; the writer puts it back
        consumed.update(name for role, name in layer.stored_names.items() if role in layer.used)
    for name, tensor in stored.items():
        if name in packed:
            index.slots[packed[name].entry.name] = packed[name]
        elif name not in consumed:
            index.slots[name] = plain_slot(name, tensor)
    return index


def _layers(
    stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, int]], index: Index
) -> dict[str, Layer]:
    """Group tensors around their weights; parts without a weight stay by themselves and are reported."""
    layers: dict[str, Layer] = {}
    for name, tensor in stored.items():
        layer_name, _, leaf = name.rpartition(".")
        role = ROLES.get(leaf)
        if role is None or not layer_name:
            continue
        layer = layers.setdefault(layer_name, Layer(layer_name, shape=shapes.get(layer_name)))
        if role in layer.parts:
            names = f"{layer.stored_names[role]} and {name}"
            index.findings.append(
                Finding("error", "two-parts", "two tensors play the same part", layer_name, names)
            )
            continue
        layer.parts[role] = tensor
        layer.stored_names[role] = name
    for layer in layers.values():
        bias = stored.get(f"{layer.name}.bias")
        if bias is not None and len(bias.shape) == 1:
            layer.bias_rows = bias.shape[0]
        if "weight" not in layer.parts:
            problem = "scales or a marker without a weight; kept as plain tensors"
            index.findings.append(
                Finding("warning", "no-weight", problem, layer.name, ", ".join(layer.parts))
            )
    return {name: layer for name, layer in layers.items() if "weight" in layer.parts}


def _header_markers(
    metadata: Mapping[str, str], layers: Mapping[str, Layer], index: Index
) -> dict[str, Marker]:
    """Markers from the header, by layer; a name that fits no layer is an error."""
    if METADATA_KEY not in metadata:
        return {}
    try:
        named = parse_metadata(metadata[METADATA_KEY])
    except HswqError as error:
        index.findings.append(from_error(error, "header-marker"))
        return {}
    markers: dict[str, Marker] = {}
    for name, marker in named.items():
        layer = resolve_layer(name, layers)
        if layer is None:
            index.unmatched.append(name)
        elif layer in markers and not _agree(markers[layer], marker):
            problem = "the header names this layer in two spellings that contradict each other"
            index.findings.append(Finding("error", "header-marker", problem, layer, name))
        else:
            markers[layer] = marker
    index.matched = len(markers)
    if index.unmatched:
        index.findings.append(
            Finding(
                "error",
                "header-marker",
                f"the header's metadata names {len(index.unmatched)} layers that the file does not have "
                f"({index.matched} matched)",
                index.unmatched[0],
                ", ".join(index.unmatched[:5]),
                "names of layers in the file, with or without its prefix",
            )
        )
    return markers


def _agree(one: Marker, other: Marker) -> bool:
    """Whether two markers say the same about format and rotation; a side that gives no group accepts any."""
    groups_agree = one.group == other.group or None in (one.group, other.group)
    return one.format == other.format and one.rotated == other.rotated and groups_agree


def _layer_slot(layer: Layer, from_header: Marker | None, index: Index) -> Slot | None:
    try:
        layer.marker = _marker(layer, from_header, index)
        slot = packed_slot(layer)
    except HswqError as error:
        index.findings.append(from_error(error, "layer", layer.key))
        layer.used.update(layer.parts)  # packed bytes never pass for a tensor
        return None
    index.findings += layer.findings
    extra = sorted(role for role in layer.parts if role not in ("weight", MARKER_SUFFIX))
    if slot is None and extra and layer.parts["weight"].dtype in FLOATS:
        problem = "scales beside an unpacked weight; kept as plain tensors"
        index.findings.append(Finding("warning", "idle-scale", problem, layer.key, ", ".join(extra)))
    return slot


def _marker(layer: Layer, from_header: Marker | None, index: Index) -> Marker | None:
    """The layer's marker: its tensor, else the header's.

    Raises:
        HswqError: the tensor is no marker, or the two contradict each other.
    """
    tensor = layer.parts.get(MARKER_SUFFIX)
    if tensor is None:
        if from_header is not None:
            index.markers[layer.name] = canonical(from_header.fields)
        return from_header
    name = f"{layer.name}.{MARKER_SUFFIX}"
    if tensor.dtype not in (torch.uint8, torch.int8) or tensor.nbytes > MAX_MARKER_BYTES:
        raise HswqError(
            "this is no marker",
            tensor=name,
            found=f"{tensor.info.dtype} {list(tensor.shape)}",
            expected=f"U8, 1-D, at most {MAX_MARKER_BYTES} bytes",
        )
    raw = tensor.read().reshape(-1).view(torch.uint8).numpy().tobytes()
    marker = decode(raw, name)
    index.markers[layer.name] = raw
    if marker is None:
        return from_header
    if from_header is not None and not _agree(marker, from_header):
        raise HswqError(
            "the marker tensor and the header contradict each other",
            tensor=layer.key,
            found=f"tensor: {dict(marker.fields)}; header: {dict(from_header.fields)}",
        )
    return marker
