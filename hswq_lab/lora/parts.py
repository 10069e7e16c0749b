"""What one entry of a LoRA file adds to some rows of a layer: the exact formulas, in fp32, on any device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from hswq_lab.errors import HswqError

Axis = Literal["out", "in"]


@dataclass(frozen=True, eq=False)
class Part(ABC):
    """A delta on rows `start` to `stop` of a layer's weight [N, K].

    Attributes:
        key: the module's name as the file spells it, for messages.
        start: first row of the layer.
        stop: one past the last row.
        scale: factor at strength 1; the formulas below include it.
    """

    kind: ClassVar[str]
    needs_weight: ClassVar[bool] = False

    key: str
    start: int
    stop: int
    scale: float

    @abstractmethod
    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        """ΔW of these rows at strength 1.

        Args:
            weight: fp32 [stop − start, K], the rows that the delta is put on; only kinds with `needs_weight`
                use it.
            norms_of: the rows that DoRA takes its norms from, if not `weight`.

        Returns:
            fp32 [stop − start, K].
        """

    def add_to(
        self, total: Tensor, strength: float, weight: Tensor | None = None, norms_of: Tensor | None = None
    ) -> None:
        """Adds strength · ΔW to fp32 [stop − start, K] in place; the other arguments are those of `dense`."""
        total.add_(self.dense(weight, norms_of), alpha=strength)

    def to(self, device: torch.device | str) -> Self:
        """The same with its tensors on a device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (Tensor, Part)):
                moved[field.name] = value.to(device)
        return replace(self, **moved)

    def rescaled(self, rows: Tensor, columns: Tensor) -> Part:
        """The delta diag(rows) · ΔW · diag(columns), for a weight whose channels were rescaled so.

        Args:
            rows: fp32 [stop − start].
            columns: fp32 [K].

        Raises:
            HswqError: a DoRA.
        """
        scaled = self.dense() * rows[:, None] * columns
        return Full(self.key, self.start, self.stop, 1.0, scaled)

    def norm(self) -> float | None:
        """‖ΔW‖ (Frobenius), or None where it depends on the layer's weight."""
        return float(torch.linalg.vector_norm(self.dense().double()))

    def gain(self) -> float:
        """The root mean square of the norms of ΔW's rows (of W' where ΔW depends on W): how far x is amplified."""
        return (self.norm() or 0.0) / math.sqrt(self.stop - self.start)


@dataclass(frozen=True, eq=False)
class LowRank(Part):
    """ΔW = scale · up · down, with down [r, K] and up [n, r] as stored."""

    kind: ClassVar[str] = "LoRA"
    down: Tensor
    up: Tensor

    @override
    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        return torch.mm(self.up.float(), self.down.float()).mul_(self.scale)

    @override
    def add_to(
        self, total: Tensor, strength: float, weight: Tensor | None = None, norms_of: Tensor | None = None
    ) -> None:
        total.addmm_(self.up.float(), self.down.float(), alpha=self.scale * strength)

    @override
    def rescaled(self, rows: Tensor, columns: Tensor) -> Part:
        return replace(self, up=self.up.float() * rows[:, None], down=self.down.float() * columns)

    def norm(self) -> float:
        """‖ΔW‖² = trace((upᵀup)(down downᵀ)), without the dense matrix, in fp64."""
        up, down = self.up.double(), self.down.double()
        square = float(((up.T @ up) * (down @ down.T)).sum())
        return abs(self.scale) * math.sqrt(max(square, 0.0))


@dataclass(frozen=True, eq=False)
class Kron(Part):
    """LoKr: ΔW = scale · w1 ⊗ w2 with w1 [a, b], w2 [c, d], a·c = n, b·d = K; factors are multiplied out."""

    kind: ClassVar[str] = "LoKr"
    w1: Tensor
    w2: Tensor

    @override
    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        return torch.kron(self.w1.float(), self.w2.float()).mul_(self.scale)

    def norm(self) -> float:
        """‖w1 ⊗ w2‖ = ‖w1‖ ‖w2‖."""
        return abs(self.scale) * float(self.w1.double().norm() * self.w2.double().norm())


