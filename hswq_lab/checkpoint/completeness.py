"""Whether a checkpoint holds every parameter of the model that it is of, and in its shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hswq_lab.checkpoint.findings import Finding
from hswq_lab.errors import HswqError
from hswq_lab.models.families import architecture_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def completeness(shapes: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """Compare names and logical shapes with those of the network whose sizes they state.

    Args:
        shapes: native name → shape.
    """
    try:
        architecture = architecture_of(shapes)
    except HswqError as error:
        problem = "not a model that is known here, so nobody can tell whether something is missing"
        return [Finding("info", "family", problem, error.tensor, error.problem)]
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in architecture.network().state_dict().items()}
    findings = []
    for name, shape in wanted.items():
        found = shapes.get(name)
        # A pad token is [dim] in some files and [1, dim] in others; both load.
        same = found == shape or (found is not None and "pad_token" in name and math.prod(found) == shape[-1])
        if not same:
            problem = "the model's parameter is missing" if found is None else "a parameter has a wrong shape"
            told = None if found is None else str(list(found))
            findings.append(Finding("error", "family", problem, name, told, str(list(shape))))
    others = [name for name in shapes if name not in wanted]
    if others:
        problem = f"{len(others)} tensors that the model does not have; they are kept"
        findings.append(Finding("info", "family", problem, others[0], ", ".join(others[:5])))
    return findings
