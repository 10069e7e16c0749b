"""LoraFile: a LoRA read and understood, and matched against any model's layers on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from hswq_lab.arguments import path_of
from hswq_lab.errors import HswqError
from hswq_lab.lora.checks import file_warnings, refuse_fused_and_split, refuse_unusable
from hswq_lab.lora.delta import LayerDelta
from hswq_lab.lora.dialects import is_text_encoder, parse_key
from hswq_lab.lora.entries import Entry, EntryBuilder, FullLokrScale, Tensors, bias_parts_of, part_of
from hswq_lab.lora.matching import Coverage, Match, coverage_of, match_entries, refuse_mismatches, unplaced
from hswq_lab.lora.parts import BiasPart, Part
from hswq_lab.lora.report import LoraReport, LoraRow
from hswq_lab.lora.scales import metadata_rank
from hswq_lab.lora.settings import peft_settings
from hswq_lab.lora.source import RawLora, check_values, identity, made_of, raw_from_tensors, read_raw
from hswq_lab.lora.targets import HasLayers, LayerShapes, Target, TargetIndex, layers_of, weight_of

if TYPE_CHECKING:
    import os

    from torch import Tensor

Value = TypeVar("Value")


class PerLayer(Mapping[str, Value]):
    """Layer → value, made at each access, so that only one layer's tensors need to be in memory."""

    def __init__(self, layers: list[str], make: Callable[[str], Value]) -> None:
        self._layers = dict.fromkeys(layers)
        self._make = make

    def __getitem__(self, layer: str) -> Value:
        if layer not in self._layers:
            raise KeyError(layer)
        return self._make(layer)

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@dataclass(frozen=True, eq=False, repr=False)
class LoraFile:
    """A LoRA file. Nothing in it depends on a model; `report`, `deltas` and `dense_deltas` take the layers.

    Attributes:
        path: the file, None for tensors in memory.
        name: for people: the file's name without ending.
        sha256: of the content, and of settings outside it that change its meaning (an adapter_config.json that was
            used, another full_lokr_scale where it matters); two LoraFiles with the same one are the same LoRA.
        file_sha256: of the content alone, by which packs name it that were baked before those settings counted.
        metadata: the header's metadata as text.
        entries: its modules, in the file's order.
        warnings: what a reader should know about its scales and settings.
        tensors: key → tensor as stored.
        full_lokr_scale: how it was read, see `load_lora`.
    """

    path: Path | None
    name: str
    sha256: str
    file_sha256: str
    metadata: Mapping[str, str]
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]
    tensors: Tensors
    full_lokr_scale: FullLokrScale = "one"

    @cached_property
    def made_of(self) -> frozenset[str]:
        """SHA-256 of the LoRAs that it was converted or merged from, and of those that these were made of."""
        return made_of(self.metadata)

    def ancestry(self, label: str) -> str:
        """What a file that is made of this one says of it: `label`, its hash, and those of what it is made of."""
        older = sorted((self.made_of | {self.file_sha256}) - {self.sha256})
        return f"{label} sha256={self.sha256}" + (
            f" (made of {', '.join(f'sha256={each}' for each in older)})" if older else ""
        )

    @cached_property
    def strongest(self) -> tuple[str, float]:
        """The module with the largest `Part.gain` at strength 1, and that gain."""
        found: list[Part | BiasPart] = []
        for entry in self.entries:
            if entry.shape is not None:
                part = part_of(entry, self.tensors, 0, entry.shape[0])
                biases = bias_parts_of(entry, self.tensors, 0, entry.shape[0])
                found += [*biases, *([] if part is None else [part])]
        gain, module = max(((part.gain(), part.key) for part in found), default=(0.0, ""))
        return module, gain

    def match(self, layers: LayerShapes | HasLayers) -> list[Match]:
        """Each entry with its target, or with the reason why it has none; raises nothing."""
        return match_entries(self.entries, TargetIndex(layers_of(layers)))

    def coverage(self, layers: LayerShapes | HasLayers) -> Coverage:
        """How many of its modules match a layer, and which do not; raises nothing."""
        return coverage_of(self.name, self.match(layers))

    def report(self, layers: LayerShapes | HasLayers | None = None) -> LoraReport:
        """What is in the file and where it goes: a row a module.

        Args:
            layers: name → (N, K), or a model; with a model, norms of DoRA and replaced weights are computed
                too. None only reads the file: the status of what could be matched is then "read".
        """
        if layers is None:
            rows = [self._row(match) for match in map(unplaced, self.entries)]
            return LoraReport(
                self.name, str(self.path or "in memory"), self.sha256, rows, list(self.warnings)
            )
        index = TargetIndex(layers_of(layers))
        rows = [self._row(match, index, layers) for match in match_entries(self.entries, index)]
        return LoraReport(self.name, str(self.path or "in memory"), self.sha256, rows, list(self.warnings))

    def deltas(
        self, layers: LayerShapes | HasLayers, *, allow_unmatched: bool = False
    ) -> Mapping[str, LayerDelta]:
        """The delta of every layer that the file touches; tensors are read when a layer is asked for.

        Args:
            layers: name → (N, K) of a model's Linears, or a model.
            allow_unmatched: leave out modules that match no layer, instead of refusing the file.

        Raises:
            HswqError: a module matches no layer, has the wrong shape, or overlaps another; or nothing matches
                at all.
        """
        shapes = layers_of(layers)
        index = TargetIndex(shapes)
        matches = match_entries(self.entries, index)
        refuse_mismatches(matches, index, self.path or self.name, allow_unmatched=allow_unmatched)
        grouped: dict[str, list[tuple[Entry, Target]]] = {}
        for match in matches:
            if match.target is not None:
                grouped.setdefault(match.target.layer, []).append((match.entry, match.target))

        # Whoever applies a delta asks for it several times in a row: the last layer's factors are kept.
        @lru_cache(maxsize=1)
        def delta(layer: str) -> LayerDelta:
            return self._delta(layer, shapes[layer], grouped[layer])

        return PerLayer(list(grouped), delta)

    def dense_deltas(
        self, layers: LayerShapes | HasLayers, *, allow_unmatched: bool = False
    ) -> Mapping[str, Tensor]:
        """Layer → ΔW at strength 1, fp32 [N, K]; computed at each access.

        Raises:
            HswqError: as `deltas`; and for a DoRA layer if `layers` is no model, since its ΔW depends on the
                weight.
        """
        deltas = self.deltas(layers, allow_unmatched=allow_unmatched)

        def dense(layer: str) -> Tensor:
            delta = deltas[layer]
            return delta.dense(weight_of(layers, layer) if delta.needs_weight else None)

        return PerLayer(list(deltas), dense)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({entry.in_words for entry in self.entries}))
        return f"<LoraFile {self.name}: {len(self.entries)} modules ({kinds})>"

    def _delta(self, layer: str, shape: tuple[int, int], items: list[tuple[Entry, Target]]) -> LayerDelta:
        parts = [part_of(entry, self.tensors, target.start, target.stop) for entry, target in items]
        biases = [bias_parts_of(entry, self.tensors, target.start, target.stop) for entry, target in items]
        found = tuple(part for part in parts if part is not None)
        return LayerDelta(layer, shape, found, tuple(bias for group in biases for bias in group))

    def _row(
        self, match: Match, index: TargetIndex | None = None, layers: LayerShapes | HasLayers | None = None
    ) -> LoraRow:
        entry, target = match.entry, match.target
        row = LoraRow(
            module=entry.module,
            keys=tuple(entry.keys.values()),
            kind=entry.in_words,
            status=match.status,
            why_not=match.why_not,
            rank=entry.rank,
        )
        if entry.shape is None:
            return row
        scale = entry.scale
        row = replace(row, scale=scale.value, rule=scale.rule, alternative=scale.alternative)
        if target is None:
            unmatched = index is not None and match.status == "unmatched"
            nearest = index.nearest(entry.module) if index is not None and unmatched else ""
            return replace(row, norm=self._norm(entry), nearest=nearest)
        rows = f"{target.start}:{target.stop}"
        return replace(row, layer=target.layer, rows=rows, norm=self._norm(entry, target, layers))

    def _norm(
        self, entry: Entry, target: Target | None = None, layers: LayerShapes | HasLayers | None = None
    ) -> float | None:
        start, stop = (target.start, target.stop) if target else (0, entry.shape[0] if entry.shape else 0)
        part = part_of(entry, self.tensors, start, stop)
        if part is None or not part.needs_weight:
            return None if part is None else part.norm()
        weight = weight_of(layers, target.layer) if target is not None and layers is not None else None
        return None if weight is None else float(part.dense(weight[start:stop]).norm())


