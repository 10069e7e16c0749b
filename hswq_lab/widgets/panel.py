"""Panel: what every widget of the workbench is made of: progress, cancel, errors, exports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ipywidgets

from hswq_lab.errors import HswqError
from hswq_lab.export import why_no_static_export
from hswq_lab.widgets import markup
from hswq_lab.widgets.latest import Latest
from hswq_lab.widgets.places import note_place, place_of

if TYPE_CHECKING:
    from hswq_lab.jobs import Job
    from hswq_lab.progress import Progress
    from hswq_lab.quantize import Plan
    from hswq_lab.results import Result

FORMS: Final = ("png", "svg", "html", "csv", "json")
_TICK = 0.1  # seconds between two repaints of the progress


class AtWorkError(HswqError):
    """Not now: the panel's work runs."""


class Panel(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """A widget with a title, its own controls, and the frame that all panels share.

    Work runs in a Job through `start`; whatever fails, in a handler or in a job, is shown in the panel. Work ends when
    the cell that shows the panel is run again, or deleted, and no other cell shows it: nobody could cancel it any more.

    Args:
        title: plain text.
        note: a line under the title, plain text.
        body: the panel's own widgets.
        css_class: a handle for style sheets and tests.
        below: the part of the body that starts the work: progress, Cancel and errors stand under it; the last one by
            default.
        folder: where exports are written.
    """

    def __init__(
        self,
        title: str,
        note: str,
        body: Sequence[ipywidgets.Widget],
        *,
        css_class: str,
        below: ipywidgets.Widget | None = None,
        folder: Path | str = "exports",
    ) -> None:
        self._folder = Path(folder).expanduser()
        self._name = css_class
        self._work = Latest(self._work_changed)
        self._looking = Latest(self._beside)
        self._writing = Latest(self._beside, delay=0)
        self._painted = 0.0
        self._error_lock = threading.Lock()
        self._passing = False
        self.errors = ipywidgets.HTML()
        self.status = ipywidgets.HTML()
        self.bar = ipywidgets.FloatProgress(min=0, max=1, layout={"width": "220px"})
        self.cancel_button = ipywidgets.Button(description="Cancel", tooltip="stop this work", icon="stop")
        self.cancel_button.on_click(lambda _: self.cancel())
        self._running = ipywidgets.HBox([self.bar, self.cancel_button], layout={"display": "none"})
        self.export_buttons = {form: self._export_button(form) for form in FORMS}
        self._exports = ipywidgets.HBox(list(self.export_buttons.values()), layout={"display": "none"})
        head = ipywidgets.HTML(markup.style_sheet() + markup.heading(title, note))
        # As high without work as with it: what stands below is not to jump.
        frame = ipywidgets.HBox(
            [self._running, self.status], layout={"align_items": "center", "min_height": "36px"}
        )
        self._title = title
        place = len(body) if below is None else list(body).index(below) + 1
        self._parts = [head, *body[:place], frame, self.errors, *body[place:], self._exports]
        super().__init__(self._parts)
        self.add_class("hswq-panel")
        self.add_class(css_class)

    # -- work ------------------------------------------------------------------------------------------------

    def start(self, work: Callable[..., Any], then: Callable[[Any], None]) -> None:
        """Runs `work(progress=…)` in a thread, then `then(result)`; a newer start replaces this one."""
        self.errors.value = ""
        self._work.request(work, self.guarded(then))

    def begin(self, work: Callable[..., Any], then: Callable[[Any], None]) -> None:
        """As `start`, for long work behind a button: a press must not throw away what another one has begun.

        Raises:
            HswqError: work runs.
        """
        if self._work.busy:
            raise AtWorkError("this panel is at work", fix="wait for the end of it, or press Cancel first")
        self.start(work, then)

    def look(self, work: Callable[..., Any], then: Callable[[Any], None]) -> None:
        """As `start`, for what only shows something that is there already: the work that runs goes on beside it."""
        self.errors.value = ""
        self._looking.request(work, self.guarded(then))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing runs or waits, for scripts and tests; False if that took too long."""
        return all(lane.wait(timeout) for lane in (self._work, self._looking, self._writing))

    def cancel(self) -> None:
        """Stops the work at its next unit, and says at once that it will."""
        if self._running.layout.display != "none":
            self.say("stopping after the unit that is being worked on")
        for lane in (self._work, self._looking, self._writing):
            lane.cancel()

    def guarded(self, handler: Callable[..., Any]) -> Callable[..., None]:
        """The handler, with every exception shown in the panel: in a notebook nothing else would show it."""

        @wraps(handler)
        def safe(*args: object, **kwargs: object) -> None:
            try:
                handler(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # whatever it is, the panel is where the user can see it
                self.show_error(error)

        return safe

    def show_error(self, error: BaseException) -> None:
        """Shows an exception until the next work starts; one that only work is the reason of until that ends."""
        with self._error_lock:
            self._passing = isinstance(error, AtWorkError)
            self.errors.value = markup.error_box(error)

    def _work_ended(self) -> None:
        with self._error_lock:
            if self._passing:
                self.errors.value = ""

    def say(self, text: str) -> None:
        """Shows a line in the status."""
        self.status.value = markup.status(text)

    def close(self) -> None:
        """Stops the work and frees the widgets; a panel whose constructor failed has neither."""
        if "_parts" not in vars(self):
            return
        self.cancel()
        _close_inside(self)
        super().close()

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:  # noqa: ANN401  # as in ipywidgets
        note_place(self)
        shown: dict[str, Any] = super()._repr_mimebundle_(**options)
        return shown

    def _work_changed(self, job: Job[Any]) -> None:
        if job.state != "running":
            self._work_ended()
        self._job_changed(job)

    def _job_changed(self, job: Job[Any]) -> None:
        ended = job.state != "running"
        if not ended and time.monotonic() - self._painted < _TICK:
            return
        self._painted = time.monotonic()
        self._running.layout.display = "none" if ended else ""
        if job.state == "failed" and job.error is not None:
            self.status.value = ""
            self.show_error(job.error)
        elif job.state == "cancelled":
            self.say("cancelled")
        elif ended:
            self.status.value = ""
        else:
            self.bar.value = job.done / job.total if job.total else 0.0
            self.say(f"{job.label}{_time_left(job.seconds_left)}")

    def _beside(self, job: Job[Any]) -> None:
        """Of a look or an export: progress only while no work shows its own, which has the Cancel button."""
        if not self._work.busy:
            self._job_changed(job)
        elif job.state == "failed" and job.error is not None:
            self.show_error(job.error)

    def mind(self, **controls: ipywidgets.Widget) -> None:
        """Asks the page for what ipywidgets lacks, see `Manners`; to be called at the end of a panel's `__init__`.

        Args:
            controls: those whose values are to survive a restart of the kernel.
        """
        if (
            find_spec("anywidget") is not None
        ):  # keys, names and values are as ipywidgets leaves them otherwise
            manners = import_module("hswq_lab.widgets.manners").Manners(
                place_of(f"{self._name}, {self._title}"), controls
            )
            self.children = [*self._parts, manners]

    # -- exports ---------------------------------------------------------------------------------------------

    def result(self) -> Result | Plan | None:
        """What the export buttons write; None while there is nothing."""
        return None

    def allow_exports(self) -> None:
        """Shows the export buttons; to be called once `result` has something."""
        self._exports.layout.display = ""

    def export(self, form: str) -> Path:
        """Writes the result as "png", "svg", "html", "csv" or "json" under a fresh name and returns the file.

        Raises:
            HswqError: there is nothing to export yet, or this form is not possible here.
        """
        result = self.result()
        if result is None:
            if self._work.busy:
                raise AtWorkError(
                    "there is nothing to export while this panel is at work", fix="wait for the end of it"
                )
            raise HswqError("there is nothing to export yet", fix="run something first")
        if form in ("png", "svg") and (why := why_no_static_export()) is not None:
            raise HswqError("a static picture cannot be made here", found=why, fix="export HTML instead")
        return result.save(_fresh(self._folder / f"{self.export_name()}.{form}"))

    def export_name(self) -> str:
        """The name of an exported file, without its suffix and without the number that makes it fresh."""
        return self._name

    def _export_button(self, form: str) -> ipywidgets.Button:
        button = ipywidgets.Button(
            description=form.upper(), tooltip=f"export as {form.upper()}", layout={"width": "72px"}
        )

        def write(_: object) -> None:
            self.errors.value = ""
            written = self.guarded(lambda path: self.say(f"written: {path}"))
            self._writing.request(lambda progress: self._exported(form, progress), written)

        button.on_click(self.guarded(write))
        return button

    def _exported(self, form: str, progress: Progress) -> Path:
        progress(0, 1, f"writing {form.upper()}")
        return self.export(form)  # no tick behind it: a file that is there was not cancelled


def _fresh(path: Path) -> Path:
    """The path, or, where there is such a file, the first of name-2, name-3, … that is free."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(each for each in chain([path], names) if not each.exists())


def _close_inside(box: ipywidgets.Widget) -> None:
    for child in getattr(box, "children", ()):
        _close_inside(child)
        child.close()


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f", {seconds:.0f} s left" if seconds < 100 else f", {seconds / 60:.0f} min left"
