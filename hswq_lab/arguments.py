"""What public functions ask of their plain arguments, so that a slip is one clear sentence and not a traceback."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path

import torch

from hswq_lab.errors import HswqError

_COMPUTING = (torch.float32, torch.bfloat16, torch.float16)


def path_of(value: object, what: str) -> Path:
    """A path, with ~ as a shell reads it; `what` says whose, for the message.

    Raises:
        HswqError: it is neither text nor a path.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        found = "no text" if value == "" else repr(value)[:80]
        raise HswqError(f"{what} is named by its path", found=found, expected="text or a pathlib.Path")
    return Path(os.path.expanduser(value))  # noqa: PTH111 - Path's own raises where a user is unknown


def whole(value: object, what: str, least: int = 1) -> int:
    """A whole number of at least `least`.

    Raises:
        HswqError: it is another number, or none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise HswqError(f"{what} is a whole number from {least} on", found=repr(value)[:80])
    return int(value)


def finite(value: object, what: str) -> float:
    """A finite number.

    Raises:
        HswqError: it is infinite, not a number, or something else.
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise HswqError(f"{what} must be a finite number", found=repr(value)[:80])
    return number


def positive(value: object, what: str) -> float:
    """A finite number above 0.

    Raises:
        HswqError: it is another number, or none.
    """
    if (number := finite(value, what)) <= 0:
        raise HswqError(f"{what} must be a positive number", found=number)
    return number


def texts_of(value: object, what: str, example: str) -> dict[str, str]:
    """A mapping from text to text; `example` shows one.

    Raises:
        HswqError: it is something else, or one of its pairs is.
    """
    if not isinstance(value, Mapping):
        raise HswqError(f"{what} is a mapping", found=repr(value)[:80], expected=example)
    for pair in value.items():
        if not all(isinstance(each, str) for each in pair):
            found = ": ".join(repr(each)[:80] for each in pair)
            raise HswqError(f"{what} maps text to text", found=found, expected=example)
    return dict(value)


def list_of_texts(value: object, what: str, example: str) -> list[str]:
    """A list of texts with at least one in it; `example` shows one.

    Raises:
        HswqError: it is a single text, empty, or something else.
    """
    texts = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if not texts or not all(isinstance(each, str) for each in texts):
        raise HswqError(f"{what} are a list of texts", found=repr(value)[:80], expected=example)
    return texts


def device_of(value: str | torch.device | None) -> torch.device:
    """A device that is usable here; None means a card if there is one, else the CPU.

    Raises:
        HswqError: there is no such device.
    """
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(value or ("cuda" if cards else "cpu"))
    except (RuntimeError, TypeError):
        raise HswqError("unknown device", found=repr(value), expected="cpu, cuda, cuda:1, …") from None
    if device.type == "cuda" and (device.index or 0) >= cards:
        here = f"{cards} CUDA cards" if cards else "no CUDA card, or a torch without CUDA"
        raise HswqError("there is no such card", found=f"{device}; here: {here}", fix="choose another device")
    return device


def activation_dtype(value: object) -> torch.dtype:
    """A dtype that a network can compute in.

    Raises:
        HswqError: it is another one, or none.
    """
    if value not in _COMPUTING:
        raise HswqError(
            "a network computes in fp32, bf16 or fp16", found=repr(value), expected="torch.bfloat16, …"
        )
    assert isinstance(value, torch.dtype)  # noqa: S101 - for the type checker
    return value


def seeds_of(value: object) -> list[int]:
    """A list of seeds.

    Raises:
        HswqError: it is a single number, or something else.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise HswqError("seeds are a list of whole numbers", found=repr(value)[:80], expected="[1, 2, 3]")
    return [whole(seed, "a seed", 0) for seed in value]
