"""Files that are no checkpoint of this model: everything that opens one says what it is."""

from __future__ import annotations

import pytest
import torch
from lora_dialects import DIALECTS, LAYERS, logical
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab.checkpoint import Checkpoint, check
from hswq_lab.cli import main
from hswq_lab.errors import HswqError
from hswq_lab.models.foreign import looks_like_lora, what_it_is


def file_of(path, names):
    save_file({name: torch.zeros(4, 4) for name in names}, path)
    return str(path)


LORA = [
    "diffusion_model.layers.0.attention.out.lora_A.weight",
    "diffusion_model.layers.0.attention.out.lora_B.weight",
]
OTHERS = {
    "a LoRA": LORA,
    "a VAE": ["encoder.conv_in.weight", "decoder.conv_in.weight", "decoder.mid.block_1.conv1.weight"],
    "a text encoder": [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
    ],
    "Flux": [
        "model.diffusion_model.double_blocks.0.img_attn.qkv.weight",
        "model.diffusion_model.img_in.weight",
    ],
    "SDXL": ["model.diffusion_model.input_blocks.1.0.in_layers.0.weight"],
    "a language model": ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"],
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_lora_is_known_in_every_dialect(dialect):
    tensors, _ = DIALECTS[dialect](logical(list(LAYERS), lambda _: 4, lambda _: 8.0))
    assert looks_like_lora(tensors)


def test_a_model_is_no_lora_even_with_adapters_in_it(tiny_tensors):
    assert not looks_like_lora(tiny_tensors)
    assert not looks_like_lora([*tiny_tensors, *LORA])
    assert not looks_like_lora([])
    assert what_it_is(tiny_tensors) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_load_says_what_the_file_is(kind, tmp_path):
    path = file_of(tmp_path / "x.safetensors", OTHERS[kind])
    with pytest.raises(HswqError, match=f"this is .*{kind}") as caught:
        hl.load(path)
    assert str(caught.value.file) == path


def test_nothing_takes_a_lora_for_a_model(tmp_path, capsys):
    path, out = file_of(tmp_path / "style.safetensors", LORA), str(tmp_path / "out.safetensors")
    for command in (
        ["pack", path, "-o", out, "--all", "int8"],
        ["calibrate", path, "-o", out],
        ["compare", path, path],
        ["diff", path, path],
        ["sensitivity", path],
        ["bake", path, path, "-o", out],
        ["check", path, "--source", path],
    ):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "this is a LoRA, not a checkpoint of a model" in told
        assert "hl.load_lora" in told
    assert main(["check", path]) == 1
    assert "error: [kind] this is a LoRA" in capsys.readouterr().out
    with pytest.raises(HswqError, match="this is a LoRA"):
        Checkpoint.open(path)


def test_a_file_of_another_family_is_checked_by_the_rules_of_formats(tmp_path):
    report = check(file_of(tmp_path / "flux.safetensors", OTHERS["Flux"]))
    assert report.ok
    (finding,) = (finding for finding in report.findings if finding.rule == "family")
    assert "Flux" in finding.found
