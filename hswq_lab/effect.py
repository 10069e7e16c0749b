"""The effect test of LoRAs: what they do to each layer's outputs on a pack, against what they do at 16 bits."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
import torch
from torch import Tensor

from hswq_lab.arguments import whole
from hswq_lab.checkpoint.smoothed import check_same_units
from hswq_lab.errors import HswqError
from hswq_lab.lora.evidence import format_of, kind_of
from hswq_lab.lora.targets import unpacked
from hswq_lab.model import check_model
from hswq_lab.progress import part, progress_of
from hswq_lab.quantize.pairs import choose_pairs, label_of
from hswq_lab.results import Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hswq_lab.layers import LabLinear
    from hswq_lab.lora.evidence import Kind
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.trajectory.compare import Prompt

DROWNED = math.sqrt(0.5)
"""A smaller cosine means that the error of a layer's change is larger than the change itself."""


@dataclass(frozen=True)
class LayerEffect:
    """What LoRAs do to one layer's outputs, over some rows of real activations.

    With Δ the change of the outputs at 16 bits and Δ' the change on the pack, for the same inputs:

    Attributes:
        kind: of the stored weight, as in a `BakeReport`.
        format: of the stored weight.
        mode: in which the layer runs.
        rows: of activations.
        change: ‖Δ‖ / ‖y‖, how much the LoRAs change the outputs y of the pristine pack.
        cosine: of Δ' and Δ; None where Δ is zero, 0 where Δ' is.
        gain: ⟨Δ', Δ⟩ / ⟨Δ, Δ⟩, the share of the effect that is there.
        error: ‖Δ' − Δ‖ / ‖Δ‖.
    """

    layer: str
    kind: Kind
    format: str
    mode: str
    rows: int
    change: float | None
    cosine: float | None
    gain: float | None
    error: float | None

    @property
    def warning(self) -> str:
        """Empty, or what is wrong."""
        if self.cosine is None or self.cosine >= DROWNED:
            return ""
        return f"the effect drowns in the error: cosine {self.cosine:.2f}, {self.gain:.0%} of it arrived"


@dataclass(frozen=True, repr=False)
class EffectReport(Result):
    """The effect test over all layers that LoRAs touch.

    Attributes:
        model: the pack.
        loras: what is on it.
        activations: the model whose activations were used, and in what arithmetic.
        prompts: one for each seed.
        rows: layers in network order.
        remarks: what to know about the LoRAs as a whole, e.g. that modules were left out.
    """

    model: str
    loras: tuple[str, ...]
    activations: str
    prompts: list[str]
    seeds: list[int]
    steps: int
    rows: list[LayerEffect]
    remarks: tuple[str, ...] = ()

    computed: ClassVar[tuple[str, ...]] = ("warnings",)

    @property
    def warnings(self) -> list[str]:
        """The remarks, then one a layer that has one."""
        found = [f"{row.layer} ({row.format}): {row.warning}" for row in self.rows if row.warning]
        return [*self.remarks, *found]

    def to_frame(self) -> pd.DataFrame:
        """One row a layer."""
        return pd.DataFrame([vars(row) for row in self.rows])

    def summary(self) -> pd.DataFrame:
        """One row a format: layers, smallest and median cosine, median gain."""
        frame = self.to_frame()
        if frame.empty:
            return frame
        grouped = frame.dropna(subset=["cosine"]).groupby(["format", "mode"], sort=False)
        return grouped.agg(
            layers=("layer", "size"),
            lowest=("cosine", "min"),
            median=("cosine", "median"),
            gain=("gain", "median"),
            error=("error", "median"),
        ).reset_index()

    def __repr__(self) -> str:
        """A summary for a console."""
        lines = [f"effect of {', '.join(self.loras)} on the activations of {self.activations}:"]
        lines += [
            f"  {row.format} ({row.mode}): cosine {row.median:.4f} in the median of {row.layers} layers, "
            f"{row.lowest:.4f} at least; {row.gain:.1%} of the effect"
            for row in self.summary().itertuples()
        ]
        warned = [row for row in self.rows if row.warning]
        if warned:
            worst = min(warned, key=lambda row: row.cosine or 0.0)
            lines.append(f"  warning: {len(warned)} layers, the worst {worst.layer}: {worst.warning}")
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.remarks)])


