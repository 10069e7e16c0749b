"""Encode prompts with the real Z-Image's text encoder, for a model whose text encoder is not loaded beside it.

    python tools/encode_captions.py Z_IMAGE_FOLDER captions.safetensors --prompts prompts.txt

The folder is a diffusers folder of Z-Image with `tokenizer/` and `text_encoder/` (Qwen3-4B). Each line of the text
file is a prompt; the empty prompt, which guidance needs, is always added. The recipe is diffusers' ZImagePipeline:
the chat template with thinking enabled, at most 512 tokens, the hidden states before the last layer, padding left
out. Needs the package transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from hswq_lab.captions import save_captions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LONGEST = 512


def encode(tokenizer: Any, encoder: Any, prompt: str) -> Tensor:  # noqa: ANN401 - transformers' own classes
    """Caption features of a prompt, [tokens, cap_dim] in the encoder's dtype, on the CPU."""
    told = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    tokens = tokenizer(told, max_length=LONGEST, truncation=True, return_tensors="pt").to(encoder.device)
    with torch.no_grad():
        states = encoder(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
        ).hidden_states
    return states[-2][0].cpu()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="diffusers folder with tokenizer/ and text_encoder/")
    parser.add_argument("out", type=Path, help="the captions file to write")
    parser.add_argument("--prompts", type=Path, required=True, help="text file, a prompt a line")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415 - heavy, and optional

    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [*dict.fromkeys(line.strip() for line in lines if line.strip()), ""]
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "tokenizer", local_files_only=True)
    encoder = AutoModel.from_pretrained(
        args.folder / "text_encoder", dtype=torch.bfloat16, local_files_only=True
    ).to(args.device)
    written = save_captions(args.out, {prompt: encode(tokenizer, encoder, prompt) for prompt in prompts})
    print(f"{written}: {len(prompts)} prompts, the empty one included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
