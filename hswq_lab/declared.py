"""One LoRA as it is declared on a model, and the declarations that are refused before anything is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal, get_args

import torch

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.checkpoint.baked import baked_loras
from hswq_lab.checkpoint.smoothed import SMOOTH_KEY
from hswq_lab.errors import HswqError
from hswq_lab.lora import LayerDelta, LoraFile
from hswq_lab.lora.targets import TargetIndex

if TYPE_CHECKING:
    from hswq_lab.lora.evidence import Verdict

Way = Literal["branch", "bake", "bake_from_source"]

_MOST_GAIN = 1000.0


@dataclass(frozen=True, eq=False)
class Attachment:
    """One LoRA as it was declared.

    Attributes:
        allow_unmatched: go on although keys of the file match no layer.
        allow_baked: go on although the checkpoint's metadata say that LoRAs are baked into it already: bake more
            into it, or add one of them once more; or although a LoRA attached before shares its origin.
        verdict: of the evidence when it was attached; None if it has not been measured since it was declared.

    Raises (in the constructor):
        HswqError: an unknown way, a strength that is not finite, "bake_from_source" without a source, or another source
            than a checkpoint.
    """

    lora: LoraFile
    strength: float
    how: Way
    source: Checkpoint | None = None
    allow_unmatched: bool = False
    allow_baked: bool = False
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        if self.how not in get_args(Way):
            raise HswqError(
                "unknown way to apply a LoRA", found=repr(self.how), expected=", ".join(get_args(Way))
            )
        if not torch.isfinite(torch.tensor(self.strength)):
            raise HswqError(
                "a LoRA's strength must be a finite number", file=self.lora.path, found=self.strength
            )
        if self.source is not None:
            check_checkpoint(self.source, "source")
        if self.how == "bake_from_source" and self.source is None:
            raise HswqError(
                "baking from source needs the 16-bit checkpoint",
                file=self.lora.path,
                fix="give source=, or use 'bake'",
            )

    def __str__(self) -> str:
        return f"{self.lora.name} ×{self.strength:g} ({self.how})"


def check_checkpoint(value: object, what: str) -> None:
    """Raises HswqError for anything but opened weights; `what` they are for, for the message."""
    if not isinstance(value, Checkpoint):
        raise HswqError(f"this is no {what}", found=repr(value)[:80], fix="open it with hl.load(...) first")


def refuse_mixtures(items: Sequence[Attachment]) -> None:
    """Two ways of baking, or two sources, on one model would make its weights depend on the order of the LoRAs."""
    ways = {item.how for item in items} - {"branch"}
    if len(ways) > 1:
        raise HswqError(
            "LoRAs baked in place and LoRAs baked from source cannot be on one model",
            found=", ".join(str(item) for item in items),
            fix="bake all of them the same way",
        )
    sources = {id(item.source): item.source for item in items if item.source is not None}
    if len(sources) > 1 and len({source.sha256 for source in sources.values()}) > 1:  # reads the files
        raise HswqError(
            "LoRAs with different sources cannot be on one model",
            found=", ".join(
                f"{item} from {item.source.path or 'memory'}" for item in items if item.source is not None
            ),
            expected="the one 16-bit checkpoint that the pack was made from",
            fix="give the same source= to all of them",
        )


def refuse_twice(items: Sequence[Attachment]) -> None:
    """One LoRA attached twice, or beside what it was converted or merged into, of which it is a part already."""
    for before, item in combinations(items, 2):
        if before.lora.sha256 == item.lora.sha256:
            raise HswqError(
                "this LoRA is attached already",
                file=item.lora.path,
                fix="change its strength, or detach it first",
            )
        here, there = ({each.lora.sha256} | each.lora.made_of for each in (item, before))
        if here & there and not item.allow_baked:
            raise HswqError(
                "one LoRA is in this one and in one that is attached already, and would apply twice",
                file=item.lora.path,
                tensor=item.lora.name,
                found=f"both were made of it, or one of the other: {before.lora.name}, {item.lora.name}",
                fix="detach the other one first, or say allow_baked=True (--allow-baked on the command line)",
            )


def refuse_absurd(item: Attachment, layers: Mapping[str, tuple[int, int]]) -> None:
    """A trained layer amplifies x about once; what is so much more leaves NaN or noise, whatever the way."""
    module, gain = item.lora.strongest
    strength = abs(item.strength) * gain
    if strength > _MOST_GAIN:
        target = TargetIndex(layers).find(module)
        raise HswqError(
            "with this strength the LoRA is so much larger than the weights that no picture can come of it",
            file=item.lora.path,
            tensor=target.layer if target else module,
            found=f"strength {item.strength:g}, at which the rows of its delta have norms of {strength:.3g}",
            expected=f"at most {_MOST_GAIN:g}; rows of a trained weight have norms of about 1",
            fix="use a strength near 1, or look at the effective scales in hl.load_lora(...).report()",
        )


def refuse_other_units(item: Attachment, checkpoint: Checkpoint) -> None:
    """A source that was smoothed in another way than the pack has channels that cannot be brought to its units."""
    told = None if item.source is None else item.source.metadata.get(SMOOTH_KEY)
    if told not in (None, checkpoint.metadata.get(SMOOTH_KEY)):
        raise HswqError(
            "smooth() rescaled the source's channels, and not those of the pack, or in another way",
            file=checkpoint.path,
            tensor=item.lora.name,
            expected="the 16-bit model that the pack was made from, or the original",
            fix="give that one as source=",
        )


def refuse_baked(item: Attachment, checkpoint: Checkpoint) -> None:
    """A file that has LoRAs in it is no pristine pack: another bake, or the same LoRA again, would go unnoticed."""
    baked = baked_loras(checkpoint.metadata)
    own = {item.lora.sha256, item.lora.file_sha256} | item.lora.made_of
    again = any(own & {lora.sha256, *lora.made_of} for lora in baked)
    if (
        not baked
        or (item.how == "branch" and not again)
        or (item.allow_baked and item.how != "bake_from_source")
    ):
        return
    found = ", ".join(map(str, baked))
    allowed = "say allow_baked=True (--allow-baked on the command line)"
    if again:
        raise HswqError(
            "this LoRA, or one that it was made of or into, is baked into this file already and would apply twice",
            file=checkpoint.path,
            tensor=item.lora.name,
            found=found,
            expected="a pack without this LoRA",
            fix="leave it off, or take the pack that this file was made from"
            + ("" if item.how == "bake_from_source" else f"; or {allowed} to add to it"),
        )
    raise HswqError(
        "LoRAs are baked into this file already",
        file=checkpoint.path,
        found=found,
        expected="a pack without baked LoRAs",
        fix="bake all LoRAs at once into the pack that this file was made from"
        + ("" if item.how == "bake_from_source" else f"; or {allowed} to add to them"),
    )


def refuse_unbranchable(item: Attachment, deltas: Mapping[str, LayerDelta]) -> None:
    """Some deltas have no small side path."""
    for layer in deltas:
        reason = deltas[layer].why_no_branch()
        if reason is not None:
            raise HswqError(
                "this LoRA cannot run as a branch",
                file=item.lora.path,
                tensor=layer,
                found=reason,
                fix="attach it with how='bake'",
            )
