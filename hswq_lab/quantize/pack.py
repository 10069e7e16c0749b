"""pack: a 16-bit checkpoint becomes a hybrid pack by a plan; in memory and streaming to a file, one generator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.quantize.observe import CalibrationReport
    from hswq_lab.quantize.plan import Plan


def pack(
    model: Model,
    plan: Plan,
    scales: str = "sweep",
    *,
    activations: CalibrationReport | None = None,
    progress: Progress | None = None,
) -> Model:
    """A new model whose layers are packed as the plan says.

    Args:
        model: a 16-bit model.
        plan: which layer gets which format.
        scales: how NVFP4 block scales are found: "rtn", "four_six", "sweep" or "gptq".
        activations: from `observe`; weights the sweep's error by the inputs' power, and is what "gptq" needs.
        progress: told after every layer.
    """
    raise NotImplementedError
