"""The sizes of a Z-Image network, given or read off a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hswq_lab.errors import HswqError

PATCH = 2


@dataclass(frozen=True)
class ZImageConfig:
    """The sizes of one Z-Image network; everything else about the architecture is fixed."""

    dim: int
    n_layers: int
    n_refiners: int
    head_dim: int
    ffn_dim: int
    cap_dim: int
    in_channels: int = 16
    time_dim: int = 256
    time_hidden: int = 1024

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1 or self.head_dim % 16 or self.dim % self.head_dim:
            raise HswqError(
                "these sizes make no Z-Image network",
                found=f"dim {self.dim}, head dimension {self.head_dim}; {self}",
                expected="positive sizes, a head dimension that is a multiple of 16 and divides dim",
            )

    @property
    def n_heads(self) -> int:
        """Attention heads of a block."""
        return self.dim // self.head_dim

    @property
    def axes_dims(self) -> tuple[int, int, int]:
        """Rotary dimensions of caption position, row, column: a quarter and twice three eighths of a head."""
        return self.head_dim // 4, self.head_dim * 3 // 8, self.head_dim * 3 // 8

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> ZImageConfig:
        """Read the sizes off the (logical, unpacked) shapes of a checkpoint's native parameters.

        Args:
            shapes: parameter name without prefix -> shape; names that say nothing about a size are ignored.

        Raises:
            HswqError: a parameter is missing that a size is read from, or the sizes contradict each other.
        """
        dim, patch_values = _matrix(shapes, "x_embedder.weight")
        time_dim, time_hidden = _matrix(shapes, "t_embedder.mlp.2.weight")
        return cls(
            dim=dim,
            n_layers=_count_blocks(shapes, "layers"),
            n_refiners=_count_blocks(shapes, "noise_refiner"),
            head_dim=math.prod(_shape(shapes, "layers.0.attention.q_norm.weight")),
            ffn_dim=_matrix(shapes, "layers.0.feed_forward.w1.weight")[0],
            cap_dim=_matrix(shapes, "cap_embedder.1.weight")[1],
            in_channels=patch_values // PATCH**2,
            time_dim=time_dim,
            time_hidden=time_hidden,
        )


FULL = ZImageConfig(dim=3840, n_layers=30, n_refiners=2, head_dim=128, ffn_dim=10240, cap_dim=2560)
MINI = ZImageConfig(dim=256, n_layers=8, n_refiners=1, head_dim=64, ffn_dim=768, cap_dim=512)


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise HswqError(
            "this is no Z-Image checkpoint: a parameter is missing",
            tensor=name,
            expected="native names without prefix, such as layers.0.attention.qkv.weight",
        )
    return tuple(shapes[name])


def _matrix(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    shape = _shape(shapes, name)
    if len(shape) != 2:
        raise HswqError("a Linear's weight is no matrix", tensor=name, found=list(shape), expected="[N, K]")
    return shape[0], shape[1]


def _count_blocks(shapes: Iterable[str], stack: str) -> int:
    pattern = re.compile(rf"{stack}\.([0-9]{{1,6}})\.")
    numbers = {int(match[1]) for match in map(pattern.match, shapes) if match}
    if numbers != set(range(len(numbers))) or not numbers:
        raise HswqError(
            f"the blocks of {stack} are not numbered 0, 1, 2, …", tensor=stack, found=sorted(numbers)
        )
    return len(numbers)
