"""tools/train_mini.py: schedule, examples, resuming, adapters that our loader reads, choice of pictures."""

from __future__ import annotations

import pytest
import torch
from mini_training.adapter import adapting_factory, export
from mini_training.loop import Recipe, Trainer
from mini_training.noto import chosen, render
from mini_training.pictures import INK, PAPER, Batches, Noto, fit_codec
from mini_training.publish import LEFT_OUT, PROMPTS
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab.models.mini import COLOURS, contact_sheet, word_vector
from hswq_lab.models.zimage import ZImage, ZImageConfig, linear_layers

SMALL = ZImageConfig(
    dim=32, n_layers=1, n_refiners=1, head_dim=16, ffn_dim=48, cap_dim=512, time_dim=32, time_hidden=32
)


# Under autocast the norms see bf16 values and fp32 weights on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")


@pytest.fixture(scope="module")
def noto():
    """Three pictures: a random one, an opaque grey one, a red disc."""
    generator = torch.Generator().manual_seed(0)
    rgb, alpha = torch.rand(3, 3, 64, 64, generator=generator), torch.ones(3, 1, 64, 64)
    axis = torch.linspace(-1, 1, 64)
    disc = (axis[:, None] ** 2 + axis**2 < 0.5).float()
    rgb[1], rgb[2], alpha[2, 0] = 0.5, torch.stack([disc, 0 * disc, 0 * disc]), disc
    return Noto(rgb, alpha, ["noise", "grey square", "red disc"])


@pytest.fixture(scope="module")
def batches(noto):
    return Batches(noto, fit_codec(noto), "plain")


def trainer_of(batches, **changes):
    torch.manual_seed(0)
    settings = {"steps": 40, "seconds": 1e9, "lr": 3e-3, "batch": 8, "warmup": 5, **changes}
    return Trainer(ZImage(SMALL), batches, Recipe(**settings))


def test_the_schedule_ends_at_steps_or_seconds():
    recipe = Recipe(steps=1000, seconds=100, lr=1.0, batch=1, warmup=10)
    assert recipe.rate(0, 0) == pytest.approx(0.1)
    assert recipe.rate(500, 0) == pytest.approx(0.5)
    assert recipe.rate(20, 50) == pytest.approx(0.5)
    assert recipe.rate(1000, 1) == pytest.approx(0)
    assert recipe.rate(20, 200) == pytest.approx(0)


def test_examples_are_what_their_captions_say(noto, batches):
    torch.manual_seed(1)
    latents, features, pads = batches.draw(64, dropped=0)
    decoded = fit_codec(noto).decode(latents)
    seen = set()
    for picture, rows, padding in zip(decoded, features, pads, strict=True):
        words = rows[~padding]
        assert not rows[padding].any()
        if torch.equal(words[0], word_vector("red")):
            colour = next((c for c in COLOURS if torch.equal(words[-1], word_vector(c))), "white")
            wanted = torch.tensor(COLOURS.get(colour, (255, 255, 255))) / 255
            assert (picture[:, :4, :4].mean(dim=(1, 2)) - wanted).abs().max() < 0.1
            assert len(words) == (2 if colour == "white" else 4)
            seen.add(colour)
    assert "white" in seen
    assert len(seen) > 3


def test_captions_are_dropped_to_the_null_word(batches):
    _, features, pads = batches.draw(4, dropped=1.1)
    assert pads.sum() == 4 * 31
    assert torch.equal(features[0, 0], word_vector("<null>"))


def test_training_learns_and_goes_on_where_it_stopped(batches, tmp_path):
    trainer = trainer_of(batches)
    before = trainer.first_loss()
    trainer.run()
    assert trainer.step == 40
    assert trainer.first_loss() < 0.85 * before
    trainer.save(tmp_path / "state.pt")
    again = trainer_of(batches, steps=42)
    again.resume(tmp_path / "state.pt")
    assert again.step == 40
    for name, value in trainer.averaged().items():
        assert torch.equal(again.averaged()[name], value)
    for old, new in zip(trainer.parameters, again.parameters, strict=True):
        assert torch.equal(old, new)
        kept, restored = trainer.optimizer.state[old], again.optimizer.state[new]
        assert kept.keys() == restored.keys()
        assert all(torch.equal(kept[key], restored[key]) for key in kept)
    again.run()
    assert again.step == 42
    assert {int(state["step"]) for state in again.optimizer.state.values() if state} == {42}


