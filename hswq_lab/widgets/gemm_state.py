"""What GemmBench shows, without widgets: results measured here, stored ones, and the sizes that a person typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import torch

from hswq_lab import bench, ops
from hswq_lab.arguments import path_of
from hswq_lab.bench import gemm
from hswq_lab.errors import HswqError
from hswq_lab.model import named_models

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from hswq_lab.model import Model
    from hswq_lab.progress import Progress

DTYPES: Final = ("bfloat16", "float16", "float32")


class Loaded(NamedTuple):
    """What was found at a place.

    Attributes:
        names: of the results that were read.
        skipped: name of another file → why it was not.
    """

    names: list[str]
    skipped: dict[str, str]


class GemmState:
    """Benchmarks by name: products (`bench.GemmBench`) and pictures (`bench.ModelBench`).

    Args:
        models: name → model, to time whole pictures with; the first is what the others are measured against.
        results: results to begin with.
    """

    def __init__(
        self, models: Mapping[str, Model] | None = None, results: Mapping[str, bench.Bench] | None = None
    ) -> None:
        self.models = named_models({} if models is None else models)
        self.results: dict[str, bench.Bench] = dict(results or {})

    @property
    def products(self) -> dict[str, bench.GemmBench]:
        """The benchmarks of one Linear."""
        return {name: each for name, each in self.results.items() if isinstance(each, bench.GemmBench)}

    def pictures_of(self, products: bench.GemmBench) -> bench.ModelBench | None:
        """The newest benchmark of whole pictures from the same machine."""
        found = [each for each in self.results.values() if isinstance(each, bench.ModelBench)]
        machine = products.machine["name"]
        return next((each for each in reversed(found) if each.machine["name"] == machine), None)

    @staticmethod
    def devices() -> list[str]:
        """Where something can be timed here."""
        return ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]

    @staticmethod
    def backends(device: str) -> list[ops.BackendName]:
        """Back ends that can be compared on a device."""
        known = ops.backends()
        return [
            name for name in cast("tuple[ops.BackendName, ...]", (device, "reference")) if known[name].usable
        ]

    @staticmethod
    def sizes(device: str) -> tuple[str, str]:
        """The shapes and rows to begin with, as a person would type them."""
        card = device == "cuda"
        shapes = gemm.SHAPES_CARD if card else gemm.SHAPES_CPU
        rows = gemm.ROWS_CARD if card else gemm.ROWS_CPU
        return ", ".join(f"{n}×{k}" for n, k in shapes), ", ".join(map(str, rows))

    def run(
        self,
        shapes: str,
        rows: str,
        device: str,
        dtype: str,
        backends: Sequence[ops.BackendName],
        repeats: int,
        progress: Progress,
    ) -> str:
        """Times Linears; returns the result's name.

        Args:
            shapes: "768×256, 256×768": N × K of each weight.
            rows: "1, 16": values of M.
            device: one of `devices`.
            dtype: one of `DTYPES`.
            backends: those to compare; empty: what the device takes by itself.
            repeats: calls for each median.
            progress: see `hl.bench_gemm`.

        Raises:
            HswqError: sizes that cannot be read, or whatever `hl.bench_gemm` raises.
        """
        result = bench.bench_gemm(
            parse_shapes(shapes),
            parse_rows(rows),
            device=device,
            dtype=getattr(torch, dtype),
            backends=backends or None,
            repeats=repeats,
            progress=progress,
        )
        return self._keep(f"this machine, {device}, {dtype}", result)

    def run_pictures(self, steps: int, progress: Progress) -> str:
        """Times a whole picture with every model; returns the result's name.

        Raises:
            HswqError: no models were given.
        """
        if not self.models:
            raise HswqError(
                "there is no model to time a picture with", fix="GemmBench(models={name: model, …})"
            )
        return self._keep(
            "this machine, pictures", bench.bench_model(self.models, steps=steps, progress=progress)
        )

    def load(self, where: str) -> Loaded:
        """Reads a stored result, or every one of a folder; files of a folder that are none are skipped.

        Raises:
            HswqError: nothing is there, or it is no benchmark.
        """
        path = path_of(where.strip(), "a stored benchmark, or a folder of them,")
        skipped: dict[str, str] = {}
        found = _read_folder(path, skipped) if path.is_dir() else {path.stem: bench.read_bench(path)}
        self.results |= found
        return Loaded(list(found), skipped)

    def gains(self, products: bench.GemmBench) -> pd.DataFrame:
        """What is left of a product's speed-up in a whole picture, see `bench.gains`."""
        return bench.gains(products, self.pictures_of(products))

    def _keep(self, name: str, result: bench.Bench) -> str:
        self.results.pop(name, None)  # the newest is the last
        self.results[name] = result
        return name


def _read_folder(folder: Path, skipped: dict[str, str]) -> dict[str, bench.Bench]:
    """The results of a folder; `skipped` takes the other files, with why they are none."""
    found: dict[str, bench.Bench] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = bench.read_bench(file)
        except HswqError as error:
            skipped[file.name] = f"{error.problem}: {error.found}" if error.found else error.problem
    if not found:
        told = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise HswqError(
            "there is no stored benchmark in this folder", file=folder, found=told or "no .json file"
        )
    return found


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Shapes as people type them: 768×256, 256x768 → [(768, 256), (256, 768)].

    Raises:
        HswqError: something else.
    """
    pairs = [re.fullmatch(r"(\d{1,9})\s*[xX×*]\s*(\d{1,9})", part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise HswqError(
            "these are no shapes", found=text, expected="N×K, N×K, … for example 768×256, 256×768"
        )
    return [(int(pair[1]), int(pair[2])) for pair in pairs if pair]


def parse_rows(text: str) -> list[int]:
    """Numbers of rows as people type them: 1, 16 → [1, 16].

    Raises:
        HswqError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise HswqError("these are no numbers of rows", found=text, expected="M, M, … for example 1, 16, 192")
    return [int(part) for part in parts]
