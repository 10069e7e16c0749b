"""A file beside the 16-bit weights that it was made from: what differs, and what may."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hswq_lab.checkpoint.baked import baked_in_words, baked_layers
from hswq_lab.checkpoint.closeness import Closeness, closeness, dense
from hswq_lab.checkpoint.findings import Finding
from hswq_lab.checkpoint.smoothed import SMOOTH_KEY, smoothed_names
from hswq_lab.formats import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.checkpoint.checkpoint import Checkpoint
    from hswq_lab.checkpoint.findings import Severity
    from hswq_lab.checkpoint.slots import Entry, Value

LEAST_COSINE = 0.9  # the worst right reading of a real layer is above 0.98, a wrong one below 0.7
LEAST_COSINE_BAKED = 0.5  # with LoRAs in the layer: less means that they are 1.7 times as large as it


@dataclass(frozen=True)
class LayerCheck:
    """One weight beside its source, unrotated; where smooth() rescaled channels, up to a factor for each.

    Attributes:
        sqnr_db, cosine: see `Closeness`.
        gain: factor that fits it to the source best; far from 1 says that the tensor scale is wrong.
    """

    name: str
    format: str
    group: int | None
    sqnr_db: float
    cosine: float
    gain: float


class Origin:
    """The source of a file. Packed weights must be near it, anything else equal to it, unless the metadata say why not.

    Args:
        source: the 16-bit weights; None: nothing is compared.
        metadata: the file's.
        shapes: the file's, native name → logical shape.
    """

    def __init__(
        self, source: Checkpoint | None, metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._source = source
        known = {} if source is None else source.metadata
        self._loras = [lora for lora in baked_in_words(metadata) if lora not in baked_in_words(known)]
        self._baked = baked_layers(metadata)
        self._smoothed: frozenset[str] = frozenset()
        if metadata.get(SMOOTH_KEY) != known.get(SMOOTH_KEY):
            self._smoothed = smoothed_names(metadata, shapes) | smoothed_names(known, shapes)
        self.layers: list[LayerCheck] = []
        self.findings: list[Finding] = []
        self._absent: list[str] = []

    def wanted(self, name: str, value: Value | None) -> Tensor | None:
        """The source's values for a name in the units of the file's value; None without a source or such a name."""
        if self._source is None:
            return None
        if name not in self._source:
            if name.endswith(".weight"):
                self._find("warning", "the source does not have this layer", name)
            else:
                self._absent.append(name)
            return None
        wanted = dense(self._source[name])
        if name not in self._smoothed or value is None or tuple(wanted.shape) != tuple(value.shape):
            return wanted
        if isinstance(value, PackedWeight):
            return _fitted(wanted, dense(value))
        if name.endswith(".bias"):
            return None  # 1 + b may have been rescaled
        # Powers of two leave the mantissas: the source with the value's exponents.
        return torch.ldexp(wanted.float().frexp()[0], value.float().frexp()[1])

    def compare(self, entry: Entry, values: Tensor, wanted: Tensor) -> None:
        """Notes how close a name's values are to those that are `wanted`, and a finding where they are too far."""
        name = entry.name
        if _without_ones(values) != _without_ones(wanted):
            shapes = list(entry.shape), list(wanted.shape)
            self._find("error", "the source has another shape", name, *shapes)
            return
        match = closeness(values, wanted)
        if name.endswith(".weight"):
            self.layers.append(
                LayerCheck(name, entry.format, entry.group, match.sqnr_db, match.cosine, match.gain)
            )
        if match.sqnr_db == math.inf:
            return
        if self._has_loras(name):
            if name.endswith(".weight"):
                self._compare_with_loras(name, match)
        elif not entry.packed:
            if not _alike(values, wanted.reshape(values.shape)):
                problem = "a tensor that is not packed differs from the source: changed, or of another model"
                found = f"cosine {match.cosine:.6f}"
                self._find("error", problem, name, found, "the source's own values")
        elif not match.cosine >= LEAST_COSINE:
            problem = "the layer does not look like its source: wrong layout, wrong rotation or another model"
            self._find("error", problem, name, f"cosine {match.cosine:.4f}", f"at least {LEAST_COSINE}")
        elif not 0.8 < match.gain < 1.25:
            problem = "the layer has its source's direction but not its size: a scale is wrong"
            self._find("error", problem, name, f"source = {match.gain:.4g} × layer")

    def conclude(self) -> list[Finding]:
        """All findings, with what is true of the file as a whole."""
        if self._absent:
            problem = f"{len(self._absent)} tensors that the source does not have were not compared"
            self._find("info", problem, self._absent[0])
        if self._smoothed:
            problem = (
                "smooth() rescaled channels: where it did, the source is compared up to a factor for each"
            )
            self.findings.append(Finding("info", "smooth", problem, found=f"{len(self._smoothed)} tensors"))
        if self._loras:
            differing = sum(
                self._has_loras(layer.name) and layer.sqnr_db != math.inf for layer in self.layers
            )
            problem = "LoRAs are baked into the weights"
            if self._source is not None:
                problem += f", so {differing} layers differ from the source by them as well as by rounding"
            self.findings.append(Finding("info", "loras", problem, found=", ".join(self._loras)))
        return self.findings

    def _has_loras(self, name: str) -> bool:
        """Whether LoRAs are baked into a layer; into any, where the file does not say which."""
        layer, _, leaf = name.rpartition(".")
        return (
            bool(self._loras) and leaf in ("weight", "bias") and (self._baked is None or layer in self._baked)
        )

    def _compare_with_loras(self, name: str, match: Closeness) -> None:
        """The source is still in the layer, once and whole: what LoRAs add is hardly ever along it."""
        share = match.cosine**2 / match.gain if match.gain else math.nan  # ⟨layer, source⟩ / ⟨source, source⟩
        if match.cosine >= LEAST_COSINE_BAKED and 0.5 < share < 2:
            return
        problem = "the layer does not hold its source, which the LoRAs in it do not explain"
        found = f"cosine {match.cosine:.4f}, {share:.4g} × the source in it"
        self._find("error", problem, name, found, f"at least {LEAST_COSINE_BAKED}, and 1 ×")

    def _find(
        self, severity: Severity, problem: str, name: str, found: object = None, expected: object = None
    ) -> None:
        texts = [None if value is None else str(value) for value in (found, expected)]
        self.findings.append(Finding(severity, "source", problem, name, *texts))


def _without_ones(values: Tensor) -> list[int]:
    """The shape; a pad token is [dim] in some files and [1, dim] in others."""
    return [side for side in values.shape if side != 1]


def _alike(values: Tensor, wanted: Tensor) -> bool:
    """Whether unpacked values are the same but for the rounding of the coarser of two float dtypes."""
    if values.dtype == wanted.dtype or not (values.is_floating_point() and wanted.is_floating_point()):
        return False  # equal values never get here
    kinds = [torch.finfo(tensor.dtype) for tensor in (values, wanted)]
    spacing, smallest = max(kind.eps for kind in kinds), max(kind.tiny * kind.eps for kind in kinds)
    return torch.allclose(values.float(), wanted.float(), rtol=spacing, atol=smallest)


def _fitted(wanted: Tensor, values: Tensor) -> Tensor:
    """The source [N, K] with every column, then every row, multiplied by what fits it to the values best.

    Weights that are not each other's keep a cosine of about √(1/N + 1/K): the factors are far fewer than the values.
    """
    fitted = wanted.float()
    for along in (0, 1):
        power = fitted.square().sum(along, keepdim=True)
        fitted = fitted * ((fitted * values).sum(along, keepdim=True) / power.clamp_min(1e-30))
    return fitted
