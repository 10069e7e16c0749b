"""Plan: which layer gets which format; readable, immutable, checked against a model before use."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hswq_lab.arguments import path_of, texts_of
from hswq_lab.checkpoint.kinds import KINDS
from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import ceil_to
from hswq_lab.formats.rotation import group_for
from hswq_lab.formats.swizzle import swizzled_shape
from hswq_lab.json_file import entry, read_json
from hswq_lab.packing import FORMATS
from hswq_lab.quantize.measured import MeasuredOn
from hswq_lab.results import write_text

if TYPE_CHECKING:
    import os

KEPT = "16-bit"
UNROTATED = "-unrotated"
RANK = "+r"
ROTATABLE = ("nvfp4", "int8_tensorwise")
_FORMATS = (*FORMATS, *(name + UNROTATED for name in ROTATABLE), KEPT)
_ENTRIES = ("hswq_plan", "note", "measured_on", "formats")
_ALIASES = {
    "int8": "int8_tensorwise",
    "int8-unrotated": "int8_tensorwise-unrotated",
    "bf16": KEPT,
    "bfloat16": KEPT,
}


class LayerFormat(NamedTuple):
    """What becomes of a layer.

    Attributes:
        format: as stored; "16-bit": left alone.
        group: rotation group; None: not rotated.
        rank: of its input basis (NVFP4 only); 0: none.
    """

    format: str
    group: int | None
    rank: int = 0


class Plan(Mapping[str, str]):
    """An immutable mapping layer name or glob → format.

    Formats: "nvfp4" and "int8_tensorwise" (short: "int8") are rotated; "nvfp4-unrotated" and
    "int8_tensorwise-unrotated" are not; "nvfp4+r16" and "nvfp4-unrotated+r16" have an input basis of rank 16
    (see `gather_bases`); "float8_e4m3fn", "float8_e5m2" and "mxfp8"; "16-bit" leaves the layer alone.
    Where several entries match a layer, the last one wins; a layer that none matches stays 16-bit. Names may
    end in ".weight".

    Args:
        formats: layer name or shell-style glob → format, the general first, exceptions after it.
        note: where the plan comes from, for people.
        measured_on: the model whose impacts it was made by: packing another one by it warns. None: no model's.

    Raises:
        HswqError: an unknown format, or no mapping from text to text.
    """

    def __init__(
        self, formats: Mapping[str, str], note: str = "", measured_on: MeasuredOn | None = None
    ) -> None:
        formats = texts_of(formats, "a plan", '{"layer or glob": "nvfp4"}')
        self._formats: dict[str, str] = {}
        for pattern, form in formats.items():
            # Named again, with or without ".weight": the last wins.
            self._formats.pop(layer_name(pattern), None)
            self._formats[layer_name(pattern)] = canonical(form, pattern)
        self._places = {pattern: place for place, pattern in enumerate(self._formats)}
        self._globs = [pattern for pattern in self._formats if set(pattern) & set("*?[")]
        self.note = note
        self.measured_on = measured_on

    def __getitem__(self, pattern: str) -> str:
        return self._formats[layer_name(pattern)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def __eq__(self, other: object) -> bool:
        # Order decides which entry wins, so it is part of what a plan is; where it comes from is not.
        return isinstance(other, Plan) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return f"Plan({self._formats!r})"

    def with_pins(self, keep: Mapping[str, str]) -> Plan:
        """This plan with further entries that win over all of its own."""
        pins = Plan(keep)
        formats = {p: f for p, f in self.items() if p not in pins} | dict(pins)
        return Plan(formats, self.note, self.measured_on)

    def for_layers(self, layers: Mapping[str, tuple[int, int]]) -> dict[str, LayerFormat]:
        """What becomes of every layer of a model.

        Args:
            layers: layer name → (N, K), as `Model.layers()` gives it.

        Raises:
            HswqError: an entry that matches no layer of this model (so a plan for another model is refused).
        """
        for pattern in self:
            if pattern not in layers and not any(fnmatchcase(layer, pattern) for layer in layers):
                raise _unmatched(pattern, layers)
        return {layer: layer_format(self.form_of(layer) or KEPT, k) for layer, (_, k) in layers.items()}

    def form_of(self, *names: str) -> str | None:
        """What the last entry that matches any of a layer's names says, as it is spelled there; None without one."""
        matching = [name for name in names if name in self._formats]
        matching += [glob for glob in self._globs if any(fnmatchcase(name, glob) for name in names)]
        return self._formats[max(matching, key=self._places.__getitem__)] if matching else None

    def nbytes(self, layers: Mapping[str, tuple[int, int]]) -> int:
        """Bytes of the Linears' weights with all scales, an input_scale for every NVFP4 layer included."""
        self.for_layers(layers)  # refuses a plan for another model
        return sum(packed_nbytes(self.form_of(layer) or KEPT, shape) for layer, shape in layers.items())

    def bits(self, layers: Mapping[str, tuple[int, int]]) -> float:
        """Mean bits a weight over all Linears, scales included."""
        return 8 * self.nbytes(layers) / sum(n * k for n, k in layers.values())

    def count(self, form: str, layers: Mapping[str, tuple[int, int]]) -> int:
        """The number of layers that are stored in a format, rotated or not."""
        return sum(chosen.format == canonical(form, form) for chosen in self.for_layers(layers).values())

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes."""
        measured_on = {} if self.measured_on is None else {"measured_on": asdict(self.measured_on)}
        return {"hswq_plan": 1, "note": self.note, **measured_on, "formats": dict(self)}

    @classmethod
    def from_dict(cls, content: object, file: str | os.PathLike[str] | None = None) -> Plan:
        """The inverse of `to_dict`; a bare {layer glob: format} is taken too.

        Raises:
            HswqError: the content is no plan.
        """
        if isinstance(content, dict) and "formats" in content and (other := content.keys() - _ENTRIES):
            found, expected = ", ".join(sorted(other)), ", ".join(_ENTRIES)
            raise HswqError("a plan has no such entry", file=file, found=found, expected=expected)
        formats = content.get("formats", content) if isinstance(content, dict) else None
        if not isinstance(formats, dict) or not all(isinstance(form, str) for form in formats.values()):
            raise HswqError(
                "this is no plan", file=file, expected='{"formats": {"layer or glob": "format", …}}'
            )
        note = content.get("note", "") if isinstance(content, dict) and "formats" in content else ""
        try:
            return cls(formats, str(note), measured_on=_measured_on(content))
        except HswqError as error:
            raise HswqError(
                error.problem,
                file=file,
                tensor=error.tensor,
                found=error.found,
                expected=error.expected,
                fix=error.fix,
            ) from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the plan as JSON that a person can read and edit."""
        target = path_of(path, "a plan")
        write_text(target, json.dumps(self.to_dict(), indent=1) + "\n")
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan.

        Raises:
            HswqError: no such file, no JSON, or no plan.
        """
        return cls.from_dict(read_json(path), path)


def _measured_on(content: object) -> MeasuredOn | None:
    """The model of a stored plan's impacts, if it names one."""
    if not isinstance(content, dict) or not {"formats", "measured_on"} <= content.keys():
        return None
    told = entry(content, "measured_on", dict)
    return MeasuredOn(entry(told, "model", str), entry(told, "sha256", str))


