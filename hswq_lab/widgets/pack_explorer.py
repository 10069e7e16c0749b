"""PackExplorer: what is in a checkpoint, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets
import traitlets

from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.plots import contents_figure, detail_figure, style
from hswq_lab.plots.pack import stored_as
from hswq_lab.widgets import markup
from hswq_lab.widgets.file_picker import FilePicker
from hswq_lab.widgets.live_figure import LiveFigure
from hswq_lab.widgets.pack_state import ORDERS, PackState
from hswq_lab.widgets.panel import Panel

if TYPE_CHECKING:
    from hswq_lab.checkpoint import CheckReport, InspectReport
    from hswq_lab.checkpoint.anything import Anything
    from hswq_lab.detail import LayerDetail
    from hswq_lab.progress import Progress

_FINDING = {
    "severity": "severity", "rule": "rule", "tensor": "tensor", "problem": "problem", "found": "found",
    "expected": "expected", "to do": "fix",
}  # fmt: skip  # column → attribute
_LONGEST = 2000  # characters of a metadata value; all of it is in the JSON export


class Named(traitlets.HasTraits):
    """What is open, as it was named: file and source, "" for what was given as an object or not at all."""

    value = traitlets.Tuple(("", ""))


class PackExplorer(Panel):
    """Opens a checkpoint by path, from a list of files nearby, or as an object.

    Args:
        what: a path, a Checkpoint or a Model to open at once; None: choose in the panel.
        source: 16-bit weights to compare each layer with.
    """

    def __init__(self, what: Anything | None = None, source: Anything | None = None) -> None:
        self.state = PackState()
        self._given, self._given_source = what, source
        shown = str(what) if isinstance(what, str | Path) else ""
        self.named = Named(value=(shown, ""))
        self._is_open = self.named.value
        wide = {"width": "420px"}
        self.path = ipywidgets.Text(
            value=shown,
            description="file",
            layout=wide,
            placeholder="a path, or Browse",
            continuous_update=False,
        )
        self.source = ipywidgets.Text(
            description="source",
            layout=wide,
            placeholder="16-bit original (optional)" if source is None else "as given",
        )
        self.open_button = ipywidgets.Button(description="Open", icon="folder-open", button_style="primary")
        self.browse_button = ipywidgets.ToggleButton(
            description="Browse", tooltip="look for a file in folders", layout={"width": "90px"}
        )
        self.picker = FilePicker(Path.cwd(), self._picked)
        self.picker.layout.display = "none"
        self.filter = ipywidgets.Text(
            description="filter", placeholder="*.attention.* or a word", continuous_update=False,
            layout={"width": "280px"},
        )  # fmt: skip
        self.order = ipywidgets.Dropdown(options=ORDERS, description="order", layout={"width": "240px"})
        self.descending = ipywidgets.Checkbox(
            description="descending", indent=False, layout={"width": "110px", "margin": "2px 2px 2px 14px"}
        )
        self.opened, self.count = ipywidgets.HTML(), ipywidgets.HTML()
        self.layers = ipywidgets.Select(description="layer", rows=16, layout={"width": "400px"})
        self.detail = ipywidgets.HTML(layout={"flex": "1 1 280px", "min_width": "0"})
        self.figure = LiveFigure(style.placeholder("choose a layer"))
        self.map = LiveFigure(style.placeholder("open a file"))
        self.table, self.findings, self.metadata = (ipywidgets.HTML() for _ in range(3))
        self.findings.add_class("hswq-findings")
        self.check_button = ipywidgets.Button(description="Check the whole file", layout={"width": "180px"})
        views = {
            "layer": ipywidgets.VBox([ipywidgets.HBox([self.layers, self.detail]), self.figure]),
            "map and bytes": self.map,
            "table": self.table,
            "findings": ipywidgets.VBox([self.check_button, self.findings]),
            "metadata": self.metadata,
        }
        self.tabs = ipywidgets.Tab(list(views.values()), titles=list(views))
        self._detail: LayerDetail | None = None
        files = ipywidgets.HBox([self.path, self.open_button, self.browse_button])
        form = ipywidgets.VBox([files, self.picker, self.source])
        form.add_class("hswq-form")
        body = [
            form,
            self.opened,
            ipywidgets.HBox(
                [self.filter, self.order, self.descending, self.count], layout={"align_items": "center"}
            ),
            self.tabs,
        ]
        super().__init__("What is in a pack", "Only headers and scales are read until a layer is chosen.", body,
                         css_class="hswq-pack", below=form)  # fmt: skip
        self.open_button.on_click(self.guarded(lambda _: self._open()))
        self.check_button.on_click(self.guarded(lambda _: self.begin(self.state.check, self._show_findings)))
        self.browse_button.observe(self.guarded(lambda _: self._browse()), names="value")
        self.picker.enter_button.on_click(self.guarded(lambda _: self.picker.enter()))
        for control in (self.filter, self.order, self.descending):
            control.observe(self.guarded(lambda _: self._list()), names="value")
        self.layers.observe(self.guarded(self._choose), names="value")
        self.named.observe(self.guarded(self._restore), names="value")
        self.mind(named=self.named, filter=self.filter, order=self.order, descending=self.descending)
        if what is not None:
            self.load(what)

    def load(self, what: Anything) -> None:
        """Opens something else, with the source that the panel names."""
        named = (str(what) if isinstance(what, str | Path) else "", _path(self.source.value))
        self.path.value, self.source.value = named
        source = named[1] or self._given_source

        def opened(report: InspectReport) -> None:
            self._is_open = self.named.value = named
            self._opened(report)

        self.start(lambda progress: self.state.open(what, source, progress), opened)

    def _open(self) -> None:
        path = _path(self.path.value)
        if not path:
            raise HswqError("no file is named", fix="type its path, or choose it with Browse")
        self.load(path)

    def _restore(self, _change: object) -> None:
        """Opens what the page remembers to have been open, with its source."""
        path, source = self.named.value
        what = path or self._given
        if (path, source) != self._is_open and what is not None:
            self.source.value = source
            self.load(what)

    def _browse(self) -> None:
        self.picker.layout.display = "" if self.browse_button.value else "none"

    def _picked(self, path: Path) -> None:
        self.path.value = str(path)

    def result(self) -> InspectReport | LayerDetail | CheckReport | None:
        """What the tab shows: the layer, what the check found, else the file."""
        shown = self.tabs.titles[self.tabs.selected_index or 0]
        special = {"layer": self._detail, "findings": self.state.checked}.get(shown)
        return special or self.state.report

    def _opened(self, report: InspectReport) -> None:
        self.opened.value = markup.facts(self.state.opened)
        self.map.show(contents_figure(report))
        self.metadata.value = markup.facts({key: _short(text) for key, text in report.metadata.items()})
        self.findings.value = markup.note("\n".join(report.warnings) or "no warnings from reading the header")
        self.allow_exports()
        kept = self.layers.value
        self.layers.options = ()  # a layer of the same name is another one in another file
        self._forget()
        self._list(kept)

    def _list(self, kept: str | None = None) -> None:
        kept = kept or self.layers.value
        rows = self.state.rows(self.filter.value, self.order.value, descending=self.descending.value)
        columns = ["name", "format", "dtype", "shape", "rotation", "calibrated", "bytes", "bits"]
        cells = [
            (
                row.name,
                markup.chip(stored_as(row), style.format_color(stored_as(row))),
                row.dtype,
                " × ".join(map(str, row.shape)),
                str(row.group or "–"),
                "yes" if row.calibrated else "",
                row.nbytes,
                f"{row.bits:.2f}",
            )
            for row in rows
        ]
        self.table.value = markup.table(columns, cells)
        names = self.state.matrices(rows)
        self.layers.options = names
        self.layers.value = kept if kept in names else self.state.first_to_show(rows)
        total = len(self.state.report.rows) if self.state.report else 0
        self.count.value = markup.status(f"{len(rows)} of {style.count(total, 'name')}")

    def _choose(self, _change: object) -> None:
        name = self.layers.value
        if name is None:
            self._forget()
        else:
            self.look(lambda progress: self._read(name, progress), self._show_detail)

    def _read(self, name: str, progress: Progress) -> LayerDetail:
        try:
            return self.state.detail(name, progress)
        except HswqError as error:
            if not isinstance(error, Cancelled):
                self._forget()  # what is shown is another layer
            raise

    def _forget(self) -> None:
        """Shows no layer."""
        self._detail = None
        self.detail.value = ""
        self.figure.show(style.placeholder("choose a layer"))

    def _show_detail(self, detail: LayerDetail) -> None:
        self._detail = detail
        self.figure.show(detail_figure(detail))
        replaced = ", since replaced, changed or removed on disk" if self.state.replaced else ""
        facts = {
            "file": f"{detail.file}{replaced}",
            "format": detail.format if detail.marker else f"not packed, {detail.dtype}",
            "shape": " × ".join(map(str, detail.shape)),
            "rotation": detail.group or "none",
            "bytes": f"{detail.nbytes:,} ({detail.bits:.2f} bits a weight)",
            "closeness": self.state.closeness(detail),
            **{f"tails, {tails.basis}": f"block crest {tails.block_crest:.3f}" for tails in detail.tails},
            "marker": json.dumps(detail.marker) if detail.marker else "none",
            "findings": self.state.findings_of(detail.name),
        }
        self.detail.value = markup.facts(facts)

    def _show_findings(self, report: CheckReport) -> None:
        columns = {
            column: [getattr(finding, name) or "" for finding in report.findings]
            for column, name in _FINDING.items()
        }
        told = {column: cells for column, cells in columns.items() if any(cells)}
        listed = markup.table(list(told), zip(*told.values(), strict=True)) if told else ""
        self.findings.value = markup.banner(str(report).splitlines()[-1], good=report.ok) + listed
        if self._detail is not None:
            self._show_detail(self._detail)


def _path(text: str) -> str:
    """A path as it was typed, or pasted with the quotes of a shell or a file manager."""
    bare = text.strip()
    quoted = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\""
    return bare[1:-1] if quoted else bare


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text):,} characters)"