@dataclass(frozen=True, eq=False)
class Hada(Part):
    """LoHa: ΔW = scale · (w1_a · w1_b) ∘ (w2_a · w2_b)."""

    kind: ClassVar[str] = "LoHa"
    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor

    @override
    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        first = self.w1_a.float() @ self.w1_b.float()
        return first.mul_(self.w2_a.float() @ self.w2_b.float()).mul_(self.scale)

    @override
    def gain(self) -> float:
        # Some rows tell as much as all, and the dense matrix of a large layer takes its time.
        rows = slice(None, None, max(1, (self.stop - self.start) // 256))
        some = replace(self, w1_a=self.w1_a[rows], w2_a=self.w2_a[rows]).dense()
        return float(torch.linalg.vector_norm(some.double())) / math.sqrt(some.shape[0])


@dataclass(frozen=True, eq=False)
class Full(Part):
    """A whole matrix: ΔW = scale · diff."""

    kind: ClassVar[str] = "full delta"
    diff: Tensor

    @override
    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        return self.diff.to(torch.float32, copy=True).mul_(self.scale)


@dataclass(frozen=True, eq=False)
class Replacement(Part):
    """`.set_weight`: at strength 1 the weight becomes `value`; in between W + k · (value − W)."""

    kind: ClassVar[str] = "replaced weight"
    needs_weight: ClassVar[bool] = True
    value: Tensor

    @override
    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        assert weight is not None, "LayerDelta.dense checks this"  # noqa: S101
        return self.value.float() - weight

    @override
    def rescaled(self, rows: Tensor, columns: Tensor) -> Part:
        return replace(self, value=self.value.float() * rows[:, None] * columns)

    def norm(self) -> None:
        """Depends on the weight."""

    @override
    def gain(self) -> float:
        return float(torch.linalg.vector_norm(self.value.double())) / math.sqrt(self.stop - self.start)


@dataclass(frozen=True, eq=False)
class Dora(Part):
    """DoRA (Liu et al. 2024, arXiv:2402.09353): W' = m · (W + sΔ) / ‖W + sΔ‖, and ΔW = W' − W.

    The norm runs over a row (axis "out": one magnitude a row) or over a column of these rows (axis "in"). A
    rotation of the weight changes column norms, so this is only ever computed on the unrotated weight, in
    fp32.
    """

    kind: ClassVar[str] = "DoRA"
    needs_weight: ClassVar[bool] = True
    inner: Part
    magnitude: Tensor
    axis: Axis

    def row_gain(self, weight: Tensor) -> Tensor:
        """M / ‖W + sΔ‖, fp32, [n, 1] or [1, K]; 0 where the norm is 0, since the direction is 0 there."""
        norm = torch.linalg.vector_norm(
            weight + self.inner.dense(), dim=1 if self.axis == "out" else 0, keepdim=True
        )
        magnitude = self.magnitude.float().reshape(norm.shape)
        return torch.where(norm > 0, magnitude / norm, torch.zeros_like(norm))

    @override
    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        assert weight is not None, "LayerDelta.dense checks this"  # noqa: S101
        gain = self.row_gain(weight if norms_of is None else norms_of)
        return self.inner.dense().add_(weight).mul_(gain).sub_(weight)

    @override
    def rescaled(self, rows: Tensor, columns: Tensor) -> Part:
        raise HswqError(
            "a DoRA takes norms of the original's weights, and smooth() rescaled the channels of this model's",
            tensor=self.key,
            fix="bake it into the 16-bit model, save that, and smooth and pack the result",
        )

    def norm(self) -> None:
        """Depends on the weight."""

    @override
    def gain(self) -> float:
        # The norms of W' are the magnitudes themselves.
        return float(torch.linalg.vector_norm(self.magnitude.double())) / math.sqrt(self.stop - self.start)


@dataclass(frozen=True, eq=False)
class BiasPart:
    """A delta on rows `start` to `stop` of a layer's bias: scale · value [stop − start]."""

    key: str
    start: int
    stop: int
    scale: float
    value: Tensor

    def gain(self) -> float:
        """The root mean square of its values."""
        return abs(self.scale) * float(self.value.double().square().mean().sqrt())
