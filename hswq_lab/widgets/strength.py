"""StrengthSlider: a LoRA's strength on a pack, and the picture that comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ipywidgets

from hswq_lab.model import check_model
from hswq_lab.plots import style
from hswq_lab.progress import Progress, part
from hswq_lab.widgets import markup
from hswq_lab.widgets.panel import Panel

if TYPE_CHECKING:
    from PIL.Image import Image

    from hswq_lab.lora import LoraFile
    from hswq_lab.model import Model

_EMPTY = "the pictures come here"


@dataclass(frozen=True)
class Preview:
    """What one setting of the slider gives.

    Attributes:
        setting: of all pictures: prompt, seed, steps.
        plain: the pack without the LoRA.
        packed: the pack with it.
        source: the 16-bit model with it; None if no such model was given.
    """

    setting: str
    strength: float
    plain: Image
    packed: Image
    source: Image | None


class StrengthModel:
    """The state behind the slider, without widgets: views of the models that carry the LoRA as a branch.

    The models given are not changed.

    Args:
        pack: the packed model.
        lora: the LoRA.
        source: the 16-bit model, to compare with.
        prompt: of all pictures.
        seed: of all pictures.
        steps: Euler steps.
    """

    def __init__(
        self, pack: Model, lora: LoraFile, source: Model | None, prompt: str, seed: int, steps: int
    ) -> None:
        self.prompt, self.seed, self.steps = prompt, seed, steps
        self._lora = lora
        self._plain_model = pack
        self._dressed = [view_of(model) for model in (pack, source) if model is not None]
        for model in self._dressed:
            model.attach(lora, how="branch")
        self._plain: tuple[tuple[str, int, int], Image] | None = None

    def preview(self, strength: float, progress: Progress) -> Preview:
        """Makes the pictures at a strength; the one without the LoRA is kept while the settings last."""
        key = (self.prompt, self.seed, self.steps)
        known = self._plain is not None and self._plain[0] == key
        total = len(self._dressed) + (not known)
        done = 0
        if not known:
            self._plain = (key, self._picture(self._plain_model, part(progress, 0, 100, 100 * total)))
            done = 1
        made = []
        for place, model in enumerate(self._dressed, start=done):
            model.set_strength(self._lora, strength)
            made.append(self._picture(model, part(progress, 100 * place, 100 * (place + 1), 100 * total)))
        plain = self._plain[1]  # type: ignore[index]  # made above
        return Preview(setting_in_words(*key), strength, plain, made[0], made[1] if len(made) > 1 else None)

    def _picture(self, model: Model, progress: Progress) -> Image:
        return model.generate(self.prompt, self.seed, self.steps, progress=progress).image


def setting_in_words(prompt: str, seed: int, steps: int) -> str:
    """What a picture was made of."""
    return f"“{prompt}”, seed {seed}, {style.count(steps, 'step')}"


def view_of(model: Model) -> Model:
    """A view of a model in its own mode that can be given LoRAs of its own."""
    check_model(model)
    return model.in_mode(model.request.mode, model.request.uncalibrated)


class StrengthSlider(Panel):
    """A slider from 0 to 2 for a LoRA's strength on a pack; the newest position wins.

    Args:
        pack: the packed model.
        lora: the LoRA, attached as a branch to views of the models; the models themselves are not changed.
        source: the 16-bit model, to compare with.
        prompt: first prompt; the model's first one by default.
        seed: first seed.
        steps: Euler steps.
    """

    def __init__(
        self,
        pack: Model,
        lora: LoraFile,
        source: Model | None = None,
        *,
        prompt: str | None = None,
        seed: int = 42,
        steps: int = 8,
    ) -> None:
        self.model = StrengthModel(pack, lora, source, prompt or pack.prompts[0], seed, steps)
        self.strength = ipywidgets.FloatSlider(
            value=1.0, min=0.0, max=2.0, step=0.05, description="strength", continuous_update=False,
            layout={"width": "420px"}, tooltip=f"strength of {lora.name}",
        )  # fmt: skip
        self.prompt = ipywidgets.Text(
            value=self.model.prompt, description="prompt", continuous_update=False, layout={"width": "420px"}
        )
        self.seed = ipywidgets.BoundedIntText(
            value=seed, min=0, max=2**53 - 1, description="seed", layout={"width": "220px"}
        )
        self.pictures = ipywidgets.HTML(markup.note(_EMPTY))
        self.shown: Preview | None = None
        what = ipywidgets.HBox([self.prompt, self.seed])
        super().__init__(
            f"{lora.name} on {pack.name}",
            "Drag the slider, or use the arrow keys. The LoRA runs as a branch beside the packed weights.",
            [self.strength, what, self.pictures],
            css_class="hswq-strength",
            below=what,
        )
        for control in (self.strength, self.prompt, self.seed):
            control.observe(self.guarded(self._request), names="value")
        self.mind(strength=self.strength, prompt=self.prompt, seed=self.seed)
        self._request(None)

    def _request(self, _change: object) -> None:
        self.model.prompt, self.model.seed = self.prompt.value, int(self.seed.value)
        strength = float(self.strength.value)
        self.start(lambda progress: self.model.preview(strength, progress), self._show)

    def _show(self, preview: Preview) -> None:
        self.shown = preview
        items = {"pack, without": preview.plain, f"pack, strength {preview.strength:.2f}": preview.packed}
        if preview.source is not None:
            items[f"16 bit, strength {preview.strength:.2f}"] = preview.source
        self.pictures.value = markup.note(preview.setting) + markup.pictures(items)
