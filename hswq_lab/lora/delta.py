"""LayerDelta: everything that one LoRA file adds to one layer, and the side path that can carry it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.lora.parts import BiasPart, Dora, Kron, LowRank, Part


@dataclass(frozen=True, eq=False)
class KronTerm:
    """One LoKr of a side path: y[start:stop] += k · gain ∘ scale · (w1 ⊗ w2) x, as two small products."""

    start: int
    stop: int
    w1: Tensor
    w2: Tensor
    scale: float
    gain: Tensor | None


@dataclass(frozen=True, eq=False)
class Branch:
    """A 16-bit side path: y + k·(gain ∘ (y − layer's bias) + (x downᵀ · scale) upᵀ + LoKr + bias).

    Attributes:
        down: [R, K], the down factors of all parts stacked, as stored.
        up: [N, R], the up factors in their rows, zeros elsewhere.
        scale: fp32 [R], the factor of each rank.
        kron: LoKr terms.
        gain: fp32 [N], DoRA's row gain minus 1; None without DoRA.
        bias: fp32 [N], or None.
    """

    layer: str
    shape: tuple[int, int]
    down: Tensor
    up: Tensor
    scale: Tensor
    kron: tuple[KronTerm, ...] = ()
    gain: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerDelta:
    """One LoRA's contribution to one layer.

    Attributes:
        layer: the layer's name.
        shape: (N, K) of its weight.
        parts: deltas of the weight; their rows do not overlap.
        biases: deltas of the bias.
    """

    layer: str
    shape: tuple[int, int]
    parts: tuple[Part, ...] = ()
    biases: tuple[BiasPart, ...] = ()

    @property
    def needs_weight(self) -> bool:
        """Whether ΔW depends on the layer's weight (DoRA, replaced weights)."""
        return any(part.needs_weight for part in self.parts)

    @property
    def kind(self) -> str:
        """The kinds of the parts, in words."""
        kinds = [f"DoRA of {part.inner.kind}" if isinstance(part, Dora) else part.kind for part in self.parts]
        return ", ".join(dict.fromkeys([*kinds, *(["bias"] if self.biases else [])]))

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The row ranges of the weight that the delta touches, ascending."""
        return tuple(sorted((part.start, part.stop) for part in self.parts))

    def to(self, device: torch.device | str) -> LayerDelta:
        """The same with its tensors on a device."""
        return replace(
            self,
            parts=tuple(part.to(device) for part in self.parts),
            biases=tuple(replace(bias, value=bias.value.to(device)) for bias in self.biases),
        )

    def rescaled(self, rows: Tensor, columns: Tensor) -> LayerDelta:
        """The same for a weight whose rows and columns were multiplied by fp32 [N] and [K]; see `Part.rescaled`."""
        parts = tuple(part.rescaled(rows[part.start : part.stop], columns) for part in self.parts)
        biases = (replace(b, value=b.value.float() * rows[b.start : b.stop]) for b in self.biases)
        return replace(self, parts=parts, biases=tuple(biases))

    def dense(self, weight: Tensor | None = None, norms_of: Tensor | None = None) -> Tensor:
        """ΔW of the whole layer at strength 1, fp32 [N, K], on the device of the factors (or of `weight`).

        Args:
            weight: fp32 [N, K], the unrotated weight that the delta is put on; needed by DoRA and replaced
                weights.
            norms_of: the 16-bit source's weight, fp32 [N, K], where DoRA shall take its norms from it.

        Raises:
            HswqError: the weight is needed and not given.
        """
        device = weight.device if weight is not None else self._device()
        total = torch.zeros(self.shape, dtype=torch.float32, device=device)
        self.add_to(total, 1.0, weight, norms_of)
        return total

    def add_to(
        self, total: Tensor, strength: float, weight: Tensor | None = None, norms_of: Tensor | None = None
    ) -> None:
        """Adds strength · ΔW to `total` fp32 [N, K] in place; the rest is as for `dense`."""
        self._check_weight(weight)
        for part in self.to(total.device).parts:
            rows = slice(part.start, part.stop)
            own = None if weight is None else weight[rows]
            part.add_to(total[rows], strength, own, None if norms_of is None else norms_of[rows])

    def bias(self) -> Tensor | None:
        """The delta of the bias at strength 1, fp32 [N]; None if the file has none for this layer."""
        if not self.biases:
            return None
        total = torch.zeros(self.shape[0], dtype=torch.float32, device=self.biases[0].value.device)
        for part in self.biases:
            total[part.start : part.stop] = part.value.float() * part.scale
        return total

    def why_no_branch(self) -> str | None:
        """None if a 16-bit side path can carry the delta, else why not."""
        for part in self.parts:
            inner = part.inner if isinstance(part, Dora) else part
            if isinstance(part, Dora) and part.axis == "in":
                return f"{part.key}: DoRA with one magnitude a column changes every weight; use bake"
            if not isinstance(inner, (LowRank, Kron)):
                return f"{part.key}: a {inner.kind} has no small side path; use bake"
        return None

    def branch(self, weight: Tensor | None = None) -> Branch | None:
        """The side path, or None where there is none (`why_no_branch` says why).

        Args:
            weight: fp32 [N, K], unrotated: what DoRA takes its norms from (the source's weight, else the
                pack's).

        Raises:
            HswqError: DoRA without the weight.
        """
        if self.why_no_branch() is not None:
            return None
        self._check_weight(weight)
        n, k = self.shape
        device = weight.device if weight is not None else self._device()
        here = self.to(device)
        gain = torch.zeros(n, device=device) if self.needs_weight else None
        low_rank: list[tuple[LowRank, Tensor | None]] = []
        kron = []
        for part in here.parts:
            row_gain = None
            inner = part
            if isinstance(part, Dora) and weight is not None and gain is not None:
                inner = part.inner
                row_gain = part.row_gain(weight[part.start : part.stop]).reshape(-1)
                gain[part.start : part.stop] = row_gain - 1
            if isinstance(inner, LowRank):
                low_rank.append((inner, row_gain))
            elif isinstance(inner, Kron):
                kron.append(KronTerm(inner.start, inner.stop, inner.w1, inner.w2, inner.scale, row_gain))
        down, up, scale = _stack(low_rank, n, k, device)
        return Branch(self.layer, self.shape, down, up, scale, tuple(kron), gain, here.bias())

    def _device(self) -> torch.device:
        for part in self.parts:
            inner = part.inner if isinstance(part, Dora) else part
            for value in vars(inner).values():
                if isinstance(value, Tensor):
                    return value.device
        return torch.device("cpu")

    def _check_weight(self, weight: Tensor | None) -> None:
        if weight is None and self.needs_weight:
            raise HswqError(
                "this delta depends on the layer's weight",
                tensor=self.layer,
                found=f"{self.kind} without a weight",
                fix="give the model (or the weight) instead of the list of layers",
            )
        if weight is not None and tuple(weight.shape) != self.shape:
            raise HswqError(
                "the weight has the wrong shape for this delta",
                tensor=self.layer,
                found=tuple(weight.shape),
                expected=self.shape,
            )


def _stack(
    parts: list[tuple[LowRank, Tensor | None]], n: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Down [R, K], up [N, R], scale [R] of all low-rank parts; a row gain is multiplied into up, in fp32."""
    ranks = [part.down.shape[0] for part, _ in parts]
    dtype = torch.float32
    if parts and all(gain is None for _, gain in parts):
        dtype = max((t.dtype for part, _ in parts for t in (part.down, part.up)), key=lambda d: d.itemsize)
        if dtype.itemsize == 1:  # fp8 factors are values to compute with, not a format
            dtype = torch.float32
    up = torch.zeros(n, sum(ranks), dtype=dtype, device=device)
    column = 0
    for (part, gain), rank in zip(parts, ranks, strict=True):
        block = part.up.float() if gain is None else part.up.float() * gain[:, None]
        up[part.start : part.stop, column : column + rank] = block.to(dtype)
        column += rank
    downs = [part.down.to(dtype) for part, _ in parts] or [torch.zeros(0, k, dtype=dtype, device=device)]
    scales = [
        torch.full((rank,), part.scale, dtype=torch.float32)
        for (part, _), rank in zip(parts, ranks, strict=True)
    ]
    return torch.cat(downs), up, torch.cat([*scales, torch.zeros(0)]).to(device)
