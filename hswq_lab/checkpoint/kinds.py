"""What each packed format stores: the facts that reading rules are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALE_PARTS = ("weight_scale", "weight_scale_2", "input_scale")

CHANNEL_SCALE = "pre_quant_scale"
INPUT_BASIS = "input_basis"


@dataclass(frozen=True)
class Kind:
    """A packed format on disk.

    Attributes:
        dtype: of `P.weight`.
        scales: parts that must be there.
        multiple: what N and K of the stored weight are padded to.
        values_per_byte: 2 where two codes share a byte.
        block: values along K that share one block scale; None where `weight_scale` holds one value or one a
            row.
        block_dtypes: dtypes of the block scales, the right one first.
        per_row: whether `weight_scale` may hold one value a row.
        rotatable: whether the stored values may be rotated.
        calibratable: whether an `input_scale` belongs to the format.
    """

    dtype: torch.dtype
    scales: tuple[str, ...]
    multiple: int = 1
    values_per_byte: int = 1
    block: int | None = None
    block_dtypes: tuple[torch.dtype, ...] = ()
    per_row: bool = False
    rotatable: bool = False
    calibratable: bool = False


KINDS = {
    "nvfp4": Kind(
        torch.uint8,
        ("weight_scale", "weight_scale_2"),
        multiple=16,
        values_per_byte=2,
        block=16,
        block_dtypes=(torch.float8_e4m3fn, torch.uint8, *FLOATS),
        rotatable=True,
        calibratable=True,
    ),
    "int8_tensorwise": Kind(torch.int8, ("weight_scale",), per_row=True, rotatable=True),
    # Files in which whole weights were cast to fp8 have no scale: it is 1 then.
    "float8_e4m3fn": Kind(torch.float8_e4m3fn, (), calibratable=True),
    "float8_e5m2": Kind(torch.float8_e5m2, (), calibratable=True),
    "mxfp8": Kind(
        torch.float8_e4m3fn,
        ("weight_scale",),
        multiple=32,
        block=32,
        block_dtypes=(torch.float8_e8m0fnu, torch.uint8),
    ),
}


def implied_format(
    dtype: torch.dtype, shape: tuple[int, ...], scale: tuple[torch.dtype, int] | None
) -> str | None:
    """The format that a weight's dtype, shape and scale imply without a marker; None if it is unpacked.

    Args:
        dtype: of the weight.
        shape: of the weight.
        scale: dtype and number of dimensions of `weight_scale`, None if there is none.
    """
    if len(shape) != 2:
        return None
    if (
        dtype == torch.float8_e4m3fn
        and scale is not None
        and scale[1] == 2
        and scale[0] in KINDS["mxfp8"].block_dtypes
    ):
        return "mxfp8"
    return next((name for name, kind in KINDS.items() if kind.dtype == dtype), None)
