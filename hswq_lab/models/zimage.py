"""The Z-Image family: its sizes, given or read off a checkpoint, and what the rest of the package asks of a family."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hswq_lab.errors import HswqError
from hswq_lab.models.architecture import (
    Architecture,
    LinearFactory,
    Site,
    Track,
    dense_linear,
    linear_layers,
)
from hswq_lab.models.companion import Companion
from hswq_lab.models.mini import mini_companion
from hswq_lab.models.zimage_network import PATCH, ZImage, apply_rope, padded_length, rope_table

__all__ = [
    "FULL",
    "MINI",
    "PATCH",
    "LinearFactory",
    "ZImage",
    "ZImageConfig",
    "apply_rope",
    "dense_linear",
    "linear_layers",
    "padded_length",
    "rope_table",
]


@dataclass(frozen=True)
class ZImageConfig(Architecture):
    """The sizes of one Z-Image network; everything else about the architecture is fixed."""

    family: ClassVar[str] = "Z-Image"
    sign: ClassVar[str] = "cap_embedder.1.weight"
    token: ClassVar[int] = PATCH

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

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        return self.in_channels

    def network(self, linear: LinearFactory = dense_linear) -> ZImage:
        """See `Architecture.network`."""
        return ZImage(self, linear)

    def companion(self) -> Companion | None:
        """That of mini-zimage for a network of its unmistakable sizes."""
        return mini_companion() if self == MINI else None

    def padded_length(self, tokens: int) -> int:
        """The number of tokens after filling up to a multiple of 32."""
        return padded_length(tokens)

    def stages(self) -> dict[str, Track]:
        """See `Architecture.stages`."""
        return {
            "t_embedder": "time",
            "x_embedder": "image",
            **{f"noise_refiner.{i}": "image" for i in range(self.n_refiners)},
            "cap_embedder": "caption",
            **{f"context_refiner.{i}": "caption" for i in range(self.n_refiners)},
            **{f"layers.{i}": "joint" for i in range(self.n_layers)},
            "final_layer": "joint",
        }

    def sites(self) -> Iterator[Site]:
        """See `Architecture.sites`."""
        yield Site(("cap_embedder.1",), "cap_embedder.0.weight")
        stacks = (
            ("noise_refiner", self.n_refiners),
            ("context_refiner", self.n_refiners),
            ("layers", self.n_layers),
        )
        for block in (f"{stack}.{i}" for stack, count in stacks for i in range(count)):
            attention, feed_forward = f"{block}.attention", f"{block}.feed_forward"
            yield Site((f"{attention}.qkv",), f"{block}.attention_norm1.weight")
            # attention.out reads values averaged over tokens: channel by channel the rows of v.
            yield Site((f"{attention}.out",), f"{attention}.qkv.weight", (2 * self.dim, 3 * self.dim))
            yield Site((f"{feed_forward}.w1", f"{feed_forward}.w3"), f"{block}.ffn_norm1.weight")
            yield Site((f"{feed_forward}.w2",), f"{feed_forward}.w3.weight")
        yield Site(("final_layer.linear",), "final_layer.adaLN_modulation.1.weight", offset=True)


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
