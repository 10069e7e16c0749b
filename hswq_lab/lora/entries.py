"""Logical entries: the tensors of one module of a LoRA file put together, checked, and given their scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hswq_lab.errors import HswqError
from hswq_lab.lora.parts import Axis, BiasPart, Dora, Full, Hada, Kron, LowRank, Part, Replacement
from hswq_lab.lora.scales import Scale, full_lokr_scale, full_lokr_scale_by_alpha, low_rank_scale
from hswq_lab.lora.source import HeldTensors, StoredTensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from hswq_lab.lora.settings import PeftSettings

Tensors = StoredTensors | HeldTensors
Kind = Literal["LoRA", "LoKr", "LoHa", "full delta", "replaced weight", "bias", "text encoder", "unknown"]
FullLokrScale = Literal["one", "alpha/dim"]

_FACTORS: dict[Kind, frozenset[str]] = {
    "LoRA": frozenset({"down", "up", "up_bias"}),
    "LoKr": frozenset({f"lokr_{p}" for p in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")}),
    "LoHa": frozenset({f"hada_{p}" for p in ("w1_a", "w1_b", "w2_a", "w2_b")}),
    "full delta": frozenset({"diff"}),
    "replaced weight": frozenset({"set_weight"}),
}


@dataclass(frozen=True, eq=False)
class Entry:
    """One module of a LoRA file.

    Attributes:
        module: its name as the file spells it, prefix included.
        kind: what its tensors are.
        keys: role → key of the file.
        shape: (n, k) that its target must have; None for biases and what is not applied; k None for a bias
            alone.
        rank: of a factored delta.
        scale: the factor at strength 1.
        dora_axis: "out" or "in" if it carries a magnitude.
        why_not: why it is not applied, for the kinds "text encoder" and "unknown".
    """

    module: str
    kind: Kind
    keys: Mapping[str, str]
    shape: tuple[int, int | None] | None = None
    rank: int | None = None
    scale: Scale = field(default_factory=lambda: Scale(1.0, "strength alone"))
    dora_axis: Axis | None = None
    why_not: str = ""

    @property
    def in_words(self) -> str:
        """The kind, with DoRA where it is one."""
        return f"DoRA of {self.kind}" if self.dora_axis else self.kind


class EntryBuilder:
    """Makes entries from grouped keys.

    Args:
        tensors: of the file.
        path: for messages.
        peft: PEFT's settings, if the file has any.
        rank: the network's rank by the header.
        full_lokr: scale of a LoKr with two full factors.
    """

    def __init__(
        self,
        tensors: Tensors,
        path: Path | None,
        peft: PeftSettings | None,
        rank: int | None,
        full_lokr: FullLokrScale,
    ) -> None:
        self._tensors, self._path, self._peft = tensors, path, peft
        self._header_rank, self._full_lokr = rank, full_lokr

    def entry(self, module: str, keys: Mapping[str, str]) -> Entry:
        """The entry of one module.

        Raises:
            HswqError: incomplete or contradictory tensors, or shapes that do not multiply.
        """
        kinds = [kind for kind, roles in _FACTORS.items() if roles & keys.keys()]
        if len(kinds) > 1:
            raise self._error("a module has two kinds of deltas", keys, found=" and ".join(kinds))
        alpha = self._alpha(keys)
        if not kinds:
            return self._without_weight_delta(module, keys)
        kind = kinds[0]
        shape, rank = self._shape(kind, keys)
        scale = self._scale(kind, module, alpha, rank)
        axis = self._dora_axis(keys, shape) if "magnitude" in keys else None
        if axis and kind == "replaced weight":
            raise self._error("a replaced weight with a DoRA magnitude makes no sense", keys)
        if axis is None and kind == "LoRA" and self._peft is not None and self._peft.dora:
            raise self._error(
                "the settings say DoRA, but the magnitude is missing", keys, found=self._peft.origin
            )
        for role in ("diff_b", "up_bias"):
            if role in keys and self._tensors.shape(keys[role]) != (shape[0],):
                raise self._wrong(keys[role], f"({shape[0]},)")
        return Entry(module, kind, keys, shape, rank, scale, axis)

    def _without_weight_delta(self, module: str, keys: Mapping[str, str]) -> Entry:
        if "magnitude" in keys:
            raise self._error("a DoRA magnitude without its factors", keys)
        if "diff_b" in keys:
            shape = self._tensors.shape(keys["diff_b"])
            if len(shape) != 1:
                raise self._wrong(keys["diff_b"], "one number a row")
            return Entry(module, "bias", keys, (shape[0], None))
        return Entry(module, "unknown", keys, why_not="an alpha without factors")

    def _alpha(self, keys: Mapping[str, str]) -> float | None:
        if "alpha" not in keys:
            return None
        value = self._tensors[keys["alpha"]]
        if value.numel() != 1:
            raise self._wrong(keys["alpha"], "one number")
        return float(value.float().reshape(()))

    def _scale(self, kind: Kind, module: str, alpha: float | None, rank: int | None) -> Scale:
        if kind == "LoKr" and rank is None:
            scale_of = full_lokr_scale_by_alpha if self._full_lokr == "alpha/dim" else full_lokr_scale
            return scale_of(module, alpha, self._header_rank, self._peft)
        if rank is not None:
            return low_rank_scale(module, rank, alpha, self._peft)
        rule = (
            "strength alone"
            if alpha is None
            else f"strength alone (alpha {alpha:g} means nothing for a {kind})"
        )
        return Scale(1.0, rule, alpha)

    # -- shapes ----------------------------------------------------------------------------------------------

    def _shape(self, kind: Kind, keys: Mapping[str, str]) -> tuple[tuple[int, int], int | None]:
        """((n, k), rank or None) that the factors multiply out to."""
        if kind == "LoRA":
            (rank, k), (n, _) = self._pair(keys, "down", "up", inner_of_first=0)
            return (n, k), rank
        if kind == "LoHa":
            (n, rank), (_, k) = self._pair(keys, "hada_w1_a", "hada_w1_b")
            second = self._pair(keys, "hada_w2_a", "hada_w2_b")
            if (second[0][0], second[1][1]) != (n, k):
                raise self._error(
                    "the two products of a LoHa differ in shape", keys, found=second, expected=(n, k)
                )
            return (n, k), rank
        if kind == "LoKr":
            (a, b, rank1), (c, d, rank2) = self._lokr_factor(keys, "w1"), self._lokr_factor(keys, "w2")
            return (a * c, b * d), rank2 if rank2 is not None else rank1
        n, k = self._matrix(keys, "diff" if kind == "full delta" else "set_weight")
        return (n, k), None

    def _lokr_factor(self, keys: Mapping[str, str], name: str) -> tuple[int, int, int | None]:
        whole, first, second = f"lokr_{name}", f"lokr_{name}_a", f"lokr_{name}_b"
        if whole in keys:
            if first in keys or second in keys:
                raise self._error(f"LoKr's {name} is there both whole and factored", keys)
            rows, columns = self._matrix(keys, whole)
            return rows, columns, None
        (rows, rank), (_, columns) = self._pair(keys, first, second)
        return rows, columns, rank

    def _pair(
        self, keys: Mapping[str, str], first: str, second: str, inner_of_first: int = 1
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of two factors whose inner dimensions agree."""
        a, b = self._matrix(keys, first), self._matrix(keys, second)
        if a[inner_of_first] != b[1 - inner_of_first]:
            raise self._error(
                "two factors differ in rank",
                keys,
                found=f"{keys[first]} {list(a)}, {keys[second]} {list(b)}",
                expected="one common rank",
            )
        return a, b

    def _matrix(self, keys: Mapping[str, str], role: str) -> tuple[int, int]:
        if role not in keys:
            raise self._error(
                f"a factor is missing: {role.replace('_', ' ')}", keys, expected="all factors of the delta"
            )
        shape = self._tensors.shape(keys[role])
        if len(shape) == 4 and shape[2:] == (1, 1):  # a Linear written as a 1×1 convolution
            shape = shape[:2]
        if len(shape) != 2:
            raise self._wrong(keys[role], "a matrix")
        return shape[0], shape[1]

    def _dora_axis(self, keys: Mapping[str, str], shape: tuple[int, int]) -> Axis:
        """By the tensor's own shape: [n] and [n,1] are one magnitude a row, [1,k] is one a column."""
        found = self._tensors.shape(keys["magnitude"])
        n, k = shape
        if found in ((n,), (n, 1), (n, 1, 1, 1)):
            return "out"
        if found in ((1, k), (1, k, 1, 1)):
            return "in"
        raise self._wrong(keys["magnitude"], f"[{n}], [{n}, 1] (one a row) or [1, {k}] (one a column)")

    # -- errors ----------------------------------------------------------------------------------------------

    def _error(
        self, problem: str, keys: Mapping[str, str], found: object = None, expected: object = None
    ) -> HswqError:
        named = found if found is not None else ", ".join(keys.values())
        return HswqError(
            problem, file=self._path, tensor=next(iter(keys.values())), found=named, expected=expected
        )

    def _wrong(self, key: str, expected: str) -> HswqError:
        return HswqError(
            "a LoRA tensor has the wrong shape",
            file=self._path,
            tensor=key,
            found=list(self._tensors.shape(key)),
            expected=expected,
        )


