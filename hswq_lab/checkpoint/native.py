"""From diffusers' names to the native layout: parameters renamed, split q, k, v joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hswq_lab.checkpoint.findings import Finding, from_error
from hswq_lab.checkpoint.fuse import fused_slot
from hswq_lab.errors import HswqError
from hswq_lab.models.names import PARTS, native_target

if TYPE_CHECKING:
    from collections.abc import Container

    from hswq_lab.checkpoint.index import Index
    from hswq_lab.checkpoint.slots import Slot


def make_native(index: Index, foreign: Container[str]) -> bool:
    """Give the slots of an index native names, in place; broken sets of parts become findings.

    Args:
        index: of files in any layout; those in native layout stay as they are.
        foreign: names that do not belong to the model.

    Returns:
        Whether any name changed, so whether this was a diffusers layout.
    """
    native: dict[str, Slot] = {}
    parts: dict[str, dict[int, Slot]] = {}
    for name, slot in index.slots.items():
        target, part = (name, None) if name in foreign else _target(name)
        if part is not None:
            # The joined slot stands where its first part stood.
            native.setdefault(target, slot)
            parts.setdefault(target, {})[part] = slot
        elif target in native or (target != name and target in index.slots):
            problem = "a parameter is there under its native and under its diffusers name"
            index.findings.append(Finding("error", "layout-names", problem, name, name, target))
        else:
            native[target] = slot if target == name else slot.renamed(target)
            _move_marker(index, name, target)
    for target, found in parts.items():
        joined = _join(target, found, index)
        if joined is None:
            native.pop(target, None)
        else:
            native[target] = joined
    changed = native.keys() != index.slots.keys()
    index.slots = native
    return changed


def _target(name: str) -> tuple[str, int | None]:
    """The native name and the row part of a weight or bias; what hangs deeper below a split layer stays."""
    target, part = native_target(name)
    if part is not None and not name.rpartition(".")[0].endswith(PARTS):
        return name, None
    return target, part


def _move_marker(index: Index, name: str, target: str) -> None:
    raw = index.markers.pop(name.removesuffix(".weight"), None)
    if raw is not None:
        index.markers[target.removesuffix(".weight")] = raw


def _join(target: str, found: dict[int, Slot], index: Index) -> Slot | None:
    """The fused slot; None, with a finding, where parts are missing, superfluous or of different kinds."""
    entries = [slot.entry for slot in found.values()]
    if len(found) != len(PARTS) or target in index.slots:
        problem = "a fused parameter is stored in parts, and not exactly in q, k and v"
        names = [entry.name for entry in entries] + ([target] if target in index.slots else [])
        index.findings.append(
            Finding("error", "layout-names", problem, target, ", ".join(names), ", ".join(PARTS))
        )
        return None
    try:
        joined = fused_slot(target, [found[part] for part in range(len(PARTS))])
    except HswqError as error:
        index.findings.append(from_error(error, "layout-names", target))
        return None
    if not joined.keeps_bits:
        problem = (
            "q, k and v were packed apart; joined with one common tensor scale, the smaller ones packed again"
        )
        index.findings.append(Finding("warning", "joined", problem, target))
    if any(entry.calibrated for entry in entries) and not joined.entry.calibrated:
        problem = "only some of q, k and v have an input_scale; joined without"
        index.findings.append(Finding("warning", "joined", problem, target))
    return joined
