"""Prompts to caption features with the real Z-Image's text encoder: what `hswq-lab embed` does.

The recipe is that of diffusers' ZImagePipeline: the chat template with thinking enabled, at most 512 tokens, the
hidden states before the last layer, padding left out. Needs the package transformers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from hswq_lab.captions import save_captions
from hswq_lab.errors import HswqError
from hswq_lab.progress import progress_of
from hswq_lab.results import Result

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from torch import Tensor

    from hswq_lab.progress import Progress

LONGEST = 512
"""Tokens, those of the chat template included; the rest of a longer prompt is cut off."""


@dataclass(frozen=True)
class EmbedRow:
    """One prompt.

    Attributes:
        tokens: rows of its features.
        cut: whether the end of the prompt was cut off.
    """

    prompt: str
    tokens: int
    cut: bool


@dataclass(frozen=True)
class EmbedReport(Result):
    """What `embed` wrote.

    Attributes:
        width: columns of the features, the cap_dim that the model must have.
    """

    file: str
    folder: str
    width: int
    rows: list[EmbedRow] = field(repr=False)

    def to_frame(self) -> pd.DataFrame:
        """One row a prompt."""
        return pd.DataFrame([vars(row) for row in self.rows])

    def __str__(self) -> str:
        cut = [row.prompt for row in self.rows if row.cut]
        lines = [f"{self.file}: {len(self.rows)} prompts, the empty one included, width {self.width}"]
        return "\n".join(lines + [f"  cut off after {LONGEST} tokens: {prompt[:60]}…" for prompt in cut])


def embed(
    folder: str | os.PathLike[str],
    prompts: Iterable[str],
    out: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    progress: Progress | None = None,
) -> EmbedReport:
    """Encodes prompts and writes a captions file, which `open_model(…, captions=)` reads.

    Args:
        folder: a local diffusers folder of Z-Image with `tokenizer/` and `text_encoder/` (Qwen3-4B); nothing is
            fetched.
        prompts: repeated and blank ones count once; the empty prompt, which guidance needs, is always added.
        out: the file to write.
        device: where the encoder runs, in bf16.
        progress: told before every prompt.

    Raises:
        HswqError: transformers is not installed, a part of the folder is missing or cannot be read, or there is no
            prompt.
    """
    wanted = [*dict.fromkeys(text for text in map(str.strip, prompts) if text), ""]
    if wanted == [""]:
        raise HswqError("there is no prompt to encode", file=out)
    tokenizer, encoder = _open(Path(folder), device)
    features: dict[str, Tensor] = {}
    rows = []
    for done, prompt in enumerate(wanted):
        progress_of(progress)(done, len(wanted), prompt or "the empty prompt")
        features[prompt], cut = encode(tokenizer, encoder, prompt)
        rows.append(EmbedRow(prompt, len(features[prompt]), cut))
    written = save_captions(out, features)
    progress_of(progress)(len(wanted), len(wanted), "written")
    return EmbedReport(str(written), str(folder), features[""].shape[1], rows)


def encode(tokenizer: Any, encoder: Any, prompt: str) -> tuple[Tensor, bool]:  # noqa: ANN401 - transformers' classes
    """Caption features of a prompt, [tokens, cap_dim] in the encoder's dtype on the CPU, and whether it was cut."""
    told = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    tokens = tokenizer(told, return_tensors="pt").to(encoder.device)
    ids = tokens.input_ids[:, :LONGEST]
    with torch.no_grad():
        mask = tokens.attention_mask[:, :LONGEST]
        states = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    return states[-2][0].cpu(), tokens.input_ids.shape[1] > LONGEST


def _open(folder: Path, device: str | torch.device) -> tuple[Any, Any]:
    for part in ("tokenizer", "text_encoder"):
        if not (folder / part).is_dir():
            raise HswqError(
                "the folder has no text encoder",
                file=folder / part,
                expected="a diffusers folder of Z-Image with tokenizer/ and text_encoder/",
            )
    if importlib.util.find_spec("transformers") is None:
        raise HswqError(
            "encoding prompts needs the package transformers", fix="pip install 'hswq-lab[embed]'"
        )
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415 - heavy, and optional

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
        encoder = AutoModel.from_pretrained(
            folder / "text_encoder", dtype=torch.bfloat16, local_files_only=True
        )
    except (OSError, ValueError) as error:  # transformers' ways to say that files are missing or unknown
        raise HswqError("the text encoder cannot be opened", file=folder, found=error) from error
    return tokenizer, encoder.to(device).eval()
