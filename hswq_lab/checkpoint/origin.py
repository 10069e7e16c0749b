"""A file beside the 16-bit weights that it was made from: what differs, and what may."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hswq_lab.checkpoint.baked import baked_in_words, baked_layers
from hswq_lab.checkpoint.closeness import Closeness, closeness, dense
from hswq_lab.checkpoint.findings import Finding, from_error
from hswq_lab.checkpoint.provenance import Provenance, alike
from hswq_lab.checkpoint.rescaling import Rescaling
from hswq_lab.checkpoint.smoothed import SMOOTH_KEY, exponents, is_exponents, smoothed_names, tells_exponents
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from hswq_lab.checkpoint.checkpoint import Checkpoint
    from hswq_lab.checkpoint.findings import Severity
    from hswq_lab.checkpoint.slots import Entry, Value

LEAST_COSINE = 0.9  # the worst right reading of a real layer is above 0.98, a wrong one below 0.7
LEAST_COSINE_BAKED = 0.5  # with LoRAs in the layer: less means that they are 1.7 times as large as it


@dataclass(frozen=True)
class LayerCheck:
    """One weight beside its source, unrotated, in the units of the file's channels.

    Attributes:
        sqnr_db, cosine: see `Closeness`.
        gain: factor that fits it to the source best; far from 1 says that the tensor scale is wrong.
    """

    name: str
    format: str
    group: int | None
    sqnr_db: float
    cosine: float
    gain: float


class Origin:
    """The source of a file. Packed weights must be near it, anything else equal to it, unless the metadata say why not.

    Args:
        source: the 16-bit weights; None: nothing is compared.
        file: what is compared with it.
    """

    def __init__(self, source: Checkpoint | None, file: Checkpoint) -> None:
        self._source = source
        known = {} if source is None else source.metadata
        self._loras = [lora for lora in baked_in_words(file.metadata) if lora not in baked_in_words(known)]
        self._baked = baked_layers(file.metadata)
        self._rescaling: Rescaling | None = None
        self._incomparable: frozenset[str] = frozenset()
        self.layers: list[LayerCheck] = []
        self.findings: list[Finding] = []
        self._absent: list[str] = []
        self._provenance = None if source is None else Provenance(file.metadata, source)
        self._proved = 0
        self._read_units(file)

    def _read_units(self, file: Checkpoint) -> None:
        """How the source's values come to the units of the file's channels, or why they are not compared."""
        source = self._source
        differ = source is not None and file.metadata.get(SMOOTH_KEY) != source.metadata.get(SMOOTH_KEY)
        of_both = [file, source] if source is not None and differ else [file]
        untold = any(SMOOTH_KEY in each.metadata and not tells_exponents(each) for each in of_both)
        try:
            if not untold:
                exponents(file)
            if source is not None and differ and not untold:
                self._rescaling = Rescaling(file, source)
        except HswqError as error:
            self.findings.append(from_error(error, "smooth"))
        if source is not None and differ and self._rescaling is None:
            names = [smoothed_names(each.metadata, each.shapes()) for each in (file, source)]
            self._incomparable = names[0] | names[1]
        if self._incomparable and untold:
            problem = (
                "smooth() rescaled channels, and nothing says by how much: these tensors are not compared"
            )
            fix = "smooth and pack the 16-bit model again, or give the smoothed model as the source"
            found = f"{len(self._incomparable)} tensors"
            self.findings.append(Finding("warning", "smooth", problem, found=found, fix=fix))

    def wanted(self, name: str, value: Value | None) -> Tensor | None:
        """The source's values for a name in the units of the file's value; None where nothing is compared."""
        if self._source is None or name in self._incomparable:
            return None
        if self._rescaling is not None and is_exponents(name):
            return None  # the source's are others; the file's were held against its metadata
        if name not in self._source:
            if name.endswith(".weight"):
                self._find("warning", "the source does not have this layer", name)
            else:
                self._absent.append(name)
            return None
        wanted = dense(self._source[name])
        if self._rescaling is None or value is None or tuple(wanted.shape) != tuple(value.shape):
            return wanted
        return self._rescaling.values(name, wanted, dense(value))

    def compare(self, entry: Entry, value: Value, wanted: Tensor) -> None:
        """Notes how close a name's value is to what is `wanted`, and a finding where it is too far."""
        name, values = entry.name, dense(value)
        if _without_ones(values) != _without_ones(wanted):
            shapes = list(entry.shape), list(wanted.shape)
            self._find("error", "the source has another shape", name, *shapes)
            return
        match = closeness(values, wanted)
        if name.endswith(".weight"):
            self.layers.append(
                LayerCheck(name, entry.format, entry.group, match.sqnr_db, match.cosine, match.gain)
            )
        if match.sqnr_db == math.inf:
            return
        if self._has_loras(name):
            if name.endswith(".weight"):
                self._compare_with_loras(name, match)
        elif not entry.packed:
            if not alike(values, wanted.reshape(values.shape)):
                problem = "a tensor that is not packed differs from the source: changed, or of another model"
                found = f"cosine {match.cosine:.6f}"
                self._find("error", problem, name, found, "the source's own values")
        elif not match.cosine >= LEAST_COSINE:
            problem = "the layer does not look like its source: wrong layout, wrong rotation or another model"
            self._find("error", problem, name, f"cosine {match.cosine:.4f}", f"at least {LEAST_COSINE}")
        elif not 0.8 < match.gain < 1.25:
            problem = "the layer has its source's direction but not its size: a scale is wrong"
            self._find("error", problem, name, f"source = {match.gain:.4g} × layer")
        elif self._rescaling is not None and (misfits := self._rescaling.misfits(name, values, wanted)):
            problem = (
                "channels of the layer are not rescaled as the file says: it is of a model smoothed otherwise"
            )
            self._find("error", problem, name, f"{misfits} channels", "the source's, times their factors")
        else:
            self._compare_with_format(name, value, wanted)

    def conclude(self) -> list[Finding]:
        """All findings, with what is true of the file as a whole."""
        self._conclude_digests()
        if self._absent:
            problem = f"{len(self._absent)} tensors that the source does not have were not compared"
            self._find("info", problem, self._absent[0])
        if self._rescaling is not None:
            problem = (
                "smooth() rescaled channels: the source is compared times the factors that the file gives"
            )
            self.findings.append(Finding("info", "smooth", problem, found=f"{len(self._rescaling)} weights"))
        if self._loras:
            differing = sum(
                self._has_loras(layer.name) and layer.sqnr_db != math.inf for layer in self.layers
            )
            problem = "LoRAs are baked into the weights"
            if self._source is not None:
                problem += f", so {differing} layers differ from the source by them as well as by rounding"
            self.findings.append(Finding("info", "loras", problem, found=", ".join(self._loras)))
        return self.findings

    def _has_loras(self, name: str) -> bool:
        """Whether LoRAs are baked into a layer; into any, where the file does not say which."""
        layer, _, leaf = name.rpartition(".")
        return (
            bool(self._loras) and leaf in ("weight", "bias") and (self._baked is None or layer in self._baked)
        )

    def _compare_with_loras(self, name: str, match: Closeness) -> None:
        """The source is still in the layer, once and whole: what LoRAs add is hardly ever along it."""
        share = match.cosine**2 / match.gain if match.gain else math.nan  # ⟨layer, source⟩ / ⟨source, source⟩
        if match.cosine >= LEAST_COSINE_BAKED and 0.5 < share < 2:
            return
        problem = "the layer does not hold its source, which the LoRAs in it do not explain"
        found = f"cosine {match.cosine:.4f}, {share:.4g} × the source in it"
        self._find("error", problem, name, found, f"at least {LEAST_COSINE_BAKED}, and 1 ×")

    def _compare_with_format(self, name: str, value: Value, wanted: Tensor) -> None:
        """Where the digest does not say that this is the source: whether rounding explains the difference."""
        if self._provenance is None or self._provenance.certain:
            return
        fit = self._provenance.fit(name, value, wanted)
        self._proved += fit.verdict == "same"
        if fit.verdict == "far":
            problem = (
                "the layer is further from the source than its format explains: it was made from another one"
            )
            severity: Severity = "warning" if self._provenance.told is None else "error"
            self._find(severity, problem, name, f"{fit.error:.2%} from it", f"at most {fit.limit:.2%}")

    def _conclude_digests(self) -> None:
        """Where the file names another source: whether its layers prove to be this one's all the same."""
        origin = self._provenance
        if origin is None or origin.told is None or origin.certain:
            return
        problem = "the source is another file than the one that the pack was made from"
        packed = sum(layer.format != "16-bit" and layer.sqnr_db != math.inf for layer in self.layers)
        unproved = packed - self._proved
        if unproved:
            problem += f"; {unproved} of {packed} packed layers do not prove to be the same"
        else:
            problem += f"; its {packed} packed layers prove to be the same"
        severity: Severity = "warning" if unproved else "info"
        self.findings.append(
            Finding(severity, "source-digest", problem, found=origin.given, expected=origin.told)
        )

    def _find(
        self, severity: Severity, problem: str, name: str, found: object = None, expected: object = None
    ) -> None:
        texts = [None if value is None else str(value) for value in (found, expected)]
        self.findings.append(Finding(severity, "source", problem, name, *texts))


def _without_ones(values: Tensor) -> list[int]:
    """The shape; a pad token is [dim] in some files and [1, dim] in others."""
    return [side for side in values.shape if side != 1]
