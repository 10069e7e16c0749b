"""Dense weight to packed weight and back: the one place where rotation, scales and codes come together."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from hswq_lab import ops
from hswq_lab.errors import HswqError
from hswq_lab.formats import (
    GROUPS,
    Fp8Weight,
    Int8Weight,
    Mxfp8Weight,
    Nvfp4Weight,
    PackedWeight,
    decode_e4m3,
    dequantize_fp8,
    dequantize_mxfp8,
    encode_e4m3,
    quantize_fp8,
    quantize_mxfp8,
    requantize_fp8,
    requantize_mxfp8,
)
from hswq_lab.formats._checks import VALUE_DTYPES, describe
from hswq_lab.formats.e4m3 import E4M3_MAX
from hswq_lab.formats.nvfp4 import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.formats import Method

FORMATS = ("nvfp4", "int8_tensorwise", "float8_e4m3fn", "float8_e5m2", "mxfp8")
# The largest block scale that still rounds to 448.
_LARGEST_RATIO = 464.0
_LARGEST_SCALE = 0x7E  # 448 in E4M3


def pack_weight(
    w: Tensor,
    format: str,  # noqa: A002 - the format's own name everywhere else
    group: int | None,
    scales: Method = "rtn",
    importance: Tensor | None = None,
    *,
    name: str | None = None,
) -> PackedWeight:
    """Packs a dense weight.

    Args:
        w: [N, K], bf16, fp16 or fp32, unrotated.
        format: one of `FORMATS`.
        group: rotation group for nvfp4 and int8_tensorwise, None for no rotation; fp8 and mxfp8 are not
            rotated.
        scales: how NVFP4 block scales are chosen; the other formats have nothing to choose, it does not
            touch them.
        importance: fp32 [K], weights of the squared error a column IN THE STORED BASIS (mean squares of the
            rotated inputs), for nvfp4 with "four_six" or "sweep". A block of columns that are all 0 counts
            evenly.
        name: of the weight, for messages.

    Returns:
        The packed weight on w's device; NVFP4 without input_scale.

    Raises:
        HswqError: w is packed already, no matrix of floats or not finite; an unknown format; a group or an
            importance that does not fit.
    """
    _check_dense(w, group, name)
    if importance is not None:
        importance = _check_importance(importance, format, w, name)
    if format == "nvfp4":
        packed: PackedWeight = _pack_nvfp4(w, group, scales, importance)
    elif format == "int8_tensorwise":
        packed = Int8Weight(*ops.quantize_int8(w, group), _shape(w), group)
    elif format not in FORMATS:
        raise HswqError("unknown weight format", tensor=name, found=format, expected=" | ".join(FORMATS))
    elif group is not None:
        raise HswqError(
            f"{format} weights are not rotated", tensor=name, found=f"group {group}", expected="None"
        )
    elif format == "mxfp8":
        packed = Mxfp8Weight(*quantize_mxfp8(w), _shape(w))
    else:
        packed = Fp8Weight(*quantize_fp8(w, getattr(torch, format)), _shape(w))
    return packed


def dequantize(packed: PackedWeight) -> Tensor:
    """The UNROTATED values of a packed weight, fp32 [N, K]."""
    match packed:
        case Nvfp4Weight():
            return ops.dequantize_nvfp4(
                packed.codes, packed.scales, packed.scale, packed.shape, torch.float32, packed.group
            )
        case Int8Weight():
            return ops.dequantize_int8(packed.q, packed.scale, packed.group)
        case Fp8Weight():
            return dequantize_fp8(packed.data, packed.scale)
        case Mxfp8Weight():
            return dequantize_mxfp8(packed.data, packed.scales, packed.shape)
        case _:
            raise HswqError("not a packed weight", found=type(packed).__name__)


def requantize(packed: PackedWeight, w: Tensor, seed: int, *, name: str | None = None) -> PackedWeight:
    """The same kind of weight for changed values, stochastically rounded, its scales kept: baking in place.

    A block's (row's, tensor's) scale is raised only where its values no longer fit. Where the NVFP4 tensor
    scale itself no longer fits, it is doubled and the block scales are halved, as often as needed: their
    products stay, except where the halved block scale is subnormal. A weight of zeros, whose tensor scale
    is 0, takes a new one.

    Args:
        packed: the weight before the change.
        w: its values after the change, fp32 [N, K], unrotated.
        seed: of the rounding; see `layer_seed`.
        name: of the weight, for messages.

    Returns:
        The changed weight: same format, basis and input_scale.

    Raises:
        HswqError: w has another shape, is no matrix of floats, or is not finite.
    """
    _check_dense(w, packed.group, name)
    if _shape(w) != tuple(packed.shape):
        raise HswqError(
            "the changed values have another shape", tensor=name, found=list(w.shape), expected=packed.shape
        )
    match packed:
        case Nvfp4Weight():
            changed: PackedWeight = _requantize_nvfp4(packed, w, seed)
        case Int8Weight():
            q, scale = ops.requantize_int8(w, packed.scale, packed.group, seed)
            changed = replace(packed, q=q, scale=scale)
        case Fp8Weight():
            data, scale = requantize_fp8(w, packed.data.dtype, packed.scale, seed)
            changed = replace(packed, data=data, scale=scale)
        case Mxfp8Weight():
            data, scales = requantize_mxfp8(w, packed.scales, seed)
            changed = replace(packed, data=data, scales=scales)
        case _:
            raise HswqError("not a packed weight", tensor=name, found=type(packed).__name__)
    return changed


def outgrows(packed: Nvfp4Weight, amax: float) -> bool:
    """Whether the tensor scale does not suffice for (rotated) values up to `amax`; so it is where amax is no number."""
    return not math.isfinite(amax) or _too_small(packed.scale, torch.tensor(amax) / 2688.0)


def layer_seed(name: str) -> int:
    """The seed of a layer's stochastic rounding: CRC-32 of its name in UTF-8."""
    return zlib.crc32(name.encode())


