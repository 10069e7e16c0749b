"""Stages of a network that give back what they gave before, while nothing in front of them has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hswq_lab.models.architecture import Track

REPLAY_BYTES = 4 * 2**30
"""Outputs kept for replaying; stages beyond this are computed again."""


class Replay:
    """Remembers stage outputs of a reference run, and decides which of them a changed network may reuse.

    In the first step every run starts from the same noise, so all that lies before the changed layer is as it
    was. In later steps that holds for what does not depend on the latent: the time and the caption. A reused
    output is the very tensor that the stage would compute, so reuse changes no bit.

    Args:
        network: a network of one's own; its stages are wrapped in place.
        stages: from its `Architecture.stages`.
        limit: bytes to keep at most.
    """

    def __init__(self, network: nn.Module, stages: Mapping[str, Track], limit: int = REPLAY_BYTES) -> None:
        self._limit = limit
        self._places = {name: (track, place) for place, (name, track) in enumerate(stages.items())}
        self._reference: dict[tuple[object, ...], Tensor] = {}
        self._own: dict[tuple[object, ...], Tensor] = {}
        self._recording = False
        self._changed: list[tuple[Track, int] | None] = []
        self._step = 0
        self._batch = 0
        for name in stages:
            owner, _, attribute = name.rpartition(".")
            network.get_submodule(owner).add_module(attribute, Stage(network.get_submodule(name), name, self))

    def begin(self, changed: Iterable[str], *, recording: bool = False) -> None:
        """Starts a run in which these layers differ from the reference; recording makes it the reference."""
        self._recording = recording
        self._own = {}
        self._changed = [self._place_of(layer) for layer in changed]
        if recording:
            self._reference = {}

    def at(self, step: int, batch: int) -> None:
        """Says which step and which part of the batch comes next."""
        self._step, self._batch = step, batch

    def fetch(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """The output of a stage, remembered or computed."""
        track, _ = self._places[name]
        key: tuple[object, ...] = (name, self._batch, self._step if track == "time" else 0)
        if self._step and track in ("image", "joint"):
            return compute()
        store = self._own if self._recording is False and self._is_behind_a_change(name) else self._reference
        if key not in store:
            value = compute()
            if store is self._own or self._recording:
                self._keep(store, key, value, track)
            return value
        return store[key]

    def _keep(
        self, store: dict[tuple[object, ...], Tensor], key: tuple[object, ...], value: Tensor, track: Track
    ) -> None:
        if store is self._own and track != "caption":
            return  # within one run nothing else comes twice
        if sum(kept.nbytes for kept in store.values()) + value.nbytes <= self._limit:
            store[key] = value

    def _is_behind_a_change(self, name: str) -> bool:
        return any(_depends(self._places[name], changed) for changed in self._changed)

    def _place_of(self, layer: str) -> tuple[Track, int] | None:
        inside = (place for stage, place in self._places.items() if f"{layer}.".startswith(f"{stage}."))
        return next(inside, None)


class Stage(nn.Module):
    """A module whose output a `Replay` may know already."""

    def __init__(self, inner: nn.Module, name: str, replay: Replay) -> None:
        super().__init__()
        self.inner = inner
        self.name = name
        self._replay = replay

    def forward(self, *args: object) -> Tensor:
        """What the inner module gives."""
        return self._replay.fetch(self.name, lambda: cast("Tensor", self.inner(*args)))


def _depends(stage: tuple[Track, int], changed: tuple[Track, int] | None) -> bool:
    """Whether a stage (track, place in order) sees the output of a changed one, or is it; None: outside of all."""
    if changed is None:
        return True
    (track, place), (other, other_place) = stage, changed
    if track == other:
        return place >= other_place
    return track == "joint" or (track == "image" and other == "time")
