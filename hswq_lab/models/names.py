"""The names that Z-Image's parameters have in diffusers, and their native (ComfyUI) counterparts."""

from __future__ import annotations

FUSED = "attention.qkv"
PARTS = ("attention.to_q", "attention.to_k", "attention.to_v")
"""What diffusers keeps apart, in the order of the fused rows: row part 0, 1, 2."""

RENAMED = {
    "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1": "final_layer",
    "attention.to_out.0": "attention.out",
    "attention.norm_q": "attention.q_norm",
    "attention.norm_k": "attention.k_norm",
}
"""Fragments of a dotted name: diffusers -> native (patch size 2, one frame a patch: "2-1")."""


def _replaced(name: str, old: str, new: str) -> str:
    """The name with whole dotted segments exchanged, or unchanged."""
    return f".{name}.".replace(f".{old}.", f".{new}.")[1:-1]


def native_target(name: str) -> tuple[str, int | None]:
    """Where a diffusers layer or parameter lives in the native layout.

    Args:
        name: such as "layers.0.attention.to_k.weight" or "layers.0.attention.to_k"; native names stay.

    Returns:
        The native name, and which third of its rows the value is (None: all of it).
    """
    for part, fragment in enumerate(PARTS):
        fused = _replaced(name, fragment, FUSED)
        if fused != name:
            return fused, part
    for diffusers, native in RENAMED.items():
        name = _replaced(name, diffusers, native)
    return name, None


def diffusers_names(name: str) -> tuple[str, ...]:
    """The diffusers names of a native layer or parameter: three in row order for a fused qkv, else one."""
    if f".{FUSED}." in f".{name}.":
        return tuple(_replaced(name, FUSED, part) for part in PARTS)
    for diffusers, native in RENAMED.items():
        name = _replaced(name, native, diffusers)
    return (name,)