def _pack_nvfp4(w: Tensor, group: int | None, method: Method, importance: Tensor | None) -> Nvfp4Weight:
    rotated = _rotated(w, group)
    scale = ops.tensor_scale_four_six(rotated) if method == "four_six" else ops.tensor_scale(rotated)
    codes, scales = ops.quantize_nvfp4(rotated, scale, method, importance)
    return Nvfp4Weight(codes, scales, scale, _shape(w), group)


def _requantize_nvfp4(packed: Nvfp4Weight, w: Tensor, seed: int) -> Nvfp4Weight:
    scale, scales = packed.scale, packed.scales
    if scale == 0:
        scale, scales = ops.tensor_scale(_rotated(w, packed.group)), torch.zeros_like(scales)
    codes, new_scales = ops.requantize_nvfp4(w.float(), scale, scales, seed, packed.group)
    # Only a block that got the largest scale can be too large for the tensor scale: no pass over all of w.
    largest = (
        ops.unswizzle(new_scales.view(torch.uint8), w.shape[0], -(-w.shape[1] // BLOCK)) == _LARGEST_SCALE
    )
    needed = ops.tensor_scale(_rotated(w[largest.any(dim=1)], packed.group))
    if _too_small(scale, needed):
        while _too_small(scale, needed):
            scale, scales = 2 * scale, encode_e4m3(decode_e4m3(scales) / 2)
        codes, new_scales = ops.requantize_nvfp4(w.float(), scale, scales, seed, packed.group)
    return replace(packed, codes=codes, scales=new_scales, scale=scale)


def _too_small(scale: Tensor, needed: Tensor) -> bool:
    """Whether the block scales that go with a tensor scale would have to be more than 448."""
    return bool(needed * E4M3_MAX > scale * _LARGEST_RATIO)


def _rotated(w: Tensor, group: int | None) -> Tensor:
    """The unrounded fp32 values in the basis to be stored."""
    return w.float() if group is None else ops.rotate(w.float(), group)


def _shape(w: Tensor) -> tuple[int, int]:
    return w.shape[0], w.shape[1]


def _check_dense(w: Tensor | PackedWeight, group: int | None, name: str | None) -> None:
    if isinstance(w, PackedWeight):
        raise HswqError(
            "the weight is packed already",
            tensor=name,
            found=w.format,
            expected="a dense weight",
            fix="pack the 16-bit source; or dequantise it first, which adds a second error to the first",
        )
    if w.dim() != 2 or min(w.shape) < 1 or w.dtype not in VALUE_DTYPES:
        expected = "bfloat16, float16 or float32 [N, K]; codes of one byte need their scales"
        raise HswqError("not a dense weight", tensor=name, found=describe(w), expected=expected)
    if group is not None and (group not in GROUPS or w.shape[1] % group):
        expected = f"4, 16, 64 or 256, a divisor of K = {w.shape[1]}, or None"
        raise HswqError(
            "the rotation group does not fit the weight", tensor=name, found=group, expected=expected
        )
    amax = float(w.abs().amax()) if w.dtype == torch.float64 else float(ops.tensor_scale(w)) * 2688.0
    if not math.isfinite(amax):
        bad = int((~torch.isfinite(w)).sum())
        raise HswqError("the weight is not finite", tensor=name, found=f"{bad} NaN or infinite values")
    # Sums over a group must stay finite in fp32.
    limit = torch.finfo(torch.float32).max / (group or 1)
    if amax > limit:
        raise HswqError(
            "the weight is too large to be rotated in fp32",
            tensor=name,
            found=amax,
            expected=f"at most {limit:.4g}",
        )


def _check_importance(importance: Tensor, format: str, w: Tensor, name: str | None) -> Tensor:  # noqa: A002
    """The importance relative to the largest of its block of 16, all that counts; even where all are 0."""
    if format != "nvfp4":
        raise HswqError("an importance is for nvfp4 weights only", tensor=name, found=format)
    k = w.shape[1]
    if tuple(importance.shape) != (k,) or not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        raise HswqError(
            "not an importance of the columns",
            tensor=name,
            found=describe(importance),
            expected=f"[{k}], finite, >= 0",
        )
    blocks = functional.pad(importance.to(w.device, torch.float32), (0, -k % BLOCK)).reshape(-1, BLOCK)
    largest = blocks.amax(dim=1, keepdim=True)
    return torch.where(largest > 0, blocks / largest, 1.0).flatten()[:k]
