"""The real model's neighbours: captions files, the text encoder that makes them, the VAE that makes pictures."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hswq_lab.captions import caption_companion, load_captions, save_captions
from hswq_lab.checkpoint import write
from hswq_lab.cli import main
from hswq_lab.embed import embed
from hswq_lab.errors import HswqError
from hswq_lab.models.synthetic import TOY, tensors
from hswq_lab.session import open_model
from hswq_lab.vae import open_vae


@pytest.fixture
def captions(tmp_path):
    generator = torch.Generator().manual_seed(3)
    features = {
        prompt: torch.randn(5, TOY.cap_dim, generator=generator).bfloat16() for prompt in ("a fox", "")
    }
    return save_captions(tmp_path / "captions.safetensors", features)


def test_what_was_saved_is_read_with_the_empty_prompt(captions):
    assert set(load_captions(captions)) == {"a fox", ""}
    assert load_captions(captions)["a fox"].dtype == torch.bfloat16


def test_a_companion_encodes_the_file_s_prompts_and_refuses_others(captions):
    companion = caption_companion(captions, (64, 96))
    assert companion.prompts == ["a fox"]
    assert companion.size == (64, 96)
    assert companion.encode("a fox").dtype == torch.float32
    assert companion.encode("").shape == (5, TOY.cap_dim)
    with pytest.raises(HswqError, match="does not have this prompt") as raised:
        companion.encode("a box")
    assert "a fox" in str(raised.value)


@pytest.mark.parametrize("value", [torch.zeros(5), torch.zeros(5, 4, dtype=torch.int64), torch.zeros(0, 4)])
def test_other_tensors_are_refused_by_name(value, tmp_path):
    save_file({"a fox": value}, tmp_path / "other.safetensors")
    with pytest.raises(HswqError, match="a fox"):
        load_captions(tmp_path / "other.safetensors")


def test_a_missing_file_and_a_damaged_one_are_refused(tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"no header")
    for name in ("missing", "damaged"):
        with pytest.raises(HswqError, match=f"{name}.safetensors"):
            load_captions(tmp_path / f"{name}.safetensors")


def test_a_model_without_a_text_encoder_runs_on_a_captions_file(captions, tmp_path):
    path = write(tmp_path / "toy.safetensors", tensors(TOY), {})
    with pytest.raises(HswqError, match=r"no default prompts.*--captions"):
        _ = open_model(path, device="cpu").prompts
    model = open_model(path, device="cpu", captions=captions, size=(32, 32))
    run = model.generate(model.prompts[0], steps=1)  # cfg 2.5 needs the empty prompt too
    assert run.final.shape == (16, 4, 4)
    assert run.codec is None


def tiny_qwen(folder, width=32):
    """A Qwen3 of made-up weights with a tokenizer that knows letters, as the folder of a diffusers pipeline has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - heavy, for one test
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model  # noqa: PLC0415

    unknown = {"unk_token": "~"}
    letters = {letter: i for i, letter in enumerate("~<>|/\n abcdefghijklmnopqrstuvwxyz")}
    inner = Tokenizer(models.WordLevel(letters, **unknown))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **unknown, pad_token="~")  # noqa: S106 - no password
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if enable_thinking %}<think>{% else %}<answer>{% endif %}"
    )
    sizes = {"hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    encoder = Qwen3Model(Qwen3Config(vocab_size=len(letters), **sizes, **heads)).bfloat16().eval()
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder.save_pretrained(folder / "text_encoder")
    return tokenizer, encoder


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, *tiny_qwen(folder)


def test_embed_encodes_prompts_as_the_pipeline_of_diffusers_does(encoder_folder, tmp_path, capsys):
    diffusers = pytest.importorskip("diffusers")
    folder, tokenizer, encoder = encoder_folder
    (tmp_path / "prompts.txt").write_text("a red fox\n\na red fox\nten blue hearts\n" + 300 * "ab" + "\n")
    out, told = tmp_path / "captions.safetensors", tmp_path / "told.json"
    prompts = ["--prompts", str(tmp_path / "prompts.txt"), "--prompt", "a boat"]
    where = ["-o", str(out), "--device", "cpu", "--json", str(told)]
    assert main(["embed", str(folder), *prompts, *where]) == 0
    assert "cut off after 512 tokens: abab" in capsys.readouterr().out
    found = load_captions(out)
    assert set(found) == {"a boat", "a red fox", "ten blue hearts", 300 * "ab", ""}
    pipeline = diffusers.ZImagePipeline(
        scheduler=None, vae=None, text_encoder=encoder, tokenizer=tokenizer, transformer=None
    )
    for prompt, features in found.items():
        expected = pipeline._encode_prompt(prompt, device=torch.device("cpu"))[0]
        assert features.shape == expected.shape
        assert torch.allclose(features.float(), expected.float(), atol=0.05, rtol=0.02)
    rows = {row["prompt"]: row for row in json.loads(told.read_text())["rows"]}
    assert rows[300 * "ab"] == {"prompt": 300 * "ab", "tokens": 512, "cut": True}
    assert not rows["a boat"]["cut"]


def test_embed_refuses_what_it_cannot_do(encoder_folder, tmp_path):
    folder = encoder_folder[0]
    out = tmp_path / "captions.safetensors"
    for source, prompts, message in (
        (tmp_path, ["a fox"], "has no text encoder"),
        (folder, [" ", ""], "no prompt"),
        (folder, ["(empty)"], "cannot hold this prompt"),
    ):
        with pytest.raises(HswqError, match=message):
            embed(source, prompts, out)
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "text_encoder" / "config.json").write_text("{}")
    with pytest.raises(HswqError, match="cannot be opened"):
        embed(tmp_path / "damaged", ["a fox"], out)
    assert not out.exists()


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """diffusers' AutoencoderKL of made-up weights in the folder of a pipeline; a cell of 4 pixels."""
    from diffusers import AutoencoderKL  # noqa: PLC0415 - heavy, for two tests

    torch.manual_seed(0)
    widths = {"block_out_channels": (8, 8, 16), "norm_num_groups": 4, "latent_channels": TOY.in_channels}
    blocks = {"down_block_types": 3 * ("DownEncoderBlock2D",), "up_block_types": 3 * ("UpDecoderBlock2D",)}
    network = AutoencoderKL(**widths, **blocks, scaling_factor=0.3611, shift_factor=0.1159).eval()
    folder = tmp_path_factory.mktemp("vae")
    network.save_pretrained(folder / "vae")
    return folder, network


