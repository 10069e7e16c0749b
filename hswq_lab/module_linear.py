"""A packed layer inside somebody else's module: to torch, diffusers and peft it is an `nn.Linear`.

Its `weight` can be read (that dequantises) but never written: a LoRA that is fused into it is refused with a reason
instead of vanishing.
"""

# ruff: noqa: SLF001 - the protocols of torch that a tensor takes part in are spelled with underscores

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hswq_lab import packing
from hswq_lab.errors import HswqError
from hswq_lab.layers import LabLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hswq_lab.formats import PackedWeight

_VIEWS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class PackedValues(torch.Tensor):
    """The values [N, K] of a packed weight, unrotated: any operation that reads them dequantises first.

    Args:
        packed: the weight.
        dtype: of the values.
        layer: its name, for messages.
    """

    packed: PackedWeight
    layer: str

    @staticmethod
    def __new__(cls: type[Self], packed: PackedWeight, dtype: torch.dtype, layer: str) -> Self:
        """A tensor with shape, dtype and device but no storage."""
        made = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=dtype, device=packed.device)
        made.packed, made.layer = packed, layer
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    def __repr__(self) -> str:  # type: ignore[override]
        shape = tuple(self.packed.shape)
        return f"<{self.packed.format} weight of {self.layer}, {shape}, read as {self.dtype}>"

    def dense(self) -> Tensor:
        """The values as a plain tensor, made anew."""
        return packing.dequantize(self.packed).to(self.dtype)

    @property
    def data(self) -> Tensor:
        """Itself: there is no other storage behind it."""
        return self

    @data.setter
    def data(self, _value: Tensor) -> NoReturn:
        raise self.written()

    def __setitem__(self, _index: object, _value: object) -> NoReturn:
        raise self.written()

    def data_ptr(self) -> NoReturn:
        """Refused: there is no storage that could be saved or shared."""
        raise HswqError(
            "a packed weight has no plain values that could be saved or shared",
            tensor=self.layer,
            found=self.packed.format,
            fix="make a pack file with hl.pack and hl.save, or save weight.dense()",
        )

    storage = untyped_storage = data_ptr

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the operator
        cls,
        func: OpOverload,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Any operator: on the values, if it does not write to them."""
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | (kwargs or {})
        for argument in arguments:
            value = given.get(argument.name)
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise value.written()
        if func in _VIEWS:
            return PackedValues(args[0].packed, args[0].dtype, args[0].layer)
        plain, named = pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*plain, **named)

    def written(self) -> HswqError:
        """What somebody is told who wants to write to it."""
        return HswqError(
            "a packed weight cannot be written in place: the change would be lost",
            tensor=self.layer,
            found=self.packed.format,
            fix="keep LoRAs unfused beside it, or fuse them into the 16-bit module before it is packed",
        )


class ModuleLinear(nn.Linear):
    """y = x·Wᵀ + b with a packed weight, for inference.

    Args:
        layer: what computes; its bias becomes this module's parameter.
        dtype: of the dense weight before; what other code takes for the weight's dtype.
    """

    def __init__(self, layer: LabLinear, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate the dense weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        bias = None if layer.bias is None else nn.Parameter(layer.bias, requires_grad=False)
        self.register_parameter("bias", bias)
        self.compute_dtype = dtype
        self._put(layer)

    @property
    def layer(self) -> LabLinear:
        """What computes, with its mode and counters. No submodule: to other libraries a Linear is one thing."""
        return cast(LabLinear, self.__dict__["_layer"])

    @property
    def weight(self) -> PackedValues:
        """The weight as other code may read it."""
        return PackedValues(
            cast("PackedWeight", self.layer.weight), self.compute_dtype, f"{self.layer.name}.weight"
        )

    @weight.setter
    def weight(self, _value: Tensor) -> NoReturn:
        raise self.weight.written()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name for it
        """x [..., K] unrotated → [..., N].

        Raises:
            HswqError: x is on another device, or a gradient through the layer is wanted.
        """
        if input.requires_grad and torch.is_grad_enabled():
            raise HswqError(
                "packed layers are for inference, and gradients would end here unnoticed",
                tensor=self.layer.name,
                fix="call the module under torch.no_grad()",
            )
        if input.device != self.layer.weight.device:
            raise HswqError(
                "the input and the packed weight are on different devices",
                tensor=self.layer.name,
                found=f"{input.device} and {self.layer.weight.device}",
                fix="move the whole module with .to(device)",
            )
        return cast(Tensor, self.layer(input))

    def extra_repr(self) -> str:
        """What print(module) says about it."""
        weight = cast("PackedWeight", self.layer.weight)
        rotation = "" if weight.group is None else f", group={weight.group}"
        return f"{super().extra_repr()}, {weight.format}{rotation}, mode={self.layer.resolved.mode}"

    # -- what nn.Module does to its parameters: the packed weight is none, and follows by hand --------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleLinear:  # noqa: FBT001, FBT002
        """`.to()`, `.cuda()`, `.half()`: the device is followed, codes and scales keep their dtypes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.layer.weight.device))
        self.compute_dtype = probe.dtype
        self._renew(probe.device)
        return self

    def _renew(self, device: torch.device) -> None:
        self._put(self.layer if device == self.layer.weight.device else self.layer.on(device))

    def _put(self, layer: LabLinear) -> None:
        if self.bias is not None:
            layer.bias = self.bias.detach()
        self.__dict__["_layer"] = layer

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ANN401
        if f"{prefix}weight" in state_dict:
            raise self.weight.written()
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._renew(self.layer.weight.device)
