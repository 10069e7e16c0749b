"""The Z-Image network against diffusers' with the same weights, its sizes, its parameters' names."""

from __future__ import annotations

import itertools

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import FeedForward

from hswq_lab import HswqError
from hswq_lab.models.names import diffusers_names, native_target
from hswq_lab.models.zimage import (
    FULL,
    MINI,
    ZImage,
    ZImageConfig,
    apply_rope,
    linear_layers,
    padded_length,
    rope_table,
)

CAP_DIM, FFN = 48, 256
LENGTHS = (3, 32, 40)
SIZES = ((8, 8), (6, 10))  # the second has 15 tokens: its image is padded, too


def to_native(parameters):
    """diffusers' parameters under native names, q, k and v joined."""
    joined: dict[str, list[torch.Tensor]] = {}
    for name, value in sorted(parameters.items(), key=lambda item: native_target(item[0])[1] or 0):
        joined.setdefault(native_target(name)[0], []).append(value)
    return {name: torch.cat(parts) for name, parts in joined.items()}


@pytest.fixture(scope="module")
def reference():
    """A small random diffusers network whose FFN width its own rule cannot give."""
    network = ZImageTransformer2DModel(
        dim=128,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=CAP_DIM,
        axes_dims=[16, 24, 24],
    )
    for block in itertools.chain(network.layers, network.noise_refiner, network.context_refiner):
        block.feed_forward = FeedForward(128, FFN)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        spread = 0.1 if parameter.ndim > 1 else 1.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread
    return network.eval()


@pytest.fixture(scope="module")
def ours(reference):
    weights = to_native(reference.state_dict())
    network = ZImage(ZImageConfig.from_shapes({name: tuple(w.shape) for name, w in weights.items()}))
    network.load_state_dict(weights)
    return network.eval()


@pytest.fixture(scope="module")
def captions():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(length, CAP_DIM, generator=generator) for length in LENGTHS]


def latents(size, count=3):
    return torch.randn(count, 16, *size, generator=torch.Generator().manual_seed(1))


TIMES = torch.tensor([0.05, 0.5, 0.95])


