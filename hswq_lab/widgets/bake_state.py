"""What a BakeCheck shows, without widgets: LoRAs on a pack, their evidence, pictures before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from hswq_lab.errors import HswqError
from hswq_lab.lora.file import check_lora
from hswq_lab.progress import Progress, part
from hswq_lab.widgets.strength import setting_in_words, view_of

if TYPE_CHECKING:
    from hswq_lab.checkpoint import Checkpoint
    from hswq_lab.declared import Way
    from hswq_lab.lora import BakeReport, LoraFile
    from hswq_lab.model import Model
    from hswq_lab.models.sampler import Run

AMPLIFIED = 4
"""Factor on a difference picture: grey is no difference, lighter is more, darker is less."""


@dataclass(frozen=True)
class Choice:
    """One LoRA as it is to be applied; the rest as for `Model.attach`."""

    lora: LoraFile
    strength: float
    allow_unmatched: bool = False
    allow_baked: bool = False

    def put_on(self, model: Model, way: Way, source: Checkpoint | None, progress: Progress) -> None:
        """Attaches it."""
        model.attach(
            self.lora,
            self.strength,
            way,
            source,
            allow_unmatched=self.allow_unmatched,
            allow_baked=self.allow_baked,
            progress=progress,
        )


@dataclass(frozen=True)
class Checked:
    """What one way of applying the LoRAs did.

    Attributes:
        way: how they were applied.
        setting: of all pictures: prompt, seed, steps, and the LoRAs with their strengths.
        report: the evidence, from the weights.
        before: the pack without LoRAs.
        after: the pack with them.
        wanted: the 16-bit model with them; None without one.
    """

    way: Way
    setting: str
    report: BakeReport
    before: Image.Image
    after: Image.Image
    wanted: Image.Image | None

    def pictures(self) -> dict[str, Image.Image]:
        """Caption → picture; the difference is to the 16-bit model, or to the pack without LoRAs."""
        shown = {"pack, without": self.before, f"pack, {self.way}": self.after}
        if self.wanted is None:
            return shown | {f"with − without, ×{AMPLIFIED}": difference(self.after, self.before)}
        shown["16 bit, with"] = self.wanted
        return shown | {f"pack − 16 bit, ×{AMPLIFIED}": difference(self.after, self.wanted)}


@dataclass(frozen=True)
class SecondGeneration:
    """The famous failure as a test: everything dropped from memory, and the same picture made again.

    Attributes:
        same_latent: whether the second final latent equals the first, bit for bit.
        same_evidence: whether the evidence, computed again, says the same.
    """

    same_latent: bool
    same_evidence: bool

    @property
    def passed(self) -> bool:
        """Both."""
        return self.same_latent and self.same_evidence

    def __str__(self) -> str:
        if self.passed:
            return "second generation after a purge: the same latent, bit for bit, and the same evidence"
        wrong = [
            what
            for what, same in (("latent", self.same_latent), ("evidence", self.same_evidence))
            if not same
        ]
        return f"second generation after a purge: another {' and another '.join(wrong)}"


class BakeState:
    """A pack that is given LoRAs in every way; the models given are not changed.

    Args:
        pack: the packed model.
        loras: what can be put on it.
        source: the 16-bit model: for "bake_from_source", and to compare with.
        steps: Euler steps of pictures.
    """

    def __init__(self, pack: Model, loras: Sequence[LoraFile], source: Model | None, steps: int) -> None:
        self.pack = view_of(pack)
        for lora in loras:
            check_lora(lora)
        self.loras = list(loras)
        self.source = source
        self.steps = steps
        self.report: BakeReport | None = None

    def apply(
        self, choices: Sequence[Choice], way: Way, prompt: str, seed: int, progress: Progress
    ) -> Checked:
        """Takes off what is on, applies the choices, and makes the pictures.

        Raises:
            HswqError: nothing is chosen; or a LoRA does not fit, or the work was cancelled: the pack has no
                LoRAs then.
        """
        if not choices:
            raise HswqError("no LoRA is chosen", fix="tick one")
        self.undo()
        try:
            return self._applied(choices, way, prompt, seed, progress)
        except (
            BaseException
        ):  # whatever stopped it: LoRAs without their evidence would be taken for the chosen ones
            self.undo()
            raise

    def _applied(
        self, choices: Sequence[Choice], way: Way, prompt: str, seed: int, progress: Progress
    ) -> Checked:
        whole = 300 if self.source is None else 400
        before = self._run(self.pack, prompt, seed, part(progress, 0, 100, whole, "picture without LoRA"))
        source = None if self.source is None else self.source.checkpoint
        self._put_on(self.pack, choices, way, source, part(progress, 100, 160, whole))
        report = self.pack.bake_report(progress=part(progress, 160, 200, whole, "computing the evidence"))
        after = self._run(self.pack, prompt, seed, part(progress, 200, 300, whole, "picture with LoRA"))
        wanted = None
        if self.source is not None:
            dressed = view_of(self.source)
            self._put_on(dressed, choices, "branch", None, part(progress, 300, 340, whole))
            wanted = self._run(
                dressed, prompt, seed, part(progress, 340, 400, whole, "picture in 16 bits")
            ).image
        self.report = report
        setting = f"{setting_in_words(prompt, seed, self.steps)}; with: {', '.join(report.loras)}"
        return Checked(way, setting, report, before.image, after.image, wanted)

    @staticmethod
    def _put_on(
        model: Model, choices: Sequence[Choice], way: Way, source: Checkpoint | None, progress: Progress
    ) -> None:
        for place, choice in enumerate(choices):
            share = part(
                progress, 100 * place, 100 * (place + 1), 100 * len(choices), f"applying {choice.lora.name}"
            )
            choice.put_on(model, way, source, share)

    def undo(self) -> None:
        """Takes every LoRA off; the weights are the pristine ones, bit for bit."""
        for attachment in self.pack.loras:
            self.pack.detach(attachment.lora)
        self.report = None

    def second_generation(self, prompt: str, seed: int, progress: Progress) -> SecondGeneration:
        """Makes a picture, drops the network and everything computed from the LoRAs, and makes it again.

        Raises:
            HswqError: no LoRA is on the pack.
        """
        if not self.pack.loras:
            raise HswqError("no LoRA is on the pack", fix="press Apply first")
        first = self._run(self.pack, prompt, seed, part(progress, 0, 100, 200, "first picture"))
        evidence = self.pack.bake_report()
        self.pack.unload()
        second = self._run(self.pack, prompt, seed, part(progress, 100, 200, 200, "picture after the purge"))
        return SecondGeneration(
            torch.equal(first.final, second.final), self.pack.bake_report().rows == evidence.rows
        )

    def _run(self, model: Model, prompt: str, seed: int, progress: Progress) -> Run:
        return model.generate(prompt, seed, self.steps, progress=progress)


def difference(a: Image.Image, b: Image.Image) -> Image.Image:
    """a − b, amplified about middle grey; both of one size."""
    signed = np.asarray(a, dtype=np.int16) - np.asarray(b, dtype=np.int16)
    return Image.fromarray((128 + AMPLIFIED * signed).clip(0, 255).astype(np.uint8))
