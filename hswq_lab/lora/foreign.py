"""LoRAs of other models, known by their keys or widths, so that they are refused by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

# The most specific first. Patterns see the key with "_" for every separator.
_SIGNS: Final[tuple[tuple[str, str], ...]] = (
    (r"individual_token_refiner", "HunyuanVideo"),
    (r"distilled_guidance_layer", "Chroma"),
    (r"double_blocks?_\d|single_blocks?_\d|single_transformer_blocks_\d", "Flux"),
    (r"joint_blocks_\d|joint_transformer_blocks_\d", "Stable Diffusion 3"),
    (r"transformer_blocks_\d+_(img_mlp|txt_mlp|img_mod|txt_mod)", "Qwen-Image"),
    (r"(^|_)blocks_\d+_(self_attn|cross_attn)_[qkv]_proj", "Cosmos-Predict2 or Anima"),
    (r"(^|_)blocks_\d+_(self_attn|cross_attn|ffn)_", "Wan"),
    (r"input_blocks_\d|output_blocks_\d|(^|_)middle_block_\d", "SDXL"),
    (r"down_blocks_\d|up_blocks_\d|(^|_)mid_block_", "Stable Diffusion 1.5 or SDXL"),
    (
        r"transformer_blocks_\d+_",
        "another transformer in diffusers' layout (Flux, SD3, Qwen-Image, PixArt or LTX)",
    ),
    (
        r"(^|_)layers_\d+_(self_attn|mlp)_(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
        "a language model",
    ),
    (r"^lora_te[12]_", "SDXL (only its text encoders)"),
    (r"^lora_te_", "Stable Diffusion 1.5 (only its text encoder)"),
)
_PATTERNS: Final = tuple((re.compile(pattern), model) for pattern, model in _SIGNS)

_WIDTHS: Final = {256: "mini-zimage", 2304: "Lumina-Image 2.0", 3840: "Z-Image"}


def foreign_model(keys: Iterable[str]) -> tuple[str, str] | None:
    """(model, telling key) of a file made for another model, or None where the keys give no sign of one."""
    plain = [(key, re.sub(r"[.\-]", "_", key)) for key in keys]
    for pattern, model in _PATTERNS:
        telling = next((key for key, text in plain if pattern.search(text)), None)
        if telling is not None:
            return model, telling
    return None


def model_of_width(width: int) -> str:
    """The model of this family that has this width, in words."""
    name = _WIDTHS.get(width)
    return f"{name} (width {width})" if name else f"a model of width {width}"
