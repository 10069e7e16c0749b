"""BakeCheck: put LoRAs on a pack in any way and see whether they arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ipywidgets

from hswq_lab.plots import retention_figure, style
from hswq_lab.widgets import markup
from hswq_lab.widgets.bake_state import BakeState, Checked, Choice, SecondGeneration
from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.panel import Panel

if TYPE_CHECKING:
    from hswq_lab.lora import BakeReport, LoraFile
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress

WAYS = {"as a branch": "branch", "bake in place": "bake", "bake from the source": "bake_from_source"}


class BakeCheck(Panel):
    """LoRAs with strengths, the way they are applied, and the proof.

    Args:
        pack: the packed model; the panel works on a view of it.
        loras: what can be put on it.
        source: the 16-bit model.
        prompt: first prompt; the pack's first one by default.
        seed: first seed.
        steps: Euler steps.
    """

    def __init__(
        self,
        pack: Model,
        loras: Sequence[LoraFile],
        source: Model | None = None,
        *,
        prompt: str | None = None,
        seed: int = 42,
        steps: int = 8,
    ) -> None:
        self.state = BakeState(pack, loras, source, steps)
        self.rows = [
            (
                ipywidgets.Checkbox(value=place == 0, description=lora.name, indent=False, layout={"width": "210px"}),
                ipywidgets.FloatSlider(
                    value=1.0, min=-1.0, max=2.0, step=0.05, description="strength", continuous_update=False,
                    layout={"width": "380px"}, tooltip=f"strength of {lora.name}",
                ),
            )
            for place, lora in enumerate(self.state.loras)
        ]  # fmt: skip
        ways = {name: way for name, way in WAYS.items() if way != "bake_from_source" or source is not None}
        self.way = ipywidgets.Dropdown(
            options=ways, value="bake", description="way", layout={"width": "270px"}
        )
        self.allow_unmatched = ipywidgets.Checkbox(
            description="allow_unmatched", indent=False, layout={"width": "150px", "margin": "2px 2px 2px 14px"},
            tooltip="leave out the modules of a LoRA that match no layer, instead of refusing it",
        )  # fmt: skip
        self.allow_baked = ipywidgets.Checkbox(
            description="allow_baked", indent=False, layout={"width": "120px"},
            tooltip="go on although LoRAs are in the pack's file already; they stay",
        )  # fmt: skip
        self.prompt = ipywidgets.Text(
            value=prompt or pack.prompts[0], description="prompt", continuous_update=False,
            layout={"flex": "1 1 180px", "min_width": "0"},
        )  # fmt: skip
        self.seed = ipywidgets.BoundedIntText(
            value=seed, min=0, max=2**53 - 1, description="seed", layout={"width": "160px"}
        )
        self.apply_button = ipywidgets.Button(
            description="Apply",
            button_style="primary",
            icon="check",
            tooltip="put the ticked LoRAs on the pack",
        )
        self.undo_button = ipywidgets.Button(
            description="Undo", icon="undo", tooltip="take every LoRA off the pack"
        )
        self.again_button = ipywidgets.Button(
            description="Second generation", tooltip="drop everything and make the picture again",
            layout={"width": "170px"},
        )  # fmt: skip
        allowed = ipywidgets.HBox([self.allow_unmatched, self.allow_baked])
        buttons = ipywidgets.HBox([self.apply_button, self.undo_button, self.again_button, allowed])
        self.verdict, self.generation = ipywidgets.HTML(), ipywidgets.HTML()
        self.pictures = ipywidgets.HTML(markup.note("apply a LoRA to see the pictures"))
        self.figure = LiveFigure(style.placeholder("what arrived comes here"))
        self.checked: Checked | None = None
        body = [
            *(ipywidgets.HBox(row) for row in self.rows),
            ipywidgets.HBox([self.way, self.prompt, self.seed]),
            buttons,
            self.verdict,
            self.generation,
            self.pictures,
            self.figure,
        ]
        super().__init__(
            f"LoRAs on {pack.name}",
            "What arrived is computed from the weights: the share of ΔW that is in them, and the noise beside it.",
            body,
            css_class="hswq-bake",
            below=buttons,
        )
        self.apply_button.on_click(self.guarded(lambda _: self._apply()))
        self.undo_button.on_click(self.guarded(lambda _: self._undo()))
        self.again_button.on_click(self.guarded(lambda _: self._again()))
        rows = {
            f"{what} {place}": control
            for place, row in enumerate(self.rows)
            for what, control in zip(("on", "strength"), row, strict=True)
        }
        self.mind(way=self.way, prompt=self.prompt, seed=self.seed, **rows)

    def result(self) -> BakeReport | None:
        """The evidence for what is on the pack."""
        return self.state.report

    def _apply(self) -> None:
        allowed = self.allow_unmatched.value, self.allow_baked.value
        choices = [
            Choice(lora, float(strength.value), *allowed)
            for lora, (ticked, strength) in zip(self.state.loras, self.rows, strict=True)
            if ticked.value
        ]
        way, prompt, seed = self.way.value, self.prompt.value, int(self.seed.value)

        def work(progress: Progress) -> Checked:
            if choices:  # the first thing that is done with them is to take the old ones off
                self._show_nothing("the LoRAs are being applied")
            try:
                return self.state.apply(choices, way, prompt, seed, progress)
            finally:
                if not self.state.pack.loras:
                    self._show_nothing()

        self.begin(work, self._show)

    def _show(self, checked: Checked) -> None:
        self.checked = checked
        report = checked.report
        self.generation.value = ""
        self.verdict.value = _verdict(report)
        self.pictures.value = markup.note(checked.setting) + markup.pictures(checked.pictures())
        self.figure.show(retention_figure({checked.way: report}))
        self.allow_exports()

    def _undo(self) -> None:
        """In its turn: work that runs is stopped first, and leaves no LoRA either."""

        def work(progress: Progress) -> None:
            progress(0, 1, "taking the LoRAs off")
            self.state.undo()

        self.start(work, lambda _: self._show_nothing())

    def _show_nothing(self, told: str = "no LoRA is on the pack; its weights are the pristine ones") -> None:
        self.checked = None
        self.verdict.value = markup.note(told)
        self.generation.value = self.pictures.value = ""
        self.figure.show(style.placeholder("what arrived comes here"))

    def _again(self) -> None:
        prompt, seed = self.prompt.value, int(self.seed.value)
        self.begin(lambda progress: self.state.second_generation(prompt, seed, progress), self._told)
        self.generation.value = ""

    def _told(self, told: SecondGeneration) -> None:
        self.generation.value = markup.banner(str(told), good=told.passed)


def _verdict(report: BakeReport) -> str:
    text = f"{', '.join(report.loras)}: {report.verdict}; {report.log_line}"
    remarks = [f"warning: {each}" for each in report.overall]
    if report.verdict == "N/A":
        text += ". Nothing was to arrive: at these strengths the LoRAs change no weight."
        return "".join(map(markup.note, [text, *remarks]))
    warned = report.warnings[len(report.overall) :]
    more = f" (and {len(warned) - 1} more layers)" if len(warned) > 1 else ""
    remarks += [f"warning: {warned[0]}{more}"] if warned else []
    remarks += [f"note: {text}" for text in report.notes]
    return markup.banner(text, good=report.verdict == "OK") + "".join(map(markup.note, remarks))
