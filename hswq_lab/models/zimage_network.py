"""The Z-Image transformer in its native (ComfyUI) layout: fused qkv, any width, any kind of Linear.

Architecture: Z-Image (Tongyi-MAI, 2025), a single-stream diffusion transformer. Image and caption tokens
are refined apart, then joined (image first) and run through one stack of blocks; every block that sees the
image is modulated by the time. Both kinds are filled up to a multiple of 32 tokens with a learned pad token,
which attends like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hswq_lab.errors import HswqError
from hswq_lab.models.architecture import LinearFactory, dense_linear

if TYPE_CHECKING:
    from hswq_lab.models.zimage import ZImageConfig

PATCH = 2
TOKEN_MULTIPLE = 32
TIME_FREQUENCIES = 256
TIME_SCALE = 1000.0
ROPE_THETA = 256.0
NORM_EPS = 1e-5


def padded_length(tokens: int) -> int:
    """The number of tokens after filling up to a multiple of 32."""
    return -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def rope_table(
    config: ZImageConfig, cap_tokens: int, rows: int, columns: int, device: torch.device
) -> Tensor:
    """Factors of the rotary angles, fp32 [2, tokens, 1, head_dim]: image, image pads, caption.

    The first are the cosines, each for both values of its pair; the second −sine, +sine for a pair.

    Caption tokens stand at (1 … L, 0, 0), image tokens at (L + 1, row, column), image pads at the origin;
    angles are computed in fp64 and rounded to fp32 before the cosine, as the published model does.
    """
    image = torch.cartesian_prod(torch.tensor([cap_tokens + 1]), torch.arange(rows), torch.arange(columns))
    pads = torch.zeros(padded_length(len(image)) - len(image), 3, dtype=torch.long)
    caption = functional.pad(torch.arange(1, cap_tokens + 1)[:, None], (0, 2))
    positions = torch.cat([image, pads, caption]).double()
    angles = []
    for axis, size in enumerate(config.axes_dims):
        frequencies = ROPE_THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles.append(torch.outer(positions[:, axis], frequencies).float())
    joined = torch.cat(angles, dim=-1)[:, None, :]
    cos, sin = joined.cos(), joined.sin()
    pairs = [torch.stack([cos, cos], dim=-1), torch.stack([-sin, sin], dim=-1)]
    return torch.stack(pairs).flatten(-2).to(device)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Turn neighbouring pairs of x [B, tokens, heads, head_dim] by table's angles, in fp32; x's dtype out.

    (a, b) becomes (a·cos − b·sin, b·cos + a·sin), as two products with whole rows and one sum.
    """
    swapped: Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * table[0] + swapped * table[1]).to(x.dtype)


