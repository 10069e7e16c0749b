"""Where an entry belongs: names of LoRA modules matched against a model's real layers and their parts."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from hswq_lab.arguments import whole
from hswq_lab.checkpoint.smoothed import channel_factors, is_smoothed
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.lora.dialects import squash, without_prefixes
from hswq_lab.models.names import diffusers_names
from hswq_lab.packing import dequantize

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.checkpoint import Checkpoint

LayerShapes: TypeAlias = Mapping[str, tuple[int, int]]


class HasLayers(Protocol):
    """A model, as far as this package needs one."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Its weights."""
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


# Other endings of a whole layer that writers use beside diffusers' own.
_MORE_ENDINGS: Mapping[str, str] = {"attention.out": "attention.to_out", "attention.qkv": "attention.to_qkv"}


def _aliases(layer: str, n: int, k: int) -> Iterator[tuple[str, Target]]:
    """Every name under which a LoRA may address the layer or a part of its rows."""
    yield layer, Target(layer, 0, n, k)
    for native, other in _MORE_ENDINGS.items():
        if layer.endswith(native):
            yield layer.removesuffix(native) + other, Target(layer, 0, n, k)
    parts = diffusers_names(layer)
    if n % len(parts) == 0:
        rows = n // len(parts)
        for index, name in enumerate(parts):
            yield name, Target(layer, index * rows, (index + 1) * rows, k)


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
    """The layer list of a model, or the list itself; names lose a trailing ".weight".

    Raises:
        HswqError: it is neither, or a shape is not (N, K).
    """
    shapes = layers if isinstance(layers, Mapping) else _layers_of_model(layers)
    return dict(_named_shape(name, shape) for name, shape in shapes.items())


def _layers_of_model(model: HasLayers) -> LayerShapes:
    if not callable(getattr(model, "layers", None)):
        raise HswqError(
            "these are no layers", found=repr(model)[:80], expected="a loaded model, or name → (N, K)"
        )
    return model.layers()


def _named_shape(name: object, shape: object) -> tuple[str, tuple[int, int]]:
    if not isinstance(name, str) or not isinstance(shape, Sequence) or len(shape) != 2:
        found = f"{name!r}: {shape!r}"[:120]
        raise HswqError("a layer is a name with the shape of a matrix", found=found, expected="name → (N, K)")
    n, k = whole(shape[0], f"the number of rows of {name}"), whole(shape[1], f"the inputs of {name}")
    return name.removesuffix(".weight"), (n, k)


def weight_of(layers: LayerShapes | HasLayers, layer: str) -> Tensor | None:
    """The layer's weight, fp32 [N, K], unrotated, in the units that LoRAs are made for.

    Returns:
        None for a bare list of layers.
    """
    if isinstance(layers, Mapping):
        return None
    weight = unpacked(layers.checkpoint[f"{layer}.weight"])
    if not is_smoothed(layers.checkpoint):
        return weight
    rows, columns = channel_factors(layers.checkpoint, layer)
    return weight / rows[:, None] / columns


def unpacked(value: Tensor | PackedWeight) -> Tensor:
    """A weight as fp32 [N, K] in the unrotated basis."""
    return dequantize(value) if isinstance(value, PackedWeight) else value.float()
