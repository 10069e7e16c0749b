"""ImpactReport: what each layer's quantisation alone does to the final latent, and plans by it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from hswq_lab.errors import HswqError
from hswq_lab.json_file import entry, of_kind, read_json
from hswq_lab.quantize.choose import Option, least_sensitive, smallest_that, the_goal, within_budget
from hswq_lab.quantize.measured import MeasuredOn
from hswq_lab.quantize.plan import (
    KEPT,
    RANK,
    UNROTATED,
    Plan,
    canonical,
    check_same_layers,
    layer_format,
    layer_name,
    nearest,
    packed_nbytes,
)
from hswq_lab.quantize.statistics import mean_interval, spearman
from hswq_lab.results import Result

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

PROXIES = ("weight_error", "weight_power", "output_error", "output_variance")


@dataclass(frozen=True)
class LayerImpact:
    """One layer in one format.

    Attributes:
        layer: its name.
        format: as in a plan; rotation, weight error and activation error are those of this format.
        n: out features.
        k: in features.
        samples: ‖x − x_ref‖²/‖x_ref‖² of the final latent for every (prompt, seed), in the report's order.
        weight_error: proxy ‖Ŵ − W‖²/‖W‖².
        weight_power: proxy ‖Ŵ − W‖² · mean x² of the layer's input.
        output_error: proxy ‖ŷ − y‖²/‖y‖² on captured inputs, activations quantised too.
        output_variance: proxy ‖ŷ − y‖² / rows on the same inputs: the error in the output's own units.
    """

    layer: str
    format: str
    n: int
    k: int
    samples: list[float]
    weight_error: float = math.nan
    weight_power: float = math.nan
    output_error: float = math.nan
    output_variance: float = math.nan

    @property
    def impact(self) -> float:
        """Mean over the samples."""
        return math.fsum(self.samples) / len(self.samples)

    @property
    def weight(self) -> float:
        """The impact, as a plan weighs it.

        Raises:
            HswqError: a run came to NaN or infinity, so it is not finite.
        """
        if not math.isfinite(self.impact):
            raise HswqError(
                f"the impact of {self.format} on this layer is not finite, so no plan can weigh it",
                tensor=self.layer,
                found="a run that came to NaN or infinity",
                fix=f"pin the layer, as in keep={{{self.layer!r}: 'int8'}}, or measure again where nothing overflows",
            )
        return self.impact

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean, cut at 0."""
        low, high = mean_interval(self.samples)
        return max(0.0, low), high

    @property
    def group(self) -> int | None:
        """Rotation group."""
        return layer_format(self.format, self.k).group


