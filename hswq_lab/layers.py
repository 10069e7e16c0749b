"""Linear layers of a workbench model: a weight in any format, the mode it runs in, low-rank branches, counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from hswq_lab import ops, packing
from hswq_lab.errors import HswqError
from hswq_lab.formats import Fp8Weight, Int8Weight, Mxfp8Weight, Nvfp4Weight, PackedWeight
from hswq_lab.modes import Resolved

if TYPE_CHECKING:
    from hswq_lab.lora.branch import BranchStack


@dataclass(frozen=True)
class Counts:
    """What a layer did since it was built.

    Attributes:
        calls: forward passes.
        rows: rows of x over all calls; FLOP = 2 · rows · N · K.
        blocks: blocks of 16 activations that a static scale quantised.
        clipped: those of them whose largest value exceeded the scale and was clipped.
    """

    calls: int
    rows: int
    blocks: int
    clipped: int


class LabLinear(nn.Module):
    """y = x·Wᵀ + b + branches, for any kind of weight. Takes unrotated x [..., K], gives [..., N] in x's dtype.

    Args:
        name: the layer's name in the model.
        weight: [N, K], a tensor or a packed weight.
        bias: [N] or None.
        resolved: the mode that the layer runs in.
    """

    def __init__(
        self, name: str, weight: Tensor | PackedWeight, bias: Tensor | None, resolved: Resolved
    ) -> None:
        super().__init__()
        self.name = name
        self.weight = weight
        self.bias = bias
        self.resolved = resolved
        self.out_features, self.in_features = weight.shape
        self.branches: BranchStack | None = None
        # Counters are tensors on the layer's device: no host sync, and they work under torch.compile.
        device = weight.device
        self._counters = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]

    @property
    def counts(self) -> Counts:
        """The counters, read from the device."""
        return Counts(*(int(counter) for counter in self._counters))

    def on(self, device: torch.device) -> Self:
        """The same layer on another device, its counts included; without branches."""
        bias = None if self.bias is None else self.bias.to(device)
        moved = type(self)(self.name, self.weight.to(device), bias, self.resolved)
        moved._counters = [counter.to(device) for counter in self._counters]  # noqa: SLF001 - of its own class
        return moved

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] unrotated → [..., N]."""
        if x.shape[-1] != self.in_features:
            raise HswqError(
                "the input has the wrong width",
                tensor=self.name,
                found=tuple(x.shape),
                expected=self.in_features,
            )
        rows = x.reshape(-1, self.in_features)
        self._counters[0].add_(1)
        self._counters[1].add_(rows.shape[0])
        y = self.multiply(rows)
        if self.branches is not None:
            y = self.branches.add_to(rows, y)
        return y.reshape(*x.shape[:-1], self.out_features)

    def multiply(self, x: Tensor) -> Tensor:
        """x [M, K] → [M, N], without branches."""
        raise NotImplementedError


class DenseLinear(LabLinear):
    """A layer whose weight is a plain tensor."""

    weight: Tensor

    def multiply(self, x: Tensor) -> Tensor:
        """See `LabLinear.multiply`."""
        return functional.linear(x, self.weight, self.bias)


class Nvfp4Linear(LabLinear):
    """An NVFP4 weight with 16-bit activations (W4A16, "parity")."""

    weight: Nvfp4Weight

    def multiply(self, x: Tensor) -> Tensor:
        """See `LabLinear.multiply`."""
        w = self.weight
        return ops.linear_w4a16(x, w.codes, w.scales, w.scale, w.group, self.out_features, self.bias)


class Nvfp4ScaledLinear(Nvfp4Linear):
    """An NVFP4 weight with activations that are rounded on one tensor scale."""

    def activation_scale(self, x: Tensor) -> Tensor:
        """The tensor scale of the rotated activations: static, or (uncalibrated) of this call, or 1. fp32 scalar."""
        w = self.weight
        match self.resolved.activation_scale:
            case "static" if w.input_scale is not None:
                return w.input_scale
            case "dynamic":
                return ops.tensor_scale(ops.rotate(x.float(), w.group))
            case "unit":
                return torch.ones_like(w.scale)
        raise HswqError("the layer has no scale for its activations", tensor=self.name, found=self.resolved)


