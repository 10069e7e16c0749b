"""Which implementation of the kernels runs: what is built, what is usable here, what a caller has asked for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from hswq_lab.errors import HswqError

BackendName = Literal["reference", "cpu", "cuda"]


def _load() -> tuple[ModuleType | None, str]:
    """The extension, or why there is none; HSWQ_LAB_ISA limits the instruction sets that it uses."""
    if importlib.util.find_spec("hswq_lab._C") is None:
        note = Path(__file__).with_name("_C_missing.txt")
        reason = (
            note.read_text(encoding="utf-8").strip()
            if note.is_file()
            else "no hswq_lab/_C in this installation"
        )
        return None, f"the extension is not built ({reason}); run pip install again where a C++ compiler is"
    try:
        extension = importlib.import_module("hswq_lab._C")
    except ImportError as error:
        warnings.warn(f"hswq_lab._C is there but cannot be loaded: {error}", RuntimeWarning, stacklevel=2)
        return None, f"the extension cannot be loaded ({error})"
    asked = os.environ.get("HSWQ_LAB_ISA", "")
    try:
        extension.limit_isa(asked)
    except ValueError:
        known = "baseline | avx2 | avx512 | amx"
        raise HswqError("HSWQ_LAB_ISA names no instruction set", found=asked, expected=known) from None
    return extension, ""


native, _missing = _load()


@dataclass(frozen=True)
class Backend:
    """One implementation of the kernels.

    Attributes:
        name: "reference" (pure torch, any device), "cpu" or "cuda".
        built: whether it is in this installation.
        usable: whether it can run on this machine.
        targets: instruction sets (cpu) or architectures (cuda) that are built in, best last.
        active: the instruction set or card that is used, "" if none.
        native_fp4: whether W4A4 runs on FP4 tensor cores here; elsewhere other means give the same numbers.
        why: the reason why it is not built or not usable, "" if it is.
    """

    name: BackendName
    built: bool
    usable: bool
    targets: tuple[str, ...]
    active: str
    native_fp4: bool
    why: str


def backends() -> dict[str, Backend]:
    """What is built and what is usable here, by name."""
    reference = Backend("reference", True, True, (), f"torch {torch.__version__}", False, "")
    return {"reference": reference, "cpu": _cpu(), "cuda": _cuda()}


def describe_backends() -> str:
    """`backends` as text, a line each."""
    lines = []
    for backend in backends().values():
        state = "ready" if backend.usable else ("built" if backend.built else "not built")
        detail = ", ".join(
            filter(None, (backend.active, "built for " + " ".join(backend.targets), backend.why))
        )
        lines.append(f"{backend.name:<10} {state:<10} {detail}")
    return "\n".join(lines)


def _cpu() -> Backend:
    if native is None:
        return Backend("cpu", False, False, (), "", False, _missing)
    return Backend("cpu", True, True, tuple(native.built_isas()), native.isa(), False, "")


def _cuda() -> Backend:
    if native is None or not native.cuda_built:
        return Backend(
            "cuda", False, False, (), "", False, _missing if native is None else native.cuda_reason
        )
    targets = tuple(native.cuda_targets.split(","))
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA card" if torch.version.cuda else "this torch is a CPU build"
        return Backend("cuda", True, False, targets, "", False, reason)
    device = torch.cuda.current_device()
    card = torch.cuda.get_device_name(device)
    if not _card_is_usable(device):
        reason = f"{card} is older than compute capability 8.0"
        return Backend("cuda", True, False, targets, "", False, reason)
    no_fp4 = native.cuda.probe_fp4(device)
    # No machine of ours has such a card: honest until somebody reports a run.
    fp4 = (
        f"FP4 products emulated: {no_fp4}" if no_fp4 else "FP4 products by cuBLASLt (compiled, not run by us)"
    )
    return Backend("cuda", True, True, targets, f"{card}; {fp4}", not no_fp4, "")


@cache
def _card_is_usable(device: int) -> bool:
    return hasattr(native, "cuda") and torch.cuda.get_device_capability(device) >= (8, 0)


_asked: ContextVar[BackendName | None] = ContextVar("hswq_lab_backend", default=None)


@contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Within this context every op runs in the named implementation, or raises; for tests and comparisons.

    Args:
        name: "reference", "cpu" or "cuda".

    Raises:
        HswqError: there is no such back end, or it cannot run here.
    """
    known = backends()
    if name not in known:
        raise HswqError("unknown back end", found=name, expected=" | ".join(known))
    if not known[name].usable:
        raise HswqError(f"the back end {name!r} cannot be used here", found=known[name].why)
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


def asked_backend() -> BackendName | None:
    """The back end that `use_backend` asked for in this context, None outside of one."""
    return _asked.get()


def backend_for(device: torch.device) -> BackendName:
    """The back end that runs an op on tensors of this device now.

    Raises:
        HswqError: `use_backend` asked for one that does not serve this device.
    """
    asked = _asked.get()
    if asked is None:
        if device.type == "cuda" and _card_is_usable(device.index or 0):
            return "cuda"
        return "cpu" if device.type == "cpu" and native is not None else "reference"
    if asked not in ("reference", device.type):
        raise HswqError(
            f"the back end {asked!r} was asked for, but the tensors are elsewhere", found=str(device)
        )
    return asked
