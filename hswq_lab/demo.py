"""The whole path on the small model: measure, plan, pack, calibrate, save, LoRAs, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.declared import Way
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.loading import load, save
from hswq_lab.lora import BakeReport, load_lora
from hswq_lab.progress import Progress, silent
from hswq_lab.quantize import pack as make_pack
from hswq_lab.quantize import sensitivity
from hswq_lab.quantize.calibrate import observe_for, with_input_scales
from hswq_lab.trajectory import SEEDS_20, compare

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from hswq_lab.model import Model
    from hswq_lab.models.sampler import Run
    from hswq_lab.quantize.impact import ImpactReport
    from hswq_lab.quantize.observe import CalibrationReport
    from hswq_lab.quantize.pack import Scales
    from hswq_lab.quantize.plan import Plan
    from hswq_lab.report import LoadReport
    from hswq_lab.trajectory import TrajectoryReport

Stage = Callable[[str], AbstractContextManager[Progress]]
"""Called with the name of a stage; gives the progress that its work reports to."""


@dataclass(frozen=True)
class Settings:
    """How much work the path does. The defaults are those of `make demo`; `FAST` is for tests and notebooks.

    Attributes:
        nvfp4: layers that become NVFP4, the least sensitive ones.
        impact_seeds: prompts that sensitivity is measured on.
        impact_steps: Euler steps of these runs.
        calibration_prompts: prompts that ranges are observed on.
        seeds: of the comparison.
        steps: Euler steps of calibration and comparison.
        shown: pictures in the strip.
        scales: how NVFP4 block scales are found.
    """

    nvfp4: int = 40
    impact_seeds: int = 3
    impact_steps: int = 4
    calibration_prompts: int = 8
    seeds: tuple[int, ...] = SEEDS_20
    steps: int = 12
    shown: int = 8
    scales: Scales = "sweep"


FAST = Settings(
    impact_seeds=1, impact_steps=1, calibration_prompts=1, seeds=SEEDS_20[:2], steps=2, shown=2, scales="rtn"
)


@dataclass
class Demo:
    """Everything that the path made, for a page, for tables, for files.

    Attributes:
        pack: the calibrated pack, as loaded from `file`.
        ways: way of applying the LoRA → the evidence.
        pictures: row of the picture strip → its runs, one a prompt.
        seconds: stage → wall time.
    """

    settings: Settings
    model: Model
    impact: ImpactReport
    plan: Plan
    pack: Model
    file: Path
    calibration: CalibrationReport
    load_report: LoadReport
    ways: dict[str, BakeReport]
    trajectories: TrajectoryReport
    pictures: dict[str, list[Run]]
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def quiet(title: str) -> Iterator[Progress]:
    """The stage of a caller who wants no bars."""
    del title
    yield silent


class _Clock:
    """Runs stages and keeps their wall times."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, title: str) -> Iterator[Progress]:
        start = time.perf_counter()
        with self._stage(title) as progress:
            yield progress
        self.seconds[title] = time.perf_counter() - start


