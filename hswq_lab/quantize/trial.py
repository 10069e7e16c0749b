"""Trial: a private network of a 16-bit model on which layers are exchanged for packed ones."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hswq_lab import ops, packing
from hswq_lab.arguments import finite, whole
from hswq_lab.errors import HswqError
from hswq_lab.formats import Nvfp4Weight, PackedWeight, group_for
from hswq_lab.formats.block_scales import METHODS
from hswq_lab.layers import LabLinear, make_linear
from hswq_lab.models.sampler import sigmas, starting_noise
from hswq_lab.modes import ModeRequest, resolve
from hswq_lab.quantize.activations import Activations, observing, watching
from hswq_lab.quantize.bases import SecondMoment
from hswq_lab.quantize.gptq import gptq_weight
from hswq_lab.quantize.pairs import label_of
from hswq_lab.quantize.plan import layer_format
from hswq_lab.quantize.replay import Replay
from hswq_lab.trajectory.compare import lost_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hswq_lab.formats import Method
    from hswq_lab.model import Model
    from hswq_lab.quantize.moments import LayerMoments
    from hswq_lab.trajectory.compare import Prompt

BATCH_ROWS = 16
"""Rows of one forward pass: each pair has two, with and without its prompt."""

SAMPLE_ROWS = 64
"""Input rows kept of each forward of a Linear in the reference run."""


@dataclass(frozen=True)
class TrialSettings:
    """What all runs of a trial share.

    Raises:
        HswqError: no number of steps, no finite guidance, or an unknown way to find block scales.
    """

    pairs: tuple[tuple[Prompt, int], ...]
    steps: int
    cfg: float
    shift: float
    size: tuple[int, int]
    scales: Method
    activation_scales: Method = "rtn"

    def __post_init__(self) -> None:
        whole(self.steps, "the number of steps")
        finite(self.cfg, "the guidance scale")
        for method in (self.scales, self.activation_scales):
            if method not in METHODS:
                expected = ", ".join(METHODS)
                raise HswqError("unknown way to find block scales", found=repr(method), expected=expected)

    @property
    def identity(self) -> str:
        """Equal for equal settings, in every process."""
        return repr(replace(self, pairs=tuple((label_of(prompt), seed) for prompt, seed in self.pairs)))


class Trial:
    """Final latents of a model with some layers packed, each in its real format and W4A4 if it is NVFP4.

    Activation scales come from the reference run of the unchanged model. All pairs run in one batch, always
    the same one, so that a layer exchanged for itself gives the reference's bits.

    Args:
        model: 16-bit, without LoRAs; not changed (the trial has a network of its own that shares the
            weights).
        settings: pairs of prompt and seed, steps and so on.
        moments: from `gather_moments`: rotated NVFP4 weights are made by GPTQ.

    Attributes:
        pulse: called before every pass through the network, and may raise to end the run; does nothing until
            somebody sets it.

    Raises:
        HswqError: the model is packed or has LoRAs.
    """

    def __init__(
        self, model: Model, settings: TrialSettings, moments: Mapping[str, LayerMoments] | None = None
    ) -> None:
        if model.is_packed or model.loras:
            raise HswqError(
                "layers are tried out on a 16-bit model without LoRAs",
                tensor=model.name,
                found="LoRAs are attached" if model.loras else "packed layers",
                fix="load the 16-bit source",
            )
        self.model = model
        self.settings = settings
        self.pulse: Callable[[], None] = _no_pulse
        self._moments = moments
        copy = model.on(model.device)
        self._network = copy.network()
        self._linears = copy.linears()
        self._levels = sigmas(settings.steps, settings.shift)
        self._batches = self._split()
        self._owners = {name: self._network.get_submodule(name.rpartition(".")[0]) for name in self._linears}
        self._replay = Replay(self._network, model.config.stages())
        self._weights: dict[tuple[str, str], PackedWeight | None] = {}
        self._inputs: dict[str, list[Tensor]] = {}
        self._observed: dict[tuple[bool, int], dict[str, Activations]] = {}

    @cached_property
    def reference(self) -> Tensor:
        """Final latents of the unchanged model, fp32 [pairs, C, h, w] on its device; made once.

        Raises:
            HswqError: it comes to NaN or infinity: every layer would be blamed for it.
        """
        self._inputs = {}  # a run that was cancelled may have left some
        self._replay.begin((), recording=True)
        with observing(self._linears, self._groups(rotated=True), {}) as observed, self._sampling_inputs():
            latents = self._sample(self._check_finite)
        self._observed[True, 0] = observed
        return latents

    def activations(self, layer: str, *, rotated: bool, rank: int = 0) -> Activations:
        """Statistics of a layer's inputs in the reference run.

        Args:
            layer: its name.
            rotated: in a rotated weight's basis, or as they are.
            rank: of the trial's own input basis; 0: none.
        """
        _ = self.reference
        if (rotated, rank) not in self._observed:
            bases = {name: basis[:rank] for name, basis in self._bases.items()} if rank else {}
            self._observed[rotated, rank] = self.observed(self._groups(rotated=rotated), bases)
        return self._observed[rotated, rank][layer]

    def observed(
        self, groups: Mapping[str, int | None], bases: Mapping[str, Tensor]
    ) -> dict[str, Activations]:
        """Statistics of layers' inputs in the reference run, in any basis.

        Args:
            groups: layer → rotation group.
            bases: layer → input basis, where there is one.
        """
        _ = self.reference  # what cannot be a reference is refused as one, not for its first layer
        # Recording, since a stage that is replayed sees no input.
        self._replay.begin((), recording=True)
        with observing(self._linears, groups, {}, bases) as observed:
            self._sample()
        return observed

    @cached_property
    def _bases(self) -> dict[str, Tensor]:
        """The principal directions of all inputs in the reference run, as `gather_bases` finds them."""
        sums = {
            name: SecondMoment(each.in_features, self.model.device) for name, each in self._linears.items()
        }
        self._replay.begin((), recording=True)
        with watching(self._linears, sums):
            self._sample()
        return {name: each.basis() for name, each in sums.items()}

    def inputs(self, layer: str) -> Tensor:
        """Some of the layer's unrotated inputs in the reference run, [rows, K]; none if never reached."""
        _ = self.reference
        width = self._linears[layer].in_features
        return torch.cat(self._inputs[layer]) if layer in self._inputs else torch.empty((0, width))

    def weight(self, layer: str) -> Tensor:
        """The layer's 16-bit weight [N, K]."""
        value = self.model.checkpoint[f"{layer}.weight"]
        if isinstance(value, PackedWeight):
            raise HswqError("this layer is packed", tensor=layer, found=value.format)
        return value.to(self.model.device)

    def packed(self, layer: str, form: str) -> PackedWeight | None:
        """The layer in a plan's format, as `pack` and `calibrate` make it; None if it is never reached.

        Raises:
            HswqError: the format is "16-bit" or unknown.
        """
        if (layer, form) not in self._weights:
            wanted = layer_format(form, self._linears[layer].in_features)
            weight: PackedWeight | None = self._pack(layer, wanted.format, wanted.group)
            if isinstance(weight, Nvfp4Weight):
                basis = self._bases[layer][: wanted.rank] if wanted.rank else None
                weight = replace(weight, basis=basis, activation_scales=self.settings.activation_scales)
                rotated = wanted.group is not None
                weight = self.activations(layer, rotated=rotated, rank=wanted.rank).calibrated(weight)
            self._weights[layer, form] = weight
        return self._weights[layer, form]

    @property
    def passes(self) -> int:
        """Passes through the network of one run."""
        return self.settings.steps * len(self._batches)

    @property
    def method(self) -> str:
        """How NVFP4 weights are made."""
        return self.settings.scales if self._moments is None else "gptq"

    def _pack(self, layer: str, stored: str, group: int | None) -> PackedWeight:
        moments = None if self._moments is None or stored != "nvfp4" else self._moments.get(layer)
        if moments is not None and moments.group == group:
            return gptq_weight(self.weight(layer), moments)
        name = f"{layer}.weight"
        return packing.pack_weight(self.weight(layer), stored, group, self.settings.scales, name=name)

    def module(self, layer: str, weight: PackedWeight) -> LabLinear:
        """The layer with a packed weight, as it runs in mode tc."""
        native = ops.fp4_is_native(self.model.device)
        resolved = resolve(
            layer, weight.format, calibrated=True, request=ModeRequest("tc"), fp4_is_native=native
        )
        return make_linear(layer, weight, self._linears[layer].bias, resolved)

    def run(self, weights: Mapping[str, PackedWeight]) -> Tensor:
        """Final latents [pairs, C, h, w] with these weights packed; NVFP4 ones need their input_scale."""
        _ = self.reference
        with self._exchanged(weights):
            self._replay.begin(weights)
            return self._sample()

    def errors(self, latents: Tensor) -> list[float]:
        """‖x − x_ref‖²/‖x_ref‖² for each pair, in fp64; infinite where the latent holds NaN."""
        reference = self.reference.flatten(1).double()
        difference = latents.flatten(1).double() - reference
        errors = difference.square().sum(1) / reference.square().sum(1)
        return [float(e) for e in errors.nan_to_num(nan=math.inf, posinf=math.inf)]

    def cosines(self, latents: Tensor) -> list[float]:
        """Cosine with the reference's final latent for each pair, in fp64."""
        return [
            float(c)
            for c in cosine_similarity(latents.flatten(1).double(), self.reference.flatten(1).double())
        ]

    def _groups(self, *, rotated: bool) -> dict[str, int | None]:
        return {
            name: group_for(layer.in_features) if rotated else None for name, layer in self._linears.items()
        }

    @contextmanager
    def _exchanged(self, weights: Mapping[str, PackedWeight]) -> Iterator[None]:
        before = []
        try:
            for layer, weight in weights.items():
                owner, attribute = self._owners[layer], layer.rpartition(".")[2]
                before.append((owner, attribute, getattr(owner, attribute)))
                setattr(owner, attribute, self.module(layer, weight.to(self.model.device)))
            yield
        finally:
            for owner, attribute, module in before:
                setattr(owner, attribute, module)

    @contextmanager
    def _sampling_inputs(self) -> Iterator[None]:
        """Keeps evenly spaced rows of every Linear's input during the reference run."""

        def keep(layer: LabLinear, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].reshape(-1, layer.in_features)
            stride = -(-len(rows) // SAMPLE_ROWS)
            self._inputs.setdefault(layer.name, []).append(rows[::stride].clone())

        hooks = [layer.register_forward_pre_hook(keep) for layer in self._linears.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _split(self) -> list[Batch]:
        """Rows by padded caption length: first all prompts, then (with guidance) as many empty ones."""
        texts: list[Prompt] = [prompt for prompt, _ in self.settings.pairs]
        if self.settings.cfg != 1:
            texts += [""] * len(texts)
        captions = [self.model.encode(text).to(self.model.device, self.model.dtype) for text in texts]
        by_length: dict[int, list[int]] = {}
        for row, caption in enumerate(captions):
            by_length.setdefault(self.model.config.padded_length(len(caption)), []).append(row)
        return [
            Batch(
                rows[start : start + BATCH_ROWS], [captions[row] for row in rows[start : start + BATCH_ROWS]]
            )
            for rows in by_length.values()
            for start in range(0, len(rows), BATCH_ROWS)
        ]

    def _check_finite(self, step: int, latents: Tensor) -> None:
        """Refuses latents of the reference run [pairs, C, h, w] that hold NaN or infinity."""
        finite = torch.isfinite(latents).flatten(1).all(1).tolist()
        for (_, seed), good in zip(self.settings.pairs, finite, strict=True):
            if not good:
                raise lost_reference(self.model.name, seed, step, self.settings.steps)

    @torch.no_grad()
    def _sample(self, after_step: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Euler steps for all pairs at once; see `hswq_lab.models.sampler.euler`."""
        device, dtype, cfg = self.model.device, self.model.dtype, self.settings.cfg
        shape = self.model.latent_shape(self.settings.size)
        latents = torch.stack([starting_noise(shape, seed) for _, seed in self.settings.pairs]).to(device)
        count = len(latents)
        for step, (sigma, following) in enumerate(pairwise(self._levels)):
            out = torch.empty((count if cfg == 1 else 2 * count, *shape), device=device)
            for number, batch in enumerate(self._batches):
                self.pulse()
                self._replay.at(step, number)
                x = latents[[row % count for row in batch.rows]].to(dtype)
                t = torch.full((len(x),), 1 - sigma, device=device)
                out[batch.rows] = self._network(x, t, batch.captions).float()
            direction = out if cfg == 1 else out[count:] + cfg * (out[:count] - out[count:])
            latents = latents - (following - sigma) * direction
            if after_step is not None:
                after_step(step, latents)
        return latents


def _no_pulse() -> None:
    """The pulse of a trial that nobody watches."""


@dataclass(frozen=True)
class Batch:
    """Rows that run through the network together; all captions have one padded length."""

    rows: list[int]
    captions: list[Tensor]
