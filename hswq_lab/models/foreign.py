"""What a file is that is no Z-Image checkpoint, or a LoRA of another model: told from names or widths, to be said."""

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


# A LoRA's tensors, in every dialect and of every method, those that are refused included.
_ADAPTER: Final = re.compile(
    r"[._](lora_(A|B|down|up|mid|magnitude_vector|embedding_[AB])|lora[._](down|up)|lora_linear_layer|dora_scale"
    r"|lokr_(w[12]|t2)|hada_(w[12]|t[12])|b?oft_(blocks|diag|[rRsS])|ia3_l|vera_lambda_[bd])(?=[._]|$)"
    r"|\.(alpha|diff|diff_b|set_weight|w_norm|b_norm|reshape_weight|on_input)$"
)
# A model that carries adapters has its own weights besides; a LoRA may have a stray tensor.
_MOST: Final = 0.75
# Parts of a pipeline that are no diffusion transformer. Patterns see names with "_" for every separator.
_COMPANIONS: Final = (
    (re.compile(r"(^|_)(decoder|encoder)_(conv_in|up_blocks|down_blocks|up_\d|down_\d|mid)(_|$)"), "a VAE"),
    (re.compile(r"(^|_)text_model_encoder|(^|_)token_embedding|(^|_)embed_tokens"), "a text encoder"),
)


def looks_like_lora(names: Iterable[str]) -> bool:
    """Whether nearly all names are those of a LoRA's tensors."""
    found = [_ADAPTER.search(name) is not None for name in names]
    return sum(found) > _MOST * len(found)


def what_it_is(names: Iterable[str]) -> str | None:
    """What a file that is no Z-Image checkpoint looks like, for a message; None where nothing tells."""
    names = list(names)
    if looks_like_lora(names):
        return "a LoRA"
    plain = [re.sub(r"[.\-]", "_", name) for name in names]
    companion = next((kind for sign, kind in _COMPANIONS if any(map(sign.search, plain))), None)
    foreign = foreign_model(names)
    return companion or (foreign and f"a model of another family: {foreign[0]}")


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
