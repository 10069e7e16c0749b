"""pack_module: the Linears of any torch module, packed in place; the module goes on working where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hswq_lab import ops
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.layers import LabLinear, make_linear
from hswq_lab.models.names import native_target
from hswq_lab.modes import ModeRequest, Requested, Uncalibrated, resolve
from hswq_lab.module_linear import ModuleLinear
from hswq_lab.quantize.pack import Scales, pack_items
from hswq_lab.quantize.plan import KEPT, LayerFormat, Plan, layer_format, refuse_empty
from hswq_lab.report import LayerRow, LoadReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.modes import Resolved
    from hswq_lab.progress import Progress


def pack_module(
    module: nn.Module,
    plan: Plan | Mapping[str, str],
    scales: Scales = "sweep",
    *,
    mode: Requested = "auto",
    uncalibrated: Uncalibrated | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Packs the `nn.Linear`s of a module where they stand, say `pipe.transformer` of a diffusers pipeline.

    A layer answers to its name in the module; those of diffusers' Z-Image answer to their native names too, so a plan
    that `hl.sensitivity` made works (q, k and v are then packed apart, each with its own tensor scale). Everything is
    packed before anything is exchanged, so memory holds both for a moment. LoRAs are loaded after packing, with the
    module's own loader; they stay beside the packed weights, and fusing them is refused.

    Args:
        module: any module whose Linears are dense; changed in place. It is for inference afterwards.
        plan: layer name or glob → format; what it leaves at "16-bit" or does not name stays as it is.
        scales: as for `hl.pack`, without "gptq", which needs a Model; so do formats with a rank.
        mode: "auto", "parity" (W4A16), "tc" (W4A4) or "tc8" (W4A8).
        uncalibrated: a module's layers have no input_scale, so tc and tc8 need "dynamic" or "unit".
        progress: told before every layer.

    Returns:
        A row a Linear; `module_report` gives it again later, with counters.

    Raises:
        HswqError: an entry that matches no layer, a layer that cannot be packed or cannot run in the mode, LoRAs or
            hooks on the Linears, a module that is packed already. The module is unchanged then.
    """
    _check_module(module)
    plan = plan if isinstance(plan, Plan) else Plan(plan)
    refuse_empty(plan)
    request = ModeRequest(mode, uncalibrated, "default" if mode == "auto" else "asked for")
    _refuse_unfit(module)
    linears = {name: each for name, each in module.named_modules() if type(each) is nn.Linear}
    formats = _formats(linears, plan)
    _refuse_observed(formats, scales)
    modes = {name: _resolved(name, wanted, request, linears[name]) for name, wanted in formats.items()}
    dense = {f"{name}.weight": linears[name].weight.detach() for name in formats}
    items = pack_items(Checkpoint.from_mapping(dense), formats, scales, progress=progress)
    made: dict[nn.Module, nn.Module] = {}
    for key, packed in items:
        name = key.removesuffix(".weight")
        old = linears[name]
        bias = None if old.bias is None else old.bias.detach()
        made[old] = ModuleLinear(make_linear(name, packed, bias, modes[name]), old.weight.dtype)
    _exchange(module, made)
    return module_report(module)


def _check_module(value: object) -> None:
    if not isinstance(value, nn.Module):
        raise HswqError("this is no torch module", found=repr(value)[:80], expected="an nn.Module")


def module_report(module: nn.Module) -> LoadReport:
    """Format, mode and counters of every Linear of a module, packed or not.

    Subclasses of `nn.Linear` that `pack_module` leaves alone are named in the report's warnings.

    Raises:
        HswqError: it is no module.
    """
    _check_module(module)
    rows, warnings = [], []
    for name, each in module.named_modules():
        if isinstance(each, ModuleLinear):
            rows.append(_row(name, each.layer))
        elif type(each) is nn.Linear:
            n, k = each.weight.shape
            rows.append(
                LayerRow(
                    name, KEPT, None, n, k, KEPT, "not packed", each.weight.nbytes, False, arithmetic=KEPT
                )
            )
        elif isinstance(each, nn.Linear):
            warnings.append(f"{name}: a {type(each).__name__}, no plain Linear; left alone")
    first = next((each for each in module.parameters()), torch.empty(0))
    requested = {row.why for row in rows if row.format != KEPT}
    return LoadReport(
        model=type(module).__name__,
        source="packed in place",
        device=str(first.device),
        dtype=str(first.dtype).removeprefix("torch."),
        requested_mode="; ".join(sorted(requested)) or "nothing is packed",
        layers=rows,
        warnings=warnings,
    )