class Attention(nn.Module):
    """Self-attention with RMS-normalised queries and keys and rotary positions; no biases."""

    def __init__(self, name: str, config: ZImageConfig, linear: LinearFactory) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = linear(f"{name}.qkv", config.dim, 3 * config.dim, False)
        self.out = linear(f"{name}.out", config.dim, config.dim, False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=NORM_EPS)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x [B, tokens, dim]; table as of `rope_table`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        q = apply_rope(self.q_norm(q), table).to(v.dtype)
        k = apply_rope(self.k_norm(k), table).to(v.dtype)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """Gated SiLU: w2(silu(w1 x) · w3 x)."""

    def __init__(self, name: str, config: ZImageConfig, linear: LinearFactory) -> None:
        super().__init__()
        self.w1 = linear(f"{name}.w1", config.dim, config.ffn_dim, False)
        self.w2 = linear(f"{name}.w2", config.ffn_dim, config.dim, False)
        self.w3 = linear(f"{name}.w3", config.dim, config.ffn_dim, False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        return cast(Tensor, self.w2(functional.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and after; scaled and gated by time if modulated."""

    def __init__(self, name: str, config: ZImageConfig, linear: LinearFactory, *, modulated: bool) -> None:
        super().__init__()
        self.attention = Attention(f"{name}.attention", config, linear)
        self.feed_forward = FeedForward(f"{name}.feed_forward", config, linear)
        self.attention_norm1 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.attention_norm2 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.ffn_norm1 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.ffn_norm2 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.adaLN_modulation = None
        if modulated:
            modulation = linear(f"{name}.adaLN_modulation.0", config.time_dim, 4 * config.dim, True)
            self.adaLN_modulation = nn.Sequential(modulation)

    def forward(self, x: Tensor, table: Tensor, time: Tensor | None = None) -> Tensor:
        """x [B, tokens, dim]; table as of `rope_table`; time [B, time_dim] for a modulated block."""
        if self.adaLN_modulation is None:
            x = x + self.attention_norm2(self.attention(self.attention_norm1(x), table))
            return cast(Tensor, x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x))))
        scale_a, gate_a, scale_f, gate_f = self.adaLN_modulation(time).unsqueeze(1).chunk(4, dim=-1)
        attended = self.attention(self.attention_norm1(x) * (1 + scale_a), table)
        x = x + gate_a.tanh() * self.attention_norm2(attended)
        fed = self.feed_forward(self.ffn_norm1(x) * (1 + scale_f))
        return cast(Tensor, x + gate_f.tanh() * self.ffn_norm2(fed))


class TimeEmbedder(nn.Module):
    """Sinusoids of the scaled time, then two Linears."""

    def __init__(self, name: str, config: ZImageConfig, linear: LinearFactory) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            linear(f"{name}.mlp.0", TIME_FREQUENCIES, config.time_hidden, True),
            nn.SiLU(),
            linear(f"{name}.mlp.2", config.time_hidden, config.time_dim, True),
        )

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """t [B] in 0 … 1 -> [B, time_dim]; dtype is that of the first Linear's input."""
        half = TIME_FREQUENCIES // 2
        steps = torch.arange(half, dtype=torch.float32, device=t.device)
        frequencies = torch.exp(steps * (-math.log(10000.0) / half))
        angles = t.float()[:, None] * TIME_SCALE * frequencies
        return cast(Tensor, self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)))


class FinalLayer(nn.Module):
    """Normalise, scale by the time, map a token to the values of its patch."""

    def __init__(self, name: str, config: ZImageConfig, linear: LinearFactory) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)
        self.linear = linear(f"{name}.linear", config.dim, PATCH**2 * config.in_channels, True)
        modulation = linear(f"{name}.adaLN_modulation.1", config.time_dim, config.dim, True)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), modulation)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, tokens, dim], time [B, time_dim] -> patches [B, tokens, 4 · in_channels]."""
        scale = 1 + self.adaLN_modulation(time).unsqueeze(1)
        return cast(Tensor, self.linear(self.norm_final(x) * scale))


def _pad_tokens_as_rows(
    _module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_rest: object
) -> None:
    """Pad tokens are [1, dim] in diffusers files and [dim] in some native ones; both load."""
    for name in (f"{prefix}x_pad_token", f"{prefix}cap_pad_token"):
        if name in state_dict and state_dict[name].ndim == 1:
            state_dict[name] = state_dict[name].unsqueeze(0)


class ZImage(nn.Module):
    """The network. Parameters carry the native names, so a checkpoint without prefix loads as it is.

    Args:
        config: the sizes.
        linear: makes the module of each Linear, in `linear_layers` order; packed layers come in this way.
    """

    def __init__(self, config: ZImageConfig, linear: LinearFactory = dense_linear) -> None:
        super().__init__()
        self.config = config
        self.t_embedder = TimeEmbedder("t_embedder", config, linear)
        self.x_embedder = linear("x_embedder", PATCH**2 * config.in_channels, config.dim, True)
        self.noise_refiner = self._stack("noise_refiner", config.n_refiners, linear, modulated=True)
        self.cap_embedder = nn.Sequential(
            nn.RMSNorm(config.cap_dim, eps=NORM_EPS),
            linear("cap_embedder.1", config.cap_dim, config.dim, True),
        )
        self.context_refiner = self._stack("context_refiner", config.n_refiners, linear, modulated=False)
        self.layers = self._stack("layers", config.n_layers, linear, modulated=True)
        self.final_layer = FinalLayer("final_layer", config, linear)
        self.x_pad_token = nn.Parameter(torch.zeros(1, config.dim))
        self.cap_pad_token = nn.Parameter(torch.zeros(1, config.dim))
        self.register_load_state_dict_pre_hook(_pad_tokens_as_rows)  # type: ignore[no-untyped-call]
        self._tables: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def _stack(self, name: str, count: int, linear: LinearFactory, *, modulated: bool) -> nn.ModuleList:
        blocks = (Block(f"{name}.{i}", self.config, linear, modulated=modulated) for i in range(count))
        return nn.ModuleList(blocks)

    def forward(self, latents: Tensor, t: Tensor, captions: Sequence[Tensor]) -> Tensor:
        """Predict x0 − ε, the velocity from noise to picture.

        Args:
            latents: [B, in_channels, H, W], H and W even; bf16 or fp32, which the network computes in.
            t: [B], 1 − sigma: 0 for pure noise, 1 for a clean picture.
            captions: B text feature matrices [L_i, cap_dim]; lengths may differ.

        Raises:
            HswqError: fp16 latents, odd sizes, or a batch that does not fit together.
        """
        self._check(latents, t, captions)
        lengths = [padded_length(len(caption)) for caption in captions]
        if len(set(lengths)) == 1:
            return self.denoise(latents, t, self.embed_captions(captions, latents.dtype))
        # Attention sees every token of its row, so captions of different padded lengths run apart: no mask,
        # and the same numbers as alone.
        results: dict[int, Tensor] = {}
        for length in sorted(set(lengths)):
            rows = [i for i, other in enumerate(lengths) if other == length]
            tokens = self.embed_captions([captions[i] for i in rows], latents.dtype)
            part = self.denoise(
                torch.stack([latents[i] for i in rows]), torch.stack([t[i] for i in rows]), tokens
            )
            results.update(zip(rows, part.unbind(0), strict=True))
        return torch.stack([results[i] for i in range(len(lengths))])

    def _check(self, latents: Tensor, t: Tensor, captions: Sequence[Tensor]) -> None:
        if latents.dtype == torch.float16:
            raise HswqError(
                "Z-Image cannot run in fp16: the inputs of feed_forward.w2 exceed its range",
                found="float16 latents",
                expected="bfloat16 or float32",
            )
        fits = latents.ndim == 4 and latents.shape[1] == self.config.in_channels
        if not fits or latents.shape[2] % PATCH or latents.shape[3] % PATCH:
            raise HswqError(
                "latents of this shape are no input of this network",
                found=list(latents.shape),
                expected=f"[B, {self.config.in_channels}, H, W] with even H and W",
            )
        if len(captions) != len(latents) or t.shape != (len(latents),):
            raise HswqError(
                "a batch needs one time and one caption for each latent",
                found=f"{len(latents)} latents, times {list(t.shape)}, {len(captions)} captions",
            )
        for caption in captions:
            if caption.ndim != 2 or caption.shape[1] != self.config.cap_dim or not len(caption):
                raise HswqError(
                    "caption features of this shape are no input of this network",
                    found=list(caption.shape),
                    expected=f"[L, {self.config.cap_dim}] with at least one token",
                )

    def embed_captions(self, captions: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """[L_i, cap_dim] each, all of one padded length L -> [B, L, dim], filled up with the pad token."""
        sizes = [len(caption) for caption in captions]
        embedded = self.cap_embedder(torch.cat([caption.to(dtype) for caption in captions])).split(sizes)
        pad = self.cap_pad_token.to(embedded[0].dtype)
        rows = [
            torch.cat([e, pad.expand(padded_length(n) - n, -1)]) for e, n in zip(embedded, sizes, strict=True)
        ]
        return torch.stack(rows)

    def denoise(self, latents: Tensor, t: Tensor, caption_tokens: Tensor) -> Tensor:
        """`forward` after the captions were embedded: caption_tokens [B, L, dim], L a multiple of 32."""
        batch, channels, height, width = latents.shape
        rows, columns = height // PATCH, width // PATCH
        count = rows * columns
        table = self._table(caption_tokens.shape[1], rows, columns, latents.device)
        time = self.t_embedder(t, latents.dtype)

        patches = latents.view(batch, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 3, 5, 1)
        x = self.x_embedder(patches.reshape(batch, count, -1))
        pads = padded_length(count) - count
        if pads:
            x = torch.cat([x, self.x_pad_token.to(x.dtype).expand(batch, pads, -1)], dim=1)
        image_tokens = x.shape[1]
        for block in self.noise_refiner:
            x = block(x, table[:, :image_tokens], time)
        for block in self.context_refiner:
            caption_tokens = block(caption_tokens, table[:, image_tokens:])
        x = torch.cat([x, caption_tokens], dim=1)
        for block in self.layers:
            x = block(x, table, time)
        values = self.final_layer(x[:, :count], time)
        image = values.view(batch, rows, columns, PATCH, PATCH, channels).permute(0, 5, 1, 3, 2, 4)
        return cast(Tensor, image.reshape(latents.shape))

    def _table(self, cap_tokens: int, rows: int, columns: int, device: torch.device) -> Tensor:
        key = (cap_tokens, rows, columns, device)
        if key not in self._tables:
            self._tables[key] = rope_table(self.config, *key)
        return self._tables[key]
