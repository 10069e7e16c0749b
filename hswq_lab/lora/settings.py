"""What PEFT writes beside a LoRA's tensors: in the header or in adapter_config.json; read, or refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError
from hswq_lab.json_file import json_of
from hswq_lab.lora.dialects import without_prefixes
from hswq_lab.lora.patterns import ModulePattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
PEFT_METADATA = "lora_adapter_metadata"

Patterned = tuple[tuple[ModulePattern, float], ...]

_MOST_PATTERNS = 5000  # all of them may have to be held against all modules of a file
_TYPES = ("LORA", "LOHA", "LOKR")
_KEPT_BASE = ("gaussian", "eva", "orthogonal", "mica")
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings with which a Linear's update is not scale · B · A on the model's own layers.
_OTHER_UPDATES = {
    "layer_replication": "its layers are copies of a model's layers in another order",
    "use_qalora": "its inputs are pooled in groups",
    "use_bdlora": "its factors are block-diagonal",
    "kasa_config": "the smallest singular values of the base weights were taken away",
    "alora_invocation_tokens": "it acts on some tokens only",
    "arrow_config": "it is routed among several LoRAs by token",
    "monteclora_config": "its factors are sampled",
}


@dataclass(frozen=True)
class PeftSettings:
    """The settings that scales depend on.

    For LoHa and LoKr PEFT calls alpha just `alpha`, and divides by the configured rank even where both
    factors of a LoKr are full.
    """

    origin: str
    alpha: float | None
    rank: int | None
    alpha_pattern: Patterned
    rank_pattern: Patterned
    rslora: bool
    dora: bool

    def alpha_of(self, module: str) -> float | None:
        """Alpha of a module as the file spells it, by the first pattern that matches or the common one."""
        return _first(self.alpha_pattern, module, self.alpha)

    def rank_of(self, module: str) -> float | None:
        """Rank of a module, in the same way."""
        return _first(self.rank_pattern, module, self.rank)

    def idle_patterns(self, modules: Iterable[str]) -> list[str]:
        """The patterns that match none of these modules, each once."""
        names = [without_prefixes(module) for module in modules]
        patterns = {pattern.text: pattern for pattern, _ in (*self.alpha_pattern, *self.rank_pattern)}
        return [text for text, pattern in patterns.items() if not any(_hits(pattern, each) for each in names)]


def peft_settings(
    metadata: Mapping[str, str], adapter_config: Mapping[str, object], path: Path | None = None
) -> PeftSettings | None:
    """Reads PEFT's settings from a header or an adapter_config.json; the header wins. None if there are none.

    diffusers flattens the settings of several parts into one object: `transformer.lora_alpha`, `text_encoder.r`.

    Args:
        metadata: of the header.
        adapter_config: content of the adapter_config.json that belongs to the file, else empty.
        path: of the file, for messages.

    Raises:
        HswqError: settings that make no sense, or of an adapter that is no plain delta on the model's layers.
    """
    if PEFT_METADATA in metadata:
        content = _header_settings(metadata[PEFT_METADATA], path)
        told = _Told(content, f"the header's {PEFT_METADATA}", path)
    else:
        told = _Told(adapter_config, ADAPTER_CONFIG, None if path is None else path.with_name(ADAPTER_CONFIG))
    if not told.content:
        return None
    _refuse_other_adapters(told)
    return PeftSettings(
        origin=told.origin,
        alpha=told.number("lora_alpha" if "lora_alpha" in told.content else "alpha"),
        rank=told.rank("r"),
        alpha_pattern=told.patterns("alpha_pattern"),
        rank_pattern=told.patterns("rank_pattern"),
        rslora=told.flag("use_rslora"),
        dora=told.flag("use_dora"),
    )


def _header_settings(text: str, path: Path | None) -> Mapping[str, object]:
    try:
        content = json_of(text)
    except ValueError as error:
        raise HswqError(f"{PEFT_METADATA} is not valid JSON", file=path, found=str(error)[:200]) from error
    if not isinstance(content, dict):
        raise HswqError(f"{PEFT_METADATA} is not a JSON object", file=path, found=type(content).__name__)
    own = {key.removeprefix("transformer."): value for key, value in content.items()}
    if len(own) < len(content):
        twice = sorted(key for key in own if key in content and f"transformer.{key}" in content)
        raise HswqError(
            f"{PEFT_METADATA} says one thing twice, with the prefix transformer. and without",
            file=path,
            found=", ".join(twice[:5]),
            expected="each setting once",
        )
    return own


def _refuse_other_adapters(told: _Told) -> None:
    """Adapters of other methods, and LoRAs that are a delta on other weights than the model's own."""
    kind = told.content.get("peft_type")
    if kind is not None and str(kind).upper() not in _TYPES:
        raise told.error("peft_type", "this adapter is no additive delta that is known", ", ".join(_TYPES))
    for key, why in _OTHER_UPDATES.items():
        if told.content.get(key):
            raise told.error(key, f"this adapter is no plain LoRA: {why}", "a plain LoRA")
    start = told.content.get("init_lora_weights")
    if start is None or isinstance(start, bool) or str(start).lower() in _KEPT_BASE:
        return
    if str(start).lower().startswith(_CHANGED_BASE):
        raise told.error(
            "init_lora_weights",
            "this LoRA was trained on changed base weights, and is no delta on the model's own",
            "a LoRA on the model's own weights",
            "save it in PEFT with path_initial_model_for_weight_conversion=, which makes a plain LoRA of it",
        )
    raise told.error(
        "init_lora_weights",
        "it is not known whether this initialisation changes the base weights",
        ", ".join(("true", "false", *_KEPT_BASE)),
        "if it leaves the base weights alone, write true in its place",
    )