@dataclass(frozen=True)
class ImpactReport(Result):
    """True impact of every layer on the final latent, one layer quantised at a time.

    Attributes:
        model: name of the 16-bit model.
        sha256: of its checkpoint.
        prompts: one for each seed.
        seeds: of the starting noises.
        steps: Euler steps.
        cfg: guidance scale.
        shift: noise shift.
        size: picture size in pixels.
        scales: how weights were quantised ("sweep", …).
        activation_scales: how activations were.
        unmeasured: the model's other layers, name → (N, K): plans leave them 16-bit and count their bytes.
        rows: layers in network order; for each of them its formats in the order asked for.
        seconds: how long it took in all.
        captions: identity of the text encoder; None in files that do not say.
        dtype: of activations; None in files that do not say.
    """

    model: str
    sha256: str
    prompts: list[str]
    seeds: list[int]
    steps: int
    cfg: float
    shift: float
    size: tuple[int, int]
    scales: str
    rows: list[LayerImpact]
    seconds: float = 0.0
    activation_scales: str = "rtn"
    unmeasured: dict[str, tuple[int, int]] = field(default_factory=dict)
    captions: str | None = None
    dtype: str | None = None

    @property
    def formats(self) -> list[str]:
        """The formats measured."""
        return list(dict.fromkeys(row.format for row in self.rows))

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """The layers that were measured, name → (N, K)."""
        return {row.layer: (row.n, row.k) for row in self.rows}

    @property
    def measured_on(self) -> MeasuredOn:
        """The model that was measured."""
        return MeasuredOn(self.model, self.sha256)

    def __str__(self) -> str:
        what = f"{len(self.layers)} layers of {self.model} ({', '.join(self.formats)})"
        runs = f"{len(self.seeds)} pictures × {self.steps} steps"
        largest = sorted(self.rows, key=lambda row: -row.impact)[:5]
        lines = [f"  {row.impact:.3g}  {row.layer} ({row.format})" for row in largest]
        return "\n".join([f"impact of {what} on the final latent, {runs}; the largest:", *lines])

    def check_layers(self, layers: Mapping[str, tuple[int, int]]) -> None:
        """Whether these are the layers of the model that was measured.

        Args:
            layers: layer name → (N, K), as `Model.layers()` gives it.

        Raises:
            HswqError: a layer is missing on either side, or has another size.
        """
        check_same_layers(
            self.layers | self.unmeasured,
            layers,
            "the impact was measured on a model of other layers",
            "measure this model with hl.sensitivity, or `hswq-lab sensitivity`",
        )

    def of(self, layer: str, form: str = "nvfp4") -> LayerImpact:
        """The row of a layer and format.

        Raises:
            HswqError: it was not measured.
        """
        name, wanted = layer_name(layer), canonical(form, layer)
        for row in self.rows:
            if row.layer == name and row.format == wanted:
                return row
        raise HswqError(
            f"the impact of {wanted} on this layer was not measured",
            tensor=name,
            fix=f"measure it with formats=[…, {wanted!r}]"
            if name in self.layers
            else nearest(name, self.layers),
        )

    def ranking(self, form: str = "nvfp4") -> list[str]:
        """Layer names, the least sensitive first; ties in network order."""
        wanted = canonical(form, form)
        rows = [row for row in self.rows if row.format == wanted]
        if not rows:
            raise HswqError("this format was not measured", found=wanted, expected=", ".join(self.formats))
        return [row.layer for row in sorted(rows, key=lambda row: row.impact)]

    def to_frame(self) -> pd.DataFrame:
        """One row a layer and format: layer, format, group, n, k, impact, low, high, then the proxies."""
        return pd.DataFrame(
            [
                {
                    "layer": row.layer,
                    "format": row.format,
                    "group": row.group,
                    "n": row.n,
                    "k": row.k,
                    "impact": row.impact,
                    "low": row.interval[0],
                    "high": row.interval[1],
                    **{proxy: getattr(row, proxy) for proxy in PROXIES},
                }
                for row in self.rows
            ]
        )

    def correlations(self, form: str = "nvfp4") -> dict[str, float]:
        """Spearman's rank correlation of each proxy with the true impact over the layers."""
        rows = [self.of(layer, form) for layer in self.ranking(form)]
        truth = [row.impact for row in rows]
        return {proxy: spearman([getattr(row, proxy) for row in rows], truth) for proxy in PROXIES}

    def plan(
        self,
        nvfp4: int | None = None,
        *,
        bits: float | None = None,
        budget_bytes: int | None = None,
        final_cos: float | None = None,
        keep: Mapping[str, str] | None = None,
    ) -> Plan:
        """A plan by impact: NVFP4 where it costs least, ConvRot INT8 elsewhere. Give exactly one goal.

        Layers that were not measured stay 16-bit unless they are pinned, and count as such.

        NVFP4 is rotated; if "nvfp4-unrotated" was measured too, each layer gets the one of less output error.
        Goals other than `nvfp4` choose among input bases too, of the ranks that were measured ("nvfp4+r16").

        Args:
            nvfp4: the number of NVFP4 layers, pinned ones included: the least sensitive ones.
            bits: mean bits a weight over the Linears, scales included, not to be exceeded.
            budget_bytes: bytes of the Linears' weights with their scales, not to be exceeded.
            final_cos: smallest plan whose predicted mean final cosine (`predicted_cos`) is at least this.
            keep: pins, layer glob → format; they win over everything.

        Raises:
            HswqError: no or several goals, one that is impossible or cannot be reached, nothing was measured, or an
                impact that would count is not finite.
        """
        if not self.rows:
            raise HswqError("no layer was measured, so there is nothing to plan by", tensor=self.model)
        goal = the_goal(nvfp4=nvfp4, bits=bits, budget_bytes=budget_bytes, final_cos=final_cos)
        options = self._options(keep or {}, with_bases=nvfp4 is None)
        if nvfp4 is not None:
            chosen = least_sensitive(options, nvfp4, "nvfp4")
        elif final_cos is not None:
            chosen = smallest_that(options, lambda formats: self.predicted_cos(Plan(formats)) >= final_cos)
        else:
            total = sum(n * k for n, k in (self.layers | self.unmeasured).values())
            limit = budget_bytes if budget_bytes is not None else math.floor((bits or 0.0) * total / 8)
            chosen = within_budget(options, limit, total)
        note = f"{goal} by impact on {self.model}, {len(self.seeds)} seeds, {self.steps} steps"
        if self.unmeasured:
            note += f"; {len(self.unmeasured)} layers were not measured"
        left_alone = {layer for layer in self.unmeasured if chosen[layer] == KEPT}
        formats = {layer: form for layer, form in chosen.items() if layer not in left_alone}
        return Plan(formats, note, self.measured_on)

    def best_nvfp4(self, layer: str) -> str:
        """NVFP4 rotated, or unrotated if that was measured too and has the smaller output error."""
        unrotated = f"nvfp4{UNROTATED}"
        if unrotated not in self.formats:
            return "nvfp4"
        return min(("nvfp4", unrotated), key=lambda form: self.of(layer, form).output_error)

    def predicted_cos(self, plan: Plan) -> float:
        """Mean over samples of 1/√(1 + Σ impact): the final cosine if the layers' errors were independent.

        Formats that were not measured count as free, but for those of NVFP4, which count as plain NVFP4. Layers
        interact, so what is measured may be better or worse: see `hl.pareto`.
        """
        totals = [0.0] * len(self.seeds)
        for layer in self.layers:
            form = self._stand_in(plan.form_of(layer) or KEPT)
            if form is not None:
                totals = [
                    total + sample for total, sample in zip(totals, self.of(layer, form).samples, strict=True)
                ]
        return math.fsum(1 / math.sqrt(1 + total) for total in totals) / len(totals)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ImpactReport:
        """Reads a report that `save("….json")` wrote.

        Raises:
            HswqError: the file is no impact report.
        """
        try:
            return cls.from_dict(read_json(path))
        except HswqError as error:
            if error.file is not None:
                raise
            raise HswqError("this is no impact report", file=path, found=str(error)) from error

    @classmethod
    def from_dict(cls, content: object) -> ImpactReport:
        """The inverse of `to_dict`; layer names may end in ".weight".

        Raises:
            HswqError: an entry is missing or of another kind.
        """
        rows = [_row(row) for row in entry(content, "rows", list)]
        seeds = [of_kind(seed, int, "seeds") for seed in entry(content, "seeds", list)]
        height, width = _pair(entry(content, "size", list))
        prompts = [of_kind(prompt, str, "prompts") for prompt in entry(content, "prompts", list)]
        if not seeds or len(prompts) != len(seeds):
            raise HswqError("there is no prompt for each seed", found=f"{len(prompts)}, {len(seeds)} seeds")
        _check_rows(rows, len(seeds))
        later = content if isinstance(content, dict) else {}  # has what the first files do not have
        others = entry(later, "unmeasured", dict) if "unmeasured" in later else {}
        return cls(
            model=entry(content, "model", str),
            sha256=entry(content, "sha256", str),
            prompts=prompts,
            seeds=seeds,
            steps=entry(content, "steps", int),
            cfg=entry(content, "cfg", float),
            shift=entry(content, "shift", float),
            size=(height, width),
            scales=entry(content, "scales", str),
            rows=rows,
            seconds=entry(content, "seconds", float),
            activation_scales=entry(later, "activation_scales", str)
            if "activation_scales" in later
            else "rtn",
            unmeasured={
                layer: _shape(_pair(of_kind(shape, list, layer), layer), layer)
                for layer, shape in others.items()
            },
            **{
                name: entry(later, name, str) for name in ("captions", "dtype") if later.get(name) is not None
            },
        )

    def _options(self, keep: Mapping[str, str], *, with_bases: bool) -> dict[str, list[Option]]:
        pins = Plan(keep)
        every = self.layers | self.unmeasured
        pins.for_layers(every)  # refuses a pin that matches nothing
        ranked = [form for form in self.formats if with_bases and form.startswith(f"nvfp4{RANK}")]
        options = {}
        for layer, shape in every.items():
            pinned = pins.form_of(layer) or (KEPT if layer in self.unmeasured else None)
            formats = [pinned] if pinned else ["int8_tensorwise", self.best_nvfp4(layer), *ranked]
            options[layer] = [
                Option(form, packed_nbytes(form, shape), self._cost(layer, form)) for form in formats
            ]
        return options

    def _cost(self, layer: str, form: str) -> float:
        stand_in = None if layer in self.unmeasured else self._stand_in(form)
        return 0.0 if stand_in is None else self.of(layer, stand_in).weight

    def _stand_in(self, form: str) -> str | None:
        """The format whose impact tells a format's: itself, plain NVFP4 for its kin; None: it counts as free."""
        if form in self.formats:
            return form
        return "nvfp4" if form.startswith("nvfp4") else None


