"""hswq_lab: a workbench for what 4-bit quantisation does to a diffusion transformer.

Public names are imported when they are first used, so that `hswq-lab --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hswq_lab.errors import Cancelled, HswqError

if TYPE_CHECKING:
    from hswq_lab import ops, widgets
    from hswq_lab.bench import bench_gemm, bench_model
    from hswq_lab.checkpoint import Checkpoint, check, diff, inspect
    from hswq_lab.checkup import doctor
    from hswq_lab.executors import local_pool
    from hswq_lab.export import save_figure
    from hswq_lab.jobs import Job
    from hswq_lab.loading import load, save
    from hswq_lab.lora import load_lora
    from hswq_lab.model import Model
    from hswq_lab.quantize.calibrate import calibrate
    from hswq_lab.quantize.in_place import module_report, pack_module
    from hswq_lab.quantize.pack import pack
    from hswq_lab.quantize.plan import Plan
    from hswq_lab.quantize.sensitivity import sensitivity
    from hswq_lab.spec import purge
    from hswq_lab.trajectory.compare import compare
    from hswq_lab.trajectory.seeds import SEEDS_20

_HOMES = {
    "Checkpoint": "checkpoint",
    "Job": "jobs",
    "Model": "model",
    "Plan": "quantize",
    "SEEDS_20": "trajectory",
    "bench_gemm": "bench",
    "bench_model": "bench",
    "calibrate": "quantize",
    "check": "checkpoint",
    "compare": "trajectory",
    "diff": "checkpoint",
    "doctor": "checkup",
    "inspect": "checkpoint",
    "load": "loading",
    "load_lora": "lora",
    "local_pool": "executors",
    "module_report": "quantize.in_place",
    "pack": "quantize",
    "pack_module": "quantize.in_place",
    "purge": "spec",
    "save": "loading",
    "save_figure": "export",
    "sensitivity": "quantize",
}
_MODULES = ("ops", "widgets")

__all__ = [
    "SEEDS_20",
    "Cancelled",
    "Checkpoint",
    "HswqError",
    "Job",
    "Model",
    "Plan",
    "bench_gemm",
    "bench_model",
    "calibrate",
    "check",
    "compare",
    "diff",
    "doctor",
    "inspect",
    "load",
    "load_lora",
    "local_pool",
    "module_report",
    "ops",
    "pack",
    "pack_module",
    "purge",
    "save",
    "save_figure",
    "sensitivity",
    "widgets",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"hswq_lab.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hswq_lab' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hswq_lab.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
