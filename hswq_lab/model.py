"""Model: a checkpoint, what was declared about it (mode, LoRAs), and a network that is rebuilt from both at will."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hswq_lab import ops
from hswq_lab.arguments import activation_dtype, device_of, finite
from hswq_lab.assembly import Parts, SharedWeights, build_network, effective_items, linears_of
from hswq_lab.attachments import Attachments
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.checkpoint.baked import baked_in_words
from hswq_lab.declared import Attachment, Way, check_checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.layers import LabLinear
from hswq_lab.lora import BakeReport, LoraFile
from hswq_lab.lora.file import check_lora
from hswq_lab.models.architecture import linear_layers
from hswq_lab.models.companion import Companion
from hswq_lab.models.families import architecture_of
from hswq_lab.modes import Fp8Weights, ModeRequest, Requested, Resolved, Uncalibrated, resolve
from hswq_lab.pictures import PictureMaker
from hswq_lab.progress import Progress
from hswq_lab.report import LayerRow, LoadReport

if TYPE_CHECKING:
    from hswq_lab.effect import EffectReport
    from hswq_lab.spec import ModelSpec


def check_model(value: object) -> None:
    """Raises HswqError for anything but a loaded model: a path, a checkpoint, a report, …."""
    if not isinstance(value, Model):
        path = value if isinstance(value, str) else "…"
        raise HswqError(
            "this is no loaded model", found=repr(value)[:80], fix=f"open it first: hl.load({path!r})"
        )


def named_models(value: object) -> dict[str, Model]:
    """Models by name, as in {"tc": pack.in_mode("tc")}; raises HswqError for anything else."""
    if not isinstance(value, Mapping):
        raise HswqError("models have names", found=repr(value)[:80], expected='{"tc": pack.in_mode("tc"), …}')
    for name, each in value.items():
        if not isinstance(name, str) or not name.strip():
            raise HswqError("a model's name is a text that is not empty", found=repr(name)[:80])
        check_model(each)
    return dict(value)


class Model(PictureMaker):
    """A diffusion transformer that can be generated with, compared, packed and given LoRAs.

    Nothing of the network is state: it follows from the checkpoint and the declared state (mode, LoRAs), so after
    `unload()` the next use gives the same numbers, bit for bit.

    Args:
        checkpoint: the weights, 16-bit or packed.
        name: what reports call it.
        companion: text encoder, codec and defaults, if known.
        device: "cpu", "cuda", …
        dtype: of activations and unpacked weights; fp32 or bf16.
        request: the mode asked for.
        attachments: LoRAs declared so far.
        shared: device copies to share with another view of the same checkpoint.

    Raises:
        HswqError: the checkpoint is not of a known model family, or the mode is not possible for one of its layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        companion: Companion | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        request: ModeRequest | None = None,
        attachments: Sequence[Attachment] = (),
        shared: SharedWeights | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self.companion = companion
        self.device = device_of(device)
        self.dtype = activation_dtype(dtype)
        self.request = request or ModeRequest()
        self.config = architecture_of(checkpoint.shapes(), checkpoint.path)
        self._attachments = Attachments(checkpoint, self.layers(), attachments)
        self._shared = shared or SharedWeights()
        self._network: nn.Module | None = None
        self._fresh: list[PackedWeight] = []  # baked for the evidence, and wanted by the network to come
        self._lock = threading.RLock()
        for layer in self.layers():
            self._resolve(layer)  # refuses an impossible mode now, not in the middle of a picture

    # -- what it is ------------------------------------------------------------------------------------------

    def layers(self) -> dict[str, tuple[int, int]]:
        """Every Linear in network order: name → (N, K)."""
        return linear_layers(self.config)

    @property
    def prompts(self) -> list[str]:
        """The companion's default prompts.

        Raises:
            HswqError: this model has none.
        """
        if self.companion is None:
            raise HswqError(
                "this model has no default prompts",
                tensor=self.name,
                fix="give prompts=; on the command line --captions FILE, which `hswq-lab embed` makes",
            )
        return list(self.companion.prompts)

    @property
    def loras(self) -> list[Attachment]:
        """The LoRAs on this model, in the order in which they were attached."""
        return list(self._attachments)

    @property
    def touched_layers(self) -> list[str]:
        """The layers that attached LoRAs touch, in network order."""
        return self._attachments.touched

    @property
    def baked_layers(self) -> list[str]:
        """The layers that attached LoRAs are baked into, in network order."""
        return self._attachments.baked_layers

    @property
    def lora_remarks(self) -> list[str]:
        """What to know about the attached LoRAs as a whole: modules that match no layer."""
        return self._attachments.remarks

    @property
    def is_packed(self) -> bool:
        """Whether any Linear is quantised."""
        return any(self.checkpoint.entry(f"{layer}.weight").format != "16-bit" for layer in self.layers())

    @property
    def placeholder_scales(self) -> list[str]:
        """The layers that run with an activation scale of 1 because they have none and "unit" was asked for."""
        return [layer for layer in self.layers() if self._resolve(layer).activation_scale == "unit"]

    def report(self) -> LoadReport:
        """Format, rotation, mode and reason for every layer, with the counters of the network if it is built."""
        with self._lock:
            built = {} if self._network is None else linears_of(self._network)
            rows = [self._row(layer, built.get(layer)) for layer in self.layers()]
        return LoadReport(
            model=self.name,
            source=str(self.checkpoint.path or "in memory"),
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            requested_mode=f"{self.request.mode} ({self.request.origin})",
            layers=rows,
            warnings=[*self.checkpoint.warnings, *self.lora_remarks],
            loras=self._attachments.in_words(),
            baked=baked_in_words(self.checkpoint.metadata),
        )

    def __repr__(self) -> str:
        baked = [f"{lora} in the file" for lora in baked_in_words(self.checkpoint.metadata)]
        loras = ", ".join([*map(str, self._attachments), *baked]) or "no LoRAs"
        return f"<Model {self.name}: {len(self.layers())} Linears, mode {self.request.mode}, {loras}, on {self.device}>"

    # -- views and copies ------------------------------------------------------------------------------------

    def in_mode(
        self,
        mode: Requested,
        uncalibrated: Uncalibrated | None = None,
        fp8_weights: Fp8Weights = "per_call",
    ) -> Model:
        """A view of this model that runs in another mode and shares its weights; this model is not changed.

        The view starts with this model's LoRAs; later attachments to either do not reach the other. For
        `fp8_weights` see `hl.load`.

        Raises:
            HswqError: tc or tc8 for a layer without input_scale, unless `uncalibrated` is "dynamic" or "unit".
        """
        return self._copy(request=ModeRequest(mode, uncalibrated, "asked for", fp8_weights))

    def on(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Model:
        """The same model on another device, or with another activation dtype."""
        return self._copy(device=device, dtype=dtype or self.dtype)

    def without_loras(self) -> Model:
        """A view of this model without its LoRAs that shares its pristine weights; this model is not changed."""
        return self._copy(attachments=())

    def with_checkpoint(self, checkpoint: Checkpoint, name: str | None = None) -> Model:
        """A model of other weights with the same companion, device, dtype and mode, and no LoRAs."""
        check_checkpoint(checkpoint, "checkpoint")
        return Model(
            checkpoint,
            name=name or self.name,
            companion=self.companion,
            device=self.device,
            dtype=self.dtype,
            request=self.request,
        )

    def _copy(
        self,
        request: ModeRequest | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        attachments: Sequence[Attachment] | None = None,
    ) -> Model:
        return Model(
            self.checkpoint,
            name=self.name,
            companion=self.companion,
            device=device or self.device,
            dtype=dtype or self.dtype,
            request=request or self.request,
            attachments=tuple(self._attachments) if attachments is None else attachments,
            shared=self._shared,
        )

    def spec(self) -> ModelSpec:
        """A small picklable description from which another process builds the same model."""
        from hswq_lab.spec import spec_of  # noqa: PLC0415 - a spec builds models, so it imports this module

        return spec_of(self)

    # -- the network -----------------------------------------------------------------------------------------

    def network(self) -> nn.Module:
        """The network, built now if it is not there. Its Linears are `hswq_lab.layers.LabLinear`s."""
        with self._lock:
            if self._network is None:
                self._network = self._build()
            return self._network

    def linears(self) -> dict[str, LabLinear]:
        """The network's Linears by layer name."""
        return linears_of(self.network())

    def unload(self) -> None:
        """Drops the network and its weights; the next use rebuilds them from the checkpoint and the declared state."""
        with self._lock:
            self._network, self._fresh = None, []

    def _build(self) -> nn.Module:
        network = build_network(self.config, self._parts(self._attachments), self._resolve)
        self._fresh = []
        return network

    def _parts(self, attachments: Attachments) -> Parts:
        return Parts(self.checkpoint, attachments, self._shared, self.device, self.dtype)

    def _resolve(self, layer: str) -> Resolved:
        entry = self.checkpoint.entry(f"{layer}.weight")
        native = ops.fp4_is_native(self.device)
        return resolve(layer, entry.format, self.request, calibrated=entry.calibrated, fp4_is_native=native)

    # -- LoRAs -----------------------------------------------------------------------------------------------

    def attach(
        self,
        lora: LoraFile,
        strength: float = 1.0,
        how: Way = "branch",
        source: Checkpoint | Model | None = None,
        *,
        allow_unmatched: bool = False,
        allow_baked: bool = False,
        progress: Progress | None = None,
    ) -> BakeReport:
        """Puts a LoRA on the model and proves that it arrived.

        Args:
            lora: from `hl.load_lora`.
            strength: factor on its delta.
            how: "branch" (exact 16-bit side path), "bake" (requantise in place, stochastic rounding) or
                "bake_from_source" (quantise the 16-bit source plus the delta).
            source: the 16-bit model or checkpoint for "bake_from_source"; for the other ways it adds the growth of
                the error to the report.
            allow_unmatched: go on although keys of the file match no layer (they are reported).
            allow_baked: bake in place, or add the same LoRA, although LoRAs are in the pack's file already; they stay.
            progress: told of every layer; nothing is changed if it stops the work.

        Returns:
            Per layer, what arrived, computed from the weights.

        Raises:
            HswqError: the file does not fit this model, or is no loaded LoRA; nothing is changed then.
        """
        check_lora(lora)
        origin = source.checkpoint if isinstance(source, Model) else source
        with self._lock:
            added = Attachment(
                lora, finite(strength, "a LoRA's strength"), how, origin, allow_unmatched, allow_baked
            )
            changed = self._attachments.plus(added)
            parts = self._parts(changed)
            report = changed.evidence(self.device, added, parts, progress)
            self._adopt(changed.with_verdict(added, report.verdict), parts.fresh)
            return report

    def detach(self, lora: LoraFile) -> None:
        """Takes a LoRA off; the weights are the pristine ones again, bit for bit.

        Raises:
            HswqError: it is not attached.
        """
        with self._lock:
            self._adopt(self._attachments.minus(lora))

    def set_strength(self, lora: LoraFile, strength: float) -> None:
        """Changes the strength of an attached LoRA; free for a branch, a new bake from the pristine weights else."""
        with self._lock:
            changed = self._attachments.with_strength(lora, strength := finite(strength, "a LoRA's strength"))
            if self._network is not None and changed.differs_only_in_branch_strengths(self._attachments):
                for layer in linears_of(self._network).values():
                    if layer.branches is not None and lora.sha256 in layer.branches.strengths:
                        layer.branches.set_strength(lora.sha256, strength)
                self._attachments = changed
            else:
                self._adopt(changed)

    def bake_report(self, *, progress: Progress | None = None) -> BakeReport:
        """The evidence for every LoRA on the model together, computed from the weights layer by layer."""
        with self._lock:
            parts = self._parts(self._attachments)
            report = self._attachments.evidence(self.device, None, parts, progress)
            if self._network is None:
                self._fresh += parts.fresh
            return report

    def effect(
        self,
        model: Model | None = None,
        prompts: str | Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        *,
        steps: int = 4,
        progress: Progress | None = None,
    ) -> EffectReport:
        """What the LoRAs on this model do to each layer's outputs, against what they do at 16 bits.

        See `hswq_lab.effect.measure_effect`.
        """
        from hswq_lab.effect import measure_effect  # noqa: PLC0415 - it runs models, so it imports this module

        return measure_effect(self, model, prompts, seeds, steps=steps, progress=progress)

    def lora_delta(self, layer: str, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """What all LoRAs together are to add to a layer: (Σ strength · ΔW, Σ strength · Δb or None), fp32.

        Args:
            layer: its name.
            weight: fp32 [N, K], unrotated, the weight that they are put on.
        """
        return self._attachments.wanted(layer, weight)

    def _adopt(self, changed: Attachments, fresh: Sequence[PackedWeight] = ()) -> None:
        # The old network lives until the new one is built, so that both share the device copies of untouched layers.
        before, built = self._attachments, self._network
        self._attachments, self._network, self._fresh = changed, None, list(fresh)
        if built is not None:
            try:
                self._network = self._build()
            except BaseException:
                self._attachments, self._network, self._fresh = before, built, []
                raise

    def effective_items(self) -> Iterator[tuple[str, Tensor | PackedWeight]]:
        """Every parameter with what is baked into it, one at a time, on the CPU; branches are not in it."""
        return effective_items(self.layers(), self._parts(self._attachments))

    # -- inside ----------------------------------------------------------------------------------------------

    def _row(self, layer: str, built: LabLinear | None) -> LayerRow:
        entry = self.checkpoint.entry(f"{layer}.weight")
        resolved = self._resolve(layer)
        n, k = self.layers()[layer]
        row = LayerRow(
            layer=layer,
            format=entry.format,
            group=entry.group,
            n=n,
            k=k,
            mode=resolved.mode,
            why=resolved.why,
            bytes=entry.nbytes,
            calibrated=entry.calibrated,
            loras=self._attachments.on_layer(layer),
            arithmetic=resolved.arithmetic,
            fallback=resolved.fallback,
        )
        return row if built is None else replace(row, **vars(built.counts))
