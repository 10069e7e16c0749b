"""GemmBench: how fast a Linear multiplies here and elsewhere, and what a picture gains by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ipywidgets
import pandas as pd

from hswq_lab import bench
from hswq_lab.plots import gemm_figure, pictures_figure, roofline_figure, style
from hswq_lab.plots.bench import OP_COLORS
from hswq_lab.widgets import markup
from hswq_lab.widgets.gemm_state import DTYPES, GemmState
from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.panel import Panel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hswq_lab.model import Model

_NOTE = (
    "Every way to multiply x [M, K] by a packed W [N, K], beside torch's own product in the same dtype. "
    "No back end chosen: what the device takes by itself."
)
_WIDE, _NARROW, _FLEXIBLE = {"width": "420px"}, {"width": "210px"}, {"flex": "1 1 300px"}
_NO_PICTURE = "no picture was timed on this machine"


class GemmBench(Panel):
    """Times Linears and pictures here, and shows stored results of other machines beside them.

    Args:
        models: name → model, to time whole pictures with; the first is what the others are measured against.
        results: a folder or a file of stored results, or name → result.
        steps: Euler steps of a picture.
    """

    def __init__(
        self,
        models: Mapping[str, Model] | None = None,
        results: str | Mapping[str, bench.Bench] | None = None,
        *,
        steps: int = 4,
    ) -> None:
        given = None if isinstance(results, str) else results
        self.state = GemmState(models, given)
        self._picture_steps = steps
        device = self.state.devices()[0]
        shapes, rows = self.state.sizes(device)
        self.device = ipywidgets.Dropdown(options=self.state.devices(), description="device", layout=_NARROW)
        self.dtype = ipywidgets.Dropdown(options=DTYPES, description="dtype", layout=_NARROW)
        self.shapes = ipywidgets.Text(value=shapes, description="N × K", layout=_FLEXIBLE)
        self.rows = ipywidgets.Text(value=rows, description="M", layout=_FLEXIBLE)
        self.backends = ipywidgets.SelectMultiple(
            options=self.state.backends(device), description="back end", rows=2, layout={"width": "240px"}
        )
        self.repeats = ipywidgets.BoundedIntText(
            value=5, min=1, max=1000, description="repeats", layout=_NARROW
        )
        self.run_button = ipywidgets.Button(
            description="Run", icon="play", button_style="primary", tooltip="time every way to multiply"
        )
        self.shown = ipywidgets.Dropdown(description="show", layout=_WIDE)
        self.where = ipywidgets.Text(
            description="stored", placeholder="a .json file or a folder of them", layout=_WIDE,
            value=results if isinstance(results, str) else "",
        )  # fmt: skip
        self.load_button = ipywidgets.Button(
            description="Load", icon="folder-open", tooltip="load stored results"
        )
        self.picture_button = ipywidgets.Button(
            description="Time a whole picture", icon="picture-o", layout={"width": "200px"},
            disabled=not self.state.models, tooltip="make one picture several times with every model",
        )  # fmt: skip
        self.loaded = ipywidgets.HTML()
        self.products = LiveFigure(style.placeholder("press Run, or load a stored result"))
        self.roofline = LiveFigure(style.placeholder("press Run, or load a stored result"))
        self.pictures = LiveFigure(style.placeholder(_NO_PICTURE))
        self.summary, self.times, self.left, self.arithmetic, self.machines, self.compiled = (
            ipywidgets.HTML() for _ in range(6)
        )
        views = {
            "TFLOP/s": self.products,
            "roofline": self.roofline,
            "times": self.times,
            "picture": ipywidgets.VBox([self.picture_button, self.left, self.pictures, self.arithmetic]),
            "machines": self.machines,
            "compiled": self.compiled,
        }
        self.tabs = ipywidgets.Tab(list(views.values()), titles=list(views), selected_index=0)
        body = [
            ipywidgets.HBox([self.shapes, self.rows]),
            ipywidgets.HBox([self.device, self.dtype, self.repeats]),
            ipywidgets.HBox([self.backends, self.run_button]),
            ipywidgets.HBox([self.where, self.load_button]),
            self.loaded,
            self.shown,
            self.summary,
            self.tabs,
        ]
        super().__init__(
            "Products and pictures, timed", _NOTE, body, css_class="hswq-gemm", below=self.loaded
        )
        self.run_button.on_click(self.guarded(lambda _: self.run()))
        self.load_button.on_click(self.guarded(lambda _: self.load(self.where.value)))
        self.picture_button.on_click(self.guarded(lambda _: self.run_pictures()))
        self.shown.observe(self.guarded(lambda _: self._show()), names="value")
        self.device.observe(self.guarded(lambda _: self._device_changed()), names="value")
        self._refresh()
        if isinstance(results, str):
            self.guarded(self.load)(results)
        self.mind(
            device=self.device, dtype=self.dtype, shapes=self.shapes, rows=self.rows, backends=self.backends,
            repeats=self.repeats, shown=self.shown,
        )  # fmt: skip

    def run(self) -> None:
        """Times what the controls describe."""
        shapes, rows, device, dtype = self.shapes.value, self.rows.value, self.device.value, self.dtype.value
        backends, repeats = list(self.backends.value), int(self.repeats.value)
        self.begin(
            lambda progress: self.state.run(shapes, rows, device, dtype, backends, repeats, progress),
            self._refresh,
        )

    def run_pictures(self) -> None:
        """Times a whole picture with every model that was given."""
        self.begin(lambda progress: self.state.run_pictures(self._picture_steps, progress), self._refresh)

    def load(self, where: str) -> None:
        """Loads a stored result or a folder of them."""
        self.errors.value = self.loaded.value = ""
        names, skipped = self.state.load(where)
        self._refresh(next((name for name in names if name in self.state.products), names[0]))
        told = {"loaded": ", ".join(names)}
        if skipped:
            alike = {why: [name for name in skipped if skipped[name] == why] for why in skipped.values()}
            told["skipped"] = "; ".join(f"{', '.join(names)} ({why})" for why, names in alike.items())
        self.loaded.value = markup.facts(told)

    def result(self) -> bench.Bench | None:
        """The pictures on their tab, else the products that are shown."""
        products, pictures = self._chosen()
        if self.tabs.titles[self.tabs.selected_index or 0] == "picture":
            return pictures or products
        return products or pictures

    def _chosen(self) -> tuple[bench.GemmBench | None, bench.ModelBench | None]:
        """The products that are shown and the pictures of the same machine, or pictures alone."""
        chosen = self.state.results.get(self.shown.value)
        if isinstance(chosen, bench.ModelBench):
            return None, chosen
        return chosen, None if chosen is None else self.state.pictures_of(chosen)

    def _device_changed(self) -> None:
        self.shapes.value, self.rows.value = self.state.sizes(self.device.value)
        self.backends.options = self.state.backends(self.device.value)

    def _refresh(self, chosen: str | None = None) -> None:
        """Lists the results; shows the one that is named, or the first products."""
        results = self.state.results
        self.shown.options = list(results)
        if results:
            self.allow_exports()
            self.shown.value = chosen or next(iter(self.state.products), next(iter(results)))
        if isinstance(results.get(self.shown.value), bench.ModelBench):
            self.tabs.selected_index = self.tabs.titles.index("picture")
        targets = bench.compiled_targets(results.values())
        self.compiled.value = markup.table(
            ["back end", "compiled for", "status"], [(t.backend, t.target, t.status) for t in targets]
        )
        self._show()

    def _show(self) -> None:
        products, pictures = self._chosen()
        self._show_pictures(products, pictures)
        if products is None:
            for figure in (self.products, self.roofline):
                figure.show(style.placeholder("press Run, or choose products in “show”"))
            self.times.value = ""
            self.summary.value = markup.facts({"machine": pictures.machine["name"]} if pictures else {})
            return
        self.products.show(gemm_figure(products))
        self.roofline.show(roofline_figure(products))
        self.summary.value = markup.facts(_facts(products))
        self.times.value = _times(products)
        machines = bench.side_by_side(self.state.products).drop(columns="machine")
        self.machines.value = _frame(machines.assign(stage=machines.stage.map(_stage)))

    def _show_pictures(self, products: bench.GemmBench | None, pictures: bench.ModelBench | None) -> None:
        self.left.value = "" if products is None else _frame(self.state.gains(products))
        if pictures is None:
            self.pictures.show(style.placeholder(_NO_PICTURE))
            self.arithmetic.value = ""
            return
        self.pictures.show(pictures_figure(pictures))
        columns = ["model", "mode", "seconds", "speedup", "final_cos", "hits", "fallbacks", "why"]
        self.arithmetic.value = _frame(pictures.to_frame()[columns])


def _facts(products: bench.GemmBench) -> dict[str, object]:
    calls = products.repeats * len(products.rows)
    fallbacks = sum(row.fallbacks for row in products.rows)
    reasons = "; ".join(dict.fromkeys(row.why for row in products.rows if row.why))
    limits = products.roofline
    return {
        "machine": f"{products.machine['name']}, torch {products.machine['torch']}",
        "limits": f"copy {limits.copy / 1e9:,.1f} GB/s, {limits.dtype} product {limits.matmul / 1e12:.3g} TFLOP/s",
        "hits": f"{calls - fallbacks} of {calls} timed calls ran where they should"
        if calls
        else "not counted",
        "fallbacks": f"{fallbacks} ran in the reference: {reasons}"
        if fallbacks
        else "none"
        if calls
        else "not counted",
    }


def _times(products: bench.GemmBench) -> str:
    columns = [
        "M",
        "N × K",
        "op",
        "stage",
        "ran in",
        "µs",
        "TFLOP/s",
        "× torch",
        "% of roofline",
        "error",
        "fallbacks",
    ]
    cells = [
        (
            row.m,
            f"{row.n} × {row.k}",
            markup.chip(row.op, OP_COLORS.get(row.op, style.GREY)),
            _stage(row.stage),
            row.backend,
            round(row.seconds * 1e6, 1),
            float(f"{row.tflops:.3g}"),
            float(f"{row.speedup:.3g}"),
            round(100 * row.of_roofline),
            _cell(row.error),
            row.fallbacks if products.repeats else "not counted",
        )
        for row in products.rows
    ]
    return markup.table(columns, cells)


def _frame(frame: pd.DataFrame) -> str:
    """A table of names and factors; what was not measured says so."""
    cells = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    return markup.table(list(frame.columns), cells)


def _stage(stage: str) -> str:
    """Short, for a narrow column."""
    return stage if stage == bench.ALONE else "whole Linear"


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "not measured" if math.isnan(value) else round(value, 3)
    return "–" if value is pd.NA else value
