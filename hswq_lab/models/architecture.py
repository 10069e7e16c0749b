"""What the package has to know of a model family: one class each; an instance is the family at one size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

if TYPE_CHECKING:
    from hswq_lab.models.companion import Companion

LinearFactory = Callable[[str, int, int, bool], nn.Module]
"""(layer name, in_features, out_features, bias) -> the module that stands for this Linear."""

Track = Literal["time", "image", "caption", "joint"]
"""What a stage depends on: the time; the image so far, and the time; the caption so far; everything so far."""


def dense_linear(_name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:  # noqa: FBT001
    """The default factory: an ordinary torch Linear."""
    return nn.Linear(in_features, out_features, bias)


@dataclass(frozen=True)
class Site:
    """A place where input channels can be rescaled by s without a change of the network's function.

    Attributes:
        linears: layers that read the same input; their columns are multiplied by s.
        source: the tensor that the input is proportional to, channel by channel: a norm's weight, or the rows
            of a Linear in front; divided by s.
        rows: the rows of the source that are meant, (first, behind the last); None: all.
        offset: whether the input is proportional to 1 + source · … + bias (the final layer's modulation).
    """

    linears: tuple[str, ...]
    source: str
    rows: tuple[int, int] | None = None
    offset: bool = False


class Architecture(ABC):
    """A model family at one size. A family is a frozen dataclass of its sizes, and a line in `families.FAMILIES`.

    What is not abstract has a default that is right for every family, and that a family states to get more.

    Attributes:
        family: what messages call it.
        sign: a parameter's name by which its checkpoints are told from those of other families.
        token: side of a token in latent cells.
        pixels_per_latent, picture_size, shift: of a model without a companion: side of a latent cell and default
            (height, width) of a picture in pixels, default noise shift.
    """

    family: ClassVar[str]
    sign: ClassVar[str]
    token: ClassVar[int] = 1
    pixels_per_latent: ClassVar[int] = 8
    picture_size: ClassVar[tuple[int, int]] = (1024, 1024)
    shift: ClassVar[float] = 3.0

    @classmethod
    @abstractmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Reads the sizes off the (logical, unpacked) shapes of a checkpoint: native name without prefix → shape.

        Raises:
            HswqError: a parameter is missing that a size is read from, or the sizes contradict each other.
        """

    @property
    @abstractmethod
    def latent_channels(self) -> int:
        """Channels of a latent."""

    @abstractmethod
    def network(self, linear: LinearFactory = dense_linear) -> nn.Module:
        """The network, its Linears made by the factory in network order; its parameters have the native names.

        It maps (latents [B, latent_channels, H, W], t [B] = 1 − sigma, captions: B feature matrices [L_i, cap_dim])
        to x0 − ε, of the latents' shape.
        """

    def companion(self) -> Companion | None:
        """Text encoder, codec and defaults of a model that ships with the package."""
        return None

    def padded_length(self, tokens: int) -> int:
        """How long a caption of so many tokens is in the network; equal ones run in one batch."""
        return tokens

    def stages(self) -> Mapping[str, Track]:
        """Submodules in the order in which a pass calls each of them once → what their output depends on.

        Sensitivity takes their outputs from an earlier run where nothing in front of them has changed.
        """
        return {}

    def sites(self) -> Iterable[Site]:
        """Where `smooth` can move magnitude from inputs to weights, in network order."""
        return ()


def linear_layers(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Every Linear of the network, in network order: layer name -> (out_features N, in_features K)."""
    return dict(_linear_layers(architecture))


@cache  # it is asked for at every layer of a report, and takes ten milliseconds at full size
def _linear_layers(architecture: Architecture) -> tuple[tuple[str, tuple[int, int]], ...]:
    found: dict[str, tuple[int, int]] = {}

    def record(name: str, in_features: int, out_features: int, _bias: bool) -> nn.Module:  # noqa: FBT001
        found[name] = (out_features, in_features)
        return nn.Identity()

    with torch.device("meta"):
        architecture.network(record)
    return tuple(found.items())
