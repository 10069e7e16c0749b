"""LoRA for training on the native network: rank 8 beside frozen Linears, q, k and v apart though fused."""

from __future__ import annotations

import json
import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional

from hswq_lab.models.names import diffusers_names
from hswq_lab.models.zimage import LinearFactory

RANK = 8
ADAPTED = ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


class AdaptedLinear(nn.Module):
    """A frozen weight and one low-rank pair for each of its row parts: y = W x + scale · B A x."""

    def __init__(self, in_features: int, out_features: int, parts: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.zeros(out_features, in_features), requires_grad=False)
        bound = 1 / math.sqrt(in_features)
        self.lora_a = nn.Parameter(torch.empty(parts, RANK, in_features).uniform_(-bound, bound))
        self.lora_b = nn.Parameter(torch.zeros(parts, out_features // parts, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        narrow = functional.linear(x, self.lora_a.flatten(0, 1))
        if len(self.lora_a) == 1:
            delta = functional.linear(narrow, self.lora_b[0])
        else:
            pairs = zip(narrow.chunk(len(self.lora_b), -1), self.lora_b, strict=True)
            delta = torch.cat([functional.linear(n, b) for n, b in pairs], dim=-1)
        return functional.linear(x, self.weight) + self.scale * delta


def adapting_factory(alpha: float) -> LinearFactory:
    """Linears for ZImage: adapters on attention and feed-forward, ordinary ones elsewhere."""

    def linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:  # noqa: FBT001
        if name.endswith(ADAPTED):
            return AdaptedLinear(in_features, out_features, len(diffusers_names(name)), alpha / RANK)
        return nn.Linear(in_features, out_features, bias)

    return linear


def export(
    network: nn.Module, values: dict[str, Tensor], alpha: float
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The adapters in the diffusers/PEFT dialect (split q, k, v), bf16, and the header with rank and alpha.

    Args:
        network: a ZImage made with `adapting_factory`.
        values: its trained parameters by name, such as the running mean.
        alpha: of the factory.
    """
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    for name, module in network.named_modules():
        if not isinstance(module, AdaptedLinear):
            continue
        a, b = values[f"{name}.lora_a"], values[f"{name}.lora_b"]
        for part, split in enumerate(diffusers_names(name)):
            stem = f"transformer.{split}"
            tensors[f"{stem}.lora_A.weight"] = a[part].to("cpu", torch.bfloat16).contiguous()
            tensors[f"{stem}.lora_B.weight"] = b[part].to("cpu", torch.bfloat16).contiguous()
            targets.add(re.split(r"(?:attention|feed_forward)\.", split)[1])
    header = {
        "transformer.r": RANK,
        "transformer.lora_alpha": alpha,
        "transformer.target_modules": sorted(targets),
    }
    return tensors, {"format": "pt", "lora_adapter_metadata": json.dumps(header, sort_keys=True)}