def check_lora(value: object) -> None:
    """Raises HswqError for anything but a loaded LoRA."""
    if not isinstance(value, LoraFile):
        raise HswqError(
            "this is no loaded LoRA", found=repr(value)[:80], fix="open the file with hl.load_lora first"
        )


def load_lora(path: str | os.PathLike[str], *, full_lokr_scale: FullLokrScale = "one") -> LoraFile:
    """Reads a LoRA file in any of the known dialects; all tensors are checked, none is kept in memory.

    Args:
        path: a .safetensors file, or a folder in PEFT's layout.
        full_lokr_scale: the factor of a LoKr with two full factors: "one" (LyCORIS, ComfyUI), or "alpha/dim"
            with the dim of the header's metadata. The other choice is shown in the report where the two
            differ.

    Raises:
        HswqError: no LoRA file; one for another model (named); a method that is no additive delta (named); an
            incomplete, contradictory or damaged one, with the key's name.
    """
    return _understood(read_raw(path_of(path, "a LoRA")), full_lokr_scale)


def lora_from_tensors(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    name: str = "in memory",
    *,
    full_lokr_scale: FullLokrScale = "one",
) -> LoraFile:
    """The same as `load_lora` for tensors in memory."""
    return _understood(raw_from_tensors(tensors, metadata or {}, name), full_lokr_scale)


