"""The spellings of LoRA keys, as data: which ending plays which role, which prefixes a name may have."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_ADAPTER = (
    r"(?:\.(?!weight$|bias$)[\w-]+)?"  # PEFT writes the adapter's name into the key: lora_A.default.weight
)
_WEIGHT = r"(?:\.weight)?"

_ENDINGS: Final[tuple[tuple[str, str], ...]] = (
    ("down", rf"\.lora_A{_ADAPTER}{_WEIGHT}"),
    ("down", rf"\.lora_down{_WEIGHT}"),
    ("down", rf"[._]lora\.down{_WEIGHT}"),
    ("down", rf"\.lora_linear_layer\.down{_WEIGHT}"),
    ("up", rf"\.lora_B{_ADAPTER}{_WEIGHT}"),
    ("up", rf"\.lora_up{_WEIGHT}"),
    ("up", rf"[._]lora\.up{_WEIGHT}"),
    ("up", rf"\.lora_linear_layer\.up{_WEIGHT}"),
    ("up_bias", rf"(?:\.lora_B{_ADAPTER}|\.lora_up|[._]lora\.up|\.lora_linear_layer\.up)\.bias"),
    ("alpha", r"\.alpha"),
    ("magnitude", r"\.dora_scale"),
    ("magnitude", rf"\.lora_magnitude_vector{_ADAPTER}{_WEIGHT}"),
    *((f"lokr_{part}", rf"\.lokr_{part}") for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")),
    *((f"hada_{part}", rf"\.hada_{part}") for part in ("w1_a", "w1_b", "w2_a", "w2_b")),
    ("diff", r"\.diff"),
    ("diff_b", r"\.diff_b"),
    ("set_weight", r"\.set_weight"),
)
# The shortest module wins, hence the longest ending.
_ROLES: Final = tuple((role, re.compile(rf"(?P<module>.+?){ending}$")) for role, ending in _ENDINGS)

_REFUSED_ENDINGS: Final[tuple[tuple[str, str], ...]] = (
    (r"\.(oft_blocks|oft_diag|oft_[rRsS])\b", "OFT (a rotation of the weight)"),
    (r"\.(boft_[rRsS]|boft_blocks)\b", "BOFT (butterfly rotations of the weight)"),
    (r"\.[ab][12]\.weight$", "GLoRA (a weight-dependent update)"),
    (r"\.(on_input|ia3_l)\b", "IA3 (a gain on activations)"),
    (r"\.vera_lambda_[bd]\b", "VeRA (its random projections are not in the file)"),
    (r"\.(lora_mid\.weight|hada_t[12]|lokr_t2)$", "a Tucker decomposition (convolutions only)"),
    (r"\.lora_embedding_[AB]\b", "a LoRA of an embedding"),
    (r"\.(w_norm|b_norm)$", "a delta of a norm"),
    (r"\.reshape_weight$", "a LoRA that changes a layer's shape"),
)
_REFUSED: Final = tuple((re.compile(pattern), method) for pattern, method in _REFUSED_ENDINGS)

PREFIXES: Final = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "lora_transformer_",
    "lora_unet_",
    "lycoris_",
    "unet.",
    "model.",
    "net.",
)
"""What writers put before a layer's name; several may follow one another."""

_TEXT_ENCODER: Final = re.compile(
    r"^(lora_te\d*_|lora_text_encoder|text_encoders?[._\d]|te\d?[._]|text_model\.|cond_stage_model\."
    r"|conditioner\.|base_model\.model\.text_model\.)"
)


class Parsed(NamedTuple):
    """A key taken apart: the module's name as the file spells it, and what the tensor is to it."""

    module: str
    role: str


def parse_key(key: str) -> Parsed | None:
    """Takes a key apart by its ending; None if no ending is known."""
    for role, pattern in _ROLES:
        match = pattern.match(key)
        if match:
            return Parsed(match["module"], role)
    return None


def refused_method(key: str) -> str | None:
    """The name of the method that a key belongs to, if it is one that no additive delta can express."""
    return next((method for pattern, method in _REFUSED if pattern.search(key)), None)


def is_text_encoder(key: str) -> bool:
    """Whether a key belongs to a text encoder, which the checkpoint does not contain."""
    return _TEXT_ENCODER.match(key) is not None


def without_prefixes(module: str) -> list[str]:
    """A module's name with none, one or several of the known prefixes taken away, in this order."""
    found = [module]
    for name in found:  # grows while it is read: a stripped name may start with another prefix
        found += [
            name.removeprefix(p) for p in PREFIXES if name.startswith(p) and name.removeprefix(p) not in found
        ]
    return found


def squash(name: str) -> str:
    """A name without its separators, for comparison only.

    Between two digits the separator stays (as "/"), so `layers.1.1` is not `layers.11`.
    """
    name = re.sub(r"(?<=\d)[._-]+(?=\d)", "/", name.lower())
    return re.sub(r"[._-]+", "", name)