def test_a_vae_makes_the_pictures_that_the_pipeline_of_diffusers_makes(vae):
    from diffusers.image_processor import VaeImageProcessor  # noqa: PLC0415 - heavy, for one test

    folder, network = vae
    codec = open_vae(folder)
    assert codec == open_vae(folder / "vae")
    assert codec == pickle.loads(pickle.dumps(codec))  # noqa: S301 - our own bytes
    latent = torch.randn(2, TOY.in_channels, 6, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        raw = network.decode(latent / 0.3611 + 0.1159, return_dict=False)[0]
    expected = VaeImageProcessor().postprocess(raw, output_type="pt")
    assert torch.equal(codec.decode(latent), expected)
    torch.testing.assert_close(codec.decode(latent[1]), expected[1], rtol=0, atol=1e-5)


def test_with_encoder_and_vae_a_model_makes_pictures(vae, tmp_path):
    tiny_qwen(tmp_path, width=TOY.cap_dim)
    captions = tmp_path / "captions.safetensors"
    embed(tmp_path, ["a fox"], captions)
    path = write(tmp_path / "toy.safetensors", tensors(TOY), {})
    model = open_model(path, device="cpu", captions=captions, size=(32, 48), vae=vae[0])
    run = model.generate("a fox", steps=1)
    assert run.final.shape == (16, 8, 12)
    assert run.image.size == (48, 32)
    spread = np.asarray(run.image).std()
    assert spread > 1
    told = ["--captions", str(captions), "--vae", str(vae[0]), "--size", "32", "32", "--device", "cpu"]
    found = tmp_path / "found.json"
    quick = ["--modes", "auto", "--seeds", "1", "--steps", "1", "--prompt", "a fox", "--json", str(found)]
    assert main(["compare", str(path), str(path), *told, *quick]) == 0
    assert json.loads(found.read_text())["size"] == [32, 32]


def test_a_folder_without_a_vae_is_refused(vae, tmp_path):
    with pytest.raises(HswqError, match="cannot be read"):
        open_vae(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "Qwen3Model"}')
    with pytest.raises(HswqError, match="no VAE"):
        open_vae(tmp_path)
    shutil.copy(vae[0] / "vae" / "config.json", tmp_path / "config.json")
    with pytest.raises(HswqError, match="weights cannot be read"):
        open_vae(tmp_path).decode(torch.zeros(TOY.in_channels, 2, 2))
    with pytest.raises(HswqError, match="cannot be decoded"):
        open_vae(vae[0]).decode(torch.zeros(4, 2, 2))
    with pytest.raises(HswqError, match="together with captions"):
        open_model("mini-zimage", device="cpu", vae=vae[0])
