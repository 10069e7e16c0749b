"""Benchmarks that were stored as JSON, read back as the result objects they were."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

from hswq_lab import ops
from hswq_lab.arguments import path_of
from hswq_lab.bench.gemm import TORCH, WHOLE, GemmBench, GemmRow
from hswq_lab.bench.machine import Roofline
from hswq_lab.bench.model import ModelBench, ModelRow
from hswq_lab.errors import HswqError
from hswq_lab.json_file import read_json

Bench: TypeAlias = GemmBench | ModelBench

NOT_RUN: Final = "compiled, not run"


def read_bench(path: str | os.PathLike[str]) -> Bench:
    """A result that `save("x.json")` of a benchmark wrote, or the Linears of a `benchmarks/gpu_kernels.py` file.

    Raises:
        HswqError: the file cannot be read, or is not such a result.
    """
    file = path_of(path, "a stored benchmark")
    content: Any = read_json(file)
    kind = content.get("result") if isinstance(content, dict) else None
    try:
        if kind is None and isinstance(content, dict) and _KERNEL_MARK in content:
            return _kernels(content)
        if kind == "GemmBench":
            return _gemm(content)
        if kind == "ModelBench":
            return _pictures(content)
    except (KeyError, TypeError) as error:
        raise HswqError(
            "a stored benchmark lacks something, or has too much", file=file, found=repr(error),
            fix="measure again with this version of hswq_lab",
        ) from error  # fmt: skip
    raise HswqError(
        "this is no stored benchmark",
        file=file,
        found=kind or "JSON of another kind",
        expected="what the save() of a GemmBench or a ModelBench writes as .json",
    )


def read_benches(folder: str | os.PathLike[str]) -> dict[str, Bench]:
    """File name without suffix → result, for every .json of a folder that says it is a benchmark, in order.

    Raises:
        HswqError: the folder is not there, or one of the files is broken.
    """
    place = path_of(folder, "a folder of stored benchmarks")
    if not place.is_dir():
        raise HswqError("there is no such folder of stored benchmarks", file=place)
    return {path.stem: read_bench(path) for path in sorted(place.glob("*.json")) if _is_benchmark(path)}


def _is_benchmark(path: Path) -> bool:
    """Whether a file says so itself; reports of other kinds may hold the same words further inside."""
    if _MARK.search(path.read_text(errors="replace")) is None:
        return False
    content: Any = read_json(path)
    return isinstance(content, dict) and (content.get("result") in _KINDS or _KERNEL_MARK in content)


_KINDS: Final = ("GemmBench", "ModelBench")
_KERNEL_MARK: Final = "bf16_tflops"
_MARK = re.compile(rf'"result":\s*"({"|".join(_KINDS)})"|"{_KERNEL_MARK}":')


@dataclass(frozen=True)
class TargetRow:
    """One architecture that the extension was compiled for.

    Attributes:
        backend: "cpu" or "cuda".
        target: e.g. "avx512", or "90a" (a CUDA architecture).
        status: where it ran, or "compiled, not run".
    """

    backend: str
    target: str
    status: str


def compiled_targets(results: Iterable[Bench]) -> list[TargetRow]:
    """Every architecture in this build, and whether any of the results was measured with it.

    Nothing is said to run because it compiled: only a result of a matching machine counts.
    """
    found = list(results)
    return [
        TargetRow(name, target, _status(name, target, backend, found))
        for name, backend in ops.backends().items()
        for target in backend.targets
    ]


def _status(name: str, target: str, backend: ops.Backend, results: list[Bench]) -> str:
    if name != "cuda":
        return "in use here" if backend.usable and target == backend.active else "not in use here"
    machines = dict.fromkeys(r.machine["name"] for r in results if _uses(r.machine["name"], target))
    return f"ran: {', '.join(machines)}" if machines else NOT_RUN


def _uses(machine: str, target: str) -> bool:
    """Whether a card takes a target: code is made for a generation, and a card takes its own generation's."""
    capability = re.search(r"capability (\d+)\.", machine)
    number = re.match(r"(\d+)", target)
    return capability is not None and number is not None and int(capability[1]) == int(number[1]) // 10


def _gemm(content: Mapping[str, Any]) -> GemmBench:
    return GemmBench(
        machine=content["machine"],
        roofline=_made(Roofline, content["roofline"]),
        dtype=content["dtype"],
        repeats=content["repeats"],
        rows=[_made(GemmRow, row) for row in content["rows"]],
    )


def _kernels(content: Mapping[str, Any]) -> GemmBench:
    """The Linears among a card's kernels; the bytes and the share of the roofline follow from the sizes."""
    limits = Roofline(content["copy_gb_per_s"] * 1e9, content["bf16_tflops"] * 1e12, "bfloat16")
    rows = [_kernel_row(row, limits) for row in content["rows"] if "linear" in row]
    return GemmBench(content["machine"], limits, limits.dtype, content.get("repeats", 0), rows)


def _kernel_row(row: Mapping[str, Any], limits: Roofline) -> GemmRow:
    op, _, package = row["linear"].partition(", ")  # "w4a16", or "w4a16, comfy-kitchen" for another package's
    m, n, k = row["m"], row["n"], row["k"]
    plain = op == "bf16"
    weight = n * k * _BYTES_A_WEIGHT[op]
    traffic = 2 * (m * k + m * n) + weight
    seconds = row["us"] / 1e6
    return GemmRow(
        op="torch bfloat16" if plain else op,
        stage=WHOLE,
        backend=TORCH if plain else package or "cuda",
        m=m,
        n=n,
        k=k,
        seconds=seconds,
        tflops=row["tflops"],
        gb_per_s=traffic / seconds / 1e9,
        of_roofline=limits.seconds(2 * m * n * k, traffic) / seconds,
        speedup=row["speedup"],
        error=math.nan,
    )


# "w4a8 kept" decodes the weight once and keeps it in FP8.
_BYTES_A_WEIGHT: Final = {
    "bf16": 2,
    "w4a4": 0.5625,
    "w4a8": 0.5625,
    "w4a8 kept": 1,
    "w4a16": 0.5625,
    "int8": 1,
}


def _pictures(content: Mapping[str, Any]) -> ModelBench:
    plain = {name: content[name] for name in ("machine", "prompt", "seed", "steps", "cfg", "repeats")}
    height, width = content["size"]
    return ModelBench(**plain, size=(height, width), rows=[_made(ModelRow, row) for row in content["rows"]])


def _made(kind: type[Any], values: Mapping[str, Any]) -> Any:  # noqa: ANN401  # a dataclass of any kind
    """A dataclass from JSON, where NaN and infinities are null."""
    numbers = {field.name for field in fields(kind) if field.type == "float"}
    return kind(
        **{name: math.nan if value is None and name in numbers else value for name, value in values.items()}
    )
