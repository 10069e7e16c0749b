"""Where an entry belongs: names of LoRA modules matched against a model's real layers and their parts."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.lora.dialects import squash, without_prefixes
from hswq_lab.packing import dequantize

if TYPE_CHECKING:
    from torch import Tensor

LayerShapes: TypeAlias = Mapping[str, tuple[int, int]]


class HasLayers(Protocol):
    """A model, as far as this package needs one."""

    @property
    def checkpoint(self) -> Mapping[str, Tensor | PackedWeight]:
        """Parameter name → value."""
        ...

    def layers(self) -> LayerShapes:
        """Every Linear: name → (N, K)."""
        ...


class Target(NamedTuple):
    """Rows `start` to `stop` of a layer's weight [N, K]."""

    layer: str
    start: int
    stop: int
    k: int


_QKV = "attention.qkv"
_QKV_PARTS = ("to_q", "to_k", "to_v")
# Native ending → endings that other layouts use for the whole layer.
_OTHER_ENDINGS: Mapping[str, tuple[str, ...]] = {
    "attention.out": ("attention.to_out.0", "attention.to_out"),
    _QKV: ("attention.to_qkv",),
}
# Native beginning → the same in diffusers' layout (patch size 2, frame patch size 1).
_OTHER_BEGINNINGS: Mapping[str, str] = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.": "all_final_layer.2-1.",
}


def _aliases(layer: str, n: int, k: int) -> Iterator[tuple[str, Target]]:
    """Every name under which a LoRA may address the layer or a part of its rows."""
    names = [layer]
    for native, other in _OTHER_BEGINNINGS.items():
        if layer.startswith(native):
            names.append(other + layer.removeprefix(native))
    for native, others in _OTHER_ENDINGS.items():
        if layer.endswith(native):
            names += [layer.removesuffix(native) + other for other in others]
    for name in names:
        yield name, Target(layer, 0, n, k)
    if layer.endswith(_QKV) and n % 3 == 0:
        third = n // 3
        for index, part in enumerate(_QKV_PARTS):
            name = f"{layer.removesuffix('qkv')}{part}"
            yield name, Target(layer, index * third, (index + 1) * third, k)


def split_names(layer: str) -> list[str]:
    """diffusers' names of a native layer: to_q, to_k, to_v in row order for a fused qkv, else one name."""
    if layer.endswith(_QKV):
        return [f"{layer.removesuffix('qkv')}{part}" for part in _QKV_PARTS]
    for native, other in _OTHER_BEGINNINGS.items():
        if layer.startswith(native):
            return [other + layer.removeprefix(native)]
    for native, others in _OTHER_ENDINGS.items():
        if layer.endswith(native):
            return [layer.removesuffix(native) + others[0]]
    return [layer]


class TargetIndex:
    """Looks up modules of LoRA files among a model's layers, separators aside.

    Args:
        layers: name → (N, K), names without ".weight".

    Raises:
        HswqError: two layers cannot be told apart without separators.
    """

    def __init__(self, layers: LayerShapes) -> None:
        self._targets: dict[str, Target] = {}
        for layer, (n, k) in layers.items():
            for alias, target in _aliases(layer, n, k):
                known = self._targets.setdefault(squash(alias), target)
                if known != target:
                    raise HswqError(
                        "two layers have names that differ in separators only",
                        tensor=layer,
                        found=f"{known.layer} and {layer}",
                    )
        self._pairs = {alias: _pairs(alias) for alias in self._targets}

    def find(self, module: str) -> Target | None:
        """The target of a module as a file spells it, or None."""
        names = (squash(name) for name in without_prefixes(module))
        return next((self._targets[name] for name in names if name in self._targets), None)

    def nearest(self, module: str) -> str:
        """The layer whose name is most like a module's."""
        name = min((squash(name) for name in without_prefixes(module)), key=len)
        # difflib is slow: it only chooses among the names that share the most pairs of letters.
        pairs = _pairs(name)
        likely = heapq.nlargest(8, self._pairs, key=lambda alias: len(pairs & self._pairs[alias]))
        close = difflib.get_close_matches(name, likely, n=1, cutoff=0.0)
        return self._targets[close[0]].layer if close else "no layers"


def _pairs(name: str) -> frozenset[str]:
    return frozenset(first + second for first, second in pairwise(name))


def layers_of(layers: LayerShapes | HasLayers) -> LayerShapes:
    """The layer list of a model, or the list itself; names lose a trailing ".weight"."""
    shapes = layers if isinstance(layers, Mapping) else layers.layers()
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items()}


def weight_of(layers: LayerShapes | HasLayers, layer: str) -> Tensor | None:
    """The layer's weight, fp32 [N, K], unrotated, if `layers` is a model; None for a bare list."""
    if isinstance(layers, Mapping):
        return None
    return unpacked(layers.checkpoint[f"{layer}.weight"])


def unpacked(value: Tensor | PackedWeight) -> Tensor:
    """A weight as fp32 [N, K] in the unrotated basis."""
    return dequantize(value) if isinstance(value, PackedWeight) else value.float()
