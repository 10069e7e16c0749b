"""smooth: move magnitude between a Linear's input channels and its columns where nothing else changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from hswq_lab.checkpoint.smoothed import COLUMNS, ROWS, SMOOTH_KEY
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.model import check_model
from hswq_lab.quantize.observe import CalibrationReport
from hswq_lab.quantize.plan import layer_name

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.model import Model
    from hswq_lab.models.architecture import Site

LARGEST_SHIFT = 4


def smooth(model: Model, activations: CalibrationReport) -> Model:
    """A 16-bit model with the same function whose layers suffer less from quantisation.

    The error of a rotated product is about (Σ x²/s²)(Σ w² s²) / K over channels; s² = rms(x) / rms(w) makes
    it least (by Cauchy and Schwarz). s is rounded to powers of two, so no weight and no norm loses a bit.

    Args:
        model: 16-bit, without LoRAs; not changed.
        activations: from `observe(model, groups=dict.fromkeys(model.layers()))`, that is, of UNROTATED
            inputs.

    Returns:
        The new model. It holds the exponents of its channels, by which LoRAs of the old one are brought to its units.

    Raises:
        HswqError: packed layers or LoRAs, activations that are missing or rotated, or a family without sites.
    """
    check_model(model)
    if not isinstance(activations, CalibrationReport):
        raise HswqError(
            "these are no activations",
            found=repr(activations)[:80],
            fix="observe(model, groups=dict.fromkeys(model.layers()))",
        )
    if model.is_packed or model.loras:
        raise HswqError("only a 16-bit model without LoRAs can be smoothed", tensor=model.name)
    if not (sites := tuple(model.config.sites())):
        raise HswqError("no places to smooth are known for this family", tensor=model.config.family)
    values = {name: model.checkpoint[name] for name in model.checkpoint}
    dense: dict[str, Tensor] = {
        name: value for name, value in values.items() if not isinstance(value, PackedWeight)
    }
    shifted = {}
    for site in sites:
        scale = _scale(site, dense, activations)
        _apply(site, dense, scale)
        # Of all that was done, not of this time alone: the model may have been smoothed before.
        shifted[", ".join(site.linears)] = int(dense[f"{site.linears[0]}.{COLUMNS}"].count_nonzero())
    changed = {name: value for name, value in dense.items() if value is not values.get(name)}
    checkpoint = model.checkpoint.with_values(changed, {SMOOTH_KEY: json.dumps(shifted)})
    return model.with_checkpoint(checkpoint, f"{model.name} smoothed")


def _scale(site: Site, dense: dict[str, Tensor], activations: CalibrationReport) -> Tensor:
    """s of a site: powers of two, fp32 [K]; 1 where a channel is always zero."""
    row = activations.of(site.linears[0])
    if row.group is not None:
        raise HswqError(
            "smoothing needs the power of unrotated channels",
            tensor=row.layer,
            found=f"rotation group {row.group}",
            fix="observe(model, groups=dict.fromkeys(model.layers()))",
        )
    x = activations.mean_squares[row.layer]
    w = torch.stack([dense[f"{layer}.weight"].float().square().mean(0) for layer in site.linears]).mean(0)
    exponent = torch.log2(x / w) / 4
    usable = torch.isfinite(exponent)
    if not usable.any():
        return torch.ones_like(x)
    centred = torch.where(usable, exponent - exponent[usable].mean(), torch.zeros_like(exponent))
    return torch.exp2(centred.round().clamp(-LARGEST_SHIFT, LARGEST_SHIFT))


def _apply(site: Site, dense: dict[str, Tensor], scale: Tensor) -> None:
    for layer in site.linears:
        name = f"{layer}.weight"
        dense[name] = (dense[name].float() * scale).to(dense[name].dtype)
        _note(dense, f"{layer}.{COLUMNS}", scale)
    source = dense[site.source].float().clone()
    rows = slice(*(site.rows or (0, len(source))))
    per_row = scale if source.ndim == 1 else scale[:, None]
    source[rows] /= per_row
    dense[site.source] = source.to(dense[site.source].dtype)
    if source.ndim == 2:
        divided = torch.ones(len(source))
        divided[rows] /= scale
        _note(dense, f"{layer_name(site.source)}.{ROWS}", divided)
    bias = f"{layer_name(site.source)}.bias"
    if site.offset:
        # 1 + (W t + b)/s + 1/s − 1 = (1 + W t + b)/s.
        value = dense[bias].float()
        dense[bias] = (value + 1) / scale - 1
    elif bias in dense and source.ndim == 2:
        value = dense[bias].float().clone()
        value[rows] /= scale
        dense[bias] = value.to(dense[bias].dtype)


def _note(dense: dict[str, Tensor], name: str, factors: Tensor) -> None:
    """Adds the exponents of powers of two to those that are there already."""
    dense[name] = dense.get(name, 0) + torch.log2(factors).to(torch.int8)
