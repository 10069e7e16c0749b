"""Writing LoRAs in a chosen dialect, converted exactly; what a dialect cannot say is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import torch

from hswq_lab import checkpoint
from hswq_lab.arguments import path_of
from hswq_lab.errors import HswqError
from hswq_lab.lora.file import check_lora
from hswq_lab.lora.parts import Dora, Full, Hada, Kron, LowRank, Part, Replacement
from hswq_lab.lora.settings import PEFT_METADATA
from hswq_lab.lora.source import CONVERTED_KEY
from hswq_lab.lora.units import Unit, units_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from hswq_lab.lora.file import LoraFile
    from hswq_lab.lora.targets import HasLayers, LayerShapes

Dialect = Literal["peft", "kohya", "native"]
"""peft: diffusers' split names, alpha in the header. kohya: the same with underscores, alpha tensors.
native: ComfyUI's fused names, alpha tensors."""

_PREFIX: Mapping[Dialect, str] = {"peft": "transformer.", "kohya": "lora_unet_", "native": "diffusion_model."}


def convert_lora(
    lora: LoraFile, layers: LayerShapes | HasLayers, to: Dialect
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A LoRA in another dialect, with the same ΔW.

    Fused modules are split by rows (a block-diagonal one falls apart into its blocks), split ones are fused
    block-diagonally with alpha grown like the rank. Factors keep their dtype; only scales that differ within
    one fused module are multiplied into the up factor, in fp32.

    Args:
        lora: the file.
        layers: name → (N, K), or a model.
        to: the dialect.

    Returns:
        (tensors, header metadata), to be written with `save_lora`.

    Raises:
        HswqError: the file does not fit the layers, or holds a delta that the dialect cannot express.
    """
    check_lora(lora)
    check_dialect(to)
    deltas = lora.deltas(layers)
    units = (unit for layer in deltas for unit in units_of(deltas[layer], split=to != "native"))
    metadata = {key: value for key, value in lora.metadata.items() if key != PEFT_METADATA}
    return write_units(units, to, metadata | {CONVERTED_KEY: lora.ancestry(lora.name)})


def save_lora(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Path:
    """Writes a LoRA file, whole or not at all.

    Raises:
        HswqError: another ending than .safetensors, no tensors, or the file cannot be written.
    """
    target = path_of(path, "a LoRA")
    if target.suffix != ".safetensors":
        raise HswqError(
            "a LoRA is saved as safetensors", file=target, expected="a name that ends in .safetensors"
        )
    if not isinstance(tensors, Mapping) or not tensors:
        raise HswqError(
            "there is nothing to write",
            file=target,
            found=repr(tensors)[:80],
            expected="what convert_lora or merge_loras returned",
        )
    return checkpoint.write(path, tensors.items(), metadata, prefix="")


def check_dialect(to: object) -> None:
    """Raises HswqError for anything but a dialect's name."""
    if to not in get_args(Dialect):
        raise HswqError("unknown LoRA dialect", found=repr(to)[:80], expected=", ".join(get_args(Dialect)))


def write_units(
    units: Iterable[Unit], to: Dialect, metadata: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of modules in a dialect."""
    written: dict[str, dict[str, Tensor]] = {}
    factors: dict[str, LowRank] = {}
    for unit in units:
        written[unit.name] = _tensors(unit, to)
        if (low_rank := _low_rank(unit.part)) is not None:
            factors[unit.name] = low_rank
    if not written:
        raise HswqError("there is nothing to write: all deltas are zero")
    metadata = dict(metadata)
    if to == "peft":
        settings = _peft_settings(written, factors)
        flattened = json.dumps({f"transformer.{key}": value for key, value in settings.items()})
        metadata |= {"format": "pt", PEFT_METADATA: flattened}
    tensors = {
        _PREFIX[to] + (name.replace(".", "_") if to == "kohya" else name) + ending: value
        for name, found in written.items()
        for ending, value in found.items()
    }
    return tensors, metadata


def _peft_settings(
    written: Mapping[str, dict[str, Tensor]], factors: Mapping[str, LowRank]
) -> dict[str, object]:
    """What diffusers makes PEFT's LoraConfig of; modules without a bias get one of zeros if another has one.

    Raises:
        HswqError: only some modules are DoRA, which PEFT has one setting for, or DoRA comes with biases.
    """
    biased = [name for name, found in written.items() if ".lora_B.bias" in found]
    plain = [name for name, found in written.items() if ".lora_magnitude_vector" not in found]
    if plain and len(plain) < len(written):
        raise HswqError(
            "a file in PEFT's dialect is DoRA as a whole or not at all",
            tensor=plain[0],
            found=f"{len(plain)} of {len(written)} modules are plain LoRA",
            fix="convert to kohya or native, or use merge_loras",
        )
    if biased and not plain:
        raise HswqError(
            "PEFT has no biases beside DoRA",
            tensor=biased[0],
            fix="convert to kohya or native, or use merge_loras",
        )
    if biased:
        for found in written.values():
            up = found[".lora_B.weight"]
            found.setdefault(".lora_B.bias", torch.zeros(up.shape[0], dtype=torch.float32))
    ranks = {f"^{name}": part.down.shape[0] for name, part in factors.items()}
    return {
        "peft_type": "LORA",
        "target_modules": list(written),
        "r": max(ranks.values()),
        "lora_alpha": max(ranks.values()),
        "rank_pattern": ranks,
        "alpha_pattern": {f"^{name}": part.scale * part.down.shape[0] for name, part in factors.items()},
        "use_dora": not plain,
        "lora_bias": bool(biased),
    }


def _low_rank(part: Part | None) -> LowRank | None:
    inner = part.inner if isinstance(part, Dora) else part
    return inner if isinstance(inner, LowRank) else None


def _tensors(unit: Unit, to: Dialect) -> dict[str, Tensor]:
    """Ending → tensor of one module."""
    if to == "peft":
        return _peft_tensors(unit)
    tensors: dict[str, Tensor] = {} if unit.bias is None else {".diff_b": unit.bias}
    part = unit.part
    if isinstance(part, Dora):
        shape = (-1, 1) if part.axis == "out" else (1, -1)
        tensors[".dora_scale"] = part.magnitude.reshape(shape).contiguous()
        part = part.inner
    match part:
        case LowRank():
            tensors |= {".lora_down.weight": part.down.contiguous(), ".lora_up.weight": part.up.contiguous()}
            tensors[".alpha"] = torch.tensor(part.scale * part.down.shape[0], dtype=torch.float32)
        case Kron():
            tensors |= {".lokr_w1": part.w1.float() * part.scale, ".lokr_w2": part.w2}
        case Hada():
            names = ("w1_a", "w1_b", "w2_a", "w2_b")
            tensors |= {f".hada_{name}": getattr(part, name).contiguous() for name in names}
            tensors[".alpha"] = torch.tensor(part.scale * part.w1_b.shape[0], dtype=torch.float32)
        case Full():
            tensors[".diff"] = part.dense()
        case Replacement():
            tensors[".set_weight"] = part.value.contiguous()
    return tensors


def _peft_tensors(unit: Unit) -> dict[str, Tensor]:
    part = _low_rank(unit.part)
    if part is None or (isinstance(unit.part, Dora) and unit.part.axis == "in"):
        kind = "a bias alone" if unit.part is None else unit.part.kind
        raise HswqError(
            "PEFT's dialect holds LoRA and row-wise DoRA only",
            tensor=unit.name,
            found=kind,
            fix="convert to kohya or native, or use merge_loras",
        )
    tensors = {".lora_A.weight": part.down.contiguous(), ".lora_B.weight": part.up.contiguous()}
    if isinstance(unit.part, Dora):
        tensors[".lora_magnitude_vector"] = unit.part.magnitude.reshape(-1).contiguous()
    if unit.bias is not None:
        if part.scale == 0:
            raise HswqError(
                "a bias beside a LoRA of scale 0 cannot be written in PEFT's dialect", tensor=unit.name
            )
        tensors[".lora_B.bias"] = unit.bias / part.scale
    return tensors
