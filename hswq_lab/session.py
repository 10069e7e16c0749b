"""What command line and notebooks share: a progress bar, models in the mode that the environment asks for."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import tqdm as terminal
from tqdm import notebook

from hswq_lab.captions import caption_companion
from hswq_lab.errors import HswqError
from hswq_lab.loading import load
from hswq_lab.model import Model
from hswq_lab.modes import request_from_environment
from hswq_lab.theme import theme
from hswq_lab.vae import open_vae

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from hswq_lab.models.companion import Companion
    from hswq_lab.progress import Progress

LOG_INTERVAL = 5.0
"""Seconds between the lines of a bar that goes into a log."""


def open_model(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    captions: str | os.PathLike[str] | None = None,
    size: tuple[int, int] = (1024, 1024),
    vae: str | os.PathLike[str] | None = None,
) -> Model:
    """`hl.load` in the mode of HSWQ_ZI_FORCE_PARITY=1 or HSWQ_ZI_FORCE_TC=1; warnings go to stderr.

    The library itself takes no mode from the environment: only a command line or a notebook calls this.

    Args:
        path: "mini-zimage", a file, or a diffusers folder.
        device: "cpu", "cuda", …; a GPU if there is one by default.
        captions: a captions file (see `hswq_lab.captions`) for a model whose text encoder is not here.
        size: picture size in pixels for such a model.
        vae: folder of a VAE (see `hswq_lab.vae`) for such a model, which has no pictures without one.

    Raises:
        HswqError: as `hl.load`, `load_captions` and `open_vae`, or a VAE without captions.
    """
    request, ignored = request_from_environment(os.environ)
    if ignored is not None:
        warn_once(ignored)
    model = load(
        path, device=device, mode=request.mode, uncalibrated=request.uncalibrated, origin=request.origin
    )
    for text in model.checkpoint.warnings:
        warn(text)
    placeholders = model.placeholder_scales
    if placeholders:
        warn_once(
            f"{request.origin} runs {len(placeholders)} layers without an input_scale ({placeholders[0]}, …) in W4A4 "
            "with a placeholder scale of 1, which no calibration stands behind: compare with parity before you "
            "believe a picture"
        )
    if captions is None:
        if vae is not None:
            raise HswqError("a VAE is taken together with captions", file=vae, fix="give captions too")
        return model
    codec = None if vae is None else open_vae(vae, model.device)
    return _with_companion(model, caption_companion(captions, size, codec))


def _with_companion(model: Model, companion: Companion) -> Model:
    return Model(
        model.checkpoint,
        name=model.name,
        companion=companion,
        device=model.device,
        dtype=model.dtype,
        request=model.request,
    )


def lora_of(model: Model, name: str) -> str:
    """The path of a LoRA that ships with a model.

    Raises:
        HswqError: the model has none of this name.
    """
    shipped = {} if model.companion is None else model.companion.loras
    if name not in shipped:
        raise HswqError(
            "no such LoRA ships with this model",
            tensor=model.name,
            found=", ".join(shipped) or "none at all",
            expected=name,
            fix='name a file, in a notebook LORA = "….safetensors"',
        )
    return shipped[name]


def warn(text: object) -> None:
    """A warning, on stderr."""
    sys.stderr.write(f"hswq-lab: warning: {text}\n")


@cache
def warn_once(text: str) -> None:
    """A warning that one process gives once, however many models it concerns."""
    warn(text)


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """A progress bar with time left, as the `progress` of a call: in a notebook, a terminal, or a log."""
    if "ipykernel" in sys.modules:
        shown = import_module("IPython.display")
        shown.display(shown.HTML(theme()))  # figures beside the bar follow the notebook's theme by it
        yield from _painted(notebook.tqdm(desc=title, unit=""))
    elif sys.stderr.isatty():
        layout = "{l_bar}{bar}| {elapsed}<{remaining} {postfix}"
        yield from _painted(terminal.tqdm(desc=f"{title:<12}", dynamic_ncols=True, bar_format=layout))
    else:
        yield from _lines(title)


def _painted(drawn: Any) -> Iterator[Progress]:  # noqa: ANN401  # tqdm's two bars have no common type
    def progress(done: int, total: int, label: str) -> None:
        if drawn.total != total:
            drawn.reset(total)
        drawn.set_postfix_str(label[-40:], refresh=False)
        drawn.update(done - drawn.n)

    with drawn:
        yield progress
        progress(drawn.total or 1, drawn.total or 1, "done")


def _lines(title: str) -> Iterator[Progress]:
    start = last = time.monotonic()

    def progress(done: int, total: int, label: str) -> None:
        nonlocal last
        if time.monotonic() - last > LOG_INTERVAL:
            last = time.monotonic()
            sys.stderr.write(f"{title}: {100 * done // max(total, 1)} % ({label})\n")

    yield progress
    sys.stderr.write(f"{title}: done in {time.monotonic() - start:.1f} s\n")
