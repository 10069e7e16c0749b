"""hswq_lab: a workbench for what 4-bit quantisation does to a diffusion transformer."""

from __future__ import annotations

from hswq_lab.errors import Cancelled, HswqError

__all__ = ["Cancelled", "HswqError"]
__version__ = "0.1.0"
