"""One logical LoRA, written in every dialect: the generator behind the LoRA tests.

Written from the formats' own description, not from the reader's tables, so that a wrong table cannot hide.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

D, F = 32, 48
_BLOCK = {
    "attention.qkv": (3 * D, D),
    "attention.out": (D, D),
    "feed_forward.w1": (F, D),
    "feed_forward.w2": (D, F),
    "feed_forward.w3": (F, D),
}
LAYERS: dict[str, tuple[int, int]] = {
    **{f"{stack}.{i}.{leaf}": shape
       for stack, n in (("layers", 12), ("noise_refiner", 2), ("context_refiner", 2))
       for i in range(n) for leaf, shape in _BLOCK.items()},
    **{f"layers.{i}.adaLN_modulation.0": (4 * D, 16) for i in range(12)},
    "cap_embedder.1": (D, 24),
    "x_embedder": (D, 16),
    "t_embedder.mlp.0": (64, 16),
    "t_embedder.mlp.2": (16, 64),
    "final_layer.linear": (16, D),
    "final_layer.adaLN_modulation.1": (D, 16),
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """One split module: diffusers' name, its native layer and rows, its factors in fp32."""

    name: str
    layer: str
    start: int
    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def delta(self) -> Tensor:
        return (self.up.double() @ self.down.double() * (self.alpha / self.rank)).float()


def split_names(layer: str) -> list[str]:
    """diffusers' names of a native layer: three for a fused qkv."""
    if layer.endswith("attention.qkv"):
        return [layer.replace("qkv", part) for part in ("to_q", "to_k", "to_v")]
    if layer == "x_embedder":
        return ["all_x_embedder.2-1"]
    if layer.startswith("final_layer."):
        return [layer.replace("final_layer.", "all_final_layer.2-1.")]
    return [layer.replace("attention.out", "attention.to_out.0")]


def logical(
    layers: list[str],
    rank: Callable[[str], int],
    alpha: Callable[[str], float],
    seed: int = 0,
    parts: str = "qkv",
) -> list[Module]:
    """Random modules on some layers; `parts` says which of q, k, v; rank and alpha by diffusers' name."""
    generator = torch.Generator().manual_seed(seed)
    modules = []
    for layer in layers:
        n, k = LAYERS[layer]
        names = split_names(layer)
        rows = n // len(names)
        for index, name in enumerate(names):
            if len(names) == 3 and "qkv"[index] not in parts:
                continue
            r = rank(name)
            down = torch.randn(r, k, generator=generator) / k**0.5
            up = torch.randn(rows, r, generator=generator)
            modules.append(Module(name, layer, index * rows, down, up, alpha(name)))
    return modules


def dense(modules: list[Module]) -> dict[str, Tensor]:
    """The truth: layer → ΔW, from the definition, in fp64."""
    result: dict[str, Tensor] = {}
    for m in modules:
        total = result.setdefault(m.layer, torch.zeros(LAYERS[m.layer]))
        total[m.start : m.start + m.up.shape[0]] += m.delta
    return result


Written = tuple[dict[str, Tensor], dict[str, str]]


def _pairs(
    prefix: str, down: str, up: str, *, alpha: bool, flat: bool = False
) -> Callable[[list[Module]], Written]:
    """Split dialects: with an alpha tensor, or with the scale folded into the up factor."""

    def write(modules: list[Module]) -> Written:
        tensors: dict[str, Tensor] = {}
        for m in modules:
            name = prefix + (m.name.replace(".", "_") if flat else m.name)
            tensors[name + down] = m.down
            tensors[name + up] = m.up if alpha else m.up * (m.alpha / m.rank)
            if alpha:
                tensors[f"{name}.alpha"] = torch.tensor(m.alpha)
        return tensors, {}

    return write


def _peft(prefix: str, *, rslora: bool = False, flattened: bool = True) -> Callable[[list[Module]], Written]:
    """PEFT: alpha in the header, per module in alpha_pattern, ranks in rank_pattern."""

    def write(modules: list[Module]) -> Written:
        tensors, _ = _pairs(prefix, ".lora_A.weight", ".lora_B.weight", alpha=True)(modules)
        tensors = {key: value for key, value in tensors.items() if not key.endswith(".alpha")}
        patterns = {m.name: m.alpha / m.rank**0.5 if rslora else m.alpha for m in modules}
        config = {"r": 999, "lora_alpha": 12345.0, "alpha_pattern": patterns, "use_rslora": rslora,
                  "rank_pattern": {m.name: m.rank for m in modules}, "use_dora": False}  # fmt: skip
        if flattened:
            config = {f"transformer.{key}": value for key, value in config.items()}
        return tensors, {"format": "pt", "lora_adapter_metadata": json.dumps(config)}

    return write