def run_demo(
    out: Path,
    settings: Settings | None = None,
    *,
    lora: str = "outline",
    stage: Stage = quiet,
    executor: Executor | None = None,
) -> Demo:
    """Runs the path; the packed checkpoint is written into `out`.

    Args:
        out: folder, made if it is not there.
        settings: how much work.
        lora: the shipped LoRA that is put on the pack.
        stage: shows progress, see `Stage`.
        executor: where sensitivity and comparison run; in this process by default.

    Raises:
        HswqError: something cannot be done, or the saved pack does not come back bit for bit.
    """
    chosen = settings or Settings()
    clock = _Clock(stage)
    with clock("load"):
        model = load("mini-zimage", device="cpu")
        prompts = model.prompts
    with clock("sensitivity") as progress:
        impact = sensitivity(
            model,
            prompts[: chosen.impact_seeds],
            steps=chosen.impact_steps,
            formats=("nvfp4",),
            scales="rtn",
            executor=executor,
            progress=progress,
        )
    plan = impact.plan(nvfp4=chosen.nvfp4)
    with clock("pack") as progress:
        uncalibrated = make_pack(model, plan, chosen.scales, progress=progress)
    with clock("calibrate") as progress:
        some = prompts[: chosen.calibration_prompts]
        calibration = observe_for(uncalibrated, model, some, steps=chosen.steps, progress=progress)
        made = with_input_scales(uncalibrated, calibration)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"mini_hswq_hybrid_nv{chosen.nvfp4}_convrot_nvfp4_calib.safetensors"
    with clock("save") as progress:
        save(made, file, progress=progress)
        pack = load(file, device="cpu")
        require_same(made.checkpoint, pack.checkpoint)
    with clock("LoRA") as progress:
        ways = apply_every_way(pack, model, lora, progress)
    with clock("compare") as progress:
        variants = {"parity": pack.in_mode("parity"), "tc": pack.in_mode("tc")}
        trajectories = compare(
            model, variants, chosen.seeds, steps=chosen.steps, executor=executor, progress=progress
        )
    with clock("pictures") as progress:
        pictures = _pictures(model, variants["tc"], trajectories, lora, chosen, progress)
    return Demo(
        chosen, model, impact, plan, pack, file, calibration, variants["tc"].report(), ways, trajectories,
        pictures, clock.seconds,
    )  # fmt: skip


def require_same(before: Checkpoint, after: Checkpoint) -> None:
    """Raises HswqError unless both hold the same names with the same bits."""
    if list(before) != list(after) and set(before) != set(after):
        raise HswqError("the saved file holds other names", file=after.path, found=set(before) ^ set(after))
    for name in before:
        a, b = before[name], after[name]
        packed = isinstance(a, PackedWeight) and isinstance(b, PackedWeight)
        same = a.same_bits(b) if packed else a.equal(b)  # type: ignore[union-attr, arg-type]  # told apart by packed
        if not same:
            raise HswqError("the saved file does not come back bit for bit", file=after.path, tensor=name)


def apply_every_way(pack: Model, source: Model, lora: str, progress: Progress) -> dict[str, BakeReport]:
    """Attaches a shipped LoRA as a branch, baked in place and baked from source; detaches it each time.

    Args:
        pack: the packed model; it has no LoRA afterwards.
        source: the 16-bit model.
        lora: name of a LoRA that ships with the model.
        progress: told after each way.
    """
    file = shipped_lora(source, lora)
    reports: dict[str, BakeReport] = {}
    ways: tuple[Way, ...] = ("branch", "bake", "bake_from_source")
    for done, way in enumerate(ways):
        progress(done, len(ways), way)
        one = load_lora(file)
        reports[way] = pack.attach(one, how=way, source=source.checkpoint)
        pack.detach(one)
    progress(len(ways), len(ways), "detached")
    return reports


def shipped_lora(model: Model, name: str) -> str:
    """The path of a LoRA that ships with a model; raises HswqError if there is none of that name."""
    loras = {} if model.companion is None else model.companion.loras
    if name not in loras:
        raise HswqError("the model has no such LoRA", tensor=name, expected=", ".join(loras) or "none ship")
    return loras[name]


def _pictures(
    model: Model, tc: Model, report: TrajectoryReport, lora: str, settings: Settings, progress: Progress
) -> dict[str, list[Run]]:
    """The strip's rows: the comparison's own runs, and both models with the LoRA as a branch."""
    shown = slice(0, settings.shown)
    rows = {"16 bit": report.reference_runs[shown]}
    rows |= {name: runs[shown] for name, runs in report.variant_runs.items()}
    pairs = list(zip(report.prompts[shown], report.seeds[shown], strict=True))
    done, total = 0, 2 * len(pairs)
    for label, base in ((f"16 bit + {lora}", model), (f"tc + {lora}", tc)):
        dressed = base.in_mode(base.request.mode)
        dressed.attach(load_lora(shipped_lora(model, lora)))
        rows[label] = []
        for prompt, seed in pairs:
            progress(done, total, prompt)
            rows[label].append(dressed.generate(prompt, seed, settings.steps))
            done += 1
    progress(total, total, "pictures")
    return rows
