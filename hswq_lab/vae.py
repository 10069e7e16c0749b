"""The real Z-Image's latents as pictures, through diffusers' AutoencoderKL from a local folder."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hswq_lab.errors import HswqError
from hswq_lab.json_file import read_json

if TYPE_CHECKING:
    import os

    from torch import Tensor

CLASS = "AutoencoderKL"


@dataclass(frozen=True)
class VaeCodec:
    """A `Codec`; small and picklable: the network is read at the first picture, once a process.

    Attributes:
        folder: with the VAE's config.json and weights.
        device: where it runs, in fp32.
        channels: of a latent.
        pixels_per_latent: side of a latent cell in pixels.
        scale: latents are divided by it,
        shift: and then raised by it, before they are decoded.
    """

    folder: str
    device: str
    channels: int
    pixels_per_latent: int
    scale: float
    shift: float

    def decode(self, latent: Tensor) -> Tensor:
        """Latent [(B,) C, h, w] → RGB in 0 … 1, [(B,) 3, H, W] fp32 on the CPU.

        Raises:
            HswqError: a latent of another number of channels, or the VAE's files cannot be read.
        """
        if latent.ndim not in (3, 4) or latent.shape[-3] != self.channels:
            raise HswqError(
                "a latent of this shape cannot be decoded by this VAE",
                file=self.folder,
                found=list(latent.shape),
                expected=f"[{self.channels}, h, w] or [B, {self.channels}, h, w]",
            )
        batch = latent.reshape(-1, *latent.shape[-3:]).to(self.device, torch.float32)
        with torch.no_grad():
            rgb = _network(self.folder, self.device).decode(
                batch / self.scale + self.shift, return_dict=False
            )
        pictures: Tensor = (rgb[0] / 2 + 0.5).clamp(0, 1).cpu()
        return pictures.reshape(*latent.shape[:-3], *pictures.shape[1:])


def open_vae(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> VaeCodec:
    """The VAE in a folder, or in the `vae/` of a diffusers pipeline's folder; only its config.json is read now.

    Raises:
        HswqError: diffusers is not installed, or there is no AutoencoderKL in the folder.
    """
    folder = Path(path) / "vae" if (Path(path) / "vae").is_dir() else Path(path)
    try:
        config: Any = read_json(folder / "config.json")
        if config.get("_class_name") != CLASS:
            raise HswqError("this is no VAE", file=folder, found=config.get("_class_name"), expected=CLASS)
        codec = VaeCodec(
            folder=str(folder),
            device=str(device),
            channels=int(config["latent_channels"]),
            pixels_per_latent=2 ** (len(config["block_out_channels"]) - 1),
            scale=float(config["scaling_factor"]),
            shift=float(config.get("shift_factor") or 0.0),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HswqError("the VAE's configuration cannot be read", file=folder, found=error) from error
    if importlib.util.find_spec("diffusers") is None:
        raise HswqError(
            "decoding latents needs the package diffusers", fix="pip install 'hswq-lab[diffusers]'"
        )
    return codec


@cache
def _network(folder: str, device: str) -> Any:  # noqa: ANN401 - diffusers' class, untyped and optional
    from diffusers import AutoencoderKL  # noqa: PLC0415 - heavy, and optional

    try:
        options = {"local_files_only": True, "torch_dtype": torch.float32}
        network = AutoencoderKL.from_pretrained(folder, **options)  # type: ignore[no-untyped-call]
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # missing, damaged, or other shapes than the configuration's
        raise HswqError("the VAE's weights cannot be read", file=folder, found=error) from error
    return network.to(device).eval()
