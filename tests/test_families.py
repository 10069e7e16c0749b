"""A second family is one class and one line: it loads, packs, generates and has its sensitivity measured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import hswq_lab as hl
from hswq_lab.errors import HswqError
from hswq_lab.model import Model
from hswq_lab.models import families
from hswq_lab.models.architecture import Architecture, dense_linear
from hswq_lab.quantize import observe, smooth


class ToyNetwork(nn.Module):
    def __init__(self, toy, linear):
        super().__init__()
        self.toy_in = linear("toy_in", toy.channels, toy.dim, True)
        self.toy_text = linear("toy_text", toy.cap_dim, toy.dim, True)
        self.toy_out = linear("toy_out", toy.dim, toy.channels, True)

    def forward(self, latents, t, captions):
        text = torch.stack([self.toy_text(caption.to(latents.dtype)).mean(0) for caption in captions])
        x = (
            self.toy_in(latents.movedim(1, -1))
            + text[:, None, None]
            + t[:, None, None, None].to(latents.dtype)
        )
        return self.toy_out(torch.tanh(x)).movedim(-1, 1)


@dataclass(frozen=True)
class Toy(Architecture):
    channels: int
    dim: int
    cap_dim: int
    family = "Toy"
    sign = "toy_text.weight"
    picture_size = (64, 64)

    @classmethod
    def from_shapes(cls, shapes):
        return cls(shapes["toy_out.weight"][0], *shapes["toy_text.weight"])

    @property
    def latent_channels(self):
        return self.channels

    def network(self, linear=dense_linear):
        return ToyNetwork(self, linear)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, Toy))
    torch.manual_seed(0)
    checkpoint = hl.Checkpoint.from_mapping(Toy(16, 64, 32).network().state_dict())
    return Model(checkpoint, name="toy")


def test_a_toy_family_packs_generates_and_is_measured(toy):
    prompt = torch.randn(5, 32)
    run = {"prompts": [prompt], "seeds": [1], "steps": 2}
    packed = hl.pack(toy, hl.Plan({"toy_in": "int8_tensorwise", "toy_out": "nvfp4"}))
    assert packed.generate(prompt, 1, steps=2, cfg=1).final.shape == (16, 8, 8)
    impact = hl.sensitivity(toy, **run, cfg=1)
    assert {row.layer for row in impact.rows} == {"toy_in", "toy_text", "toy_out"}
    assert all(row.samples[0] > 0 for row in impact.rows)


def test_a_family_without_sites_is_not_smoothed(toy):
    activations = observe(toy, [torch.randn(5, 32)], [1], steps=1, cfg=1)
    with pytest.raises(HswqError, match="no places to smooth"):
        smooth(toy, activations)
