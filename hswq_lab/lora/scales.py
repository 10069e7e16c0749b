"""The factor on a delta: from alpha and rank, wherever a writer put them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from collections.abc import Mapping

PEFT_METADATA = "lora_adapter_metadata"
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


@dataclass(frozen=True)
class PeftSettings:
    """What PEFT writes about scales: in the header (`lora_adapter_metadata`) or in adapter_config.json.

    For LoHa and LoKr PEFT calls alpha just `alpha`, and divides by the configured rank even where both
    factors of a LoKr are full.
    """

    origin: str
    alpha: float | None = None
    rank: int | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False

    def alpha_of(self, module: str) -> float | None:
        """Alpha of a module, by its own pattern or the common one."""
        return self._by_pattern(self.alpha_pattern, module, self.alpha)

    def rank_of(self, module: str) -> float | None:
        """Rank of a module, by its own pattern or the common one."""
        return self._by_pattern(self.rank_pattern, module, self.rank)

    def _by_pattern(self, patterns: Mapping[str, float], module: str, default: float | None) -> float | None:
        """A pattern matches the whole name or its end after a dot, as in PEFT's get_pattern_key."""
        for pattern, value in patterns.items():
            try:
                hit = re.match(rf"(.*\.)?({pattern})$", module)
            except re.error as error:
                raise HswqError(
                    "a pattern is no regular expression", tensor=self.origin, found=pattern
                ) from error
            if hit:
                return value
        return default


def peft_settings(metadata: Mapping[str, str], adapter_config: Mapping[str, Any]) -> PeftSettings | None:
    """Reads PEFT's settings from a header or an adapter_config.json; the header wins. None if there are none.

    diffusers flattens the settings of several parts into one object: `transformer.lora_alpha`, `text_encoder.r`.

    Raises:
        HswqError: settings that are there but make no sense.
    """
    origin, content = "adapter_config.json", dict(adapter_config)
    if PEFT_METADATA in metadata:
        origin = f"the header's {PEFT_METADATA}"
        try:
            content = json.loads(metadata[PEFT_METADATA])
        except (ValueError, RecursionError) as error:
            raise HswqError(
                f"{PEFT_METADATA} is not valid JSON", found=metadata[PEFT_METADATA][:120]
            ) from error
        if not isinstance(content, dict):
            raise HswqError(f"{PEFT_METADATA} is not a JSON object", found=type(content).__name__)
    if not content:
        return None
    own = {key.removeprefix("transformer."): value for key, value in content.items()}
    rank = _number(own.get("r"), f"r in {origin}")
    return PeftSettings(
        origin=origin,
        alpha=_number(own.get("lora_alpha", own.get("alpha")), f"alpha in {origin}"),
        rank=None if rank is None else int(rank),
        alpha_pattern=_patterns(own.get("alpha_pattern"), f"alpha_pattern in {origin}"),
        rank_pattern=_patterns(own.get("rank_pattern"), f"rank_pattern in {origin}"),
        rslora=own.get("use_rslora") is True,
        dora=own.get("use_dora") is True,
    )


def metadata_rank(metadata: Mapping[str, str], peft: PeftSettings | None) -> int | None:
    """The network's rank as the header states it (kohya's ss_network_dim and its kin), or None."""
    for key in _RANK_KEYS:
        text = metadata.get(key, "")
        if re.fullmatch(r"\d+(\.0*)?", text) and float(text) > 0:
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


def _patterns(value: object, what: str) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HswqError("a LoRA setting is not a JSON object", tensor=what, found=type(value).__name__)
    return {str(key): _known_number(number, what) for key, number in value.items()}


def _number(value: object, what: str) -> float | None:
    return None if value is None else _known_number(value, what)


def _known_number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise HswqError("a LoRA setting is not a number", tensor=what, found=repr(value)[:80])
    return float(value)
