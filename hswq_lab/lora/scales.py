"""The factor on a delta: from alpha and rank, wherever a writer put them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.lora.settings import PeftSettings

_RANK_KEYS = ("ss_network_dim", "network_dim", "lora_dim", "dim", "rank", "r")


@dataclass(frozen=True)
class Scale:
    """The factor on one delta at strength 1, and where it comes from.

    Attributes:
        value: the factor.
        rule: in words, e.g. "alpha / rank = 8 / 16".
        alpha: alpha as found, None if there was none.
        alternative: another factor that some tools would use, None where all agree.
    """

    value: float
    rule: str
    alpha: float | None = None
    alternative: float | None = None


def metadata_rank(metadata: Mapping[str, str], peft: PeftSettings | None) -> int | None:
    """The network's rank as the header states it (kohya's ss_network_dim and its kin), or None."""
    for key in _RANK_KEYS:
        text = metadata.get(key, "")
        # No network has a rank of ten digits, and such a text has more of them than a float holds.
        if re.fullmatch(r"\d{1,9}(\.0*)?", text) and float(text) > 0:
            return int(float(text))
    return None if peft is None else peft.rank


def low_rank_scale(module: str, rank: int, alpha: float | None, peft: PeftSettings | None) -> Scale:
    """The factor of a delta of known rank: alpha / rank, alpha / √rank under rsLoRA, 1 without alpha.

    An alpha tensor wins over the settings; `module` is the module's name as the file spells it.
    """
    source = "alpha"
    if alpha is None and peft is not None:
        alpha, source = peft.alpha_of(module), f"alpha of {peft.origin}"
    if alpha is None:
        return Scale(1.0, "no alpha: 1")
    if peft is not None and peft.rslora:
        return Scale(alpha / math.sqrt(rank), f"{source} / √rank = {alpha:g} / √{rank} (rsLoRA)", alpha)
    return Scale(alpha / rank, f"{source} / rank = {alpha:g} / {rank}", alpha)


def full_lokr_scale(module: str, alpha: float | None, rank: int | None, peft: PeftSettings | None) -> Scale:
    """The factor of a LoKr whose two factors are both full: PEFT's where it wrote settings, else 1.

    LyCORIS and ComfyUI use 1, whatever alpha says; alpha / rank with the header's rank is the alternative.
    """
    other = alpha / rank if alpha is not None and rank is not None else None
    return _configured_lokr(module, alpha, peft) or Scale(
        1.0, "both factors full: 1", alpha, None if other == 1.0 else other
    )


def full_lokr_scale_by_alpha(
    module: str, alpha: float | None, rank: int | None, peft: PeftSettings | None
) -> Scale:
    """The same for tools that use alpha / rank with the header's rank; 1 is the alternative.

    Raises:
        HswqError: one of them is unknown.
    """
    if (configured := _configured_lokr(module, alpha, peft)) is not None:
        return configured
    if alpha is None or rank is None:
        raise HswqError(
            "alpha / dim of a full LoKr cannot be computed",
            found=f"alpha {alpha}, dim {rank}",
            expected="an alpha tensor and a dim in the header's metadata",
            fix='use full_lokr_scale="one"',
        )
    return Scale(alpha / rank, f"alpha / dim of the metadata = {alpha:g} / {rank} (asked for)", alpha, 1.0)


def _configured_lokr(module: str, alpha: float | None, peft: PeftSettings | None) -> Scale | None:
    """What PEFT does: its alpha / r, where no alpha tensor says otherwise."""
    if peft is None or alpha is not None:
        return None
    known, configured = peft.alpha_of(module), peft.rank_of(module)
    if known is None or not configured:
        return None
    rule = f"alpha / r of {peft.origin} = {known:g} / {configured:g}"
    return Scale(known / configured, rule, known)
