"""From a 16-bit model to a calibrated hybrid pack: sensitivity, plan, pack, calibrate."""

from __future__ import annotations

from hswq_lab.quantize.bases import gather_bases
from hswq_lab.quantize.calibrate import calibrate, observe_for, with_input_scales
from hswq_lab.quantize.curve import greedy, pareto
from hswq_lab.quantize.impact import ImpactReport, LayerImpact
from hswq_lab.quantize.moments import LayerMoments, Moments, gather_moments
from hswq_lab.quantize.observe import CalibrationReport, LayerActivations, observe
from hswq_lab.quantize.pack import pack, pack_items, pack_to_file
from hswq_lab.quantize.pareto import ParetoPoint, ParetoReport
from hswq_lab.quantize.plan import Plan
from hswq_lab.quantize.sensitivity import impact_of_pack, sensitivity
from hswq_lab.quantize.smooth import smooth

__all__ = [
    "CalibrationReport",
    "ImpactReport",
    "LayerActivations",
    "LayerImpact",
    "LayerMoments",
    "Moments",
    "ParetoPoint",
    "ParetoReport",
    "Plan",
    "calibrate",
    "gather_bases",
    "gather_moments",
    "greedy",
    "impact_of_pack",
    "observe",
    "observe_for",
    "pack",
    "pack_items",
    "pack_to_file",
    "pareto",
    "sensitivity",
    "smooth",
    "with_input_scales",
]
