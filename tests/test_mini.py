"""mini-zimage: codec, text encoder, what ships with it, and that the shipped model draws what is asked."""

from __future__ import annotations

import hashlib

import pytest
import torch

import hswq_lab as hl
from hswq_lab import HswqError
from hswq_lab.models import mini
from hswq_lab.models.mini import (
    LinearCodec,
    contact_sheet,
    encode_text,
    mini_companion,
    retrieval,
)
from hswq_lab.shipped import MINI_WEIGHTS, asset


@pytest.fixture(scope="module")
def companion():
    return mini_companion()


@pytest.fixture(scope="module")
def model():
    return hl.load("mini-zimage", device="cpu")


def pictures_of(prompts):
    return torch.stack([contact_sheet().target(prompt) for prompt in prompts])


def test_the_codec_keeps_pictures(companion):
    images = pictures_of(companion.prompts)
    latents = companion.codec.encode(images)
    assert latents.shape == (20, 16, 16, 16)
    assert 0.5 < float(latents.var()) < 2
    error = (companion.codec.decode(latents) - images).square().mean()
    assert -10 * error.log10() > 26


def test_the_codec_is_a_projection(companion):
    """Encoding what was decoded gives the same latents: v is orthonormal and s cancels."""
    values = companion.codec
    torch.testing.assert_close(values.v.T @ values.v, torch.eye(16), rtol=0, atol=1e-5)
    small = torch.randn(3, 16, 4, 6, generator=torch.Generator().manual_seed(0)) * 0.05
    small = small + values.encode(torch.full((3, 3, 16, 24), 0.5))
    torch.testing.assert_close(values.encode(values.decode(small)), small, rtol=0, atol=1e-4)
    torch.testing.assert_close(values.decode(small)[1], values.decode(small[1]))


def test_the_codec_on_disk(companion, tmp_path):
    companion.codec.save(tmp_path / "codec.npz")
    again = LinearCodec.load(tmp_path / "codec.npz")
    assert torch.equal(again.v, companion.codec.v)
    with pytest.raises(HswqError, match="no latent codec"):
        LinearCodec.load(tmp_path / "missing.npz")
    (tmp_path / "broken.npz").write_bytes(b"no zip file")
    with pytest.raises(HswqError, match=r"broken\.npz"):
        LinearCodec.load(tmp_path / "broken.npz")


@pytest.mark.parametrize("shape", [(3, 64), (4, 64, 64), (3, 62, 64)])
def test_the_codec_refuses_other_shapes(companion, shape):
    with pytest.raises(HswqError, match="cannot be encoded"):
        companion.codec.encode(torch.zeros(shape))
    with pytest.raises(HswqError, match="cannot be decoded"):
        companion.codec.decode(torch.zeros(shape))


def test_words_become_the_bits_of_their_hash():
    features = encode_text("Red heart, red!")
    assert features.shape == (3, 512)
    assert torch.equal(features[0], features[2])
    assert not torch.equal(features[0], features[1])
    digest = int.from_bytes(hashlib.shake_256(b"heart").digest(64), "big")
    assert features[1].tolist() == [1.0 if digest >> (511 - bit) & 1 else -1.0 for bit in range(512)]


@pytest.mark.parametrize("prompt", ["", "  ", "…!"])
def test_a_prompt_without_words_is_the_null_caption(prompt):
    assert torch.equal(encode_text(prompt), mini.word_vector("<null>")[None])


def test_long_prompts_are_cut_with_a_warning():
    with pytest.warns(UserWarning, match="first 32"):
        features = encode_text(" ".join(f"word{i}" for i in range(40)))
    assert torch.equal(features, encode_text(" ".join(f"word{i}" for i in range(32))))


