"""The LoRAs declared on a model, and what follows from them: effective weights, branches, evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args, overload

import torch
from torch import Tensor

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.lora import (
    BakeReport,
    Branch,
    BranchStack,
    LayerDelta,
    LayerEvidence,
    LoraFile,
    bake_bias,
    bake_from_source,
    bake_in_place,
    branch_evidence,
    total_delta,
)
from hswq_lab.lora.targets import unpacked

Way = Literal["branch", "bake", "bake_from_source"]

SCALES_KEY = "hswq.scales"
"""Metadata of a pack: how its block scales were chosen ("rtn", "four_six", …); baking from source does the same."""


@dataclass(frozen=True, eq=False)
class Attachment:
    """One LoRA as it was declared.

    Raises (in the constructor):
        HswqError: an unknown way, a strength that is not finite, or "bake_from_source" without a source.
    """

    lora: LoraFile
    strength: float
    how: Way
    source: Checkpoint | None = None
    allow_unmatched: bool = False

    def __post_init__(self) -> None:
        if self.how not in get_args(Way):
            raise HswqError(
                "unknown way to apply a LoRA", found=repr(self.how), expected=", ".join(get_args(Way))
            )
        if not torch.isfinite(torch.tensor(self.strength)):
            raise HswqError(
                "a LoRA's strength must be a finite number", file=self.lora.path, found=self.strength
            )
        if self.how == "bake_from_source" and self.source is None:
            raise HswqError(
                "baking from source needs the 16-bit checkpoint",
                file=self.lora.path,
                fix="give source=, or use 'bake'",
            )

    def __str__(self) -> str:
        return f"{self.lora.name} ×{self.strength:g} ({self.how})"


class Attachments(Sequence[Attachment]):
    """An immutable list of LoRAs on one checkpoint.

    A layer's effective weight is always computed from the pristine one in the checkpoint and all deltas baked into it
    at once: nothing accumulates, and taking a LoRA off is exact.

    Args:
        checkpoint: the pristine weights.
        layers: the model's Linears, name → (N, K).
        items: the LoRAs, in order.

    Raises:
        HswqError: a LoRA is there twice, does not fit the layers, or two ways of baking are mixed.
    """

    def __init__(
        self, checkpoint: Checkpoint, layers: Mapping[str, tuple[int, int]], items: Sequence[Attachment] = ()
    ) -> None:
        self._checkpoint = checkpoint
        self._layers = layers
        self._items = tuple(items)
        _refuse_mixtures(self._items)
        self._deltas = [
            item.lora.deltas(layers, allow_unmatched=item.allow_unmatched) for item in self._items
        ]
        for item, deltas in zip(self._items, self._deltas, strict=True):
            if item.how == "branch":
                _refuse_unbranchable(item, deltas)

    @overload
    def __getitem__(self, index: int) -> Attachment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Attachment]: ...
    def __getitem__(self, index: int | slice) -> Attachment | Sequence[Attachment]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    # -- other lists -----------------------------------------------------------------------------------------

    def plus(self, added: Attachment) -> Attachments:
        """This list and one more."""
        return self._with((*self._items, added))

    def minus(self, lora: LoraFile) -> Attachments:
        """This list without a LoRA; raises HswqError if it is not in it."""
        gone = self._item(lora)
        return self._with([item for item in self._items if item is not gone])

    def with_strength(self, lora: LoraFile, strength: float) -> Attachments:
        """This list with another strength for one LoRA; raises HswqError if it is not in it."""
        old = self._item(lora)
        return self._with([replace(item, strength=strength) if item is old else item for item in self._items])

    def differs_only_in_branch_strengths(self, other: Attachments) -> bool:
        """Whether a network built for `other` needs no more than new branch strengths."""
        return len(self) == len(other) and all(
            mine is theirs or (mine.how == theirs.how == "branch" and mine.lora is theirs.lora)
            for mine, theirs in zip(self, other, strict=True)
        )

    def _with(self, items: Sequence[Attachment]) -> Attachments:
        return Attachments(self._checkpoint, self._layers, items)

    def _item(self, lora: LoraFile) -> Attachment:
        for item in self._items:
            if item.lora.sha256 == lora.sha256:
                return item
        attached = ", ".join(item.lora.name for item in self._items) or "no LoRA"
        raise HswqError("this LoRA is not attached", file=lora.path, found=attached, expected=lora.name)

    # -- what follows from the list --------------------------------------------------------------------------

    def bake_key(self, layer: str) -> tuple[object, ...]:
        """What a layer's effective weight depends on beside the checkpoint; equal keys mean equal bits."""
        baked = [(item, deltas) for item, deltas in self._baked() if layer in deltas]
        return tuple((item.lora.sha256, item.strength, item.how, id(item.source)) for item, _ in baked)

    def effective(self, layer: str, device: torch.device) -> Tensor | PackedWeight:
        """The layer's weight with everything that is baked into it."""
        baked = self._baked_deltas(layer)
        value = self._pristine(layer).to(device)
        return self._bake(layer, value, baked)[0] if baked else value

    def effective_bias(self, layer: str) -> Tensor | None:
        """The layer's bias with everything that is baked into it; None without one."""
        key = f"{layer}.bias"
        bias = self._checkpoint.get(key)
        if isinstance(bias, PackedWeight):
            raise HswqError("a bias is packed", file=self._checkpoint.path, tensor=key)
        return bake_bias(bias, self._baked_deltas(layer))

    def branches(
        self, layer: str, device: torch.device, dtype: torch.dtype, bias: Tensor | None
    ) -> BranchStack | None:
        """The side paths beside a layer; None without any."""
        found = self._branches_of(layer, device)
        return BranchStack(found, device=device, dtype=dtype, bias=bias) if found else None

    def on_layer(self, layer: str) -> str:
        """What is on a layer, in words."""
        found = [item for item, deltas in zip(self._items, self._deltas, strict=True) if layer in deltas]
        return ", ".join(str(item) for item in found)

    def evidence(self, device: torch.device, only: Attachment | None = None) -> BakeReport:
        """What arrived on each touched layer, computed from the weights.

        A layer that carries bakes is measured with all of them together. Branches are measured beside them.

        Args:
            device: where to compute.
            only: report on the layers of this LoRA, and on its way.
        """
        ways = {only.how} if only else {item.how for item in self._items}
        wanted = [only] if only else list(self._items)
        touched = {
            layer: None
            for item, deltas in zip(self._items, self._deltas, strict=True)
            if item in wanted
            for layer in deltas
        }
        rows: list[LayerEvidence] = []
        for layer in touched:
            value = self._pristine(layer).to(device)
            baked = self._baked_deltas(layer)
            if baked and ways - {"branch"}:
                rows.append(self._bake(layer, value, baked)[1])
            if "branch" in ways:
                rows += self._branch_evidence(layer, value, device)
        return BakeReport(rows, tuple(str(item) for item in wanted))

    # -- inside ----------------------------------------------------------------------------------------------

    def _pristine(self, layer: str) -> Tensor | PackedWeight:
        return self._checkpoint[f"{layer}.weight"]

    def _baked(self) -> list[tuple[Attachment, Mapping[str, LayerDelta]]]:
        pairs = zip(self._items, self._deltas, strict=True)
        return [(item, deltas) for item, deltas in pairs if item.how != "branch"]

    def _baked_deltas(self, layer: str) -> list[tuple[LayerDelta, float]]:
        return [(deltas[layer], item.strength) for item, deltas in self._baked() if layer in deltas]

    def _source_of(self, layer: str, how: Way) -> Tensor | None:
        """The 16-bit weight from the first source that an attachment of this way names."""
        for item in self._items:
            if item.how == how and item.source is not None:
                weight = item.source[f"{layer}.weight"]
                if isinstance(weight, PackedWeight):
                    raise HswqError(
                        "the source's layer is packed itself",
                        file=item.source.path,
                        tensor=layer,
                        found=weight.format,
                        fix="give the 16-bit checkpoint",
                    )
                return weight
        return None

    def _bake(
        self, layer: str, value: Tensor | PackedWeight, baked: list[tuple[LayerDelta, float]]
    ) -> tuple[Tensor | PackedWeight, LayerEvidence]:
        how = self._baked()[0][0].how
        source = self._source_of(layer, how)
        source = None if source is None else source.to(value.device)
        moved = [(delta.to(value.device), strength) for delta, strength in baked]
        if how == "bake_from_source" and source is not None:
            scales = self._checkpoint.metadata.get(SCALES_KEY, "rtn")
            return bake_from_source(source, value, moved, layer, scales)
        return bake_in_place(value, moved, layer, source)

    def _branches_of(self, layer: str, device: torch.device) -> dict[str, tuple[Branch, float]]:
        found: dict[str, tuple[Branch, float]] = {}
        for item, deltas in zip(self._items, self._deltas, strict=True):
            if item.how == "branch" and layer in deltas:
                delta = deltas[layer]
                branch = delta.branch(self._norms(layer, delta, device))
                if branch is not None:
                    found[item.lora.sha256] = (branch, item.strength)
        return found

    def _norms(self, layer: str, delta: LayerDelta, device: torch.device) -> Tensor | None:
        """The weight that a DoRA takes its norms from: the source's if one was given, else the pack's."""
        if not delta.needs_weight:
            return None
        source = self._source_of(layer, "branch")
        return unpacked(self._pristine(layer) if source is None else source).to(device)

    def _branch_evidence(
        self, layer: str, value: Tensor | PackedWeight, device: torch.device
    ) -> list[LayerEvidence]:
        branches = self._branches_of(layer, device)
        if not branches:
            return []
        deltas = [
            (deltas[layer], item.strength)
            for item, deltas in zip(self._items, self._deltas, strict=True)
            if item.how == "branch" and layer in deltas
        ]
        source = self._source_of(layer, "branch")
        norms = None if source is None else source.to(device).float()
        total = total_delta([(delta.to(device), k) for delta, k in deltas], unpacked(value), norms)
        needs_norms = any(delta.needs_weight for delta, _ in deltas)
        norms_from = "" if not needs_norms else "pack" if source is None else "source"
        return [branch_evidence(layer, value, total, list(branches.values()), norms_from)]


def _refuse_mixtures(items: Sequence[Attachment]) -> None:
    """Two ways of baking on one model would make the weights depend on the order of the attachments."""
    ways = {item.how for item in items} - {"branch"}
    if len(ways) > 1:
        raise HswqError(
            "LoRAs baked in place and LoRAs baked from source cannot be on one model",
            found=", ".join(str(item) for item in items),
            fix="bake all of them the same way",
        )
    seen = [item.lora.sha256 for item in items]
    for item in items:
        if seen.count(item.lora.sha256) > 1:
            raise HswqError(
                "this LoRA is attached already",
                file=item.lora.path,
                fix="change its strength, or detach it first",
            )


def _refuse_unbranchable(item: Attachment, deltas: Mapping[str, LayerDelta]) -> None:
    for layer in deltas:
        reason = deltas[layer].why_no_branch()
        if reason is not None:
            raise HswqError(
                "this LoRA cannot run as a branch",
                file=item.lora.path,
                tensor=layer,
                found=reason,
                fix="attach it with how='bake'",
            )
