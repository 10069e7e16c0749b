"""calibrate: a pack gets an input_scale for every NVFP4 layer that real prompts reach."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hswq_lab.arguments import positive
from hswq_lab.checkpoint.baked import baked_in_words
from hswq_lab.checkpoint.smoothed import check_same_units
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight
from hswq_lab.model import check_model
from hswq_lab.quantize.measured import source_warning
from hswq_lab.quantize.observe import CalibrationReport, input_bases, observe
from hswq_lab.quantize.plan import check_same_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hswq_lab.checkpoint.slots import Entry
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.trajectory.compare import Prompt

CALIBRATION_KEY = "hswq.calibration"

_NAMED = 5  # layers in a sentence; the report has them all


def calibrate(
    pack: Model,
    model: Model | None = None,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 12,
    cfg: float = 2.5,
    headroom: float = 1.0,
    progress: Progress | None = None,
) -> Model:
    """A new pack with input_scale = headroom · amax / 2688 for every NVFP4 layer; the old one is not changed.

    The same as `with_input_scales(pack, observe_for(pack, model, …), headroom)`: call these two where the
    report is wanted as well.

    Args:
        pack: what to calibrate, with its LoRAs (the new pack has none).
        model: the 16-bit model whose activations count; None: those of the pack in parity mode, with the LoRAs
            that are baked into it. A UserWarning tells of a model without them, of one that is itself a pack, and of
            one that has another digest than the source that the pack names.
        prompts: one for each seed, or one for all; the model's own by default.
        seeds: of the starting noises; by default one for each prompt, none of them in `SEEDS_20`.
        steps: Euler steps; all of them count.
        cfg: guidance scale.
        headroom: room for what was not seen; costs next to nothing, too little clips: of one below 1, which
            clips what was seen, a UserWarning tells.
        progress: told after every step.

    Raises:
        HswqError: the pack has no NVFP4 layer, or the model is another one.
    """
    positive(headroom, "the headroom")  # before the work, not after it
    report = observe_for(pack, model, prompts, seeds, steps=steps, cfg=cfg, progress=progress)
    for text in [*report.warnings, *unreached_warnings(report), *clipping_warnings(headroom)]:
        warnings.warn(text, stacklevel=2)
    return with_input_scales(pack, report, headroom)


def observe_for(
    pack: Model,
    model: Model | None = None,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 12,
    cfg: float = 2.5,
    progress: Progress | None = None,
) -> CalibrationReport:
    """`observe` for a pack's NVFP4 layers, each in the basis it is stored in; arguments as of `calibrate`.

    A layer with an input basis is held against both the whole input and what the basis leaves of it.

    The report warns where the pack has LoRAs, in its file or on it, that `model` does not have, and where `model` does
    not seem to be what the pack was made from.
    """
    for each in (pack,) if model is None else (pack, model):
        check_model(each)
    groups = {layer: entry.group for layer, entry in _nvfp4_entries(pack).items()}
    if model is not None:
        check_same_layers(
            model.layers(),
            pack.layers(),
            "the model whose activations are asked for has other layers than the pack",
            "give the 16-bit model that the pack was made from, or none",
        )
        check_same_units(pack.checkpoint, model.checkpoint)
    source = pack.in_mode("parity") if model is None else model
    report = observe(
        source,
        prompts,
        seeds,
        steps=steps,
        cfg=cfg,
        groups=groups,
        bases=input_bases(pack),
        progress=progress,
    )
    doubts = [] if model is None else [source_warning(pack, model)]
    if missing := [lora for lora in _loras_of(pack) if lora not in _loras_of(source)]:
        doubts.append(
            f"{source.name} does not have the LoRAs of {pack.name} ({', '.join(missing)}), so the ranges are those "
            "without them and may clip: calibrate without another model (no --model, model=None)"
        )
    return replace(report, warnings=[doubt for doubt in doubts if doubt is not None])


def _loras_of(model: Model) -> list[str]:
    """Name and strength of every LoRA in a model's file and on it, in whatever way each was applied."""
    told = [*baked_in_words(model.checkpoint.metadata), *map(str, model.loras)]
    return [lora.rpartition(" (")[0] for lora in told]


def unreached_warnings(report: CalibrationReport) -> list[str]:
    """What is to be said about layers that got no scale; nothing where every layer got one."""
    if not (missing := report.unreached):
        return []
    named = ", ".join([*missing[:_NAMED], *(["…"] if len(missing) > _NAMED else [])])
    told = f"{len(missing)} of {len(report.rows)} layers got no input_scale"
    return [f"{told}, because they were never reached, or only zeros came: {named}"]


def clipping_warnings(headroom: float) -> list[str]:
    """What is to be said about a headroom below 1; nothing about another."""
    if headroom >= 1:
        return []
    return [f"a headroom of {headroom:g} clips inputs that calibration saw: take 1 or more"]


def with_input_scales(pack: Model, report: CalibrationReport, headroom: float = 1.0) -> Model:
    """A new pack whose NVFP4 layers carry the scales of a report; a layer that it never reached gets no key.

    A headroom below 1 is taken as it is, to see what clipping does.

    Raises:
        HswqError: the headroom is not a positive number, or a layer was observed in another basis than it is
            stored in.
    """
    headroom = positive(headroom, "the headroom")
    needed = {row.layer: row for row in report.rows}
    values = {}
    for layer, entry in _nvfp4_entries(pack).items():
        row = needed.get(layer)
        if row is not None and (row.group, row.rank) != (entry.group, entry.rank):
            raise HswqError(
                "the layer was observed in another basis than it is stored in",
                tensor=layer,
                found=f"rotation group {row.group}, input basis of rank {row.rank}",
                expected=f"rotation group {entry.group}, input basis of rank {entry.rank}",
                fix="take the report of observe_for(pack, model)",
            )
        weight = pack.checkpoint[f"{layer}.weight"]
        if not isinstance(weight, Nvfp4Weight):
            raise HswqError("the layer is not what its entry says", tensor=layer, found=type(weight).__name__)
        scale = (
            None
            if row is None or row.needed is None
            else torch.tensor(row.needed, dtype=torch.float32) * headroom
        )
        if scale is not None and not 0 < float(scale) < float("inf"):
            raise HswqError(
                "the headroom leaves no input_scale that fp32 can hold", tensor=layer, found=f"{headroom:g}"
            )
        values[f"{layer}.weight"] = weight.with_input_scale(scale)
    checkpoint = pack.checkpoint.with_values(values, {CALIBRATION_KEY: _provenance(pack, report, headroom)})
    return pack.with_checkpoint(checkpoint)


def _nvfp4_entries(pack: Model) -> dict[str, Entry]:
    entries = {layer: pack.checkpoint.entry(f"{layer}.weight") for layer in pack.layers()}
    found = {layer: entry for layer, entry in entries.items() if entry.format == "nvfp4"}
    if not found:
        raise HswqError("there is nothing to calibrate: no layer of this model is NVFP4", tensor=pack.name)
    return found


def _provenance(pack: Model, report: CalibrationReport, headroom: float) -> str:
    missing = sorted(
        _nvfp4_entries(pack).keys() - {row.layer for row in report.rows if row.needed is not None}
    )
    content = {
        "activations": f"{report.model} ({report.source})",
        "prompts": report.prompts,
        "seeds": report.seeds,
        "steps": report.steps,
        "cfg": report.cfg,
        "headroom": headroom,
        "loras": report.loras,
        "no_scale": missing,
    }
    return json.dumps(content, ensure_ascii=False)