def measure_effect(
    pack: Model,
    model: Model | None = None,
    prompts: Prompt | Sequence[Prompt] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 4,
    cfg: float = 2.5,
    rows: int = 256,
    progress: Progress | None = None,
) -> EffectReport:
    """Cosine between (pack with LoRAs − pack) and (16-bit with LoRAs − 16-bit), per layer; changes nothing.

    Each layer gets the same inputs four times, so what other layers do to them does not count. They are recorded
    from a run without LoRAs. Outputs are computed in fp32.

    Args:
        pack: with its LoRAs, in its own mode.
        model: the 16-bit model: activations, and norms of DoRA, are taken from it; else from the pack itself.
        prompts: one for each seed, or one for all; by default the first two of the model's own.
        seeds: by default one for each prompt, none of them in `SEEDS_20`.
        steps: Euler steps.
        cfg: guidance scale.
        rows: of each layer's inputs that are kept, about; evenly spaced over all steps and tokens.
        progress: told after every step and every layer.

    Raises:
        HswqError: no models or LoRAs, less than a step, prompts and seeds that do not pair, or a packed `model`.
    """
    for each in (pack,) if model is None else (pack, model):
        check_model(each)
    steps, rows = whole(steps, "the number of steps"), whole(rows, "the number of rows")
    if not pack.loras:
        raise HswqError("there is no LoRA on this model", tensor=pack.name, fix="attach one first")
    if model is not None and model.is_packed:
        raise HswqError("the reference of an effect is not 16-bit", tensor=model.name, fix="give the source")
    if model is not None:
        check_same_units(pack.checkpoint, model.checkpoint)
    watched = (model or pack).without_loras()
    pairs = choose_pairs(watched, prompts, seeds, number=2)
    layers = pack.touched_layers
    tell = progress_of(progress)
    shares = len(pairs) * steps, len(pairs) * steps + len(layers)
    inputs = _inputs(watched, layers, pairs, (steps, cfg), rows, part(tell, 0, shares[0], shares[1]))
    bare, dressed = (view.on(pack.device, torch.float32) for view in (pack.without_loras(), pack))
    found = []
    tell_layers = part(tell, shares[0], shares[1], shares[1])
    for done, layer in enumerate(layers):
        tell_layers(done, len(layers), layer)
        found.append(_effect(dressed, bare, layer, inputs[layer], _weight(model or pack, layer)))
    tell_layers(len(layers), len(layers), "done")
    return EffectReport(
        model=pack.name,
        loras=tuple(str(item) for item in pack.loras),
        activations=f"{watched.name} ({'16-bit' if model is not None else watched.request.mode})",
        prompts=[label_of(prompt) for prompt, _ in pairs],
        seeds=[seed for _, seed in pairs],
        steps=steps,
        rows=found,
        remarks=tuple(pack.lora_remarks),
    )


def _inputs(
    model: Model,
    layers: Sequence[str],
    pairs: Sequence[tuple[Prompt, int]],
    run: tuple[int, float],
    rows: int,
    progress: Progress,
) -> Mapping[str, Tensor]:
    """Layer → some of its inputs [rows, K], fp32, recorded while pictures are made."""
    steps, cfg = run
    kept: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    share = max(rows // (len(pairs) * steps), 1)

    def keep(linear: LabLinear, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].reshape(-1, linear.in_features)
        places = torch.linspace(0, len(x) - 1, min(share, len(x)), device=x.device).round().long()
        kept[linear.name].append(x[places].float())

    linears = model.linears()
    with ExitStack() as hooks:
        for layer in layers:
            handle = linears[layer].register_forward_pre_hook(keep)
            hooks.callback(handle.remove)
        for done, (prompt, seed) in enumerate(pairs):
            model.generate(prompt, seed, steps, cfg, progress=part(progress, done, done + 1, len(pairs)))
    k = {layer: linears[layer].in_features for layer in layers}
    return {layer: torch.cat(found) if found else torch.zeros(0, k[layer]) for layer, found in kept.items()}


def _weight(model: Model, layer: str) -> Tensor:
    return unpacked(model.checkpoint[f"{layer}.weight"])


def _effect(dressed: Model, bare: Model, layer: str, x: Tensor, weight: Tensor) -> LayerEffect:
    x = x.to(dressed.device)
    delta, bias = dressed.lora_delta(layer, weight.to(dressed.device))
    wanted = (x @ delta.T + (0 if bias is None else bias)).double()
    linear = dressed.linears()[layer]
    with torch.no_grad():
        before = bare.linears()[layer](x).double()
        change = linear(x).double() - before
    size, own, cross = (
        float((a * b).sum()) for a, b in ((wanted, wanted), (change, change), (change, wanted))
    )
    stored = dressed.checkpoint[f"{layer}.weight"]
    norm = float(before.norm())
    return LayerEffect(
        layer=layer,
        kind=kind_of(stored),
        format=format_of(stored),
        mode=linear.resolved.mode,
        rows=len(x),
        change=math.sqrt(size) / norm if norm else None,
        cosine=None if size == 0 else cross / math.sqrt(size * own) if own else 0.0,
        gain=cross / size if size else None,
        error=float((change - wanted).norm()) / math.sqrt(size) if size else None,
    )