def _fused(
    prefix: str, down: str, up: str, *, alpha: bool, flat: bool = False
) -> Callable[[list[Module]], Written]:
    """Fused qkv: block-diagonal up, stacked down; scales folded, half into alpha if there is one."""

    def write(modules: list[Module]) -> Written:
        tensors: dict[str, Tensor] = {}
        layers = list(dict.fromkeys(m.layer for m in modules))
        for layer in layers:
            group = [m for m in modules if m.layer == layer]
            total = sum(m.rank for m in group)
            big = torch.zeros(LAYERS[layer][0], total)
            column = 0
            for m in group:
                scale = m.alpha / m.rank
                big[m.start : m.start + m.up.shape[0], column : column + m.rank] = m.up * (
                    scale / 2 if alpha else scale
                )
                column += m.rank
            name = prefix + (layer.replace(".", "_") if flat else layer)
            tensors[name + down] = torch.cat([m.down for m in group])
            tensors[name + up] = big
            if alpha:
                tensors[f"{name}.alpha"] = torch.tensor(2.0 * total)
        return tensors, {}

    return write


def _lokr(modules: list[Module]) -> Written:
    """A LoRA is the LoKr 1 ⊗ (w2_a · w2_b)."""
    tensors: dict[str, Tensor] = {}
    for m in modules:
        name = "lycoris_" + m.name.replace(".", "_")
        tensors |= {
            f"{name}.lokr_w1": torch.ones(1, 1),
            f"{name}.lokr_w2_a": m.up,
            f"{name}.lokr_w2_b": m.down,
        }
        tensors[f"{name}.alpha"] = torch.tensor(m.alpha)
    return tensors, {}


def _lokr_full(modules: list[Module]) -> Written:
    """… or of two full factors: w1 = 2, w2 = ΔW / 2; alpha beside them counts for nothing."""
    tensors: dict[str, Tensor] = {}
    for m in modules:
        name = "lycoris_" + m.name.replace(".", "_")
        tensors |= {f"{name}.lokr_w1": torch.full((1, 1), 2.0), f"{name}.lokr_w2": m.delta / 2}
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
    return tensors, {"ss_network_dim": "32"}


def _loha(modules: list[Module]) -> Written:
    """… and the LoHa (1 · 1) ∘ (up · down)."""
    tensors: dict[str, Tensor] = {}
    for m in modules:
        name = "diffusion_model." + m.name
        n, r, k = m.up.shape[0], m.rank, m.down.shape[1]
        tensors |= {f"{name}.hada_w1_a": torch.full((n, r), 1.0 / r), f"{name}.hada_w1_b": torch.ones(r, k)}
        tensors |= {
            f"{name}.hada_w2_a": m.up,
            f"{name}.hada_w2_b": m.down,
            f"{name}.alpha": torch.tensor(m.alpha),
        }
    return tensors, {}


def _diff(modules: list[Module]) -> Written:
    return {f"diffusion_model.{m.name}.diff": m.delta for m in modules}, {}


_AB = (".lora_A.weight", ".lora_B.weight")
_DU = (".lora_down.weight", ".lora_up.weight")

DIALECTS: dict[str, Callable[[list[Module]], Written]] = {
    "1 ai-toolkit": _pairs("diffusion_model.", *_AB, alpha=False),
    "2 diffusers": _peft("transformer."),
    "2 peft": _peft("base_model.model.", flattened=False),
    "2 diffusers over peft": _peft("transformer.base_model.model."),
    "2 rslora": _peft("transformer.", rslora=True),
    "3 default infix": _pairs(
        "diffusion_model.", ".lora_A.default.weight", ".lora_B.default.weight", alpha=False
    ),
    "3 bare, default infix": _pairs("", ".lora_A.default.weight", ".lora_B.default.weight", alpha=False),
    "4 native fused": _fused("diffusion_model.", *_AB, alpha=False),
    "4 native fused, down/up": _fused("diffusion_model.", *_DU, alpha=False),
    "4 native fused, no .weight": _fused("diffusion_model.", ".lora_A", ".lora_B", alpha=False),
    "4 native fused, alpha beside A/B": _fused("diffusion_model.", *_AB, alpha=True),
    "5 kohya split": _pairs("lora_unet_", *_DU, alpha=True, flat=True),
    "6 kohya fused": _fused("lora_unet_", *_DU, alpha=True, flat=True),
    "7 double underscore": _pairs("lora_unet__", *_DU, alpha=True, flat=True),
    "8 OneTrainer": _pairs("lora_transformer_", *_DU, alpha=True, flat=True),
    "8 OneTrainer, linear layer": _pairs(
        "lora_transformer_",
        ".lora_linear_layer.down.weight",
        ".lora_linear_layer.up.weight",
        alpha=True,
        flat=True,
    ),
    "9 SimpleTuner": _pairs("lycoris_", *_DU, alpha=True, flat=True),
    "10 LoKr": _lokr,
    "10 LoKr, both full": _lokr_full,
    "11 LoHa": _loha,
    "13 full deltas": _diff,
    "suffix _lora.down": _pairs("transformer.", "_lora.down.weight", "_lora.up.weight", alpha=True),
    "suffix .lora.down": _pairs("transformer.", ".lora.down.weight", ".lora.up.weight", alpha=True),
    "alpha beside A/B": _pairs("diffusion_model.", *_AB, alpha=True),
}
