"""Stages of a network that give back what they gave before, while nothing in front of them has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hswq_lab.models.zimage import ZImage

REPLAY_BYTES = 4 * 2**30
"""Outputs kept for replaying; stages beyond this are computed again."""

TIME, IMAGE, CAPTION, JOINT = "time", "image", "caption", "joint"


class Replay:
    """Remembers stage outputs of a reference run, and decides which of them a changed network may reuse.

    In the first step every run starts from the same noise, so all that lies before the changed layer is as it
    was. In later steps that holds for what does not depend on the latent: the time and the caption. A reused
    output is the very tensor that the stage would compute, so reuse changes no bit.

    Args:
        network: a network of one's own; its stages are wrapped in place.
        limit: bytes to keep at most.
    """

    def __init__(self, network: ZImage, limit: int = REPLAY_BYTES) -> None:
        self._limit = limit
        self._places: dict[str, tuple[str, int]] = {}
        self._reference: dict[tuple[object, ...], Tensor] = {}
        self._own: dict[tuple[object, ...], Tensor] = {}
        self._recording = False
        self._changed: list[tuple[str, int]] = []
        self._step = 0
        self._batch = 0
        network.add_module("t_embedder", self._stage(network.t_embedder, "t_embedder", TIME))
        network.add_module("x_embedder", self._stage(network.x_embedder, "x_embedder", IMAGE))
        self._wrap(network.noise_refiner, "noise_refiner", IMAGE)
        network.add_module("cap_embedder", self._stage(network.cap_embedder, "cap_embedder", CAPTION))
        self._wrap(network.context_refiner, "context_refiner", CAPTION)
        self._wrap(network.layers, "layers", JOINT)

    def begin(self, changed: Iterable[str], *, recording: bool = False) -> None:
        """Starts a run in which these layers differ from the reference; recording makes it the reference."""
        self._recording = recording
        self._own = {}
        self._changed = [
            self._places[stage] for stage in map(self._stage_of, changed) if stage in self._places
        ]
        if recording:
            self._reference = {}

    def at(self, step: int, batch: int) -> None:
        """Says which step and which part of the batch comes next."""
        self._step, self._batch = step, batch

    def fetch(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """The output of a stage, remembered or computed."""
        track, _ = self._places[name]
        key: tuple[object, ...] = (name, self._batch, self._step if track == TIME else 0)
        if self._step and track in (IMAGE, JOINT):
            return compute()
        store = self._own if self._recording is False and self._is_behind_a_change(name) else self._reference
        if key not in store:
            value = compute()
            if store is self._own or self._recording:
                self._keep(store, key, value, track)
            return value
        return store[key]

    def _keep(
        self, store: dict[tuple[object, ...], Tensor], key: tuple[object, ...], value: Tensor, track: str
    ) -> None:
        if store is self._own and track != CAPTION:
            return  # within one run nothing else comes twice
        if sum(kept.nbytes for kept in store.values()) + value.nbytes <= self._limit:
            store[key] = value

    def _is_behind_a_change(self, name: str) -> bool:
        return any(_depends(self._places[name], changed) for changed in self._changed)

    def _stage_of(self, layer: str) -> str:
        head, _, rest = layer.partition(".")
        number = rest.partition(".")[0]
        return f"{head}.{number}" if f"{head}.{number}" in self._places else head

    def _wrap(self, stack: nn.ModuleList, name: str, track: str) -> None:
        for number, block in enumerate(stack):
            stack[number] = self._stage(block, f"{name}.{number}", track)

    def _stage(self, inner: nn.Module, name: str, track: str) -> Stage:
        self._places[name] = (track, len(self._places))
        return Stage(inner, name, self)


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


def _depends(stage: tuple[str, int], changed: tuple[str, int]) -> bool:
    """Whether a stage (track, place in order) sees the output of a changed one, or is it."""
    (track, place), (other, other_place) = stage, changed
    if track == other:
        return place >= other_place
    return track == JOINT or (track == IMAGE and other == TIME)
