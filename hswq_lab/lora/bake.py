"""Baking: deltas put into the weight itself, in place (only the pack is there) or from the 16-bit source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, cast, get_args

import torch
from torch import Tensor

from hswq_lab import packing
from hswq_lab.errors import HswqError
from hswq_lab.formats import Fp8Weight, Method, Nvfp4Weight, PackedWeight
from hswq_lab.lora.delta import LayerDelta
from hswq_lab.lora.evidence import LayerEvidence, Measured, measure
from hswq_lab.lora.rounding import round_stochastic
from hswq_lab.lora.rows import keep_rows
from hswq_lab.lora.targets import unpacked

Weight: TypeAlias = Tensor | PackedWeight
Weighted: TypeAlias = Sequence[tuple[LayerDelta, float]]
"""Deltas of one layer with their strengths."""


def total_delta(deltas: Weighted, weight: Tensor, norms_of: Tensor | None = None) -> Tensor:
    """Σ strength · ΔW, fp32 [N, K]; every DoRA refers to the pristine weight, whatever else is put on it.

    Args:
        deltas: of one layer.
        weight: fp32 [N, K], the pristine weight, unrotated.
        norms_of: fp32 [N, K], the source's weight for DoRA's norms, if there is one.
    """
    total = torch.zeros_like(weight, dtype=torch.float32)
    for delta, strength in deltas:
        if strength != 0:
            delta.add_to(total, strength, weight, norms_of)
    return total


def bake_in_place(
    value: Weight, deltas: Weighted, name: str, source: Tensor | None = None
) -> tuple[Weight, LayerEvidence]:
    """`put_in_place` and its evidence: (new weight of the same kind, what happened to the delta)."""
    case = put_in_place(value, deltas, name, source)
    return case.after, measure(case)


def put_in_place(value: Weight, deltas: Weighted, name: str, source: Tensor | None = None) -> Measured:
    """Puts deltas into a weight of which only the packed form exists.

    Dequantise and unrotate → add all deltas in fp32 → rotate and requantise once, with the pack's own scales
    and stochastic rounding seeded by the layer's name: round-to-nearest would drop small deltas altogether.
    Rows that no delta touches keep their codes bit for bit.

    Args:
        value: the pristine weight.
        deltas: of this layer, with strengths.
        name: the layer's name; seeds the rounding.
        source: the 16-bit weight [N, K], if there is one: for DoRA's norms and the growth of the error.

    Returns:
        The new weight (`after`, of the same kind) beside all that its evidence is measured from.
    """
    weight = unpacked(value)
    origin = _checked(source, value, name)
    total = total_delta(deltas, weight, origin)
    after = value
    touched = _touched(total)
    if touched.any():
        after = _requantized(value, weight + total, name)
        if not touched.all():
            after = keep_rows(value, after, ~touched)
    return Measured(name, "bake", value, after, weight, total, touched, origin, _norms_from(deltas, origin))


def bake_from_source(
    source: Tensor, value: Weight, deltas: Weighted, name: str, scales: str = "rtn"
) -> tuple[Weight, LayerEvidence]:
    """`put_from_source` and its evidence: (new weight of the same kind, what happened to the delta)."""
    case = put_from_source(source, value, deltas, name, scales)
    return case.after, measure(case)


def put_from_source(
    source: Tensor, value: Weight, deltas: Weighted, name: str, scales: str = "rtn"
) -> Measured:
    """Quantises the 16-bit source plus the deltas in the pack's format: no second rounding eats the delta.

    Args:
        source: the 16-bit weight [N, K].
        value: the pristine weight in the pack; it gives format, rotation and input_scale.
        deltas: of this layer, with strengths.
        name: the layer's name.
        scales: how the pack chose its block scales: "rtn", "four_six" or "sweep".

    Returns:
        The new weight (`after`, of the same kind) beside the pristine pack's, against which its evidence is
        measured. A weight with one INT8 scale for all rows gets a scale a row.

    Raises:
        HswqError: a source of another shape or a quantised one, or scales chosen in a way that needs more
            than them.
    """
    if scales not in get_args(Method):
        raise HswqError(
            "baking from source cannot choose scales this way",
            tensor=name,
            found=scales,
            expected=", ".join(get_args(Method)),
            fix="choose one of these, or attach the LoRA as a branch",
        )
    origin = _checked(source, value, name)
    assert origin is not None  # noqa: S101 - a source was given
    weight = unpacked(value)
    total = total_delta(deltas, origin)
    touched = _touched(total)
    after = _packed_like(value, origin + total, name, cast("Method", scales)) if touched.any() else value
    return Measured(
        name, "bake_from_source", value, after, weight, total, touched, origin, _norms_from(deltas, origin)
    )


def total_bias(deltas: Weighted) -> Tensor | None:
    """Σ strength · Δb, fp32 [N]; None where no delta has a bias."""
    found = [bias * strength for delta, strength in deltas if (bias := delta.bias()) is not None]
    return torch.stack(found).sum(0) if found else None


def bake_bias(bias: Tensor | None, deltas: Weighted, name: str) -> Tensor | None:
    """The layer's bias with Σ strength · Δb.

    A 16-bit bias stays 16-bit and is rounded stochastically, as weights are: to nearest, it would lose a
    small delta.

    Args:
        bias: [N], the pristine one; None without one.
        deltas: of this layer, with strengths.
        name: the layer's name; seeds the rounding.

    Returns:
        [N] in the bias's dtype, fp32 where there was none; None if it stays absent.
    """
    total = total_bias(deltas)
    if total is None or not total.any():
        return bias
    if bias is None:
        return total
    wanted = bias.float() + total.to(bias.device)
    return round_stochastic(wanted[None], bias.dtype, packing.layer_seed(f"{name}.bias"))[0]


def _touched(total: Tensor) -> Tensor:
    """Rows that are not all zeros, bool [N]; two reductions are several times faster than a mask."""
    return (total.amax(dim=1) != 0) | (total.amin(dim=1) != 0)


def _requantized(value: Weight, wanted: Tensor, name: str) -> Weight:
    seed = packing.layer_seed(name)
    if isinstance(value, PackedWeight):
        return packing.requantize(value, wanted, seed, name=name)
    return round_stochastic(wanted, value.dtype, seed)


def _packed_like(value: Weight, wanted: Tensor, name: str, scales: Method) -> Weight:
    if isinstance(value, Tensor):
        # The source of a 16-bit layer is that layer: its grid drops small deltas like any other pack's.
        return round_stochastic(wanted, value.dtype, packing.layer_seed(name))
    if isinstance(value, Nvfp4Weight):
        packed = packing.pack_weight(wanted, value.format, value.group, scales=scales, name=name)
        assert isinstance(packed, Nvfp4Weight)  # noqa: S101 - by its format
        return packed.with_input_scale(value.input_scale)
    packed = packing.pack_weight(wanted, value.format, value.group, name=name)
    if isinstance(packed, Fp8Weight) and isinstance(value, Fp8Weight):
        return replace(packed, input_scale=value.input_scale)
    return packed


def _checked(source: Tensor | None, value: Weight, name: str) -> Tensor | None:
    """The source as fp32 on the weight's device."""
    if source is None:
        return None
    if tuple(source.shape) != tuple(value.shape):
        raise HswqError(
            "the source's weight has another shape than the pack's",
            tensor=name,
            found=tuple(source.shape),
            expected=tuple(value.shape),
            fix="give the checkpoint that the pack was made from",
        )
    if not source.is_floating_point() or source.dtype.itemsize < 2:
        raise HswqError("the source's weight is itself quantised", tensor=name, found=str(source.dtype))
    return source.to(value.device).float()


def _norms_from(deltas: Weighted, origin: Tensor | None) -> str:
    if not any(delta.needs_weight for delta, _ in deltas):
        return ""
    return "pack" if origin is None else "source"
