"""From a layer's stored tensors and marker to a slot: which format it is, and whether its parts fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hswq_lab.checkpoint.findings import Finding
from hswq_lab.checkpoint.slots import Entry, PackedSlot, scalar
from hswq_lab.errors import HswqError
from hswq_lab.formats.rotation import GROUPS, group_for
from hswq_lab.formats.swizzle import swizzled_shape

if TYPE_CHECKING:
    from hswq_lab.checkpoint.markers import Marker
    from hswq_lab.checkpoint.readings import Reading
    from hswq_lab.checkpoint.source import Stored

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
WEIGHT_DTYPES: dict[str, torch.dtype] = {
    "nvfp4": torch.uint8,
    "int8_tensorwise": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
SCALES_OF = {
    "nvfp4": ("weight_scale", "weight_scale_2"),
    "int8_tensorwise": ("weight_scale",),
    "float8_e4m3fn": (),
    "float8_e5m2": (),
}
PART_NAMES = ("weight_scale", "weight_scale_2", "input_scale")


@dataclass
class Layer:
    """What a file holds about one layer.

    Attributes:
        name: without prefix and without ".weight".
        parts: stored tensors by role.
        stored_names: their names, without prefix, by role.
        marker: from the tensor or the header, None where there is neither.
        bias_rows: length of the bias, None without one.
        shape: logical (N, K) that the caller knows from the model.
    """

    name: str
    reading: Reading
    parts: dict[str, Stored] = field(default_factory=dict)
    stored_names: dict[str, str] = field(default_factory=dict)
    marker: Marker | None = None
    bias_rows: int | None = None
    shape: tuple[int, int] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The parameter's name."""
        return f"{self.name}.weight"

    def warn(self, rule: str, problem: str, found: object = None, fix: str | None = None) -> None:
        """Note something that the reader should know about this layer."""
        self.findings.append(
            Finding("warning", rule, problem, self.key, None if found is None else str(found), None, fix)
        )


def implied_format(layer: Layer) -> str | None:
    """The format that dtypes and shapes tell where no marker does; None for an unpacked weight.

    Raises:
        HswqError: packed bytes that lack their scales.
    """
    weight = layer.parts["weight"]
    has_scale = "weight_scale" in layer.parts or "weight_scale_2" in layer.parts
    if weight.dtype == torch.uint8 and (has_scale or len(weight.shape) == 2):
        name = "nvfp4"
    elif weight.dtype == torch.int8:
        name = "int8_tensorwise"
    elif weight.dtype in FP8 and (has_scale or len(weight.shape) == 2):
        name = FP8[weight.dtype]
    else:
        return None
    missing = [part for part in SCALES_OF[name] if part not in layer.parts]
    if missing:
        raise HswqError(
            f"a packed weight ({name} by its dtype) without its scale",
            tensor=layer.key,
            found=", ".join(part for part in PART_NAMES if part in layer.parts) or "no scale at all",
            expected=", ".join(f"{layer.name}.{part}" for part in missing),
        )
    return name


def packed_slot(layer: Layer) -> PackedSlot | None:
    """The slot of a layer's weight, None where it is not packed.

    Raises:
        HswqError: an unknown format, or parts that are missing or do not fit together.
    """
    if layer.marker is not None:
        name, rotated = layer.marker.format, layer.marker.rotated
    else:
        implied = implied_format(layer)
        if implied is None:
            return None
        name, rotated = implied, False
        if name in ("nvfp4", "int8_tensorwise"):
            layer.warn(
                "no-marker",
                f"no marker says how this layer is packed; read as {name} by dtype and shape, not rotated",
                fix="hswq-lab check FILE --source 16BIT tells whether it is rotated",
            )
    _check_parts(layer, name)
    shape = _logical_shape(layer, name)
    group = _group(layer, name, shape[1]) if rotated else None
    weight = layer.parts["weight"]
    parts = {role: part for role, part in layer.parts.items() if role in ("weight", *PART_NAMES)}
    nbytes = sum(part.nbytes for part in parts.values())
    entry = Entry(layer.key, name, shape, weight.dtype, group, nbytes, "input_scale" in parts)
    return PackedSlot(entry, parts, layer.reading)


def _check_parts(layer: Layer, name: str) -> None:
    weight = layer.parts["weight"]
    if name not in WEIGHT_DTYPES:
        raise HswqError(
            "the format of this layer is not known",
            tensor=layer.key,
            found=name[:80],
            expected=", ".join(WEIGHT_DTYPES),
        )
    if weight.dtype != WEIGHT_DTYPES[name] or len(weight.shape) != 2:
        raise HswqError(
            f"the marker says {name}, the weight is something else",
            tensor=layer.key,
            found=f"{weight.info.dtype} {list(weight.shape)}",
            expected=f"a {WEIGHT_DTYPES[name]} matrix".replace("torch.", ""),
        )
    for role in SCALES_OF[name]:
        if role not in layer.parts:
            raise HswqError(
                "a scale is missing", tensor=f"{layer.name}.{role}", expected=f"a scale of a {name} layer"
            )
    for role in PART_NAMES:
        if role in layer.parts:
            _check_scale(layer, name, role)


