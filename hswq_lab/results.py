"""What every result object can do: become a table, a figure, a dict, a file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from hswq_lab.arguments import path_of
from hswq_lab.errors import HswqError
from hswq_lab.partial import write_whole

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


SAVED_AS = (".json", ".csv", ".html", ".png", ".svg", ".pdf")
"""Suffixes of the files that a result can be saved as."""


class Result:
    """Base of the result dataclasses. A subclass is a dataclass and says how it becomes a table.

    Attributes:
        computed: names of properties that files hold beside the fields: a verdict, warnings, notes.
    """

    computed: ClassVar[tuple[str, ...]] = ()

    def to_frame(self) -> pd.DataFrame:
        """The rows of this result as a table."""
        raise NotImplementedError

    def figure(self) -> go.Figure:
        """The plot of this result."""
        # The one upward import of the package: plots know every result, results know no plot.
        from hswq_lab.plots import figure_of  # noqa: PLC0415

        return figure_of(self)

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes: NaN and infinities are None, tensors are lists."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        content = {field.name: json_ready(getattr(self, field.name)) for field in fields if is_saved(field)}
        told = {name: json_ready(getattr(self, name)) for name in self.computed}
        return {"result": type(self).__name__, **told, **content}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes .json, .csv or .html (always possible), or .png, .svg, .pdf of the figure (needs a browser).

        Raises:
            HswqError: no path, an unknown suffix, or a picture is asked for where no browser can be found.
        """
        target = path_of(path, "a result's file")
        match target.suffix.lower():
            case ".json":
                write_text(target, json.dumps(self.to_dict(), indent=1, allow_nan=False))
            case ".csv":
                write_text(target, self.to_frame().to_csv(index=False))
            case ".html":
                from hswq_lab.page import result_page  # noqa: PLC0415 - pages know results

                result_page(self).write(target)
            case ".png" | ".svg" | ".pdf":
                from hswq_lab.export import save_figure  # noqa: PLC0415 - export imports this module

                save_figure(self.figure(), target)
            case other:
                raise HswqError(
                    "a result cannot be saved in this form",
                    file=target,
                    found=other or "no suffix",
                    expected=", ".join(SAVED_AS),
                )
        return target


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all; lone surrogates, which come from file names, as escapes."""
    write_whole(path, text.encode("utf-8", errors="backslashreplace"))


def is_saved(field: dataclasses.Field[Any]) -> bool:
    """Whether a field belongs in a file; `field(metadata={"saved": False})` marks latents and other bulk."""
    return bool(field.metadata.get("saved", True))


def json_ready(value: Any) -> Any:  # noqa: ANN401, PLR0911 - anything comes in, a case each
    """Turns dataclasses, tensors, arrays, paths and non-finite numbers into what strict JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, torch.Tensor):
        return json_ready(value.detach().float().cpu().numpy())
    if isinstance(value, np.ndarray):
        return json_ready(value.tolist())
    if isinstance(value, np.generic):
        return json_ready(value.item())
    if isinstance(value, Result):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if is_saved(field)]
        return {field.name: json_ready(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(item) for item in value]
    return str(value)
