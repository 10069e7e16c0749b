"""JSON from files that anybody may have written."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TypeVar

from hswq_lab.arguments import path_of
from hswq_lab.errors import HswqError

T = TypeVar("T", str, int, float, list[object], dict[str, object])


def read_json(path: str | os.PathLike[str]) -> object:
    """The content of a JSON file.

    Raises:
        HswqError: the file cannot be read, is not JSON, is nested beyond reason, or says one thing twice.
    """
    path = path_of(path, "a JSON file")
    try:
        return json_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HswqError("the file cannot be read", file=path, found=error) from error
    except ValueError as error:
        raise HswqError("the file is not JSON", file=path, found=str(error)[:200]) from error


def json_of(text: str) -> object:
    """The content of a JSON text.

    Raises:
        ValueError: it is not JSON, is nested beyond reason, or says one thing twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError as error:
        raise ValueError("brackets nested too deeply") from error


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of a JSON file; a name that is there twice is a slip, and a ValueError like others in JSON."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the entry {twice!r} is there twice in one object")
    return content


def entry(content: object, key: str, kind: type[T]) -> T:
    """One entry of a JSON object, if it is of the kind that it has to be; a whole number is a float too.

    Raises:
        HswqError: there is no such entry, or it is something else.
    """
    if not isinstance(content, dict) or key not in content:
        raise HswqError("an entry is missing", tensor=key, found=repr(content)[:80])
    return of_kind(content[key], kind, key)


def of_kind(value: object, kind: type[T], name: str) -> T:
    """A value of a JSON file, if it is of the kind that it has to be; a whole number is a float too.

    Raises:
        HswqError: it is something else; `name` says what it was to be.
    """
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            value = "a number beyond fp64"
    if isinstance(value, bool) or not isinstance(value, kind) or value != value:  # noqa: PLR0124 - NaN
        raise HswqError(
            "an entry is of the wrong kind", tensor=name, found=repr(value)[:80], expected=kind.__name__
        )
    return value
