"""The data set: Noto colour emoji from npm's @iconify-json/noto, rendered to 64×64 premultiplied RGBA."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import cairosvg
import numpy as np
from PIL import Image

PACKAGE = "@iconify-json/noto@1.2.9"
RENDERED, SIDE = 128, 64


def fetch(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Download the package with the npm client and return its icons and its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "iconify-json-noto-1.2.9.tgz"
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
    with tarfile.open(archive) as tar:
        parts = []
        for name in ("icons", "metadata"):
            with tempfile.TemporaryDirectory() as unpacked:
                tar.extract(f"package/{name}.json", unpacked, filter="data")
                parts.append(json.loads((Path(unpacked) / "package" / f"{name}.json").read_text()))
    return parts[0], parts[1]


def chosen(icons: dict[str, Any], metadata: dict[str, Any]) -> dict[str, str]:
    """Caption -> SVG body: no hidden icons, flags, skin-tone variants, or drawings that came before."""
    flags = set(metadata["categories"]["Flags"])
    result: dict[str, str] = {}
    drawn: set[str] = set()
    for name, icon in icons["icons"].items():
        if icon.get("hidden") or name in flags or "skin-tone" in name or icon["body"] in drawn:
            continue
        drawn.add(icon["body"])
        result[name.replace("-", " ")] = icon["body"]
    return result


def render(body: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An SVG body -> uint8 [64, 64, 4]: 128 px, then the mean of 2×2 premultiplied pixels."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = f'<svg {spaces} viewBox="0 0 128 128">{body}</svg>'
    png = cairosvg.svg2png(bytestring=svg.encode(), output_width=RENDERED, output_height=RENDERED)
    rgba = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"), dtype=np.float64) / 255
    rgba[..., :3] *= rgba[..., 3:]
    small = rgba.reshape(SIDE, 2, SIDE, 2, 4).mean(axis=(1, 3))
    return np.round(small * 255).astype(np.uint8)


def make(folder: Path) -> Path:
    """Write folder/noto.npz: rgba uint8 [N, 64, 64, 4] (premultiplied) and the N captions."""
    captions = chosen(*fetch(folder))
    pictures = np.stack([render(body) for body in captions.values()])
    target = folder / "noto.npz"
    np.savez_compressed(target, rgba=pictures, captions=np.array(list(captions)))
    print(f"{len(captions)} pictures, {len({w for c in captions for w in c.split()})} words -> {target}")
    return target
