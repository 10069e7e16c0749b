"""Whether 16-bit weights are those that a pack was made from: by the digest that it tells, else by their values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor

from hswq_lab import packing
from hswq_lab.formats import Method, Nvfp4Weight, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.checkpoint.checkpoint import Checkpoint
    from hswq_lab.checkpoint.slots import Value

PACK_KEY = "hswq.pack"
"""Metadata of a pack: JSON of the source's sha256, how block scales were chosen, and the plan."""

SCALES_KEY = "hswq.scales"
"""Metadata of a pack: how its block scales were chosen ("rtn", "four_six", …); baking from source does the same."""

# ‖W − S‖ of a weight W to its source S, against the error of S rounded stochastically with the scales of W. Measured on
# every layer of the small model: 0.60 to 0.72 in each format and way of choosing scales; NVFP4 by GPTQ, which
# trades weights against each other, 0.61 to 1.71. A source with 20 % of noise has 1.43 on NVFP4, 5 and more elsewhere.
_NEAREST = 1.2
_TRADED = 2.5


@dataclass(frozen=True)
class Fit:
    """A weight W beside a source S.

    Attributes:
        verdict: "same" where S, packed as the pack says, gives W itself; "near" where the format explains the
            difference, else "far".
        error: ‖W − S‖ / ‖S‖.
        limit: the largest error that the format explains.
    """

    verdict: Literal["same", "near", "far"]
    error: float
    limit: float


class Provenance:
    """What a pack says it was made from, and a source.

    Args:
        metadata: the pack's.
        source: the 16-bit weights that may be those.

    Attributes:
        told: the SHA-256 of the pack's source, as its metadata have it; None where they do not.
    """

    def __init__(self, metadata: Mapping[str, str], source: Checkpoint) -> None:
        self._source = source
        told = _json_object(metadata.get(PACK_KEY, ""))
        digest = told.get("source_sha256")
        self.told = digest if isinstance(digest, str) and digest else None
        # What another program made may have been rounded in any way.
        self._traded = told.get("scales") in ("gptq", None)
        scales = metadata.get(SCALES_KEY, "rtn")
        self._scales = cast("Method", scales) if scales in get_args(Method) else "rtn"

    @property
    def given(self) -> str:
        """The SHA-256 of the source; reads its files once."""
        return self._source.sha256

    @cached_property
    def certain(self) -> bool:
        """Whether the digests are equal: nothing need be compared."""
        return self.told is not None and self.told == self.given

    def fit(self, name: str, value: Value, source: Tensor) -> Fit:
        """Compares a weight of the pack with the source's.

        Args:
            name: of the weight; seeds a rounding.
            value: [N, K], as the pack has it.
            source: [N, K], 16-bit, in the units of `value`, on its device.
        """
        wanted = source.float()
        norm = float(wanted.norm()) or 1.0
        if isinstance(value, Tensor):
            same = alike(value, source)
            error = float((value.float() - wanted).norm()) / norm
            return Fit("same" if same else "far", error, 0.0)
        values = packing.dequantize(value)
        error = float((values - wanted).norm()) / norm
        if torch.equal(packing.dequantize(self._packed_like(value, wanted, name)), values):
            return Fit("same", error, error)
        rounded = packing.requantize(value, wanted, packing.layer_seed(name), name=name)
        traded = self._traded and (self.told is None or isinstance(value, Nvfp4Weight))
        limit = (
            (_TRADED if traded else _NEAREST) * float((packing.dequantize(rounded) - wanted).norm()) / norm
        )
        return Fit("near" if error <= limit else "far", error, limit)

    def _packed_like(self, value: PackedWeight, wanted: Tensor, name: str) -> PackedWeight:
        scales: Method = self._scales if isinstance(value, Nvfp4Weight) else "rtn"
        return packing.pack_weight(wanted, value.format, value.group, scales=scales, name=name)


def alike(values: Tensor, wanted: Tensor) -> bool:
    """Whether unpacked values are the same but for the rounding of the coarser of two float dtypes."""
    if values.dtype == wanted.dtype or not (values.is_floating_point() and wanted.is_floating_point()):
        return torch.equal(values, wanted)
    kinds = [torch.finfo(tensor.dtype) for tensor in (values, wanted)]
    spacing, smallest = max(kind.eps for kind in kinds), max(kind.tiny * kind.eps for kind in kinds)
    return torch.allclose(values.float(), wanted.float(), rtol=spacing, atol=smallest)


def _json_object(text: str) -> dict[str, object]:
    """What anybody may have written; empty where it is no JSON object."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