def _understood(raw: RawLora, full_lokr_scale: FullLokrScale) -> LoraFile:
    if full_lokr_scale not in get_args(FullLokrScale):
        raise HswqError("unknown full_lokr_scale", found=repr(full_lokr_scale), expected="one or alpha/dim")
    refuse_unusable(raw)
    check_values(raw.tensors, raw.path)
    peft = peft_settings(raw.metadata, raw.adapter_config, raw.path)
    builder = EntryBuilder(raw.tensors, raw.path, peft, metadata_rank(raw.metadata, peft), full_lokr_scale)
    entries = tuple(
        builder.entry(module, keys) if kind is None else Entry(module, kind, keys, why_not=why)
        for module, kind, keys, why in _grouped(raw)
    )
    refuse_fused_and_split(entries, raw.path)
    warnings = raw.warnings + file_warnings(entries, raw.tensors, peft)
    differs = any(entry.scale.alternative is not None for entry in entries)
    sha256 = identity(raw, full_lokr_scale if differs and full_lokr_scale != "one" else "")
    return LoraFile(
        raw.path,
        raw.name,
        sha256,
        raw.sha256,
        raw.metadata,
        entries,
        warnings,
        raw.tensors,
        full_lokr_scale,
    )


def _grouped(
    raw: RawLora,
) -> Iterator[tuple[str, Literal["text encoder", "unknown"] | None, dict[str, str], str]]:
    """(module, kind if it is not to be applied, role → key, why not) in the file's order."""
    modules: dict[str, dict[str, str]] = {}
    aside: list[tuple[str, Literal["text encoder", "unknown"], dict[str, str], str]] = []
    for key in raw.tensors:
        parsed = parse_key(key)
        if is_text_encoder(key):
            aside.append((key, "text encoder", {"tensor": key}, "the checkpoint holds no text encoder"))
        elif parsed is None:
            aside.append((key, "unknown", {"tensor": key}, "no known ending of a LoRA key"))
        else:
            roles = modules.setdefault(parsed.module, {})
            if parsed.role in roles:
                raise HswqError(
                    "two tensors play the same role in one module",
                    file=raw.path,
                    tensor=key,
                    found=f"{roles[parsed.role]} and {key}",
                    expected="one adapter a file, each tensor once",
                )
            roles[parsed.role] = key
    yield from ((module, None, roles, "") for module, roles in modules.items())
    yield from aside
