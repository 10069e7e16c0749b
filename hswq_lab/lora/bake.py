"""Baking: deltas put into the weight itself, in place (only the pack is there) or from the 16-bit source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

from hswq_lab import packing
from hswq_lab.errors import HswqError
from hswq_lab.formats import Fp8Weight, Method, Nvfp4Weight
from hswq_lab.lora.change import Change, Weight, bake
from hswq_lab.lora.delta import LayerDelta
from hswq_lab.lora.evidence import Baked, LayerEvidence, measure
from hswq_lab.lora.parts import LowRank
from hswq_lab.lora.rounding import round_stochastic
from hswq_lab.lora.targets import unpacked

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


def change_of(
    deltas: Weighted, value: Weight, weight: Callable[[], Tensor], norms_of: Tensor | None = None
) -> Change:
    """Σ strength · ΔW of a layer: as factors where all deltas are low-rank, else as a whole.

    Args:
        deltas: of one layer, with strengths, where the layer's weight is.
        value: that weight [N, K] as it is stored.
        weight: makes the pristine weight, fp32 [N, K], unrotated; asked for only if factors do not do.
        norms_of: fp32 [N, K], the source's weight for DoRA's norms, if there is one.
    """
    parts = [(part, strength) for delta, strength in deltas for part in delta.parts if strength != 0]
    low_rank = [(part, strength * part.scale) for part, strength in parts if isinstance(part, LowRank)]
    if len(low_rank) < len(parts):
        return Change(total_delta(deltas, weight(), norms_of))
    n, k = value.shape
    if not low_rank:
        return Change(torch.zeros(n, 0, device=value.device), torch.zeros(0, k, device=value.device))
    left = [_in_rows(part, n) for part, _ in low_rank]
    down = [part.down.float() * factor for part, factor in low_rank]
    return _without_zeros(left[0] if len(left) == 1 else torch.cat(left, dim=1), torch.cat(down))


def _in_rows(part: LowRank, n: int) -> Tensor:
    """The up factor with zeros in the rows of other parts, fp32 [n, r]."""
    up = part.up.float()
    return up if part.stop - part.start == n else functional.pad(up, (0, 0, part.start, n - part.stop))


def _without_zeros(left: Tensor, down: Tensor) -> Change:
    """Factors of zeros left out: they touch no row."""
    used = down.any(dim=1)
    return Change(left, down) if used.all() else Change(left[:, used].contiguous(), down[used])


def bake_in_place(
    value: Weight, deltas: Weighted, name: str, source: Tensor | None = None
) -> tuple[Weight, LayerEvidence]:
    """`put_in_place` and its evidence: (new weight of the same kind, what happened to the delta)."""
    case = put_in_place(value, deltas, name, source)
    return case.after, measure(case)


def put_in_place(
    value: Weight,
    deltas: Weighted,
    name: str,
    source: Tensor | None = None,
    known: Weight | None = None,
) -> Baked:
    """Puts deltas into a weight of which only the packed form exists.

    Dequantise and unrotate → add all deltas in fp32 → rotate and requantise once, with the pack's own scales
    and stochastic rounding seeded by the layer's name: round-to-nearest would drop small deltas altogether.
    Rows that no delta touches keep their codes bit for bit.

    Args:
        value: the pristine weight.
        deltas: of this layer, with strengths.
        name: the layer's name; seeds the rounding.
        source: the 16-bit weight [N, K], if there is one: for DoRA's norms and the growth of the error.
        known: what an earlier call with the same arguments made, to measure it instead of making it again.

    Returns:
        The new weight (`after`, of the same kind) beside all that its evidence is measured from.
    """
    origin = _checked(source, value, name)
    norms_of = origin.float() if origin is not None and _norms_from(deltas, origin) else None
    change = change_of(deltas, value, lambda: unpacked(value), norms_of)
    after = known
    if after is None:
        after = bake(value, change, name) if change.any() else value
    return Baked(name, "bake", value, after, change, origin, _norms_from(deltas, origin))


def bake_from_source(
    source: Tensor, value: Weight, deltas: Weighted, name: str, scales: str = "rtn"
) -> tuple[Weight, LayerEvidence]:
    """`put_from_source` and its evidence: (new weight of the same kind, what happened to the delta)."""
    case = put_from_source(source, value, deltas, name, scales)
    return case.after, measure(case)


def put_from_source(
    source: Tensor,
    value: Weight,
    deltas: Weighted,
    name: str,
    scales: str = "rtn",
    known: Weight | None = None,
) -> Baked:
    """Quantises the 16-bit source plus the deltas in the pack's format: no second rounding eats the delta.

    Args:
        source: the 16-bit weight [N, K].
        value: the pristine weight in the pack; it gives format, rotation and input_scale.
        deltas: of this layer, with strengths.
        name: the layer's name.
        scales: how the pack chose its block scales: "rtn", "four_six" or "sweep".
        known: as for `put_in_place`.

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
    origin = origin.float()
    change = change_of(deltas, value, lambda: origin)
    after = known
    if after is None:
        wanted = change.added_to(origin)
        after = _packed_like(value, wanted, name, cast("Method", scales)) if change.any() else value
    return Baked(name, "bake_from_source", value, after, change, origin, _norms_from(deltas, origin))


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


def _packed_like(value: Weight, wanted: Tensor, name: str, scales: Method) -> Weight:
    if isinstance(value, Tensor):
        # The source of a 16-bit layer is that layer: its grid drops small deltas like any other pack's.
        return round_stochastic(wanted, value.dtype, packing.layer_seed(name))
    if isinstance(value, Nvfp4Weight):
        packed = packing.pack_weight(wanted, value.format, value.group, scales=scales, name=name)
        assert isinstance(packed, Nvfp4Weight)  # noqa: S101 - by its format
        return packed.with_activations_of(value)
    packed = packing.pack_weight(wanted, value.format, value.group, name=name)
    if isinstance(packed, Fp8Weight) and isinstance(value, Fp8Weight):
        return replace(packed, input_scale=value.input_scale)
    return packed


def _checked(source: Tensor | None, value: Weight, name: str) -> Tensor | None:
    """The source on the weight's device."""
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
    return source.to(value.device)


def _norms_from(deltas: Weighted, origin: Tensor | None) -> str:
    if not any(delta.needs_weight for delta, _ in deltas):
        return ""
    return "pack" if origin is None else "source"
