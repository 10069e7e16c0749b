"""The files of hswq_lab/assets: weights, LoRAs, codec, prompts, contact sheet, card with measured figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mini_training import files

COLUMNS, CELLS, SIDE = 20, 320, 64
PROMPTS = (
    "red heart on blue",
    "bicycle",
    "accordion on yellow",
    "pizza",
    "cat face on teal",
    "alarm clock",
    "sunflower on purple",
    "rocket",
    "teddy bear on pink",
    "owl",
    "castle",
    "ferris wheel on orange",
    "grapes",
    "passenger ship on green",
    "penguin",
    "strawberry on gray",
    "tram",
    "violin on brown",
    "butterfly",
    "camera on red",
)
# The sheet ships with the package, so what some would rather not see in it stays out.
LEFT_OUT = (
    "axe knife sword swords dagger bomb pistol bow military boomerang shield fencing ninja skull coffin",
    "blood slot",
    "beer wine sake cocktail clinking tropical tumbler cork cigarette smoking syringe pill bottle",
    "church mosque synagogue kaaba shrine cross menorah khanda om david crescent dharma worship prayer",
    "headscarf turban skullcap hindu angel halo horns imp moai nazar yin atom christmas santa claus diya",
    "zombie vampire",
    "middle poo bikini briefs breast love kiss bunny",
)


def make(run: Path, data: Path, assets: Path) -> None:
    """Fill the folder `assets` from a training run's folder and the data set."""
    assets.mkdir(parents=True, exist_ok=True)
    for name in (*files.SHARDS, files.INDEX, "mini_outline.safetensors", "mini_palette.safetensors"):
        shutil.copyfile(run / name, assets / name)
    shutil.copyfile(run / "codec.npz", assets / "mini_codec.npz")
    with np.load(data) as file:
        rgba, captions = file["rgba"], [str(c) for c in file["captions"]]
    (assets / "mini_prompts.json").write_text(json.dumps(PROMPTS, indent=1) + "\n")
    write_sheet(rgba, captions, assets)
    (assets / "MODEL_CARD.md").write_text(card(run, len(captions)))


def write_sheet(rgba: np.ndarray[Any, np.dtype[np.uint8]], captions: list[str], assets: Path) -> None:
    """mini_contact.png (straight alpha): the prompts' pictures, then every n-th other; mini_contact.json."""
    wanted = [captions.index(prompt.split(" on ")[0]) for prompt in PROMPTS]
    unwanted = {word for line in LEFT_OUT for word in line.split()}
    others = [i for i, c in enumerate(captions) if i not in wanted and unwanted.isdisjoint(c.split())]
    spread = np.linspace(0, len(others) - 1, CELLS - len(wanted)).round().astype(int)
    chosen = [*wanted, *(others[i] for i in spread)]
    cells = rgba[chosen].astype(np.float64)
    alpha = cells[..., 3:]
    cells[..., :3] = np.divide(
        cells[..., :3] * 255, alpha, out=np.zeros_like(cells[..., :3]), where=alpha > 0
    )
    grid = cells.round().clip(0, 255).astype(np.uint8).reshape(-1, COLUMNS, SIDE, SIDE, 4)
    whole = grid.transpose(0, 2, 1, 3, 4).reshape(-1, COLUMNS * SIDE, 4)
    Image.fromarray(whole).save(assets / "mini_contact.png", optimize=True)
    (assets / "mini_contact.json").write_text(json.dumps([captions[i] for i in chosen], indent=0) + "\n")


def card(run: Path, pictures: int) -> str:
    """The model card with the figures that training wrote."""
    base, outline, palette = (
        json.loads((run / f"{n}.json").read_text()) for n in ("base", "outline", "palette")
    )
    errors = base["background_error_of_255"]
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return template.format(
        **base,
        pictures=pictures,
        outline=outline,
        palette=palette,
        short=base["psnr_of_codec_db"] - base["psnr_db"],
        backgrounds=", ".join(f"{name} {error:.1f}" for name, error in errors.items()),
    )
