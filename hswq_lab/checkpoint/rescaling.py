"""A model's values in the units of another, where smooth() rescaled channels of either."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hswq_lab.checkpoint.smoothed import COLUMNS, ROWS, exponents
from hswq_lab.models.families import architecture_of

if TYPE_CHECKING:
    from hswq_lab.checkpoint.checkpoint import Checkpoint

_OFFSET_ROUNDING = 2**-20  # of 1 + b in fp32, about 1, divided by 16 at most
_TOLERANCE = 0.3  # a channel in other units has half or twice the size, or is further off
_VANISHED = 2**-5  # what is smaller than this share of the source is rounded to nothing, not rescaled


class Rescaling:
    """From the units of a source's channels to those of a pack.

    Args:
        pack: whose units are wanted.
        source: whose values are given.

    Raises:
        HswqError: one of them does not say its exponents, or contradicts itself.
    """

    def __init__(self, pack: Checkpoint, source: Checkpoint) -> None:
        told, known = exponents(pack), exponents(source)
        none = torch.zeros((), dtype=torch.int32)
        self._change = {
            name: told.get(name, none) - known.get(name, none)
            for name in [*told, *(known.keys() - told.keys())]
        }
        sites = architecture_of(pack.shapes(), pack.path).sites()
        self._offsets = {site.source.removesuffix(".weight") for site in sites if site.offset}

    def __len__(self) -> int:
        """Number of weights that have channels in other units."""
        return len({name.rpartition(".")[0] for name, change in self._change.items() if change.any()})

    def factors(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """What a parameter's rows and columns are multiplied by, fp32; None: no site has to do with them."""
        layer, _, leaf = name.rpartition(".")
        rows = self._change.get(f"{layer}.{ROWS}") if leaf in ("weight", "bias") else None
        columns = self._change.get(f"{layer}.{COLUMNS}") if leaf == "weight" else None
        return (
            None if rows is None else torch.exp2(rows.float()),
            None if columns is None else torch.exp2(columns.float()),
        )

    def values(self, name: str, source: Tensor, pack: Tensor) -> Tensor:
        """The source's values of a parameter in the pack's units.

        Args:
            name: of the parameter.
            source: its values there.
            pack: its values in the pack, of the same shape. A bias that stands for 1 + b is rounded each time that it
                is rescaled: what differs by that alone is given back as the pack has it.
        """
        rows, columns = self.factors(name)
        if rows is None and columns is None:
            return source
        values = source.float()
        layer, _, leaf = name.rpartition(".")
        if rows is not None and leaf == "bias" and layer in self._offsets:
            values = (values + 1) * rows - 1
            return torch.where((values - pack.float()).abs() <= _OFFSET_ROUNDING, pack.float(), values)
        if rows is not None:
            values = values * rows.reshape(-1, *[1] * (values.ndim - 1))
        return (values if columns is None else values * columns).to(source.dtype)

    def misfits(self, name: str, values: Tensor, wanted: Tensor) -> int:
        """The number of a packed weight's channels that are in other units than the file says.

        Args:
            name: of the weight.
            values: the pack's, [N, K].
            wanted: the source's in the pack's units, [N, K].
        """
        sides = zip(self.factors(name), (1, 0), strict=True)
        return sum(_misfits(values, wanted, along) for factors, along in sides if factors is not None)


def _misfits(values: Tensor, wanted: Tensor, along: int) -> int:
    """Channels whose share of what is wanted is not 1, whatever rounding can have to do with it.

    The share is ⟨values, wanted⟩ / ⟨wanted, wanted⟩. Errors that do not depend on the n numbers of a channel give it a
    standard deviation of √(⟨error, error⟩ / ⟨wanted, wanted⟩ / n).
    """
    values, wanted = values.float(), wanted.float()
    power = wanted.square().sum(along)
    share = (values * wanted).sum(along) / power
    error = (values - wanted * share.unsqueeze(along)).square().sum(along)
    deviation = (error / power / wanted.shape[along]).sqrt()
    misfit = (share - 1).abs() > _TOLERANCE + 5 * deviation
    return int((misfit & (share.abs() > _VANISHED)).sum())
