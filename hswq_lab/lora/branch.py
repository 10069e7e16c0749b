"""BranchStack: all 16-bit side paths of a layer in one pair of skinny GEMMs; a strength is free to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.lora.delta import Branch, KronTerm


class BranchStack(nn.Module):
    """y + Σ kᵢ · branchᵢ(x), the low-rank parts of all LoRAs evaluated together: y + ((x Aᵀ) · s) Bᵀ.

    Strengths live in an fp32 vector with an entry a rank (s = strength · scale), so changing one changes no
    factor and no shape, and a compiled forward stays valid. Gains of several DoRAs act on the layer's own
    output, not on one another's.

    Args:
        branches: LoRA id → (branch, strength); all of one layer.
        device: where the layer is.
        dtype: of the activations.
        bias: the layer's own bias [N], which DoRA's gain must not scale; None without one.

    Raises:
        HswqError: no branches, or branches of different layers.
    """

    down: Tensor
    up: Tensor
    rank_strengths: Tensor
    gain: Tensor | None
    offset: Tensor | None

    def __init__(
        self,
        branches: Mapping[str, tuple[Branch, float]],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        places = {(branch.layer, branch.shape) for branch, _ in branches.values()}
        if len(places) != 1:
            raise HswqError("a stack of branches is for one layer", found=sorted(places))
        self._terms = [(lora, b.scale, b.gain, b.bias) for lora, (b, _) in branches.items()]
        self._strengths = {lora: float(strength) for lora, (_, strength) in branches.items()}
        self._bias = bias
        stacked = [branch for branch, _ in branches.values()]
        self.register_buffer("down", torch.cat([b.down.to(device, dtype) for b in stacked]), persistent=False)
        self.register_buffer("up", torch.cat([b.up.to(device, dtype) for b in stacked], 1), persistent=False)
        owned = [
            (lora, KronBranch(term, device, dtype)) for lora, (b, _) in branches.items() for term in b.kron
        ]
        self._kron_owners = [lora for lora, _ in owned]
        self.kron = nn.ModuleList(module for _, module in owned)
        for name, value in self._strength_tensors().items():
            self.register_buffer(name, None if value is None else value.to(device), persistent=False)
        self._set_kron_strengths()

    @property
    def strengths(self) -> dict[str, float]:
        """LoRA id → strength."""
        return dict(self._strengths)

    def set_strength(self, lora: str, strength: float) -> None:
        """Changes the strength of one LoRA in place.

        Raises:
            HswqError: it has no branch here.
        """
        if lora not in self._strengths:
            raise HswqError(
                "this LoRA has no branch on the layer", found=lora, expected=sorted(self._strengths)
            )
        self._strengths[lora] = float(strength)
        for name, value in self._strength_tensors().items():
            if value is not None:
                getattr(self, name).copy_(value)
        self._set_kron_strengths()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds the branches to a layer's output.

        Args:
            x: [M, K], the layer's input, unrotated.
            y: [M, N], the layer's output with its bias.

        Returns:
            [M, N] in y's dtype; y itself is not changed.
        """
        return self.add_to(x, y.clone())

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """`forward` for a y that nobody else needs: its memory is used again, which spares a copy of it."""
        result = y
        if self.gain is not None:
            own = y.float() if self._bias is None else y.float() - self._bias.float()
            result = (y.float() + own * self.gain).to(y.dtype)
        if self.down.shape[0]:
            hidden = functional.linear(x, self.down).mul_(self.rank_strengths)  # in fp32, rounded once
            result = result.addmm_(hidden, self.up.T)
        for module in self.kron:
            result = module(x, result)
        return result if self.offset is None else result + self.offset.to(y.dtype)

    def _strength_tensors(self) -> dict[str, Tensor | None]:
        """Everything but LoKr that follows from the strengths: fp32, on the branches' own device."""
        scales = [scale * self._strengths[lora] for lora, scale, _, _ in self._terms]
        gains = [gain * self._strengths[lora] for lora, _, gain, _ in self._terms if gain is not None]
        biases = [bias * self._strengths[lora] for lora, _, _, bias in self._terms if bias is not None]
        return {
            "rank_strengths": torch.cat(scales),
            "gain": torch.stack(gains).sum(0) if gains else None,
            "offset": torch.stack(biases).sum(0) if biases else None,
        }

    def _set_kron_strengths(self) -> None:
        for lora, module in zip(self._kron_owners, self.kron, strict=True):
            cast("KronBranch", module).set_strength(self._strengths[lora])


class KronBranch(nn.Module):
    """(w1 ⊗ w2) x as two small products: x [M, b, d] → x w2ᵀ [M, b, c] → w1 · [M, a, c] → [M, a·c].

    Args:
        term: the LoKr and the rows it goes to.
        device: where the layer is.
        dtype: of the activations.
    """

    w1: Tensor
    w2: Tensor
    strength: Tensor
    gain: Tensor | None

    def __init__(self, term: KronTerm, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self._rows, self._scale = slice(term.start, term.stop), term.scale
        self.register_buffer("w1", term.w1.to(device, dtype), persistent=False)
        self.register_buffer("w2", term.w2.to(device, dtype), persistent=False)
        self.register_buffer("gain", None if term.gain is None else term.gain.to(device), persistent=False)
        self.register_buffer("strength", torch.zeros((), device=device), persistent=False)

    def set_strength(self, strength: float) -> None:
        """Changes the strength in place."""
        self.strength.fill_(strength * self._scale)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """X [M, K], y [M, N] → y with its rows added; y is not changed."""
        blocks = x.reshape(x.shape[0], self.w1.shape[1], self.w2.shape[1])
        part = torch.matmul(self.w1, functional.linear(blocks, self.w2)).reshape(x.shape[0], -1).float()
        if self.gain is not None:
            part = part * self.gain
        result = y.clone()
        result[:, self._rows] = (y[:, self._rows].float() + part * self.strength).to(y.dtype)
        return result