def _hits(pattern: ModulePattern, names: Iterable[str]) -> bool:
    return any(pattern.matches(name) for name in names)


def _first(patterns: Patterned, module: str, default: float | None) -> float | None:
    """PEFT matches the names in the model, which have none of the prefixes that writers of files add."""
    names = without_prefixes(module) if patterns else []
    return next((value for pattern, value in patterns if _hits(pattern, names)), default)


@dataclass(frozen=True)
class _Told:
    """Settings as they are in a file, taken out by kind."""

    content: Mapping[str, object]
    origin: str
    file: Path | None

    def error(self, key: str, problem: str, expected: str, fix: str | None = None) -> HswqError:
        """About the setting of this name."""
        found = repr(self.content.get(key))[:80]
        where = f"{key} in {self.origin}"
        return HswqError(problem, file=self.file, tensor=where, found=found, expected=expected, fix=fix)

    def number(self, key: str) -> float | None:
        value = self.content.get(key)
        return None if value is None else self._finite(value, key)

    def rank(self, key: str) -> int | None:
        value = self.content.get(key)
        return None if value is None else int(self._rank(value, key))

    def flag(self, key: str) -> bool:
        value = self.content.get(key)
        if value is None or isinstance(value, bool):
            return value is True
        raise self.error(key, "a LoRA setting is neither true nor false", "true or false")

    def patterns(self, key: str) -> Patterned:
        told = self.content.get(key)
        if told is None:
            return ()
        if not isinstance(told, dict):
            raise self.error(key, "a LoRA setting is not a JSON object", "patterns with numbers")
        if len(told) > _MOST_PATTERNS:
            raise self.error(
                key, f"{len(told)} patterns are more than a model has modules", "a pattern a module"
            )
        of_kind = self._rank if key == "rank_pattern" else self._finite
        origin = f"{key} in {self.origin}"
        return tuple(
            (ModulePattern(text, origin, self.file), of_kind(value, key)) for text, value in told.items()
        )

    def _finite(self, value: object, key: str) -> float:
        try:
            number = (
                float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
            )
        except OverflowError:  # JSON's whole numbers have any length
            number = math.inf
        if not math.isfinite(number):
            raise self.error(key, "a LoRA setting is not a number", "a finite number")
        return number

    def _rank(self, value: object, key: str) -> float:
        number = self._finite(value, key)
        if number < 1 or number != int(number):
            raise self.error(key, "a rank is not a whole number from 1 up", "1, 2, …")
        return number
