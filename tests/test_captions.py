"""Captions files: prompts for a model without its text encoder."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from hswq_lab.captions import caption_companion, load_captions, save_captions
from hswq_lab.checkpoint import write
from hswq_lab.errors import HswqError
from hswq_lab.models.synthetic import TOY, tensors
from hswq_lab.session import open_model


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
    with pytest.raises(HswqError, match="no default prompts"):
        _ = open_model(path, device="cpu").prompts
    model = open_model(path, device="cpu", captions=captions, size=(32, 32))
    run = model.generate(model.prompts[0], steps=1)  # cfg 2.5 needs the empty prompt too
    assert run.final.shape == (16, 4, 4)
    assert run.codec is None


def tiny_qwen(folder):
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
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    encoder = Qwen3Model(Qwen3Config(vocab_size=len(letters), **sizes, **heads)).bfloat16().eval()
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder.save_pretrained(folder / "text_encoder")
    return tokenizer, encoder


def test_the_tool_encodes_prompts_as_the_pipeline_of_diffusers_does(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    encode_captions = pytest.importorskip("encode_captions")
    tokenizer, encoder = tiny_qwen(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red fox\n\na red fox\nten blue hearts\n")
    out = tmp_path / "captions.safetensors"
    arguments = [str(tmp_path), str(out), "--prompts", str(tmp_path / "prompts.txt"), "--device", "cpu"]
    assert encode_captions.main(arguments) == 0
    found = load_captions(out)
    assert set(found) == {"a red fox", "ten blue hearts", ""}
    pipeline = diffusers.ZImagePipeline(
        scheduler=None, vae=None, text_encoder=encoder, tokenizer=tokenizer, transformer=None
    )
    for prompt, features in found.items():
        expected = pipeline._encode_prompt(prompt, device=torch.device("cpu"))[0]
        assert features.shape == expected.shape
        assert torch.allclose(features.float(), expected.float(), atol=0.05, rtol=0.02)