@pytest.mark.parametrize("size", SIZES)
def test_equals_diffusers(reference, ours, captions, size):
    x = latents(size)
    with torch.inference_mode():
        theirs = reference([latent[:, None] for latent in x], TIMES, captions).sample
        difference = ours(x, TIMES, captions) - torch.stack([latent[:, 0] for latent in theirs])
    assert difference.abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_turn_pairs_as_the_published_model_s_complex_numbers_do(dtype):
    table = rope_table(MINI, 32, 4, 4, torch.device("cpu"))
    x = torch.randn(2, table.shape[1], 4, MINI.head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[0, ..., ::2], table[1, ..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    assert torch.equal(apply_rope(x, table), turned.to(dtype))
    assert turned[:, 1:].sub(x[:, 1:].float()).abs().max() > 0.1


def test_the_comparison_can_fail(reference, ours, captions):
    """Neither the time nor the caption nor the place of the tokens is ignored by what is compared."""
    x = latents((6, 10))
    with torch.inference_mode():
        result = ours(x, TIMES, captions)
        assert (ours(x, TIMES.flip(0), captions) - result).abs().max() > 1e-2
        assert (ours(x, TIMES, captions[::-1]) - result).abs().max() > 1e-2
        assert (ours(x.mT.contiguous(), TIMES, captions).mT - result).abs().max() > 1e-2


def test_a_batch_gives_what_its_items_give_alone(ours, captions):
    """In fp64, where the other order of a batch's sums, which differs by processor, is far below the bound."""
    exact = ZImage(ours.config).double().eval()
    exact.load_state_dict(ours.state_dict())
    x, texts = latents((8, 8)).double(), [caption.double() for caption in captions]
    with torch.inference_mode():
        together = exact(x, TIMES, texts)
        alone = torch.cat([exact(x[i : i + 1], TIMES[i : i + 1], texts[i : i + 1]) for i in range(3)])
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-11)


def test_runs_in_bf16(ours, captions):
    x = latents((8, 8))
    half = ZImage(ours.config).to(torch.bfloat16).eval()
    half.load_state_dict(ours.state_dict())
    with torch.inference_mode():
        exact, rounded = ours(x, TIMES, captions), half(x.bfloat16(), TIMES, captions)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.05


def test_the_full_model_has_its_published_size():
    with torch.device("meta"):
        network = ZImage(FULL)
    assert sum(p.numel() for p in network.parameters()) == 6_154_908_736
    layers = linear_layers(FULL)
    assert len(layers) == 208
    assert sum(name.startswith("layers.") for name in layers) == 180
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert ZImageConfig.from_shapes(shapes) == FULL
    assert all(shapes[f"{name}.weight"] == size for name, size in layers.items())


def test_the_sizes_of_the_mini_model():
    with torch.device("meta"):
        network = ZImage(MINI)
    assert sum(p.numel() for p in network.parameters()) == 11_656_512
    assert MINI.axes_dims == (16, 24, 24)
    assert FULL.axes_dims == (32, 48, 48)
    assert all(k % 256 == 0 for name, (_, k) in linear_layers(MINI).items() if name != "x_embedder")


def test_linears_come_in_the_order_of_the_network():
    names = list(linear_layers(MINI))
    assert names[:3] == ["t_embedder.mlp.0", "t_embedder.mlp.2", "x_embedder"]
    assert names[-2:] == ["final_layer.linear", "final_layer.adaLN_modulation.1"]
    assert names.index("noise_refiner.0.attention.qkv") < names.index("layers.0.attention.qkv")


def test_a_factory_puts_in_other_linears():
    asked = []

    class Doubling(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def linear(name, in_features, out_features, bias):
        asked.append((name, (out_features, in_features), bias))
        kind = Doubling if name == "final_layer.linear" else torch.nn.Linear
        return kind(in_features, out_features, bias)

    config = ZImageConfig(dim=32, n_layers=1, n_refiners=1, head_dim=16, ffn_dim=48, cap_dim=8)
    plain = ZImage(config)
    changed = ZImage(config, linear)
    changed.load_state_dict(plain.state_dict())
    caption = [torch.randn(2, 8)]
    x, t = latents((4, 4), 1), torch.tensor([0.5])
    torch.testing.assert_close(changed(x, t, caption), 2 * plain(x, t, caption))
    assert {name: shape for name, shape, _ in asked} == linear_layers(config)
    without_bias = {name.rsplit(".", 1)[1] for name, _, bias in asked if not bias}
    assert without_bias == {"qkv", "out", "w1", "w2", "w3"}


@pytest.mark.parametrize("shape", [(128,), (1, 128)])
def test_pad_tokens_load_in_both_shapes(ours, shape):
    weights = {
        **ours.state_dict(),
        "x_pad_token": torch.full(shape, 3.0),
        "cap_pad_token": torch.full(shape, 4.0),
    }
    network = ZImage(ours.config)
    network.load_state_dict(weights)
    assert network.x_pad_token.tolist() == [[3.0] * 128]
    assert network.cap_pad_token.shape == (1, 128)


@pytest.mark.parametrize(
    ("x", "t", "lengths", "words"),
    [
        (torch.zeros(1, 16, 4, 4, dtype=torch.float16), torch.zeros(1), [3], "fp16"),
        (torch.zeros(1, 16, 5, 4), torch.zeros(1), [3], r"\[1, 16, 5, 4\]"),
        (torch.zeros(1, 4, 4, 4), torch.zeros(1), [3], r"\[B, 16, H, W\]"),
        (torch.zeros(2, 16, 4, 4), torch.zeros(2), [3], "1 captions"),
        (torch.zeros(1, 16, 4, 4), torch.zeros(3), [3], r"times \[3\]"),
        (torch.zeros(1, 16, 4, 4), torch.zeros(1), [0], "at least one token"),
    ],
)
def test_bad_input_is_refused(ours, x, t, lengths, words):
    with pytest.raises(HswqError, match=words):
        ours(x, t, [torch.zeros(length, CAP_DIM) for length in lengths])


def test_sizes_that_cannot_be_read_are_refused():
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in ZImage(MINI).state_dict().items()}
    with pytest.raises(HswqError, match=r"x_embedder\.weight"):
        ZImageConfig.from_shapes(
            {name: shape for name, shape in shapes.items() if name != "x_embedder.weight"}
        )
    with pytest.raises(HswqError, match="no matrix"):
        ZImageConfig.from_shapes({**shapes, "cap_embedder.1.weight": (256,)})
    gap = {name: shape for name, shape in shapes.items() if not name.startswith("layers.3.")}
    with pytest.raises(HswqError, match="not numbered"):
        ZImageConfig.from_shapes(gap)
    with pytest.raises(HswqError, match="head_dim=24"):
        ZImageConfig.from_shapes({**shapes, "layers.0.attention.q_norm.weight": (24,)})
    with pytest.raises(HswqError, match="positive sizes"):
        ZImageConfig.from_shapes({**shapes, "cap_embedder.1.weight": (256, 0)})
    with pytest.raises(HswqError, match="head_dim=1"):
        ZImageConfig.from_shapes({**shapes, "layers.0.attention.q_norm.weight": ()})


@pytest.mark.parametrize(("tokens", "padded"), [(1, 32), (32, 32), (33, 64)])
def test_padded_length(tokens, padded):
    assert padded_length(tokens) == padded


def test_names_round_trip(reference):
    """Every diffusers name has a native one, and the way back gives the same name at the same part."""
    native = set(ZImage(MINI).state_dict())
    for name in reference.state_dict():
        target, part = native_target(name)
        assert diffusers_names(target)[part or 0] == name
        assert native_target(target) == (target, None)
        assert target in native
    expected = [f"layers.1.attention.to_{which}" for which in "qkv"]
    assert list(diffusers_names("layers.1.attention.qkv")) == expected
    assert [native_target(name)[1] for name in expected] == [0, 1, 2]
    assert native_target("all_final_layer.2-1.linear") == ("final_layer.linear", None)
    assert native_target("all_x_embedder.2-1") == ("x_embedder", None)
