"""Channels that smooth() rescaled by powers of two, as a file's metadata and its model's family tell them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.models.families import architecture_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hswq_lab.checkpoint.checkpoint import Checkpoint
    from hswq_lab.models.architecture import Site

SMOOTH_KEY = "hswq.smooth"
"""Metadata of a model whose channels were rescaled before packing: layers → number of rescaled channels."""

COLUMNS = "smooth_columns"
"""Beside a Linear's weight [N, K]: int8 [K], the exponents of the powers of two that its columns were multiplied by."""

ROWS = "smooth_rows"
"""Likewise int8 [N], of its rows and its bias; a layer without either has the original's units."""


def smoothed_names(metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The parameters with rescaled channels: the columns of some weights, and what stands in front of them.

    Args:
        metadata: of a file.
        shapes: native name → shape, of the same model.
    """
    try:
        counts = json.loads(metadata.get(SMOOTH_KEY, "{}"))
        sites = list(architecture_of(shapes).sites())
    except (HswqError, ValueError, RecursionError):
        return frozenset()  # nobody can tell; whoever compares says what differs
    names: set[str] = set()
    for site in sites if isinstance(counts, dict) else ():
        if counts.get(", ".join(site.linears)):
            source = site.source.removesuffix(".weight")
            names |= {f"{source}.weight", f"{source}.bias", *(f"{layer}.weight" for layer in site.linears)}
    return frozenset(names)


def tells_exponents(checkpoint: Checkpoint) -> bool:
    """Whether a file has exponents at all: there are packs that were smoothed before smooth() wrote them."""
    return any(name.endswith(f".{COLUMNS}") for name in checkpoint)


def is_smoothed(checkpoint: Checkpoint) -> bool:
    """Whether channels have other units than the original's, as metadata say, or exponents where those were lost."""
    return SMOOTH_KEY in checkpoint.metadata or tells_exponents(checkpoint)


def is_exponents(name: str) -> bool:
    """Whether a tensor holds exponents and is no parameter."""
    return name.endswith((f".{COLUMNS}", f".{ROWS}"))


def channel_factors(checkpoint: Checkpoint, layer: str) -> tuple[Tensor, Tensor]:
    """What smooth() multiplied a Linear's weight [N, K] by: rows fp32 [N], columns fp32 [K]; exact powers of two.

    Raises:
        HswqError: see `exponents`.
    """
    told = exponents(checkpoint, layer)
    n, k = checkpoint.entry(f"{layer}.weight").shape
    rows, columns = (
        torch.exp2(told.get(f"{layer}.{leaf}", torch.zeros(size)).float())
        for leaf, size in ((ROWS, n), (COLUMNS, k))
    )
    return rows, columns


def exponents(checkpoint: Checkpoint, layer: str | None = None) -> dict[str, Tensor]:
    """Exponents of the powers of two by which a checkpoint's channels were multiplied, int32.

    Args:
        checkpoint: smoothed or not. What it says is held against its metadata and against itself: layers that read one
            input have the same exponents, and what stands in front of them the opposite ones.
        layer: the only one that is asked for; None: all.

    Returns:
        "P.smooth_columns" [K] of every Linear P behind a site and "P.smooth_rows" [N] of every Linear or norm in front
        of one; nothing for a model that was not smoothed.

    Raises:
        HswqError: the file does not say them, or contradicts itself.
    """
    if not is_smoothed(checkpoint):
        return {}
    told: dict[str, Tensor] = {}
    shapes, counts = checkpoint.shapes(), _counts(checkpoint)
    sites = list(architecture_of(shapes, checkpoint.path).sites())
    _refuse_missing(checkpoint, sites)
    for site in sites:
        source = site.source.removesuffix(".weight")
        if layer in (None, source, *site.linears):
            told |= (columns := _columns(checkpoint, site, counts))
            size = shapes[site.source][0]
            rows = told.setdefault(f"{source}.{ROWS}", torch.zeros(size, dtype=torch.int32))
            rows[slice(*(site.rows or (0, size)))] -= columns[f"{site.linears[0]}.{COLUMNS}"]
    for name, wanted in told.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == ROWS and layer in (None, owner) and name in checkpoint:  # a norm's are not stored
            _check(checkpoint, name, wanted)
    return told


def _refuse_missing(checkpoint: Checkpoint, sites: Iterable[Site]) -> None:
    """Every Linear behind a site has exponents of its columns, and every one in front of a site of its rows."""
    for site in sites:
        names = [f"{layer}.{COLUMNS}" for layer in site.linears]
        if len(checkpoint.entry(site.source).shape) == 2:
            names.append(f"{site.source.removesuffix('.weight')}.{ROWS}")
        missing = next((name for name in names if name not in checkpoint), None)
        if missing is not None:
            raise HswqError(
                "the file says that smooth() rescaled channels, but not by how much",
                file=checkpoint.path,
                tensor=missing,
                expected=f"tensors named ….{COLUMNS} and ….{ROWS}, which smooth() writes now",
                fix="smooth and pack the 16-bit model again",
            )


def _counts(checkpoint: Checkpoint) -> dict[str, object]:
    """The metadata of smooth(): the layers of a site, joined by commas → number of rescaled channels."""
    if SMOOTH_KEY not in checkpoint.metadata:
        raise HswqError(
            "the file has exponents of channels that smooth() rescaled, but lost the metadata that say so",
            file=checkpoint.path,
            expected=SMOOTH_KEY,
            fix="take the file as it was before another program wrote it",
        )
    try:
        counts = json.loads(checkpoint.metadata[SMOOTH_KEY])
    except (ValueError, RecursionError):
        counts = None
    if not isinstance(counts, dict):
        raise HswqError(
            "the metadata of smooth() say nothing that can be read", file=checkpoint.path, tensor=SMOOTH_KEY
        )
    return counts


def _columns(checkpoint: Checkpoint, site: Site, counts: Mapping[str, object]) -> dict[str, Tensor]:
    """The exponents of a site's layers, by name; they are the same for all of them."""
    columns = {}
    for layer in site.linears:
        name, size = f"{layer}.{COLUMNS}", checkpoint.entry(f"{layer}.weight").shape[1]
        columns[name] = _stored(checkpoint, name, size)
        _check(checkpoint, name, columns[f"{site.linears[0]}.{COLUMNS}"])
    rescaled, stated = int((columns[name] != 0).sum()), counts.get(", ".join(site.linears))
    if rescaled != stated:
        raise HswqError(
            "the exponents of channels contradict the metadata",
            file=checkpoint.path,
            tensor=name,
            found=f"{rescaled} rescaled channels",
            expected=f"{stated}, as {SMOOTH_KEY} says",
            fix="smooth and pack the 16-bit model again",
        )
    return columns


def _check(checkpoint: Checkpoint, name: str, wanted: Tensor) -> None:
    if not torch.equal(_stored(checkpoint, name, len(wanted)), wanted):
        raise HswqError(
            "the exponents of channels contradict those of the layers beside them",
            file=checkpoint.path,
            tensor=name,
            expected="the same for layers that read one input, the opposite in front of them",
            fix="smooth and pack the 16-bit model again",
        )


def _stored(checkpoint: Checkpoint, name: str, size: int) -> Tensor:
    """The exponents under a name, int32."""
    stored = checkpoint[name]
    if not isinstance(stored, Tensor) or stored.dtype != torch.int8 or stored.shape != (size,):
        raise HswqError(
            "these are no exponents of channels",
            file=checkpoint.path,
            tensor=name,
            found=f"{getattr(stored, 'dtype', 'packed')} {list(stored.shape)}",
            expected=f"int8 [{size}]",
        )
    return stored.int()


def check_same_units(pack: Checkpoint, model: Checkpoint) -> None:
    """Refuses a model whose channels have other units than a pack's: its activations are not those of the pack."""
    known = [metadata.get(SMOOTH_KEY) for metadata in (pack.metadata, model.metadata)]
    if known[0] != known[1] or not _same_exponents(pack, model):
        smoothed = ["not smoothed" if counts is None else "smoothed" for counts in known]
        raise HswqError(
            "smooth() rescaled channels of one of the two, or of each in another way",
            file=pack.path,
            found=f"the pack is {smoothed[0]}, the model {smoothed[1]}",
            fix="give the 16-bit model that was packed (what smooth() returned), or none",
        )


def _same_exponents(pack: Checkpoint, model: Checkpoint) -> bool:
    """Whether two smoothed models were smoothed alike, as far as both tell."""
    if not (tells_exponents(pack) and tells_exponents(model)):
        return True
    told, known = exponents(pack), exponents(model)
    return told.keys() == known.keys() and all(torch.equal(told[name], known[name]) for name in told)
