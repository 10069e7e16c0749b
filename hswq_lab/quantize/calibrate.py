"""calibrate: a pack gets an input_scale for every NVFP4 layer that real prompts reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hswq_lab.model import Model
    from hswq_lab.progress import Progress
    from hswq_lab.quantize.observe import CalibrationReport


def calibrate(
    pack: Model,
    model: Model | None = None,
    prompts: Sequence[str | Tensor] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    steps: int = 12,
    cfg: float = 2.5,
    headroom: float = 1.0,
    progress: Progress | None = None,
) -> Model:
    """A new pack with input_scale = headroom · amax / 2688 for every NVFP4 layer; the old one is not changed.

    The same as `with_input_scales(pack, observe(model or pack in parity, …), headroom)`: call these two where the report
    is wanted as well.
    """
    raise NotImplementedError


def with_input_scales(pack: Model, report: CalibrationReport, headroom: float = 1.0) -> Model:
    """A new pack whose NVFP4 layers carry the scales of a report; layers that it never reached get no key."""
    raise NotImplementedError
