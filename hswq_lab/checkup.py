"""hl.doctor: versions, the halves of the extension, front end, browser, pairs known not to work."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar, Final, Literal

import pandas as pd
import torch

from hswq_lab import ops
from hswq_lab.export import find_browser, why_no_static_export
from hswq_lab.results import Result

State = Literal["ok", "note", "problem"]

REQUIRED: Final = [
    "hswq-lab",
    "torch",
    "numpy",
    "pandas",
    "pillow",
    "plotly",
    "anywidget",
    "ipywidgets",
    "safetensors",
    "scikit-image",
    "tqdm",
]
OPTIONAL: Final = ["jupyterlab", "ipykernel", "kaleido", "distributed", "lpips", "diffusers", "peft"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        topic: "system", "versions", "extension", "notebook", "export" or "pairs".
        item: what was looked at.
        found: what was found.
        state: "ok"; "note": works in another way or is not there; "problem": will not work.
        advice: what to do about it, "" if nothing.
    """

    topic: str
    item: str
    found: str
    state: State = "ok"
    advice: str = ""


@dataclass(frozen=True)
class DoctorReport(Result):
    """Everything that was looked at."""

    checks: list[Check]

    computed: ClassVar[tuple[str, ...]] = ("healthy",)

    @property
    def healthy(self) -> bool:
        """Whether no check is a problem."""
        return all(check.state != "problem" for check in self.checks)

    def to_frame(self) -> pd.DataFrame:
        """One row a check."""
        return pd.DataFrame([vars(check) for check in self.checks])

    def __str__(self) -> str:
        marks = {"ok": " ", "note": "-", "problem": "!"}
        lines, topic = [], ""
        for check in self.checks:
            if check.topic != topic:
                topic = check.topic
                lines.append(topic)
            advice = f"  → {check.advice}" if check.advice else ""
            lines.append(f"  {marks[check.state]} {check.item:<16} {check.found}{advice}")
        problems, notes = (
            sum(check.state == state for check in self.checks) for state in ("problem", "note")
        )
        told = "no problems" if self.healthy else f"{problems} problem(s), marked with !"
        slow = f"; {notes} thing(s) marked with - work in another way or are not there" if notes else ""
        return "\n".join([*lines, told + slow])


def doctor() -> DoctorReport:
    """Looks at this installation and machine; changes nothing."""
    checks = [*_system(), *_versions(), *_extension(), _front_end(os.environ), _browser()]
    pairs = [check for rule in KNOWN_BAD if (check := rule(installed)) is not None]
    return DoctorReport(checks + (pairs or [Check("pairs", "known bad", "none")]))


def installed(package: str) -> str | None:
    """The version of an installed package, None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _system() -> Iterator[Check]:
    yield Check("system", "Python", f"{platform.python_version()} ({sys.executable})")
    yield Check("system", "platform", platform.platform())
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    yield Check("system", "torch threads", f"{threads} of {cores} cores")
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found = f"{card.name}, capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB"
        yield Check("system", f"cuda:{index}", found)


def _versions() -> Iterator[Check]:
    for package in REQUIRED:
        found = installed(package)
        if found is None:
            yield Check("versions", package, "missing", "problem", "pip install hswq-lab again")
        else:
            yield Check("versions", package, found)
    for package in OPTIONAL:
        yield Check("versions", package, installed(package) or "not installed (optional)")


def _extension() -> Iterator[Check]:
    for name, backend in ops.backends().items():
        if backend.usable:
            fp4 = ", native FP4" if backend.native_fp4 else ""
            yield Check("extension", name, f"ready, {backend.active}{fp4}")
        else:
            state = "built, not usable" if backend.built else "not built"
            yield Check("extension", name, state, "note", backend.why)


def _front_end(environ: Mapping[str, str]) -> Check:
    name = front_end(environ)
    if name == "VS Code":
        advice = "figures that change in place need its widget support; plain figures are shown without"
        return Check("notebook", "front end", name, "note", advice)
    return Check("notebook", "front end", name)


def front_end(environ: Mapping[str, str]) -> str:
    """What shows the outputs of this process, as far as its environment tells."""
    if "ipykernel" not in sys.modules:
        return "none (a terminal or a script)"
    if "google.colab" in sys.modules:
        return "Colab"
    if "JPY_SESSION_NAME" in environ:  # a Jupyter server; it may have been started from a VS Code terminal
        return "JupyterLab or another Jupyter client"
    return "VS Code" if any(name.startswith("VSCODE_") for name in environ) else "a Jupyter kernel"


def _browser() -> Check:
    missing = why_no_static_export()
    if missing is None:
        return Check("export", "png, svg, pdf", f"through {find_browser()}")
    return Check("export", "png, svg, pdf", "only html", "note", missing)


Installed = Callable[[str], str | None]


def _older(found: str | None, than: tuple[int, ...]) -> bool:
    """Whether a version is installed and older; only its leading numbers count."""
    if found is None:
        return False
    numbers = [int(part) for part in found.split("+")[0].split(".") if part.isdigit()]
    return tuple(numbers) < than


def _figure_widgets(installed: Installed) -> Check | None:
    if installed("anywidget") is not None or _older(installed("plotly"), (6,)):
        return None
    return Check(
        "pairs",
        "plotly, anywidget",
        f"plotly {installed('plotly')} without anywidget",
        "problem",
        "pip install anywidget: without it figures that change in place stay blank",
    )


def _static_export(installed: Installed) -> Check | None:
    kaleido = installed("kaleido")
    if not _older(kaleido, (1,)):
        return None
    return Check(
        "pairs",
        "plotly, kaleido",
        f"plotly {installed('plotly')}, kaleido {kaleido}",
        "problem",
        "pip install 'kaleido>=1.0': plotly 6 and later cannot write pictures with an older one",
    )


def _old_widgets(installed: Installed) -> Check | None:
    if not _older(installed("ipywidgets"), (8,)):
        return None
    return Check(
        "pairs",
        "ipywidgets",
        str(installed("ipywidgets")),
        "problem",
        "pip install 'ipywidgets>=8.1': JupyterLab 4 does not show older ones",
    )


def _cpu_torch_beside_a_card(installed: Installed) -> Check | None:
    if torch.version.cuda is not None or not Path("/proc/driver/nvidia/version").is_file():
        return None
    return Check(
        "pairs",
        "torch, NVIDIA card",
        f"a CPU build of torch ({installed('torch')}) on a machine with an NVIDIA driver",
        "problem",
        "install a CUDA build of torch, then hswq-lab again",
    )


def _nvfp4_in_diffusers(installed: Installed) -> Check | None:
    found = installed("diffusers")
    if found is None or _older(found, (0, 42)):
        return None
    return Check(
        "pairs",
        "diffusers, NVFP4",
        f"diffusers {found}",
        "note",
        "its ModelOpt loader reads ComfyUI's NVFP4 files with the other nibble order, and without an error",
    )


def _server_elsewhere(installed: Installed) -> Check | None:
    if "ipykernel" not in sys.modules or installed("jupyterlab") is not None:
        return None
    return Check(
        "pairs",
        "kernel, server",
        "this kernel's environment holds no jupyterlab: its server runs in another one",
        "note",
        "if plots or widgets stay blank, install anywidget and ipywidgets in the server's environment too",
    )


KNOWN_BAD: Final[tuple[Callable[[Installed], Check | None], ...]] = (
    _figure_widgets,
    _static_export,
    _old_widgets,
    _cpu_torch_beside_a_card,
    _nvfp4_in_diffusers,
    _server_elsewhere,
)
"""Rules that look for a pair known not to work together; each gets a function from package to version."""
