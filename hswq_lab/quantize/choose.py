"""Choosing a format for every layer so that the summed impact is small and a budget holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import NamedTuple

from hswq_lab.errors import HswqError


class Option(NamedTuple):
    """One format that a layer may get: its size and what it costs in the final latent."""

    format: str
    nbytes: int
    impact: float


Options = Mapping[str, Sequence[Option]]
"""Layer → its one or two options, the larger first."""


def the_goal(**goals: object) -> str:
    """The one goal that is not None, in words: "bits=5.0".

    Raises:
        HswqError: none or several, or a value that no plan can have.
    """
    given = {name: value for name, value in goals.items() if value is not None}
    if len(given) != 1:
        raise HswqError(
            "a plan needs exactly one goal",
            found=", ".join(f"{name}={value}" for name, value in given.items()) or "none",
            expected=" or ".join(f"{name}=" for name in goals),
        )
    [(name, value)] = given.items()
    whole = name in ("nvfp4", "budget_bytes")
    largest = 1.0 if name == "final_cos" else math.inf
    number = float(value) if isinstance(value, Integral if whole else Real) else math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and 0 <= number <= largest):
        expected = "a whole number from 0" if whole else "a number from 0" + (" to 1" if largest == 1 else "")
        raise HswqError(f"no plan can have this {name}", found=repr(value), expected=expected)
    return f"{name}={value}"


def within_budget(options: Options, limit: int) -> dict[str, str]:
    """A small summed impact within a number of bytes: best impact per byte first, then what fits back.

    Raises:
        HswqError: the smallest choice is larger than the limit.
    """
    chosen = {layer: of_layer[0] for layer, of_layer in options.items()}
    total = sum(option.nbytes for option in chosen.values())
    shrunk = []
    for layer in _by_price(options):
        if total <= limit:
            break
        total -= _saving(options[layer])
        chosen[layer] = options[layer][1]
        shrunk.append(layer)
    if total > limit:
        raise HswqError("no plan is that small", found=f"{limit} bytes", expected=f"at least {total} bytes")
    for layer in sorted(shrunk, key=lambda name: _price_paid(options[name]), reverse=True):
        if total + _saving(options[layer]) <= limit:
            total += _saving(options[layer])
            chosen[layer] = options[layer][0]
    return {layer: option.format for layer, option in chosen.items()}


def smallest_that(options: Options, good: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Shrinks layers, the best impact per byte saved first, as long as the choice stays good.

    Raises:
        HswqError: not even the largest choice is good.
    """
    chosen = {layer: of_layer[0].format for layer, of_layer in options.items()}
    if not good(chosen):
        raise HswqError("no plan reaches that goal", fix="pin the most sensitive layers to 16-bit with keep=")
    for layer in _by_price(options):
        trial = {**chosen, layer: options[layer][1].format}
        if good(trial):
            chosen = trial
    return chosen


def least_sensitive(options: Options, count: int, form: str) -> dict[str, str]:
    """`count` layers in a format, those with the least impact in it; layers with one option keep theirs.

    Raises:
        HswqError: the layers with one option make that impossible.
    """
    fixed = {layer: of_layer[0].format for layer, of_layer in options.items() if len(of_layer) == 1}
    free = {layer: of_layer for layer, of_layer in options.items() if len(of_layer) > 1}
    already = sum(name.startswith(form) for name in fixed.values())
    if not already <= count <= already + len(free):
        raise HswqError(
            f"this number of {form} layers is not possible",
            found=count,
            expected=f"{already} to {already + len(free)} ({already} are pinned to it)",
        )
    ranked = sorted(free, key=lambda layer: free[layer][1].impact)
    small = set(ranked[: count - already])
    return fixed | {layer: of_layer[layer in small].format for layer, of_layer in free.items()}


def _by_price(options: Options) -> list[str]:
    shrinkable = [layer for layer, of_layer in options.items() if len(of_layer) > 1 and _saving(of_layer) > 0]
    return sorted(shrinkable, key=lambda layer: _price_paid(options[layer]) / _saving(options[layer]))


def _price_paid(of_layer: Sequence[Option]) -> float:
    return of_layer[1].impact - of_layer[0].impact


def _saving(of_layer: Sequence[Option]) -> int:
    return of_layer[0].nbytes - of_layer[1].nbytes
