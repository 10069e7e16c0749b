"""hl.compare: the same seeds through a reference and its variants, here or on any executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from torch import Tensor

from hswq_lab.progress import Progress
from hswq_lab.trajectory.report import TrajectoryReport
from hswq_lab.trajectory.seeds import SEEDS_20

if TYPE_CHECKING:
    from hswq_lab.model import Model


def compare(
    model: Model,
    variants: Mapping[str, Model],
    seeds: Sequence[int] = SEEDS_20,
    prompts: str | Tensor | Sequence[str | Tensor] | None = None,
    steps: int = 12,
    cfg: float = 2.5,
    shift: float | None = None,
    size: tuple[int, int] | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> TrajectoryReport:
    """Runs every seed through the reference and every variant, and measures each step."""
    raise NotImplementedError
