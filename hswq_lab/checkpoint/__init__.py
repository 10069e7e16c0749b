"""Checkpoints: safetensors files in and out, in every layout in the field, as one lazy mapping."""

from __future__ import annotations

from hswq_lab.checkpoint.checking import CheckReport, check
from hswq_lab.checkpoint.checkpoint import Checkpoint
from hswq_lab.checkpoint.comparison import DiffReport, diff
from hswq_lab.checkpoint.conversion import ConvertReport, convert
from hswq_lab.checkpoint.findings import Finding
from hswq_lab.checkpoint.inspection import InspectReport, inspect
from hswq_lab.checkpoint.readings import PRODUCERS, Reading
from hswq_lab.checkpoint.slots import Entry
from hswq_lab.checkpoint.writer import write

__all__ = [
    "PRODUCERS",
    "CheckReport",
    "Checkpoint",
    "ConvertReport",
    "DiffReport",
    "Entry",
    "Finding",
    "InspectReport",
    "Reading",
    "check",
    "convert",
    "diff",
    "inspect",
    "write",
]
