"""PEFT's patterns of module names: regular expressions out of files, so matched in a time that no file can stretch.

Understood is what names modules: literals, `.`, classes, `^`, `$`, groups of alternatives, repeats of one character.
A match is followed as the set of all positions it may have reached (Thompson 1968), never by trial and error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    from pathlib import Path

_Step: TypeAlias = Callable[[str, set[int]], set[int]]
"""From a text and the positions reached in it to the positions reached one piece of the pattern later."""

_MOST_CHARACTERS, _MOST_GROUPS = 2000, 20
_ATOM = r"[^\\^$.|?*+()\[\]{}]|\.|\\[dDwW]|\\[^\w\s]|\[\^?(?:\w(?:-\w)?|\.|\\[dDwW]|\\[^\w\s])+-?\]"
_TOKENS = re.compile(
    rf"(?P<atom>{_ATOM})|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<bar>\|)|(?P<begin>\^)|(?P<end>\$)"
)
_REPEAT = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<low>\d{1,2})(?P<comma>,(?P<high>\d{1,2})?)?\})\??")
_BOUNDS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class ModulePattern:
    """A pattern of `alpha_pattern` or `rank_pattern`.

    Args:
        text: as the file has it.
        origin: where it is from, for the message.
        file: the same.

    Raises:
        HswqError: it is no regular expression, or one of another kind than names of modules need.
    """

    def __init__(self, text: str, origin: str, file: Path | None = None) -> None:
        self.text, self._origin, self._file = text, origin, file
        if len(text) > _MOST_CHARACTERS or text.count("(") > _MOST_GROUPS:
            raise self._error("too long", text[:80])
        self._match, stopped = self._alternatives(0)
        if stopped < len(text):
            raise self._error("a bracket is closed that is not open", text[stopped:][:20])

    def matches(self, name: str) -> bool:
        """Whether the pattern is the whole name or its end after a dot, as PEFT's get_pattern_key decides it."""
        starts = {0, *(found.end() for found in re.finditer(r"\.", name))}
        return len(name) in self._match(name, starts)

    def _alternatives(self, at: int) -> tuple[_Step, int]:
        """Everything up to a closing bracket or the end, and where that is."""
        branches: list[list[_Step]] = [[]]
        while at < len(self.text):
            token = _TOKENS.match(self.text, at)
            if token is None:
                raise self._error("not understood", self.text[at : at + 20])
            if token["close"]:
                break
            at = token.end()
            if token["bar"]:
                branches.append([])
                continue
            step: _Step
            if token["open"]:
                step, at = self._group(at)
            elif token["atom"]:
                step, at = self._atoms(token.start())
            else:
                step = _at_start if token["begin"] else _at_end
            branches[-1].append(step)
        return _any_of([_sequence(branch) for branch in branches]), at

    def _group(self, at: int) -> tuple[_Step, int]:
        """What is in brackets, perhaps with a `?` behind them."""
        inner, at = self._alternatives(at)
        if at == len(self.text):
            raise self._error("a bracket is not closed", self.text[:80])
        at += 1
        repeat = _REPEAT.match(self.text, at)
        if repeat is None:
            return inner, at
        if repeat["sign"] != "?":
            raise self._error("a repeated group", self.text[at:][:20])
        return _any_of([inner, _sequence([])]), repeat.end()

    def _atoms(self, at: int) -> tuple[_Step, int]:
        """As many characters and classes as stand in a row, or one of them with its repeat."""
        atoms = list(self._row(at))
        text, _, repeat = atoms[0]
        if repeat is not None:
            return _repeated(_one_by_one(self._compiled(text)), *self._times(repeat)), repeat.end()
        plain = [(text, end) for text, end, repeat in atoms if repeat is None]
        return _one_by_one(self._compiled("".join(text for text, _ in plain))), plain[-1][1]

    def _times(self, repeat: re.Match[str]) -> tuple[int, int | None]:
        """The least and the most times of a repeat; None for any number."""
        if repeat["sign"]:
            return _BOUNDS[repeat["sign"]]
        low = int(repeat["low"])
        if not repeat["comma"]:
            return low, low
        high = int(repeat["high"]) if repeat["high"] else None
        if high is not None and high < low:
            raise self._error("a repeat of more times than its most", repeat[0])
        return low, high

    def _row(self, at: int) -> Iterator[tuple[str, int, re.Match[str] | None]]:
        """(text, its end, its repeat) of the characters and classes from here, up to the first with a repeat."""
        repeat = None
        while repeat is None and (token := _TOKENS.match(self.text, at)) is not None and token["atom"]:
            at = token.end()
            repeat = _REPEAT.match(self.text, at)
            yield token["atom"], at, repeat

    def _compiled(self, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text, re.DOTALL)
        except re.error as error:
            raise self._error(str(error), text[:80]) from error

    def _error(self, reason: str, found: str) -> HswqError:
        return HswqError(
            f"a pattern of module names is not understood: {reason}",
            file=self._file,
            tensor=self._origin,
            found=f"{found!r} in {self.text[:120]!r}",
            expected="names with ^, $, dots, classes, (alternatives), and repeats of one character",
            fix="write the names out in the settings",
        )


def _at_start(_text: str, places: set[int]) -> set[int]:
    return places & {0}


def _at_end(text: str, places: set[int]) -> set[int]:
    return places & {len(text)}


def _one_by_one(row: re.Pattern[str]) -> _Step:
    """A row of characters and classes; without repeats it is of one length and cannot be tried in two ways."""

    def step(text: str, places: set[int]) -> set[int]:
        return {found.end() for place in places if (found := row.match(text, place)) is not None}

    return step


def _repeated(one: _Step, low: int, high: int | None) -> _Step:
    def step(text: str, places: set[int]) -> set[int]:
        for _ in range(low):
            places = one(text, places)
        reached, fresh, times = set(places), places, low
        while fresh and (high is None or times < high):
            fresh = one(text, fresh) - reached  # what was reached before has had more repeats left
            reached |= fresh
            times += 1
        return reached

    return step


def _sequence(steps: list[_Step]) -> _Step:
    return lambda text, places: reduce(lambda now, step: step(text, now), steps, places)


def _any_of(steps: list[_Step]) -> _Step:
    if len(steps) == 1:
        return steps[0]
    return lambda text, places: set().union(*(step(text, places) for step in steps))