def refuse_empty(plan: Plan) -> None:
    """Raises HswqError for a plan without an entry: packing by it would do nothing, and look as if it had."""
    if not plan:
        raise HswqError(
            "the plan is empty: it would pack nothing",
            found="no layer",
            expected='at least one entry: {"layer or glob": "format"}',
            fix='hl.Plan({"*": "nvfp4"}) packs every layer',
        )


def layer_format(form: str, k: int) -> LayerFormat:
    """A plan's format for a layer of K inputs, with the rotation group that belongs to K."""
    base, _, rank = form.partition(RANK)
    stored = base.removesuffix(UNROTATED)
    return LayerFormat(stored, group_for(k) if base in ROTATABLE else None, min(int(rank or 0), k))


def packed_nbytes(form: str, shape: tuple[int, int]) -> int:
    """Bytes of a weight (N, K) on disk in a format, scales and padding included, markers not."""
    n, k = shape
    form, _, rank = layer_format(form, k)
    if form == KEPT:
        return 2 * n * k
    kind = KINDS[form]
    rows, columns = ceil_to(n, kind.multiple), ceil_to(k, kind.multiple)
    if kind.block is not None:
        scales = math.prod(swizzled_shape(rows, columns // kind.block))
    else:
        scales = 4 * n if kind.per_row else 4
    tensor_scales = 4 + 4 if form == "nvfp4" else 0  # of the weight and of the inputs
    return rows * columns // kind.values_per_byte + scales + tensor_scales + rank * k


def canonical(form: str, pattern: str) -> str:
    """The one spelling of a format.

    Raises:
        HswqError: there is no such format.
    """
    base, plus, rank = _ALIASES.get(form, form).partition(RANK)
    fits = not plus or (base.startswith("nvfp4") and rank.isascii() and rank.isdigit() and int(rank) > 0)
    if base not in _FORMATS or not fits:
        expected = f"{', '.join(_FORMATS)}; for nvfp4 a rank may follow: nvfp4{RANK}16"
        raise HswqError("unknown format in a plan", tensor=pattern, found=form, expected=expected)
    return f"{base}{plus}{int(rank)}" if plus else base


def check_same_layers(
    found: Mapping[str, tuple[int, int]], expected: Mapping[str, tuple[int, int]], problem: str, fix: str
) -> None:
    """Whether two models have the same layers.

    Args:
        found: layer name → (N, K), as `Model.layers()` gives it.
        expected: those of the other one.
        problem: what is to be said of them otherwise.
        fix: what is to be done then.

    Raises:
        HswqError: a layer is missing on either side, or has another size; the first one is named.
    """
    for layer in {**expected, **found}:
        if found.get(layer) != expected.get(layer):
            raise HswqError(
                problem,
                tensor=layer,
                found=found.get(layer, "no such layer"),
                expected=expected.get(layer, "no such layer"),
                fix=fix,
            )


def layer_name(name: str) -> str:
    """A layer's name from its own or its weight's name."""
    return name.removesuffix(".weight")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """A hint for an unknown name: the most similar known one."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)
    return f"the nearest name is {close[0]}" if close else None


def _unmatched(pattern: str, layers: Mapping[str, tuple[int, int]]) -> HswqError:
    return HswqError(
        "the plan names a layer that this model does not have",
        tensor=pattern,
        found=f"0 of {len(layers)} layers match",
        fix=nearest(pattern, layers),
    )
