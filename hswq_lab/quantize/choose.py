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
"""Layer → its options."""


class _Step(NamedTuple):
    """From one option of a layer to a smaller one."""

    layer: str
    before: Option
    after: Option

    @property
    def saving(self) -> int:
        return self.before.nbytes - self.after.nbytes

    @property
    def price(self) -> float:
        return self.after.impact - self.before.impact


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


def within_budget(options: Options, limit: int, weights: int) -> dict[str, str]:
    """A small summed impact within a number of bytes: best impact per byte first, then what fits back.

    Args:
        options: of every layer.
        limit: bytes.
        weights: how many there are in all, for the message.

    Raises:
        HswqError: the smallest choice is larger than the limit.
    """
    chosen = {layer: _largest(of_layer) for layer, of_layer in options.items()}
    total = sum(option.nbytes for option in chosen.values())
    taken = []
    for step in _by_price(options):
        if total <= limit and step.price > 0:
            break
        total -= step.saving
        chosen[step.layer] = step.after
        taken.append(step)
    if total > limit:
        found, least = (f"{size} bytes ({8 * size / weights:.3f} bits a weight)" for size in (limit, total))
        raise HswqError(
            "no plan is that small",
            found=found,
            expected=f"at least {least}",
            fix="pin fewer layers, measure those that stay 16-bit because they were not, or allow more",
        )
    for step in sorted(taken, key=lambda step: step.price, reverse=True):
        if step.price > 0 and total + step.saving <= limit and chosen[step.layer] is step.after:
            total += step.saving
            chosen[step.layer] = step.before
    return {layer: option.format for layer, option in chosen.items()}


def smallest_that(options: Options, good: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Shrinks layers, the best impact per byte saved first, as long as the choice stays good.

    Raises:
        HswqError: not even the largest choice is good.
    """
    chosen = {layer: _largest(of_layer).format for layer, of_layer in options.items()}
    if not good(chosen):
        raise HswqError("no plan reaches that goal", fix="pin the most sensitive layers to 16-bit with keep=")
    for step in _by_price(options):
        trial = {**chosen, step.layer: step.after.format}
        if chosen[step.layer] == step.before.format and good(trial):
            chosen = trial
    return chosen


def least_sensitive(options: Options, count: int, form: str) -> dict[str, str]:
    """`count` layers in a format, those with the least impact in it; layers with one option keep theirs.

    The others have two: that format is the second.

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


def _largest(of_layer: Sequence[Option]) -> Option:
    return max(of_layer, key=lambda option: option.nbytes)


def _by_price(options: Options) -> list[_Step]:
    """All steps worth taking, the least impact per byte saved first; those of a layer follow each other."""
    steps = [step for layer, of_layer in options.items() for step in _steps(layer, of_layer)]
    return sorted(steps, key=lambda step: step.price / step.saving)


def _steps(layer: str, of_layer: Sequence[Option]) -> list[_Step]:
    """Down the lower convex hull of a layer's sizes and impacts: each step costs more per byte than the last."""
    steps, at = [], _largest(of_layer)
    while smaller := [option for option in of_layer if option.nbytes < at.nbytes]:
        step = min(
            (_Step(layer, at, option) for option in smaller), key=lambda step: step.price / step.saving
        )
        steps.append(step)
        at = step.after
    return steps
