"""What is wrong or odd about a LoRA file by itself, before any model is at hand: refusals and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hswq_lab.errors import HswqError
from hswq_lab.lora.dialects import is_text_encoder, parse_key, refused_method, squash
from hswq_lab.models.foreign import foreign_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hswq_lab.lora.entries import Entry, Tensors
    from hswq_lab.lora.settings import PeftSettings
    from hswq_lab.lora.source import RawLora

_SPREAD = 4.0  # effective scales that differ by this factor, or exceed it, are rarely meant


def refuse_unusable(raw: RawLora) -> None:
    """Raises for a file that is no LoRA, is for another model, or uses a method that is no additive delta."""
    keys = list(raw.tensors)
    if not keys:
        raise HswqError("the file holds no tensors", file=raw.path, expected="LoRA factors")
    for key in keys:
        method = refused_method(key)
        if method is not None:
            raise HswqError(
                f"this file uses {method}, which is not an additive delta on a Linear and is not supported",
                file=raw.path,
                tensor=key,
                expected="LoRA, DoRA, LoKr, LoHa or full deltas",
            )
    own = [key for key in keys if not is_text_encoder(key)]
    foreign = foreign_model(own or keys)
    if foreign is not None:
        model, key = foreign
        raise HswqError(
            f"this LoRA is for {model}",
            file=raw.path,
            tensor=key,
            expected="a LoRA for Z-Image or a model of its layout",
            fix="use a LoRA that was made for this model",
        )
    if not any(parse_key(key) for key in keys):
        raise HswqError(
            "this is not a LoRA file: no key has a LoRA's ending",
            file=raw.path,
            found=", ".join(keys[:3]) + (", …" if len(keys) > 3 else ""),
            expected="keys such as ….lora_A.weight, ….lora_down.weight, ….lokr_w1, ….diff",
            fix="open a model with hl.load; for a LoRA in another form, convert it first",
        )


def refuse_fused_and_split(entries: Iterable[Entry], path: Path | None) -> None:
    """Raises where a file holds a delta for a fused qkv and one for a part of it: either could be meant."""
    names = {squash(entry.module): entry for entry in entries}
    for name, entry in names.items():
        if name.endswith("qkv"):
            stem = name.removesuffix("qkv").removesuffix("to")
            clash = next((names[stem + part] for part in ("toq", "tok", "tov") if stem + part in names), None)
            if clash is not None:
                raise HswqError(
                    "the file holds a fused and a split delta for one layer",
                    file=path,
                    tensor=next(iter(clash.keys.values())),
                    found=f"{entry.module} and {clash.module}",
                    expected="one of them",
                )


def file_warnings(
    entries: Sequence[Entry], tensors: Tensors, peft: PeftSettings | None = None
) -> tuple[str, ...]:
    """What a user should know about the file's scales, in sentences."""
    return (
        *_pattern_warning(entries, peft),
        *_text_encoder_warning(entries),
        *_spread_warning(entries),
        *_lokr_warning(entries),
        *(text for entry in entries for text in _block_diagonal_warning(entry, entries, tensors)),
    )


def _pattern_warning(entries: Sequence[Entry], peft: PeftSettings | None) -> Iterable[str]:
    """A pattern that matches nothing is misspelt, or its modules go by other names in the file."""
    idle = (
        [] if peft is None else peft.idle_patterns(each.module for each in entries if each.shape is not None)
    )
    if peft is not None and idle:
        yield (
            f"{len(idle)} patterns of alphas or ranks in {peft.origin} match no module of the file, which then has "
            f"the common ones: {', '.join(idle[:3])}" + (", …" if idle[3:] else "")
        )


def _text_encoder_warning(entries: Sequence[Entry]) -> Iterable[str]:
    count = sum(entry.kind == "text encoder" for entry in entries)
    if count:
        yield f"{count} keys are for a text encoder; they are not applied, since the checkpoint holds none"


def _spread_warning(entries: Sequence[Entry]) -> Iterable[str]:
    """One alpha over very different ranks gives very different effective scales."""
    scales = [
        (entry.scale.value, entry) for entry in entries if entry.rank is not None and entry.scale.value != 0
    ]
    if not scales:
        return
    least, most = min(abs(value) for value, _ in scales), max(abs(value) for value, _ in scales)
    if most < _SPREAD * least and most <= _SPREAD:
        return
    layers: dict[float, list[Entry]] = {}
    for value, entry in scales:
        layers.setdefault(value, []).append(entry)
    named = [
        f"{value:g} (rank {group[0].rank}) on {group[0].module}"
        + (f" and {len(group) - 1} more" if group[1:] else "")
        for value, group in sorted(layers.items(), reverse=True)
    ]
    yield "the effective scales (alpha / rank) are unusual: " + "; ".join(named)


def _lokr_warning(entries: Sequence[Entry]) -> Iterable[str]:
    odd = [entry for entry in entries if entry.scale.alternative is not None]
    if odd:
        scale = odd[0].scale
        yield (
            f"{len(odd)} LoKr modules have two full factors: scale {scale.value:g} ({scale.rule}), "
            f"the other reading of alpha would give {scale.alternative:g}"
        )


def _block_diagonal_warning(entry: Entry, entries: Sequence[Entry], tensors: Tensors) -> Iterable[str]:
    """A merge of q, k, v into one block-diagonal pair triples the rank; its alpha must be tripled too."""
    alpha, rank = entry.scale.alpha, entry.rank
    if entry.kind != "LoRA" or alpha is None or rank is None or not _is_block_diagonal(entry, tensors):
        return
    others = [
        e.scale.value
        for e in entries
        if e.kind == "LoRA" and e.rank == rank // 3 and e.scale.alpha is not None
    ]
    usual = sorted(others)[len(others) // 2] if others else None
    forgotten = (
        abs(3 * entry.scale.value - usual) < 1e-6 * abs(usual)
        if usual
        else _looks_untripled(alpha, rank // 3)
    )
    if forgotten:
        yield (
            f"{entry.module}: three blocks of rank {rank // 3} were merged into rank {rank}, but alpha = "
            f"{alpha:g} was probably not tripled: the scale {entry.scale.value:g} is a third "
            f"of alpha / {rank // 3} = {3 * entry.scale.value:g}; if the LoRA is too weak, "
            "attach it with three times the strength"
        )


def _looks_untripled(alpha: float, rank: int) -> bool:
    """Without other modules to compare with: alpha is at most the block's rank, or no multiple of 3."""
    return alpha <= rank or (alpha == int(alpha) and int(alpha) % 3 != 0)


def _is_block_diagonal(entry: Entry, tensors: Tensors) -> bool:
    """Whether up [3n, 3r] is zero outside its three diagonal blocks."""
    if entry.rank is None or entry.rank % 3 or not squash(entry.module).endswith("qkv"):
        return False
    up = tensors[entry.keys["up"]].float()
    if up.shape[0] % 3:
        return False
    blocks = up.reshape(3, up.shape[0] // 3, 3, entry.rank // 3)
    off = ~torch.eye(3, dtype=torch.bool)[:, None, :, None].expand_as(blocks)
    return not blocks[off].any()