def test_what_ships(companion):
    folder = asset(MINI_WEIGHTS).parent
    weights = list(folder.glob("mini_zimage-*.safetensors"))
    assert len(weights) == 2
    assert sum(file.stat().st_size for file in weights) < 25 * 2**20
    assert all(file.stat().st_size < 16 * 2**20 for file in folder.iterdir())
    assert len(set(companion.prompts)) == 20
    assert set(companion.loras) == {"outline", "palette"}
    notice = (folder / "NOTICE").read_text(encoding="utf-8")
    assert "Google" in notice
    assert "Apache License" in notice
    assert "not a Z-Image checkpoint" in (folder / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_the_weights_say_whose_they_are(model):
    assert model.checkpoint.metadata["hswq.model"] == "mini-zimage"
    assert len(model.layers()) == 65
    assert {value.dtype for value in model.checkpoint.values()} == {torch.bfloat16}


def test_a_missing_asset_is_named():
    with pytest.raises(HswqError, match=r"no_such_file\.bin"):
        mini.asset("no_such_file.bin")


def test_retrieval_finds_the_pictures_themselves_and_nothing_else(companion):
    prompts = companion.prompts
    images = pictures_of(prompts)
    assert retrieval(images, prompts) == 1.0
    assert retrieval(images.roll(1, 0), prompts) == 0.0
    half = torch.cat([images[:10], images[:10]])
    assert retrieval(half, prompts) == 0.5


def test_a_target_is_on_the_background_that_is_asked_for():
    white, blue = pictures_of(["red heart", "red heart on blue"])
    assert white[:, 0, 0].tolist() == [1, 1, 1]
    assert (blue[:, 0, 0] * 255).round().tolist() == [66, 124, 224]
    torch.testing.assert_close(white[:, 30, 32], blue[:, 30, 32])
    assert contact_sheet().target("no such thing on blue") is None


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("red heart on blue", ("red heart", "blue")),
        ("red heart", ("red heart", None)),
        ("umbrella on ground", ("umbrella on ground", None)),
        ("umbrella on ground on red", ("umbrella on ground", "red")),
    ],
)
def test_backgrounds_are_told_from_captions(prompt, parts):
    assert mini.without_background(prompt) == parts


def test_retrieval_refuses_what_it_cannot_judge():
    with pytest.raises(HswqError, match="no such thing"):
        retrieval(torch.zeros(1, 3, 64, 64), ["no such thing"])
    with pytest.raises(HswqError, match="each prompt"):
        retrieval(torch.zeros(2, 3, 64, 64), ["red heart"])


@pytest.fixture(scope="module")
def drawn(model, companion):
    """Five of the default prompts as the shipped model draws them in eight steps."""
    prompts = companion.prompts[:5]
    runs = [model.generate(prompt, seed=42 + i, steps=8) for i, prompt in enumerate(prompts)]
    return prompts, companion.codec.decode(torch.stack([run.latents[-1] for run in runs]))


def test_the_model_draws_what_is_asked(drawn):
    prompts, images = drawn
    assert retrieval(images, prompts) == 1.0
    error = (images - pictures_of(prompts)).square().mean(dim=(1, 2, 3))
    assert (-10 * error.log10()).mean() > 26


def test_the_model_obeys_backgrounds(drawn):
    prompts, images = drawn
    coloured = [i for i, prompt in enumerate(prompts) if prompt.rsplit(" ", 1)[-1] in mini.COLOURS]
    assert len(coloured) >= 3
    for i in coloured:
        wanted = torch.tensor(mini.COLOURS[prompts[i].rsplit(" ", 1)[-1]])
        corner = images[i][:, :3, :3].mean(dim=(1, 2)) * 255
        assert (corner - wanted).abs().max() < 12


def test_its_name_is_enough_wherever_a_checkpoint_is_meant():
    assert len(hl.Checkpoint.open("mini-zimage")) == len(hl.load("mini-zimage").checkpoint)
    assert hl.inspect("mini-zimage").to_dict() == hl.inspect(hl.Checkpoint.open("mini-zimage")).to_dict()
    assert hl.check("mini-zimage", source="mini-zimage").ok
    assert hl.diff("mini-zimage", "mini-zimage").same
