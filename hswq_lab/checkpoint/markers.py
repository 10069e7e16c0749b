"""Markers: the JSON that says how a layer is packed, as a tensor beside the layer or in the file's header."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from collections.abc import Mapping

MARKER_SUFFIX = "comfy_quant"
METADATA_KEY = "_quantization_metadata"
MAX_MARKER_BYTES = 65536
MAX_SIDE = 2**31


@dataclass(frozen=True)
class Marker:
    """What a marker says about a layer.

    Attributes:
        format: e.g. "nvfp4".
        rotated: whether the stored values are in the rotated basis.
        group: rotation group as written, None where the marker gives none.
        shape: logical (N, K), a side being None where the marker does not give it.
        fields: everything that the marker holds, flattened, unknown fields included.
        raw: the marker tensor's bytes, None for a marker from the header.
    """

    format: str
    rotated: bool
    group: int | None
    shape: tuple[int | None, int | None]
    fields: Mapping[str, Any]
    raw: bytes | None = None


def decode(raw: bytes, tensor: str) -> Marker | None:
    """Read the bytes of a `P.comfy_quant` tensor.

    Any spacing, trailing NULs, fields nested under "params" and JSON inside a JSON string are understood.

    Returns:
        None for a tensor of NULs, which says that the layer has no format.

    Raises:
        HswqError: no JSON object, or one whose fields make no sense.
    """
    text = raw.rstrip(b"\0 \t\r\n")
    if not text:
        return None
    if len(text) > MAX_MARKER_BYTES:
        raise HswqError("the marker is too long", tensor=tensor, found=len(text), expected=MAX_MARKER_BYTES)
    return interpret(_load(text, tensor), tensor, raw)


def _load(text: bytes | str, tensor: str) -> object:
    try:
        content = json.loads(text)
        while isinstance(content, str) and content.lstrip().startswith(("{", '"')):
            content = json.loads(content.rstrip("\0 \t\r\n"))
    except (ValueError, RecursionError) as error:
        raise HswqError("the marker is not valid JSON", tensor=tensor, found=repr(text)[:120]) from error
    return content


def interpret(content: object, tensor: str, raw: bytes | None = None) -> Marker:
    """Turn a marker's JSON content, an object or a bare format name, into a Marker.

    Raises:
        HswqError: a field is missing or of the wrong type; `tensor` names the layer.
    """
    if isinstance(content, str):
        content = {"format": content}
    if not isinstance(content, dict):
        raise HswqError("the marker is not a JSON object", tensor=tensor, found=repr(content)[:120])
    fields = _flatten(content, tensor)
    name = fields.get("format")
    if not isinstance(name, str):
        raise HswqError("the marker names no format", tensor=tensor, found=repr(content)[:120])
    rotated = fields.get("convrot", False)
    if not isinstance(rotated, bool):
        raise HswqError(
            "the marker's convrot is neither true nor false", tensor=tensor, found=repr(rotated)[:80]
        )
    group = _side(fields, "convrot_groupsize", tensor)
    return Marker(name, rotated, group if rotated else None, _shape(fields, tensor), fields, raw)


def _flatten(content: dict[str, Any], tensor: str) -> dict[str, Any]:
    params = content.get("params")
    if params is None:
        return content
    if not isinstance(params, dict):
        raise HswqError("the marker's params are not an object", tensor=tensor, found=repr(params)[:80])
    outer = {key: value for key, value in content.items() if key != "params"}
    for key in outer.keys() & params.keys():
        if outer[key] != params[key]:
            raise HswqError(
                f"the marker gives {key} twice, differently",
                tensor=tensor,
                found=f"{outer[key]!r} and {params[key]!r}"[:120],
            )
    return outer | params


def _shape(fields: Mapping[str, Any], tensor: str) -> tuple[int | None, int | None]:
    rows, columns = _side(fields, "out_features", tensor), _side(fields, "in_features", tensor)
    shape = fields.get("orig_shape")
    if shape is None:
        return rows, columns
    if (
        not isinstance(shape, list)
        or len(shape) < 2
        or not all(type(n) is int and 0 < n < MAX_SIDE for n in shape)
    ):
        raise HswqError("the marker's orig_shape is not [N, K]", tensor=tensor, found=repr(shape)[:80])
    for key, given, side in (("out_features", rows, shape[0]), ("in_features", columns, shape[1])):
        if given not in (None, side):
            raise HswqError(
                f"the marker's orig_shape and {key} differ", tensor=tensor, found=f"{shape} and {given}"
            )
    return shape[0], shape[1]


def _side(fields: Mapping[str, Any], key: str, tensor: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 < value < MAX_SIDE:
        raise HswqError(
            f"the marker's {key} is not a positive whole number", tensor=tensor, found=repr(value)[:80]
        )
    return value


def canonical(fields: Mapping[str, Any]) -> bytes:
    """The bytes that we write for a marker: JSON without spaces, fields in the order given."""
    return json.dumps(fields, separators=(",", ":")).encode("utf-8")


def as_tensor(raw: bytes) -> Tensor:
    """Marker bytes as the uint8 vector that goes to disk."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def same_meaning(raw: bytes, fields: Mapping[str, Any]) -> bool:
    """Whether stored marker bytes say, among other things, exactly what `fields` say about a layer."""
    old = decode(raw, MARKER_SUFFIX)
    new = interpret(dict(fields), MARKER_SUFFIX)
    if old is None:
        return False
    shapes_agree = all(now in (None, was) for was, now in zip(old.shape, new.shape, strict=True))
    chosen = [marker.fields.get("activation_scales", "rtn") for marker in (old, new)]
    return (
        (old.format, old.rotated, old.group) == (new.format, new.rotated, new.group)
        and shapes_agree
        and chosen[0] == chosen[1]
    )


def parse_metadata(text: str) -> dict[str, Marker]:
    """Read the header's `_quantization_metadata`: layer name as written → marker.

    Raises:
        HswqError: not the JSON that it should be.
    """
    content = _load(text, METADATA_KEY)
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, dict):
        raise HswqError(
            'the header\'s quantisation metadata is not {"layers": {…}}',
            tensor=METADATA_KEY,
            found=text[:120],
        )
    return {name: interpret(value, name) for name, value in layers.items()}


def metadata_json(layers: Mapping[str, Mapping[str, Any]], previous: str | None) -> str:
    """The header's `_quantization_metadata` for a file's layers; other fields of `previous` are kept."""
    old = _load(previous, METADATA_KEY) if previous is not None else {}
    kept = {key: value for key, value in old.items() if key != "layers"} if isinstance(old, dict) else {}
    content = {
        "format_version": "1.0",
        **kept,
        "layers": {name: dict(fields) for name, fields in layers.items()},
    }
    return json.dumps(content, separators=(",", ":"))


def merge_metadata(one: str, other: str) -> str:
    """Two files' `_quantization_metadata` as one; raises HswqError where they contradict each other."""
    layers = {**parse_metadata(one), **parse_metadata(other)}
    for name, marker in parse_metadata(one).items():
        if marker.fields != layers[name].fields:
            raise HswqError("two files' quantisation metadata contradict each other", tensor=name)
    return metadata_json({name: marker.fields for name, marker in layers.items()}, one)
