"""A workbench model in the place of ComfyUI's diffusion network; knows nothing of ComfyUI but the call.

ComfyUI calls `network(x, timesteps, context=…, **conditions)` and takes the result for ε − x0 (flow matching). What a
condition or patch would change here and cannot is refused: a picture that ignores it would look like one that has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hswq_lab import HswqError, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HARMLESS = ("num_tokens",)
"""Conditions that ComfyUI sends with every prompt and that say nothing new."""


class LabDiffusion(nn.Module):
    """The network of a `Model`, called as ComfyUI calls its own.

    Args:
        model: a pack or a 16-bit model; it moves to wherever the latents are.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.dtype = model.dtype

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        control: object = None,
        transformer_options: Mapping[str, Any] | None = None,
        attention_mask: Tensor | None = None,
        **conditions: object,
    ) -> Tensor:
        """One evaluation.

        Args:
            x: latents [B, C, H, W].
            timesteps: [B], sigma.
            context: caption features [B, L, cap_dim].
            control: of a ControlNet; refused.
            transformer_options: ComfyUI's; patches in them are refused.
            attention_mask: [B, L], 0 for padding at the end of a caption.
            conditions: others; refused unless they say nothing new.

        Returns:
            ε − x0, [B, C, H, W].

        Raises:
            HswqError: something that this network cannot take into account.
        """
        self._refuse(control, transformer_options or {}, conditions)
        if self.model.device != x.device:
            self.model = self.model.on(x.device, self.dtype)
        lengths = [context.shape[1]] * len(context)
        if attention_mask is not None:
            lengths = [max(1, int(row.count_nonzero())) for row in attention_mask.reshape(len(context), -1)]
        captions = [row[:length].to(self.dtype) for row, length in zip(context, lengths, strict=True)]
        with torch.no_grad():
            velocity = self.model.network()(x.to(self.dtype), 1 - timesteps.float(), captions)
        return -velocity

    def state_dict(self, *_args: object, prefix: str = "", **_options: object) -> dict[str, Tensor]:  # type: ignore[override]
        """Names and shapes without data, so that ComfyUI's loaders find what they want to patch, and are refused."""
        shapes = self.model.checkpoint.shapes()
        return {
            prefix + name: torch.empty(shape, device="meta", dtype=self.dtype)
            for name, shape in shapes.items()
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LabDiffusion:  # noqa: FBT001, FBT002, ARG002
        """ComfyUI frees a card by moving models away: the network is dropped and comes again when it is needed."""
        target = fn(torch.empty(0, device=self.model.device)).device
        if target != self.model.device:
            self.model.unload()
        return self

    @staticmethod
    def _refuse(control: object, options: Mapping[str, Any], conditions: Mapping[str, object]) -> None:
        patched = [kind for kind in ("patches", "patches_replace") if options.get(kind)]
        asked = [name for name, value in conditions.items() if value is not None and name not in HARMLESS]
        if control is not None:
            asked.append("control")
        if patched or asked:
            raise HswqError(
                "this model cannot take that into account",
                found=", ".join([*asked, *patched]),
                fix="take the node away that adds it, or use ComfyUI's own loader",
            )