def _row(row: object) -> LayerImpact:
    """A layer of a stored report; JSON has no infinity: null is a latent that was lost, or a proxy not measured."""
    samples = [
        math.inf if sample is None else of_kind(sample, float, "samples")
        for sample in entry(row, "samples", list)
    ]
    layer = layer_name(entry(row, "layer", str))
    if any(sample < 0 for sample in samples):
        raise HswqError("an impact is never negative", tensor=layer, found=samples)
    proxies = {
        proxy: entry(row, proxy, float)
        for proxy in PROXIES
        if isinstance(row, dict) and row.get(proxy) is not None
    }
    n, k = _shape((entry(row, "n", int), entry(row, "k", int)), layer)
    return LayerImpact(layer, canonical(entry(row, "format", str), layer), n, k, samples, **proxies)


def _check_rows(rows: list[LayerImpact], seeds: int) -> None:
    """Refuses rows without a sample for each seed, and two that speak of one layer and contradict each other."""
    shapes: dict[str, tuple[int, int]] = {}
    seen = set()
    for row in rows:
        if len(row.samples) != seeds:
            raise HswqError("a layer has no sample for each seed", tensor=row.layer, found=len(row.samples))
        if (row.layer, row.format) in seen:
            raise HswqError("a layer is there twice in one format", tensor=row.layer, found=row.format)
        if shapes.setdefault(row.layer, (row.n, row.k)) != (row.n, row.k):
            raise HswqError(
                "a layer has two sizes", tensor=row.layer, found=[shapes[row.layer], (row.n, row.k)]
            )
        seen.add((row.layer, row.format))


def _shape(shape: tuple[int, int], layer: str) -> tuple[int, int]:
    if not all(0 < size < 2**31 for size in shape):
        raise HswqError("no layer has this size", tensor=layer, found=shape)
    return shape


def _pair(size: list[object], name: str = "size") -> tuple[int, int]:
    if len(size) != 2:
        raise HswqError("a size is two numbers", tensor=name, found=size)
    return of_kind(size[0], int, name), of_kind(size[1], int, name)
