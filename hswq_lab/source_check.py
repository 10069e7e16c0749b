"""Whether the source that comes with LoRAs is what the pack was made from, on the layers that they touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hswq_lab.checkpoint.baked import baked_layers, baked_loras
from hswq_lab.checkpoint.origin import LEAST_COSINE
from hswq_lab.checkpoint.provenance import Fit, Provenance
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from torch import Tensor

    from hswq_lab.checkpoint import Checkpoint
    from hswq_lab.formats import PackedWeight

_FAR = (
    1 - LEAST_COSINE**2
) ** 0.5  # the error of a weight of this cosine, where nothing tells what it was made from


class SourceCheck:
    """Looks at layers beside their source; refuses it at the first one that it cannot be the source of.

    Args:
        pack: with its metadata.
        source: the 16-bit weights; None: there is nothing to look at.
    """

    def __init__(self, pack: Checkpoint, source: Checkpoint | None) -> None:
        self._pack, self._source = pack, source
        self._origin = None if source is None else Provenance(pack.metadata, source)
        self._with_loras = baked_layers(pack.metadata) if baked_loras(pack.metadata) else frozenset()
        self._unproved: list[str] = []
        self._odd: list[str] = []

    def look(self, layer: str, value: Tensor | PackedWeight, source: Tensor) -> None:
        """Compares a layer's weight in the pack [N, K] with the source's, which is in its units and on its device.

        Raises:
            HswqError: the pack's weight was not made from this.
        """
        if self._origin is None or self._origin.certain:
            return
        if self._with_loras is None or layer in self._with_loras:
            self._unproved.append(layer)  # what the file's LoRAs added cannot be told from another source
            return
        fit = self._origin.fit(layer, value, source)
        if fit.verdict == "far" and (self._origin.told is not None or fit.error > _FAR):
            raise self._refusal(layer, fit)
        if fit.verdict == "far":
            self._odd.append(layer)
        elif fit.verdict == "near":
            self._unproved.append(layer)

    def remarks(self) -> tuple[str, ...]:
        """What to know about the source as a whole."""
        origin = self._origin
        if origin is None:
            return ()
        if self._odd:
            text = (
                f"the source may not be what the pack was made from: {len(self._odd)} of the touched layers are "
                f"further from it than their format explains, the first {self._odd[0]}"
            )
            return (text,)
        if origin.told is None or not self._unproved:
            return ()
        text = (
            f"the source is another file than the one that the pack was made from (sha256 {origin.given} instead of "
            f"{origin.told}); {len(self._unproved)} of the touched layers do not prove to be the same, the first "
            f"{self._unproved[0]}"
        )
        return (text,)

    def _refusal(self, layer: str, fit: Fit) -> HswqError:
        assert self._origin is not None  # noqa: S101 - something was compared
        told = "" if self._origin.told is None else f" with sha256 {self._origin.told}"
        given = f"; its sha256 is {self._origin.given}" if told else ""
        return HswqError(
            "this is not what the pack was made from",
            file=self._source.path if self._source is not None else None,
            tensor=layer,
            found=f"a weight that is {fit.error:.1%} away from the pack's{given}",
            expected=f"at most {fit.limit:.1%}, which the format explains",
            fix=f"give the 16-bit checkpoint that the pack was made from{told}, or no source",
        )
