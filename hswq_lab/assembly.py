"""A network put together from a checkpoint, the LoRAs declared on it, and the mode of each layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hswq_lab.attachments import Attachments
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.layers import LabLinear, make_linear
from hswq_lab.models.architecture import Architecture
from hswq_lab.modes import Resolved


class SharedWeights:
    """Weights on a device that several views of one checkpoint use; gone when no network holds them."""

    def __init__(self) -> None:
        self._values: weakref.WeakValueDictionary[tuple[object, ...], Tensor | PackedWeight] = (
            weakref.WeakValueDictionary()
        )

    def find(self, key: tuple[object, ...]) -> Tensor | PackedWeight | None:
        """The value of a key, None if nobody holds it."""
        return self._values.get(key)

    def put(self, key: tuple[object, ...], value: Tensor | PackedWeight) -> None:
        """Shares a value for as long as somebody holds it."""
        self._values[key] = value

    def get(
        self, key: tuple[object, ...], make: Callable[[], Tensor | PackedWeight]
    ) -> Tensor | PackedWeight:
        """The value of a key, made if no network holds it."""
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = make()
        return value


@dataclass(frozen=True)
class Parts:
    """What a network is made of.

    Attributes:
        dtype: of activations and of all weights that are not packed.
        fresh: baked weights that no network holds yet.
    """

    checkpoint: Checkpoint
    attachments: Attachments
    shared: SharedWeights
    device: torch.device
    dtype: torch.dtype
    fresh: list[PackedWeight] = field(default_factory=list)

    def weight(self, layer: str) -> Tensor | PackedWeight:
        """A Linear's weight with everything that is baked into it."""
        return self.shared.get(
            self._key(layer), lambda: self._working(self.attachments.effective(layer, self.device))
        )

    def known(self, layer: str) -> Tensor | PackedWeight | None:
        """The same if somebody holds it, else None."""
        return self.shared.find(self._key(layer))

    def keep(self, layer: str, weight: PackedWeight) -> None:
        """Holds a baked weight for the network that will be built."""
        self.shared.put(self._key(layer), weight)
        self.fresh.append(weight)

    def pristine(self, layer: str) -> PackedWeight | None:
        """A packed weight as the checkpoint has it, if a network holds it; a 16-bit one is held in another dtype."""
        held = self.shared.find((layer, str(self.device), str(self.dtype)))
        return held if isinstance(held, PackedWeight) else None

    def bias(self, layer: str) -> Tensor | None:
        """A Linear's bias, baked deltas included; the network's own, whatever it does to it."""
        value = self.attachments.effective_bias(layer)
        return None if value is None else value.to(self.device, self.dtype, copy=True)

    def other(self, name: str) -> Tensor:
        """A parameter that belongs to no Linear, the network's own; raises HswqError if it is missing or packed."""
        if name not in self.checkpoint:
            raise HswqError(
                "the checkpoint lacks a tensor that the network needs",
                file=self.checkpoint.path,
                tensor=name,
            )
        value = self.checkpoint[name]
        if isinstance(value, PackedWeight):
            raise HswqError(
                "a tensor that is no Linear's weight is packed", file=self.checkpoint.path, tensor=name
            )
        return value.to(self.device, self.dtype, copy=True)

    def _key(self, layer: str) -> tuple[object, ...]:
        return (layer, str(self.device), str(self.dtype), *self.attachments.bake_key(layer))

    def _working(self, value: Tensor | PackedWeight) -> Tensor | PackedWeight:
        return value if isinstance(value, PackedWeight) else value.to(self.dtype)


def build_network(architecture: Architecture, parts: Parts, resolve: Callable[[str], Resolved]) -> nn.Module:
    """The network, with a `LabLinear` for every Linear.

    Args:
        architecture: its family and sizes.
        parts: where the weights come from.
        resolve: the mode of a layer, by name.

    Raises:
        HswqError: the checkpoint lacks a tensor or holds one of another shape.
    """

    def linear(layer: str, in_features: int, out_features: int, bias: bool) -> LabLinear:  # noqa: FBT001
        weight, bias_value = parts.weight(layer), parts.bias(layer)
        if tuple(weight.shape) != (out_features, in_features):
            raise HswqError(
                "a weight has the wrong shape",
                file=parts.checkpoint.path,
                tensor=f"{layer}.weight",
                found=tuple(weight.shape),
                expected=(out_features, in_features),
            )
        if bias and bias_value is None:
            raise HswqError("the checkpoint lacks a bias", file=parts.checkpoint.path, tensor=f"{layer}.bias")
        made = make_linear(layer, weight, bias_value, resolve(layer))
        made.branches = parts.attachments.branches(layer, parts.device, parts.dtype, bias_value)
        return made

    network = architecture.network(linear)
    try:
        network.load_state_dict({name: parts.other(name) for name in network.state_dict()}, assign=True)
    except RuntimeError as error:  # torch's way to say that a shape differs
        raise HswqError(
            "the checkpoint does not fit the network", file=parts.checkpoint.path, found=error
        ) from error
    return network.eval().requires_grad_(requires_grad=False)


def linears_of(network: nn.Module) -> dict[str, LabLinear]:
    """The `LabLinear`s of a network, by layer name, in network order."""
    return {name: module for name, module in network.named_modules() if isinstance(module, LabLinear)}


def effective_items(layers: Collection[str], parts: Parts) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    """What a file of a network holds: every parameter with what is baked into it, one at a time, on the CPU."""
    for key in parts.checkpoint:
        layer, _, kind = key.rpartition(".")
        if layer in layers and kind == "weight":
            value = parts.known(layer)
            if not isinstance(value, PackedWeight):  # it has the network's dtype, not the file's
                value = parts.attachments.effective(layer, parts.device)
            yield key, value.to("cpu")
        elif layer not in layers or kind != "bias":
            yield key, parts.checkpoint[key]
    for layer in layers:
        bias = parts.attachments.effective_bias(layer)
        if bias is not None:
            yield f"{layer}.bias", bias.cpu()