def part_of(entry: Entry, tensors: Tensors, start: int, stop: int) -> Part | None:
    """The delta that an entry puts on rows start … stop of its layer; None for a bias alone."""

    def matrix(role: str) -> Tensor:
        value = tensors[entry.keys[role]]
        return value.reshape(value.shape[:2])

    def lokr(name: str) -> Tensor:
        whole = f"lokr_{name}"
        return (
            matrix(whole)
            if whole in entry.keys
            else matrix(f"{whole}_a").float() @ matrix(f"{whole}_b").float()
        )

    where, scale = (entry.module, start, stop), entry.scale.value
    part: Part
    match entry.kind:
        case "LoRA":
            part = LowRank(*where, scale, matrix("down"), matrix("up"))
        case "LoKr":
            part = Kron(*where, scale, lokr("w1"), lokr("w2"))
        case "LoHa":
            part = Hada(*where, scale, *(matrix(f"hada_{name}") for name in ("w1_a", "w1_b", "w2_a", "w2_b")))
        case "full delta":
            part = Full(*where, scale, matrix("diff"))
        case "replaced weight":
            part = Replacement(*where, scale, matrix("set_weight"))
        case _:
            return None
    if entry.dora_axis is None:
        return part
    magnitude = tensors[entry.keys["magnitude"]].reshape(-1)
    return Dora(*where, 1.0, part, magnitude, entry.dora_axis)


def bias_parts_of(entry: Entry, tensors: Tensors, start: int, stop: int) -> tuple[BiasPart, ...]:
    """What an entry adds to the bias: `.diff_b` as it is, `lora_B.bias` (PEFT) times the scale."""
    scales = {"diff_b": 1.0, "up_bias": entry.scale.value}
    return tuple(
        BiasPart(entry.module, start, stop, scale, tensors[entry.keys[role]])
        for role, scale in scales.items()
        if role in entry.keys
    )