def split_by_basis(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """What stays out of the rounding of x, x Pᵀ, and what is rounded, x − (x Pᵀ) P / K.

    Args:
        x: [M, K], unrotated.
        basis: P [r, K], any float dtype, rows of mean square 1.

    Returns:
        [M, r] and [M, K] in x's dtype.
    """
    basis = basis.to(x.dtype)
    inside = functional.linear(x, basis)
    return inside, torch.addmm(x, inside, basis, alpha=-1 / x.shape[1])


class Nvfp4TensorCoreLinear(Nvfp4ScaledLinear):
    """An NVFP4 weight with NVFP4 activations (W4A4, "tc"); counts the blocks that a static scale clips.

    With an input basis P [r, K], whose rows have mean square 1, what is rounded is x − (x Pᵀ) P / K, and
    (x Pᵀ) (W Pᵀ)ᵀ / K is added in x's dtype: two skinny products. Without rounding that is x Wᵀ for any P. The
    smaller what is left of x, the smaller its rounding error (the idea of Saxena et al., "ResQ", 2024).
    """

    def __init__(self, name: str, weight: Nvfp4Weight, bias: Tensor | None, resolved: Resolved) -> None:
        super().__init__(name, weight, bias, resolved)
        self._basis: Tensor | None = None
        if weight.basis is not None:
            self._basis = weight.basis.float()
            self._up = packing.dequantize(weight) @ self._basis.T / self.in_features

    def multiply(self, x: Tensor) -> Tensor:
        """See `LabLinear.multiply`."""
        if self._basis is None:
            return self._rounded(x)
        inside, rest = split_by_basis(x, self._basis)
        return torch.addmm(self._rounded(rest), inside, self._up.to(x.dtype).T)

    def _rounded(self, x: Tensor) -> Tensor:
        w, s_x = self.weight, self.activation_scale(x)
        codes, scales, clipped = ops.rotate_quantize_nvfp4_counted(x, s_x, w.group, w.activation_scales)
        if self.resolved.activation_scale == "static":
            self._counters[2].add_(x.shape[0] * -(-self.in_features // 16))
            self._counters[3].add_(clipped)
        shape = (x.shape[0], self.out_features)
        return ops.fp4_gemm(codes, scales, w.codes, w.scales, s_x * w.scale, shape, self.bias, x.dtype)


class Nvfp4Fp8Linear(Nvfp4ScaledLinear):
    """An NVFP4 weight with FP8 activations (W4A8, "tc8"); their scale is 6 · input_scale. An input basis is not used.

    Where the weight is on a card and the mode says "keep", it is held in FP8 as well, from the first call on.
    """

    _kept: tuple[Tensor, Tensor] | None = None

    def multiply(self, x: Tensor) -> Tensor:
        """See `LabLinear.multiply`."""
        w, s_x = self.weight, self.activation_scale(x)
        if self.resolved.fp8_weights == "keep" and w.device.type == "cuda":
            if self._kept is None:
                self._kept = ops.fp8_weight(w.codes, w.scales, w.shape)
            return ops.linear_fp8(x, *self._kept, w.scale, s_x, w.group, self.out_features, self.bias)
        return ops.linear_w4a8(x, w.codes, w.scales, w.scale, s_x, w.group, self.out_features, self.bias)


class Int8Linear(LabLinear):
    """An INT8 weight with activations quantised row by row (W8A8)."""

    weight: Int8Weight

    def multiply(self, x: Tensor) -> Tensor:
        """See `LabLinear.multiply`."""
        return ops.linear_int8(x, self.weight.q, self.weight.scale, self.weight.group, self.bias)


class Fp8Linear(LabLinear):
    """An FP8 or MXFP8 weight, multiplied in x's dtype."""

    weight: Fp8Weight | Mxfp8Weight

    def multiply(self, x: Tensor) -> Tensor:
        """See `LabLinear.multiply`."""
        return functional.linear(x, packing.dequantize(self.weight).to(x.dtype), self.bias)


_KINDS: dict[str, type[LabLinear]] = {
    "16-bit": DenseLinear,
    "parity": Nvfp4Linear,
    "tc": Nvfp4TensorCoreLinear,
    "tc8": Nvfp4Fp8Linear,
    "int8": Int8Linear,
    "fp8": Fp8Linear,
}


def make_linear(
    name: str, weight: Tensor | PackedWeight, bias: Tensor | None, resolved: Resolved
) -> LabLinear:
    """The layer for a weight in its resolved mode."""
    return _KINDS[resolved.mode](name, weight, bias, resolved)
