"""The LoRAs declared on a model, and what follows from them: effective weights, branches, evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.checkpoint.provenance import SCALES_KEY
from hswq_lab.checkpoint.slots import located
from hswq_lab.checkpoint.smoothed import channel_factors, is_smoothed
from hswq_lab.declared import (
    Attachment,
    Way,
    refuse_absurd,
    refuse_baked,
    refuse_mixtures,
    refuse_other_units,
    refuse_twice,
    refuse_unbranchable,
)
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.lora import (
    BakeReport,
    Branch,
    BranchStack,
    Coverage,
    LayerDelta,
    LayerEvidence,
    LoraFile,
    bake_bias,
    bias_evidence,
    branch_evidence,
    change_of,
    measure,
    put_from_source,
    put_in_place,
    total_bias,
    total_delta,
)
from hswq_lab.lora.evidence import Baked, BakedWeights, Verdict
from hswq_lab.lora.file import check_lora
from hswq_lab.lora.smoothed import in_units_of
from hswq_lab.lora.targets import unpacked
from hswq_lab.progress import Progress, silent
from hswq_lab.source_check import SourceCheck


class Attachments(Sequence[Attachment]):
    """An immutable list of LoRAs on one checkpoint.

    A layer's effective weight is always computed from the pristine one in the checkpoint and all deltas baked into it
    at once: nothing accumulates, and taking a LoRA off is exact.

    Args:
        checkpoint: the pristine weights.
        layers: the model's Linears, name → (N, K).
        items: the LoRAs, in order.

    Raises:
        HswqError: a LoRA is there twice, does not fit the layers, would be baked into a file that has baked
            ones already, is in that file itself, or two ways of baking are mixed.
    """

    def __init__(
        self, checkpoint: Checkpoint, layers: Mapping[str, tuple[int, int]], items: Sequence[Attachment] = ()
    ) -> None:
        self._checkpoint = checkpoint
        self._layers = layers
        self._items = tuple(items)
        refuse_mixtures(self._items)
        refuse_twice(self._items)
        for item in self._items:
            refuse_baked(item, checkpoint)
            refuse_other_units(item, checkpoint)
            refuse_absurd(item, layers)
        self._deltas = [
            in_units_of(checkpoint, item.lora.deltas(layers, allow_unmatched=item.allow_unmatched))
            for item in self._items
        ]
        for item, deltas in zip(self._items, self._deltas, strict=True):
            if item.how == "branch":
                refuse_unbranchable(item, deltas)

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
        new = replace(old, strength=strength, verdict=None)
        return self._with([new if item is old else item for item in self._items])

    def with_verdict(self, measured: Attachment, verdict: Verdict) -> Attachments:
        """This list with what the evidence says about one of its items."""
        return self._with(
            [replace(item, verdict=verdict) if item is measured else item for item in self._items]
        )

    def differs_only_in_branch_strengths(self, other: Attachments) -> bool:
        """Whether a network built for `other` needs no more than new branch strengths."""
        return len(self) == len(other) and all(
            mine is theirs or (mine.how == theirs.how == "branch" and mine.lora is theirs.lora)
            for mine, theirs in zip(self, other, strict=True)
        )

    def _with(self, items: Sequence[Attachment]) -> Attachments:
        return Attachments(self._checkpoint, self._layers, items)

    def _item(self, lora: LoraFile) -> Attachment:
        check_lora(lora)
        for item in self._items:
            if item.lora.sha256 == lora.sha256:
                return item
        attached = ", ".join(item.lora.name for item in self._items) or "no LoRA"
        raise HswqError("this LoRA is not attached", file=lora.path, found=attached, expected=lora.name)

    # -- what follows from the list --------------------------------------------------------------------------

    def bake_key(self, layer: str) -> tuple[object, ...]:
        """What a layer's effective weight depends on beside the checkpoint; equal keys mean equal bits."""
        baked = [(item, deltas) for item, deltas in self._baked() if layer in deltas]
        # Any attachment's source serves the layers of all of them, see `_source_of`.
        sources = (
            {item.source.sha256 for item, _ in self._baked() if item.source is not None} if baked else ()
        )
        return (*sources, *((item.lora.sha256, item.strength, item.how) for item, _ in baked))

    def effective(self, layer: str, device: torch.device) -> Tensor | PackedWeight:
        """The layer's weight with everything that is baked into it."""
        baked = self._baked_deltas(layer)
        value = self._pristine(layer).to(device)
        return self._put(layer, value, baked, None).after if _weighty(baked) else value

    def effective_bias(self, layer: str) -> Tensor | None:
        """The layer's bias with everything that is baked into it; None without one."""
        return bake_bias(self._pristine_bias(layer), self._baked_deltas(layer), layer)

    def wanted(self, layer: str, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """What all LoRAs together are to add to a layer, in whatever way: (Σ strength · ΔW, Σ strength · Δb).

        Args:
            layer: its name.
            weight: fp32 [N, K], unrotated, what they are put on.

        Returns:
            fp32 [N, K] and fp32 [N] on the weight's device; None without a delta of the bias.
        """
        deltas = [
            (found[layer].to(weight.device), item.strength)
            for item, found in zip(self._items, self._deltas, strict=True)
            if layer in found
        ]
        return total_delta(deltas, weight), total_bias(deltas)

    @property
    def touched(self) -> list[str]:
        """The layers that any LoRA touches, in the model's order."""
        return [layer for layer in self._layers if any(layer in deltas for deltas in self._deltas)]

    @property
    def baked_layers(self) -> list[str]:
        """The layers that LoRAs are baked into, in the model's order."""
        return [layer for layer in self._layers if any(layer in deltas for _, deltas in self._baked())]

    def branches(
        self, layer: str, device: torch.device, dtype: torch.dtype, bias: Tensor | None
    ) -> BranchStack | None:
        """The side paths beside a layer; None without any."""
        found = self._branches_of(layer, device)
        return BranchStack(found, device=device, dtype=dtype, bias=bias) if found else None

    def in_words(self) -> list[str]:
        """A line each: name, strength and way, where it is, and whether it arrived."""
        lines = []
        for item, deltas in zip(self._items, self._deltas, strict=True):
            verdict = "not measured yet, bake_report() does" if item.verdict is None else item.verdict
            lines.append(f"{self._label(item)} on {len(deltas)} layers: {verdict}")
        return lines

    def coverage(self, items: Sequence[Attachment]) -> tuple[Coverage, ...]:
        """How many modules of each of these LoRAs match a layer, and which do not."""
        return tuple(item.lora.coverage(self._layers) for item in items)

    @property
    def remarks(self) -> list[str]:
        """What to know about the LoRAs as a whole."""
        return [found.warning for found in self.coverage(self._items) if found.left_out]

    def on_layer(self, layer: str) -> str:
        """What is on a layer, in words."""
        found = [item for item, deltas in zip(self._items, self._deltas, strict=True) if layer in deltas]
        return ", ".join(str(item) for item in found)

    def evidence(
        self,
        device: torch.device,
        only: Attachment | None = None,
        weights: BakedWeights | None = None,
        progress: Progress | None = None,
    ) -> BakeReport:
        """What arrived on each touched layer, computed from the weights.

        A layer that carries bakes is measured with all of them together. Branches are measured beside them.

        Args:
            device: where to compute.
            only: report on the layers of this LoRA, and on its way.
            weights: baked weights that are there already are measured as they are; new ones are kept there.
            progress: told of every layer.
        """
        ways = {only.how} if only else {item.how for item in self._items}
        wanted = [only] if only else list(self._items)
        sources = (item.source for item in self._items if item.how in ways and item.source is not None)
        origin = SourceCheck(self._checkpoint, next(sources, None))
        touched = {
            layer: None
            for item, deltas in zip(self._items, self._deltas, strict=True)
            if item in wanted
            for layer in deltas
        }
        rows: list[LayerEvidence] = []
        tell = progress or silent
        for done, layer in enumerate(touched):
            tell(done, len(touched), layer)
            held = None if weights is None else weights.pristine(layer)  # no file is read, nothing is moved
            value = self._pristine(layer).to(device) if held is None else held
            baked = self._baked_deltas(layer)
            if baked and ways - {"branch"}:
                rows += self._bake_evidence(layer, value, baked, weights, origin)
            if "branch" in ways:
                rows += self._branch_evidence(layer, value, device, origin)
        tell(len(touched), len(touched), "what arrived is known")
        labels = tuple(map(self._label, wanted))
        return BakeReport(rows, labels, coverage=self.coverage(wanted), remarks=origin.remarks())

    # -- inside ----------------------------------------------------------------------------------------------

    def _label(self, item: Attachment) -> str:
        """The LoRA in words, with how much of it is applied where that is not all."""
        partly = item.lora.coverage(self._layers).in_words
        return f"{item}, {partly}" if partly else str(item)

    def _pristine(self, layer: str) -> Tensor | PackedWeight:
        return self._checkpoint[f"{layer}.weight"]

    def _pristine_bias(self, layer: str) -> Tensor | None:
        key = f"{layer}.bias"
        bias = self._checkpoint.get(key)
        if isinstance(bias, PackedWeight):
            raise HswqError("a bias is packed", file=self._checkpoint.path, tensor=key)
        return bias

    def _baked(self) -> list[tuple[Attachment, Mapping[str, LayerDelta]]]:
        pairs = zip(self._items, self._deltas, strict=True)
        return [(item, deltas) for item, deltas in pairs if item.how != "branch"]

    def _baked_deltas(self, layer: str) -> list[tuple[LayerDelta, float]]:
        return [(deltas[layer], item.strength) for item, deltas in self._baked() if layer in deltas]

    def _source_of(self, layer: str, how: Way) -> Tensor | None:
        """The 16-bit weight from the one source that attachments of this way name, in the pack's units."""
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
                if is_smoothed(item.source) or not is_smoothed(self._checkpoint):
                    return weight
                rows, columns = channel_factors(self._checkpoint, layer)
                return (weight.float() * rows[:, None] * columns).to(weight.dtype)
        return None

    def _put(
        self,
        layer: str,
        value: Tensor | PackedWeight,
        baked: list[tuple[LayerDelta, float]],
        known: Tensor | PackedWeight | None,
    ) -> Baked:
        how = self._baked()[0][0].how
        source = self._source_of(layer, how)
        source = None if source is None else source.to(value.device)
        moved = [(delta.to(value.device), strength) for delta, strength in baked]
        try:
            if how == "bake_from_source" and source is not None:
                scales = self._checkpoint.metadata.get(SCALES_KEY, "rtn")
                return put_from_source(source, value, moved, layer, scales, known)
            return put_in_place(value, moved, layer, source, known)
        except HswqError as error:
            raise error if error.file is not None else located(error, self._checkpoint.path, layer) from error

    def _bake_evidence(
        self,
        layer: str,
        value: Tensor | PackedWeight,
        baked: list[tuple[LayerDelta, float]],
        weights: BakedWeights | None,
        origin: SourceCheck,
    ) -> list[LayerEvidence]:
        rows = []
        if _weighty(baked):
            # A 16-bit weight is kept in the dtype that the network works in, which may be another.
            kept = weights if isinstance(value, PackedWeight) else None
            case = self._put(layer, value, baked, None if kept is None else kept.known(layer))
            if case.source is not None:
                origin.look(layer, value, case.source)
            if kept is not None and isinstance(case.after, PackedWeight):
                kept.keep(layer, case.after)
            rows.append(measure(case))
        total = total_bias(baked)
        if total is not None:
            before = self._pristine_bias(layer)
            after = bake_bias(before, baked, layer)
            rows.append(bias_evidence(layer, self._baked()[0][0].how, before, after, total))
        return rows

    def _branches_of(self, layer: str, device: torch.device) -> dict[str, tuple[Branch, float]]:
        found: dict[str, tuple[Branch, float]] = {}
        for item, deltas in zip(self._items, self._deltas, strict=True):
            if item.how == "branch" and layer in deltas:
                delta = deltas[layer].to(device)
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
        self, layer: str, value: Tensor | PackedWeight, device: torch.device, origin: SourceCheck
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
        moved = [(delta.to(device), strength) for delta, strength in deltas]
        needs_norms = any(delta.needs_weight for delta, _ in deltas)
        if needs_norms and source is not None:
            origin.look(layer, value, source.to(device))
        norms_from = "" if not needs_norms else "pack" if source is None else "source"
        rows = []
        if _weighty(deltas):
            wanted = change_of(moved, value, lambda: unpacked(value), norms)
            rows.append(branch_evidence(layer, value, wanted, list(branches.values()), norms_from))
        bias = total_bias(deltas)
        if bias is not None:
            carried = [
                branch.bias * strength for branch, strength in branches.values() if branch.bias is not None
            ]
            before = self._pristine_bias(layer)
            after = torch.stack(carried).sum(0).cpu() + (0 if before is None else before.float())
            rows.append(bias_evidence(layer, "branch", before, after, bias))
        return rows


def _weighty(deltas: Sequence[tuple[LayerDelta, float]]) -> bool:
    """Whether any of the deltas is more than one of the bias."""
    return any(delta.parts for delta, _ in deltas)