def _check_scale(layer: Layer, name: str, role: str) -> None:
    """Dtype and shape of one scale; the values of one-element scales."""
    stored = layer.parts[role]
    tensor = f"{layer.name}.{role}"
    if role == "weight_scale" and name == "nvfp4":
        _check_block_scales(layer, stored)
        return
    rows = layer.parts["weight"].shape[0]
    sizes = (1, rows) if role == "weight_scale" and name == "int8_tensorwise" else (1,)
    if stored.dtype not in FLOATS or math.prod(stored.shape) not in sizes:
        raise HswqError(
            "a scale has the wrong dtype or shape",
            tensor=tensor,
            found=f"{stored.info.dtype} {list(stored.shape)}",
            expected="F32, "
            + ("one value" if len(sizes) == 1 else f"one value or one for each of {rows} rows"),
        )
    if stored.dtype != torch.float32:
        layer.warn(
            "scale-dtype", f"{role} is stored in another dtype and was promoted to fp32", stored.info.dtype
        )
    if math.prod(stored.shape) == 1:
        value = float(scalar(stored))
        if not math.isfinite(value) or value < 0 or (value == 0 and role == "input_scale"):
            raise HswqError(
                "a scale has an impossible value",
                tensor=tensor,
                found=value,
                expected="a finite number above 0",
            )


def _check_block_scales(layer: Layer, stored: Stored) -> None:
    rows, half = layer.parts["weight"].shape
    if stored.dtype not in (torch.float8_e4m3fn, torch.uint8, *FLOATS):
        raise HswqError(
            "block scales have the wrong dtype",
            tensor=f"{layer.name}.weight_scale",
            found=stored.info.dtype,
            expected="F8_E4M3",
        )
    if stored.dtype in FLOATS:
        layer.warn(
            "scale-dtype",
            "block scales are stored in a wide dtype and were taken back to E4M3",
            stored.info.dtype,
        )
    blocks = -(-half // 8)
    padded = swizzled_shape(rows, blocks)
    allowed = [padded] if layer.reading.scales == "swizzled" else [(rows, blocks), padded]
    if layer.reading.scales == "swizzled" and (rows % 16 or half % 8):
        raise HswqError(
            "packed codes are not padded to multiples of 16",
            tensor=layer.key,
            found=[rows, half],
            expected="[ceil16(N), ceil16(K)/2]",
            fix="a file of ModelOpt or compressed-tensors goes through hswq-lab convert",
        )
    if stored.shape not in allowed:
        raise HswqError(
            "block scales do not fit the codes",
            tensor=f"{layer.name}.weight_scale",
            found=list(stored.shape),
            expected=" or ".join(str(list(shape)) for shape in allowed),
        )


def _logical_shape(layer: Layer, name: str) -> tuple[int, int]:
    """(N, K) from the marker, else from the model, else N from the bias; only then from the stored shape."""
    stored = layer.parts["weight"].shape
    rows, columns = (stored[0], 2 * stored[1]) if name == "nvfp4" else (stored[0], stored[1])
    marked = layer.marker.shape if layer.marker is not None else (None, None)
    known = layer.shape or (None, None)
    n = marked[0] or known[0] or layer.bias_rows or rows
    k = marked[1] or known[1] or columns
    padding = 16 if name == "nvfp4" else 1
    exact = layer.reading.scales == "linear" and (rows, columns) == (n, k)
    if not exact and (-(-n // padding) * padding != rows or -(-k // padding) * padding != columns):
        raise HswqError(
            "the logical shape does not fit the stored weight",
            tensor=layer.key,
            found=f"[{n}, {k}] for stored {list(stored)}",
            expected=f"[{rows}, {columns}]" + (" less a padding below 16" if padding == 16 else ""),
        )
    return n, k


def _group(layer: Layer, name: str, k: int) -> int:
    """The rotation group of a rotated layer."""
    group = layer.marker.group if layer.marker is not None else None
    if name not in ("nvfp4", "int8_tensorwise"):
        raise HswqError("this format is never rotated", tensor=layer.key, found=f"{name} with convrot")
    if group is None:
        group = group_for(k)
        if group is None:
            raise HswqError(
                "the layer is marked as rotated, but no group divides its K", tensor=layer.key, found=k
            )
        layer.warn(
            "no-group", "the marker gives no rotation group; the largest that divides K was taken", group
        )
    if k % group or group not in GROUPS:
        raise HswqError(
            "impossible rotation group",
            tensor=layer.key,
            found=f"{group} for K = {k}",
            expected="4, 16, 64 or 256, a divisor of K",
        )
    return group