def _formats(linears: Mapping[str, nn.Linear], plan: Plan) -> dict[str, LayerFormat]:
    """What becomes of the layers that are to be packed."""
    shapes = {name: (each.out_features, each.in_features) for name, each in linears.items()}
    native = {name: native_target(name)[0] for name in linears}
    plan.for_layers(shapes | {native[name]: shape for name, shape in shapes.items()})  # refuses strangers
    forms = {name: plan.form_of(name, native[name]) or KEPT for name in linears}
    chosen = {name: layer_format(form, shapes[name][1]) for name, form in forms.items()}
    return {name: wanted for name, wanted in chosen.items() if wanted.format != KEPT}


def _refuse_observed(formats: Mapping[str, LayerFormat], scales: Scales) -> None:
    ranked = next((name for name, wanted in formats.items() if wanted.rank), None)
    if scales == "gptq" or ranked is not None:
        raise HswqError(
            "this way to pack needs observed inputs of the layers, and only a Model's are gathered",
            tensor=ranked,
            found="gptq" if ranked is None else "a format with a rank",
            fix="take rtn, four_six or sweep and formats without a rank, or pack the model's file with hl.pack",
        )


def _resolved(name: str, wanted: LayerFormat, request: ModeRequest, linear: nn.Linear) -> Resolved:
    native = ops.fp4_is_native(linear.weight.device)
    return resolve(name, wanted.format, request, calibrated=False, fp4_is_native=native)


def _refuse_unfit(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        raise HswqError("a single Linear cannot be exchanged in place", fix="give the module that holds it")
    for name, each in module.named_modules():
        if isinstance(each, LabLinear | ModuleLinear):
            raise HswqError(
                "the module is packed already, or is a workbench model's own network",
                tensor=name,
                fix="pack the dense module; for a Model use hl.pack",
            )
        if hasattr(each, "get_base_layer"):
            raise HswqError(
                "LoRAs are loaded on the module",
                tensor=name,
                found=type(each).__name__,
                fix="unload them, pack, and load them again; they stay beside the packed weights",
            )
        if not isinstance(each, nn.Linear):
            continue
        if each.weight.is_meta:
            raise HswqError("the weight is not loaded", tensor=name, found="a meta tensor")
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_hf_hook")  # accelerate's own is the last
        if any(getattr(each, kind, None) for kind in hooks):
            raise HswqError(
                "a Linear carries hooks, which the packed layer would lose",
                tensor=name,
                fix="pack first, then offload or hook",
            )


def _exchange(module: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Puts the new modules wherever the old ones stand, shared ones in every place."""
    for parent in list(module.modules()):
        # named_children would leave out a module's second name.
        for name, child in list(parent._modules.items()):  # noqa: SLF001
            if child is not None and child in made:
                parent.add_module(name, made[child])


def _row(name: str, layer: LabLinear) -> LayerRow:
    weight = layer.weight
    group = weight.group if isinstance(weight, PackedWeight) else None
    form = weight.format if isinstance(weight, PackedWeight) else KEPT
    n, k = layer.out_features, layer.in_features
    return LayerRow(
        layer=name,
        format=form,
        group=group,
        n=n,
        k=k,
        mode=layer.resolved.mode,
        why=layer.resolved.why,
        bytes=weight.nbytes,
        calibrated=False,
        arithmetic=layer.resolved.arithmetic,
        fallback=layer.resolved.fallback,
        **vars(layer.counts),
    )
