"""pack: a 16-bit checkpoint becomes a hybrid pack by a plan; in memory and streaming, one generator."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from hswq_lab import packing
from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.checkpoint.provenance import PACK_KEY, SCALES_KEY
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight, PackedWeight
from hswq_lab.formats.block_scales import METHODS
from hswq_lab.model import check_model
from hswq_lab.progress import part, progress_of
from hswq_lab.quantize.bases import gather_bases
from hswq_lab.quantize.gptq import gptq_weight
from hswq_lab.quantize.moments import gather_moments
from hswq_lab.quantize.observe import CalibrationReport
from hswq_lab.quantize.plan import KEPT, LayerFormat, Plan, layer_name, refuse_empty

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from torch import Tensor

    from hswq_lab.formats import Method
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.quantize.moments import LayerMoments

Scales = Literal["rtn", "four_six", "sweep", "gptq"]


def pack(
    model: Model,
    plan: Plan,
    scales: Scales = "sweep",
    *,
    activations: CalibrationReport | None = None,
    moments: Mapping[str, LayerMoments] | None = None,
    bases: Mapping[str, Tensor] | None = None,
    activation_scales: Method = "rtn",
    name: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """A new model whose layers are packed as the plan says; in memory, on the CPU, until it is saved.

    Args:
        model: a 16-bit model; not changed. Its device does the work.
        plan: which layer gets which format; of one that was made by another model's impact a UserWarning tells.
        scales: how NVFP4 weights are found: "rtn", "four_six", "sweep" (block scales with the least squared
            error) or "gptq" (the least error of the layer's output, its quantised activations reckoned with).
        activations: of this model, from `observe`; for "four_six" and "sweep": weights the error by the
            power of the rotated input channels.
        moments: of this model, from `gather_moments`; for "gptq": gathered from the model's own prompts if
            not given.
        bases: of this model, from `gather_bases`; for formats with a rank ("nvfp4+r16"): gathered from the
            model's own prompts if not given.
        activation_scales: how NVFP4 layers find the block scales of their activations while running in mode
            tc: "rtn", "four_six" or "sweep". Better ones cost time, and programs that do not know the marker
            run "rtn".
        name: of the new model.
        progress: told before every tensor.

    Raises:
        HswqError: a layer is packed already, LoRAs are attached, or the plan or the activations do not fit
            the model.
    """
    formats, moments, bases, tell = _prepare(model, plan, scales, moments, bases, activation_scales, progress)
    items = pack_items(
        model.checkpoint,
        formats,
        scales,
        activations=activations,
        moments=moments,
        bases=bases,
        activation_scales=activation_scales,
        device=model.device,
        progress=tell,
    )
    metadata = pack_metadata(model.checkpoint, plan, scales)
    packed = model.checkpoint.rewritten(dict(items), metadata)
    return model.with_checkpoint(packed, name or f"{model.name} ({_summary(formats)})")


def pack_to_file(
    model: Model,
    path: str | os.PathLike[str],
    plan: Plan,
    scales: Scales = "sweep",
    *,
    activations: CalibrationReport | None = None,
    moments: Mapping[str, LayerMoments] | None = None,
    bases: Mapping[str, Tensor] | None = None,
    activation_scales: Method = "rtn",
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """`pack` from one file to another, layer by layer: the same bytes as saving what `pack` returns.

    Args:
        model: as for `pack`; one that was read from a file is never in memory as a whole.
        path: the new file; its folder must exist.
        plan: as for `pack`.
        scales: as for `pack`.
        activations: as for `pack`.
        moments: as for `pack`.
        bases: as for `pack`.
        activation_scales: as for `pack`.
        max_shard_bytes: split the output into parts of about this size, with an index.
        progress: told before every tensor.

    Returns:
        The file, or the index of a split output.

    Raises:
        HswqError: as for `pack`, or the file cannot be written; nothing is left behind then.
    """
    formats, moments, bases, tell = _prepare(model, plan, scales, moments, bases, activation_scales, progress)
    source = model.checkpoint
    items = pack_items(
        source,
        formats,
        scales,
        activations=activations,
        moments=moments,
        bases=bases,
        activation_scales=activation_scales,
        device=model.device,
    )
    metadata = pack_metadata(source, plan, scales)
    return write(path, items, metadata, source.prefix, tell, source=source, max_shard_bytes=max_shard_bytes)


def _prepare(
    model: Model,
    plan: Plan,
    scales: Scales,
    moments: Mapping[str, LayerMoments] | None,
    bases: Mapping[str, Tensor] | None,
    activation_scales: Method,
    progress: Progress | None,
) -> tuple[dict[str, LayerFormat], Mapping[str, LayerMoments] | None, Mapping[str, Tensor] | None, Progress]:
    """What becomes of each layer; moments and bases if they are needed; the progress of what is left."""
    check_model(model)
    if not isinstance(plan, Plan):
        raise HswqError("this is no plan", found=repr(plan)[:80], fix='hl.Plan({"layer or glob": "format"})')
    refuse_empty(plan)
    doubt = None if plan.measured_on is None else plan.measured_on.warning(model)
    if doubt is not None:
        warnings.warn(doubt, stacklevel=3)
    if model.loras:
        raise HswqError(
            "packing takes the model's own weights, but LoRAs are attached",
            found=", ".join(map(str, model.loras)),
            fix="detach them, pack, and attach them to the pack",
        )
    formats = plan.for_layers(model.layers())
    tell = progress_of(progress)
    ranked = {layer: wanted.rank for layer, wanted in formats.items() if wanted.rank}
    if ranked and bases is None:
        bases = gather_bases(model, layers=ranked, progress=part(tell, 0, 30, 100))
        tell = part(tell, 30, 100, 100)
    if scales == "gptq" and moments is None:
        groups = {layer: wanted.group for layer, wanted in formats.items() if wanted.format == "nvfp4"}
        moments = gather_moments(
            model,
            groups,
            bases={layer: _basis(bases, layer, rank) for layer, rank in ranked.items()},
            activation_scales=activation_scales,
            progress=part(tell, 0, 90, 100),
        )
        tell = part(tell, 90, 100, 100)
    return formats, moments, bases, tell


def pack_items(
    checkpoint: Checkpoint,
    formats: Mapping[str, LayerFormat],
    scales: Scales = "sweep",
    *,
    activations: CalibrationReport | None = None,
    moments: Mapping[str, LayerMoments] | None = None,
    bases: Mapping[str, Tensor] | None = None,
    activation_scales: Method = "rtn",
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    """Every name of a checkpoint with its new value, one by one.

    Args:
        checkpoint: 16-bit; what `formats` leaves at "16-bit" or does not name passes unchanged.
        formats: layer → what becomes of it.
        scales: as for `pack`.
        activations: as for `pack`.
        moments: as for `pack`, but "gptq" needs them.
        bases: as for `pack`, but formats with a rank need them.
        activation_scales: as for `pack`.
        device: where weights are quantised; they come back to the CPU. None: where each of them is.
        progress: told before every tensor.

    Raises:
        HswqError: a layer that is to be packed is packed already, or the activations are in another basis.
    """
    for given, known in ((scales, get_args(Scales)), (activation_scales, METHODS)):
        if given not in known:
            raise HswqError("unknown way to find block scales", found=repr(given), expected=", ".join(known))
    _check_origin(activations, CalibrationReport, "observe")
    _check_origin(moments, Mapping, "gather_moments")
    _check_origin(bases, Mapping, "gather_bases")
    tell = progress_of(progress)
    for done, name in enumerate(checkpoint):
        tell(done, len(checkpoint), name)
        value = checkpoint[name]
        wanted = formats.get(layer_name(name)) if name.endswith(".weight") else None
        if wanted is None or wanted.format == KEPT:
            yield name, value
            continue
        if isinstance(value, PackedWeight):
            raise HswqError(
                "the layer is packed already, and packing it again would add a second error",
                file=checkpoint.path,
                tensor=name,
                found=value.format,
                expected="a 16-bit tensor",
                fix="pack the 16-bit source, or leave this layer out of the plan",
            )
        layer = layer_name(name)
        if scales == "gptq" and wanted.format == "nvfp4":
            packed: PackedWeight = gptq_weight(value, _moments(moments, layer, wanted)).to("cpu")
        else:
            importance = _importance(activations, layer, wanted) if wanted.format == "nvfp4" else None
            method = "sweep" if scales == "gptq" else scales  # the other formats have nothing to choose
            dense = value if device is None else value.to(device)
            packed = packing.pack_weight(dense, wanted.format, wanted.group, method, importance, name=name)
            packed = packed if device is None else packed.to("cpu")
        if isinstance(packed, Nvfp4Weight):
            basis = _basis(bases, layer, wanted.rank) if wanted.rank else None
            packed = replace(packed, basis=basis, activation_scales=activation_scales)
            packed.validate(tensor=name)  # the basis is the caller's
        yield name, packed
    tell(len(checkpoint), len(checkpoint), "packed")


def pack_metadata(checkpoint: Checkpoint, plan: Plan, scales: str) -> dict[str, str]:
    """The source's metadata and where the pack comes from."""
    provenance = {"source_sha256": checkpoint.sha256, "scales": scales, "plan": plan.to_dict()}
    # Whoever bakes from source has no activations, so there GPTQ's layers are swept.
    again = "sweep" if scales == "gptq" else scales
    return {
        **checkpoint.metadata,
        SCALES_KEY: again,
        PACK_KEY: json.dumps(provenance, ensure_ascii=False),
    }


def _check_origin(given: object, kind: type, maker: str) -> None:
    if given is not None and not isinstance(given, kind):
        raise HswqError(
            f"this did not come from {maker}", found=repr(given)[:80], fix=f"call {maker}(model, …)"
        )


def _importance(activations: CalibrationReport | None, layer: str, wanted: LayerFormat) -> Tensor | None:
    if activations is None:
        return None
    row = activations.of(layer)
    if row.group != wanted.group:
        raise _other_basis(layer, row.group, wanted.group)
    # A layer that was never reached says nothing about its channels.
    return activations.mean_squares[layer] if row.rows else None


def _moments(moments: Mapping[str, LayerMoments] | None, layer: str, wanted: LayerFormat) -> LayerMoments:
    if moments is None or layer not in moments:
        raise HswqError(
            "GPTQ knows nothing about this layer's inputs: it was not observed, or never reached",
            tensor=layer,
            fix="give moments= from gather_moments, and pack layers that are never reached in another format",
        )
    found = moments[layer]
    if found.group != wanted.group:
        raise _other_basis(layer, found.group, wanted.group)
    return found


def _basis(bases: Mapping[str, Tensor] | None, layer: str, rank: int) -> Tensor:
    found = None if bases is None else bases.get(layer)
    if found is None or len(found) < rank:
        raise HswqError(
            "the plan wants an input basis that is not known",
            tensor=layer,
            found="none" if found is None else f"rank {len(found)}",
            expected=f"rank {rank}",
            fix="give bases= from gather_bases",
        )
    return found[:rank].contiguous()


def _other_basis(layer: str, found: int | None, wanted: int | None) -> HswqError:
    return HswqError(
        "the layer's inputs were observed in another basis than the plan stores it in",
        tensor=layer,
        found=f"rotation group {found}",
        expected=f"rotation group {wanted}",
    )


def _summary(formats: Mapping[str, LayerFormat]) -> str:
    counts: dict[str, int] = {}
    for wanted in formats.values():
        counts[wanted.format] = counts.get(wanted.format, 0) + 1
    return ", ".join(f"{number} {form}" for form, number in sorted(counts.items()))