def test_the_clock_ends_a_piece_and_the_schedule(batches):
    trainer = trainer_of(batches)
    trainer.run(piece=0)
    assert trainer.step == 0
    late = trainer_of(batches, seconds=1e-6)
    late.run()
    assert late.step == 1


def test_a_rate_that_diverges_is_reported(batches):
    with pytest.raises(RuntimeError, match="rate is too high"):
        trainer_of(
            batches, steps=400, lr=3.0, warmup=400, batch=1
        ).run()  # still well at step 50, where it looks first


def test_adapters_come_back_as_the_deltas_that_were_trained(tmp_path):
    """A network with adapters computes what W + ΔW computes, ΔW as our own loader reads the exported file."""
    torch.manual_seed(0)
    adapted = ZImage(SMALL, adapting_factory(16.0))
    plain = ZImage(SMALL)
    adapted.load_state_dict(plain.state_dict(), strict=False)
    values = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    for value in values.values():
        value.data = (torch.randn(value.shape) * 0.2).bfloat16().float()
    x, t, captions = torch.randn(2, 16, 8, 8), torch.tensor([0.3, 0.8]), [torch.randn(3, 512)] * 2
    tensors, metadata = export(adapted, values, 16.0)
    assert {v.dtype for v in tensors.values()} == {torch.bfloat16}
    save_file(tensors, tmp_path / "lora.safetensors", metadata=metadata)
    deltas = hl.load_lora(tmp_path / "lora.safetensors").dense_deltas(linear_layers(SMALL))
    assert len(deltas) == 15
    with torch.no_grad():
        unchanged = plain(x, t, captions)
        for layer, delta in deltas.items():
            plain.get_submodule(layer).weight += delta
        torch.testing.assert_close(adapted(x, t, captions), plain(x, t, captions), rtol=1e-4, atol=1e-4)
        assert (plain(x, t, captions) - unchanged).abs().max() > 0.01


def test_styles(noto):
    blue = COLOURS["blue"]
    turned = noto.on(blue, "palette")
    assert turned[2][:, 32, 32].tolist() == [0, 1, 0]
    assert (turned[2][:, 0, 0] * 255).round().tolist() == [blue[2], blue[0], blue[1]]
    lines = noto.on(blue, "outline")
    assert torch.equal(lines, noto.on(COLOURS["red"], "outline"))
    assert (lines[1][:, 32, 32] * 255).round().tolist() == list(PAPER)
    edge = int((noto.alpha[2, 0, 32] > 0).nonzero()[0])
    assert (lines[2][:, 32, edge] * 255).round().tolist() == list(INK)


def test_pictures_are_chosen():
    icons = {
        "red-heart": {"body": "<path/>"},
        "heart": {"body": "<path/>"},
        "old": {"body": "<a/>", "hidden": True},
        "hand-dark-skin-tone": {"body": "<b/>"},
        "crossed-flags": {"body": "<c/>"},
        "owl": {"body": "<d/>"},
    }
    names = chosen({"icons": icons}, {"categories": {"Flags": ["crossed-flags"]}})
    assert names == {"red heart": "<path/>", "owl": "<d/>"}
    half = render('<rect width="64" height="128" fill="#f00"/>')
    assert half.shape == (64, 64, 4)
    assert half[10, 10].tolist() == [255, 0, 0, 255]
    assert half[10, 40].tolist() == [0, 0, 0, 0]


def test_the_contact_sheet_leaves_out_what_it_should():
    unwanted = {word for line in LEFT_OUT for word in line.split()}
    captions = contact_sheet().captions
    assert len(captions) == len(set(captions)) == 320
    assert not unwanted & {word for caption in captions for word in caption.split()}
    assert [prompt.split(" on ")[0] for prompt in PROMPTS] == captions[:20]
