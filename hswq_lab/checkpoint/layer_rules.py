"""From a layer's stored tensors and marker to a slot: which format it is, and whether its parts fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hswq_lab.checkpoint.findings import Finding
from hswq_lab.checkpoint.folding import folded
from hswq_lab.checkpoint.kinds import (
    CHANNEL_SCALE,
    FLOATS,
    INPUT_BASIS,
    KINDS,
    SCALE_PARTS,
    Kind,
    implied_format,
)
from hswq_lab.checkpoint.markers import MARKER_SUFFIX
from hswq_lab.checkpoint.readings import COMFY
from hswq_lab.checkpoint.slots import Entry, PackedSlot, scalar
from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import ceil_to
from hswq_lab.formats.block_scales import METHODS, Method
from hswq_lab.formats.rotation import GROUPS, group_for
from hswq_lab.formats.swizzle import swizzled_shape

if TYPE_CHECKING:
    from hswq_lab.checkpoint.markers import Marker
    from hswq_lab.checkpoint.readings import Reading
    from hswq_lab.checkpoint.slots import Slot
    from hswq_lab.checkpoint.source import Stored

_LARGEST = torch.finfo(torch.float32).max


@dataclass
class Layer:
    """What a file holds about one layer.

    Attributes:
        name: without prefix and without ".weight".
        told: whether anything says that this is the reading; else it is ComfyUI's for want of a better one.
        parts: stored tensors by role.
        stored_names: their names, without prefix, by role.
        marker: from the tensor or the header, None where there is neither.
        bias_rows: length of the bias, None without one.
        shape: logical (N, K) that the caller knows from the model.
        used: roles that went into the weight's slot; the others remain plain tensors.
    """

    name: str
    reading: Reading = COMFY
    told: bool = True
    parts: dict[str, Stored] = field(default_factory=dict)
    stored_names: dict[str, str] = field(default_factory=dict)
    marker: Marker | None = None
    bias_rows: int | None = None
    shape: tuple[int, int] | None = None
    used: set[str] = field(default_factory=set)
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


def packed_slot(layer: Layer) -> Slot | None:
    """The slot of a layer's weight, None where it is not packed.

    Raises:
        HswqError: an unknown format, or parts that are missing or do not fit together.
    """
    name = layer.marker.format if layer.marker is not None else _implied(layer)
    if name is None:
        return None
    if name not in KINDS:
        raise HswqError(
            "the format of this layer is not known",
            tensor=layer.key,
            found=name[:80],
            expected=", ".join(KINDS),
        )
    kind = KINDS[name]
    _check_weight(layer, name, kind)
    _check_scales(layer, name, kind)
    shape = _logical_shape(layer, kind)
    group = _group(layer, name, kind, shape[1]) if layer.marker is not None and layer.marker.rotated else None
    if layer.marker is None and kind.rotatable:
        layer.warn(
            "no-marker",
            f"no marker says how this layer is packed; read as {name} by dtype and shape, not rotated",
            fix="hswq-lab check FILE --source 16BIT tells whether it is rotated",
        )
    if name == "nvfp4" and not layer.told:
        layer.warn(
            "no-producer",
            "nothing says in which layout this NVFP4 is; read as ComfyUI's",
            fix="hswq-lab convert FILE with --producer, or with --source 16BIT, which tells",
        )
    wanted = ("weight", "weight_scale", "weight_scale_2") + (("input_scale",) if kind.calibratable else ())
    if name == "nvfp4":
        wanted += (INPUT_BASIS,)
        _check_basis(layer, shape[1])
    parts = {role: part for role, part in layer.parts.items() if role in wanted}
    nbytes = sum(part.nbytes for part in parts.values())
    rank = parts[INPUT_BASIS].shape[0] if INPUT_BASIS in parts else 0
    chosen = _activation_scales(layer)
    entry = Entry(layer.key, name, shape, kind.dtype, group, nbytes, "input_scale" in parts, rank, chosen)
    slot = PackedSlot(entry, parts, layer.reading)
    layer.used |= {MARKER_SUFFIX, CHANNEL_SCALE, *parts}
    if CHANNEL_SCALE not in layer.parts:
        return slot
    problem = (
        "a pre_quant_scale (AWQ) is folded into the weight, which is packed again; its input_scale is dropped"
    )
    layer.warn("pre-quant-scale", problem)
    return folded(slot, layer.parts[CHANNEL_SCALE])


def _implied(layer: Layer) -> str | None:
    weight, scale = layer.parts["weight"], layer.parts.get("weight_scale")
    told = None if scale is None else (scale.dtype, len(scale.shape))
    return implied_format(weight.dtype, weight.shape, told)


def _check_weight(layer: Layer, name: str, kind: Kind) -> None:
    weight = layer.parts["weight"]
    if weight.dtype != kind.dtype or len(weight.shape) != 2 or 0 in weight.shape:
        raise HswqError(
            f"the layer is said to be {name}, its weight is something else",
            tensor=layer.key,
            found=f"{weight.info.dtype} {list(weight.shape)}",
            expected=f"a {kind.dtype} matrix".replace("torch.", ""),
        )
    rows, columns = weight.shape[0], weight.shape[1] * kind.values_per_byte
    if layer.reading.scales == "swizzled" and (rows % kind.multiple or columns % kind.multiple):
        raise HswqError(
            f"stored weights are not padded to multiples of {kind.multiple}",
            tensor=layer.key,
            found=f"{rows} rows, {columns} columns",
            fix="a file of ModelOpt or compressed-tensors goes through hswq-lab convert",
        )


def _check_scales(layer: Layer, name: str, kind: Kind) -> None:
    present = [part for part in SCALE_PARTS if part in layer.parts]
    missing = [f"{layer.name}.{part}" for part in kind.scales if part not in present]
    if missing:
        raise HswqError(
            f"a packed weight ({name}) without its scale",
            tensor=layer.key,
            found=", ".join(present) or "no scale at all",
            expected=", ".join(missing),
        )
    if "weight_scale_2" in present and "weight_scale_2" not in kind.scales:
        raise HswqError(f"a scale that {name} does not have", tensor=layer.stored_names["weight_scale_2"])
    if "input_scale" in present and not kind.calibratable:
        layer.warn("idle-scale", f"an input_scale that {name} does not use; kept as a plain tensor")
    for part in present:
        if part == "weight_scale" and kind.block is not None:
            _check_block_scales(layer, kind, kind.block)
        else:
            _check_scale(layer, kind, part)


def _check_scale(layer: Layer, kind: Kind, part: str) -> None:
    """Dtype and shape of one scale; the values of one-element scales."""
    stored, tensor = layer.parts[part], layer.stored_names[part]
    rows = layer.parts["weight"].shape[0]
    per_row = part == "weight_scale" and kind.per_row
    if stored.dtype not in FLOATS or math.prod(stored.shape) not in ((1, rows) if per_row else (1,)):
        raise HswqError(
            "a scale has the wrong dtype or shape",
            tensor=tensor,
            found=f"{stored.info.dtype} {list(stored.shape)}",
            expected="F32, one value" + (f" or one for each of {rows} rows" if per_row else ""),
        )
    if stored.dtype != torch.float32:
        layer.warn(
            "scale-dtype",
            f"{tensor.rpartition('.')[2]} is stored in another dtype and was promoted to fp32",
            stored.info.dtype,
        )
    if math.prod(stored.shape) == 1:
        value = float(scalar(stored))
        # A layer of zeros has the weight scale 0; an input_scale can never be 0, and a divisor needs an inverse.
        divisor = layer.reading.factor == "divisor"
        too_small = value < 1 / _LARGEST if divisor else value == 0 and part == "input_scale"
        if not math.isfinite(value) or value < 0 or too_small:
            raise HswqError(
                "a scale has an impossible value",
                tensor=tensor,
                found=value,
                expected="a finite number above 0",
            )


def _check_block_scales(layer: Layer, kind: Kind, block: int) -> None:
    stored = layer.parts["weight_scale"]
    if stored.dtype not in kind.block_dtypes:
        raise HswqError(
            "block scales have the wrong dtype",
            tensor=layer.stored_names["weight_scale"],
            found=stored.info.dtype,
            expected=str(kind.block_dtypes[0]).removeprefix("torch."),
        )
    if stored.dtype in FLOATS:
        problem = "block scales are stored in a wide dtype and were taken back to E4M3"
        layer.warn("scale-dtype", problem, stored.info.dtype)
    rows, columns = layer.parts["weight"].shape
    blocks = -(-columns * kind.values_per_byte // block)
    padded = swizzled_shape(rows, blocks)
    allowed = [padded] if layer.reading.scales == "swizzled" else [(rows, blocks), padded]
    if stored.shape not in allowed:
        raise HswqError(
            "block scales do not fit the codes",
            tensor=layer.stored_names["weight_scale"],
            found=list(stored.shape),
            expected=" or ".join(str(list(shape)) for shape in allowed),
        )


def _check_basis(layer: Layer, k: int) -> None:
    stored = layer.parts.get(INPUT_BASIS)
    if stored is None:
        return
    if stored.dtype != torch.float8_e4m3fn or len(stored.shape) != 2 or stored.shape[1] != k:
        raise HswqError(
            "an input_basis that does not fit the layer",
            tensor=layer.stored_names[INPUT_BASIS],
            found=f"{stored.info.dtype} {list(stored.shape)}",
            expected=f"F8_E4M3 [rank, {k}]",
        )


def _activation_scales(layer: Layer) -> Method:
    """What the marker says about the activations' block scales; without a word, what everybody does."""
    said = "rtn" if layer.marker is None else layer.marker.fields.get("activation_scales", "rtn")
    for method in METHODS:
        if said == method:
            return method
    raise HswqError(
        "the marker asks for activation scales that are not known here",
        tensor=layer.key,
        found=repr(said)[:80],
        expected=", ".join(METHODS),
    )


def _logical_shape(layer: Layer, kind: Kind) -> tuple[int, int]:
    """(N, K) from the marker, else from the model, else N from the bias; only then from the stored shape."""
    stored = layer.parts["weight"].shape
    rows, columns = stored[0], stored[1] * kind.values_per_byte
    marked = layer.marker.shape if layer.marker is not None else (None, None)
    known = layer.shape or (None, None)
    n = marked[0] or known[0] or layer.bias_rows or rows
    k = marked[1] or known[1] or columns
    if (n, k) != (rows, columns) and (ceil_to(n, kind.multiple), ceil_to(k, kind.multiple)) != (
        rows,
        columns,
    ):
        raise HswqError(
            "the logical shape (from marker, model or bias) does not fit the stored weight",
            tensor=layer.key,
            found=f"[{n}, {k}]",
            expected=f"[{rows}, {columns}]"
            + (f" less a padding below {kind.multiple}" if kind.multiple > 1 else ""),
        )
    return n, k


def _group(layer: Layer, name: str, kind: Kind, k: int) -> int:
    """The rotation group of a rotated layer."""
    group = layer.marker.group if layer.marker is not None else None
    if not kind.rotatable:
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
