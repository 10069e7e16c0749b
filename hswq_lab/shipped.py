"""Files that ship with the package, and the name that stands for its small model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from hswq_lab.arguments import path_of
from hswq_lab.errors import HswqError

MINI_NAME = "mini-zimage"
MINI_WEIGHTS = "mini_zimage.safetensors.index.json"


def asset(name: str) -> Path:
    """The path of a file that ships with the package.

    Raises:
        HswqError: it is not there, so the installation is damaged.
    """
    path = Path(str(files("hswq_lab") / "assets" / name))
    if not path.exists():
        raise HswqError("a file of the package is missing", file=path, fix="install hswq_lab again")
    return path


def checkpoint_path(value: object) -> Path:
    """A checkpoint's path as it was given; for the small model's name, the file that ships with the package.

    Raises:
        HswqError: it is neither text nor a path.
    """
    path = path_of(value, "a checkpoint")
    return asset(MINI_WEIGHTS) if str(value) == MINI_NAME and not path.exists() else path
