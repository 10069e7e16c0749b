"""ParetoReport: measured packs, bits a weight against the final cosine, and the front of what is possible."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from hswq_lab.errors import HswqError
from hswq_lab.quantize.choose import the_goal
from hswq_lab.quantize.measured import MeasuredOn
from hswq_lab.quantize.plan import Plan
from hswq_lab.results import Result


@dataclass(frozen=True)
class ParetoPoint:
    """One plan, measured.

    Attributes:
        label: what it is, e.g. "nv40" or "all INT8".
        nvfp4: the number of NVFP4 layers.
        bits: mean bits a weight.
        nbytes: bytes of the Linears.
        cosines: final-latent cosine with the 16-bit run for every (prompt, seed).
        impact: mean ‖x − x_ref‖²/‖x_ref‖².
        formats: the plan.
        changed: the layer whose format differs from the point before ("" if several or none).
    """

    label: str
    nvfp4: int
    bits: float
    nbytes: int
    cosines: list[float]
    impact: float
    formats: dict[str, str]
    changed: str = ""

    @property
    def mean(self) -> float:
        """Mean final cosine."""
        return sum(self.cosines) / len(self.cosines)

    @property
    def worst(self) -> float:
        """The worst seed's final cosine."""
        return min(self.cosines)


@dataclass(frozen=True)
class ParetoReport(Result):
    """Measured plans in the order in which they were tried.

    Attributes:
        model: name of the 16-bit model.
        sha256: of its checkpoint.
        mode: the mode the packs ran in.
        scales: how weights were quantised.
        prompts: one for each seed.
        seeds: of the starting noises.
        steps: Euler steps.
        cfg: guidance scale.
        shift: noise shift.
        size: picture size in pixels, (height, width).
        points: what was measured.
        seconds: how long it took.
    """

    model: str
    sha256: str
    mode: str
    scales: str
    prompts: list[str]
    seeds: list[int]
    steps: int
    cfg: float
    shift: float
    size: tuple[int, int]
    points: list[ParetoPoint]
    seconds: float = 0.0

    def front(self) -> list[ParetoPoint]:
        """The points that no other beats in both bits and mean final cosine, the fewest bits first."""
        best, found = float("-inf"), []
        for point in sorted(self.points, key=lambda point: (point.bits, -point.mean)):
            if point.mean > best:
                best = point.mean
                found.append(point)
        return found

    def to_frame(self) -> pd.DataFrame:
        """One row a point: label, nvfp4, bits, nbytes, mean, worst, impact, changed, on_front."""
        front = {id(point) for point in self.front()}
        return pd.DataFrame(
            [
                {
                    "label": point.label,
                    "nvfp4": point.nvfp4,
                    "bits": point.bits,
                    "nbytes": point.nbytes,
                    "mean": point.mean,
                    "worst": point.worst,
                    "impact": point.impact,
                    "changed": point.changed,
                    "on_front": id(point) in front,
                }
                for point in self.points
            ]
        )

    def plan(self, *, bits: float | None = None, final_cos: float | None = None) -> Plan:
        """The best measured plan within a number of bits, or the smallest with a mean final cosine.

        Raises:
            HswqError: not exactly one goal, an impossible one, or no point reaches it.
        """
        the_goal(bits=bits, final_cos=final_cos)
        front = self.front()
        fitting = [p for p in front if (p.bits <= bits if bits is not None else p.mean >= (final_cos or 0.0))]
        if not fitting:
            reached = (
                f"{front[0].bits:.3f} bits at least, {front[-1].mean:.4f} at best" if front else "no points"
            )
            raise HswqError("no measured plan reaches that goal", found=bits or final_cos, expected=reached)
        point = fitting[-1] if bits is not None else fitting[0]
        note = f"{point.label}: measured {point.mean:.4f} at {point.bits:.3f} bits"
        return Plan(point.formats, note, MeasuredOn(self.model, self.sha256))
