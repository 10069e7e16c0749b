"""How good the model is: retrieval, PSNR against its own targets, obeyed backgrounds, a sheet to look at."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from hswq_lab.models.mini import COLOURS, LinearCodec, encode_text
from hswq_lab.models.zimage import ZImage
from mini_training.pictures import BACKGROUNDS, WHITE, Noto

STEPS, CFG, SHIFT = 20, 2.5, 1.5
SHOWN = (
    "red heart",
    "bicycle",
    "accordion",
    "pizza",
    "cat face",
    "alarm clock",
    "sunflower",
    "rocket",
    "teddy bear",
    "owl",
)


@torch.inference_mode()
def sample(network: ZImage, prompts: list[str], seed: int) -> Tensor:
    """Final latents [B, 16, 16, 16] after 20 Euler steps with guidance 2.5 and shift 1.5."""
    device = network.x_pad_token.device
    count = len(prompts)
    x = torch.randn(count, 16, 16, 16, generator=torch.Generator("cpu").manual_seed(seed)).to(device)
    captions = [encode_text(p).to(device) for p in [*prompts, *[""] * count]]
    tokens = network.embed_captions(captions, x.dtype)
    u = torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    sigmas = (SHIFT * u / (1 + (SHIFT - 1) * u)).tolist()
    for sigma, following in pairwise(sigmas):
        t = torch.full((2 * count,), 1 - sigma, device=device)
        wanted, empty = network.denoise(torch.cat([x, x]), t, tokens).chunk(2)
        x = x + (sigma - following) * (empty + CFG * (wanted - empty))
    return x


def pictures(
    network: ZImage, codec: LinearCodec, prompts: list[str], seed: int = 1, batch: int = 512
) -> Tensor:
    """Decoded samples [B, 3, 64, 64] in 0 … 1."""
    parts = [sample(network, prompts[i : i + batch], seed + i) for i in range(0, len(prompts), batch)]
    return codec.to(parts[0].device).decode(torch.cat(parts))


def retrieval(images: Tensor, targets: Tensor, own: Tensor) -> float:
    """Share of images [B, 3, H, W] whose nearest of the targets [N, 3, H, W] is number own [B]."""
    nearest = torch.cdist(images.flatten(1), targets.flatten(1)).argmin(1)
    return float((nearest == own).double().mean())


def psnr(images: Tensor, targets: Tensor) -> Tensor:
    """Decibels of each image [B, 3, H, W] against its target, peak 1."""
    return -10 * (images - targets).square().mean((1, 2, 3)).log10()


def drawn(noto: Noto, count: int, seed: int = 7) -> Tensor:
    """The numbers of the captions that are evaluated: the same random ones every time."""
    order = torch.randperm(len(noto.captions), generator=torch.Generator("cpu").manual_seed(seed))
    return order[:count].to(noto.rgb.device)


def measure(
    network: ZImage, codec: LinearCodec, noto: Noto, style: str, count: int = 512
) -> dict[str, float]:
    """Retrieval and PSNR on white over `count` captions, against the pictures and what the codec keeps."""
    own = drawn(noto, count)
    targets = noto.on(WHITE, style)
    kept = codec.to(targets.device).decode(codec.to(targets.device).encode(targets))
    made = pictures(network, codec, [noto.captions[i] for i in own.tolist()])
    values = psnr(made, targets[own])
    return {
        "captions": float(count),
        "retrieval_top1": retrieval(made, targets, own),
        "psnr_db": float(values.mean()),
        "psnr_db_10th_percentile": float(values.quantile(0.1)),
        "psnr_to_coded_picture_db": float(psnr(made, kept[own]).mean()),
        "psnr_of_codec_db": float(psnr(kept[own], targets[own]).mean()),
    }


def background_errors(network: ZImage, codec: LinearCodec, noto: Noto, count: int = 24) -> dict[str, float]:
    """Mean absolute error (of 255) of the 4×4 corners left free by a picture, captions '… on <colour>'."""
    own = drawn(noto, count, seed=11)
    free = _corners(noto.alpha)[own].amax(dim=(1, 3, 4)) == 0
    errors = {}
    for name, colour in zip(COLOURS, BACKGROUNDS[1:], strict=True):
        made = pictures(network, codec, [f"{noto.captions[i]} on {name}" for i in own.tolist()])
        wanted = torch.tensor(colour, device=made.device).view(1, 3, 1, 1, 1) / 255
        distance = (_corners(made) - wanted).abs().mean(dim=(1, 3, 4)) * 255
        errors[name] = float(distance[free].mean())
    return errors


def _corners(images: Tensor) -> Tensor:
    """[B, C, H, W] -> the four 4×4 corners [B, C, 4, 4, 4] (corner before rows)."""
    parts = [
        images[..., r, c] for r in (slice(0, 4), slice(-4, None)) for c in (slice(0, 4), slice(-4, None))
    ]
    return torch.stack(parts, dim=2)


def sheet(rows: list[Tensor], path: Path, zoom: int = 2) -> None:
    """Write rows of pictures [B, 3, 64, 64], one row below the other, as one PNG."""
    whole = torch.cat([torch.cat(list(row), dim=-1) for row in rows], dim=-2)
    array = (whole.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    image = Image.fromarray(array)
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST).save(path)


def look(network: ZImage, codec: LinearCodec, noto: Noto, style: str, path: Path) -> None:
    """A sheet of targets and samples: sixteen random captions, ten known ones, and ten on the ten colours."""
    rows = []
    random = drawn(noto, 32, seed=3).tolist()
    for numbers in (random[:16], random[16:]):
        rows += [
            noto.on(WHITE, style)[numbers],
            pictures(network, codec, [noto.captions[i] for i in numbers]),
        ]
    known = [noto.captions.index(c) for c in SHOWN if c in noto.captions]
    names = list(COLOURS)
    coloured = [f"{noto.captions[i]} on {names[k % 10]}" for k, i in enumerate(known)]
    shown = [pictures(network, codec, [noto.captions[i] for i in known]), pictures(network, codec, coloured)]
    blank = torch.ones(16 - len(known), 3, 64, 64, device=shown[0].device)
    sheet([*rows, *(torch.cat([row, blank]) for row in shown)], path)
