"""Small safetensors files for tests, right ones and wrong ones, made without the package's own writer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hswq_lab.formats import (
    Fp8Weight,
    Int8Weight,
    Mxfp8Weight,
    Nvfp4Weight,
    quantize_fp8,
    quantize_int8,
    quantize_mxfp8,
    quantize_nvfp4,
    rotate_fp32,
    tensor_scale,
)

COMFY = "model.diffusion_model."


def random_matrix(n, k, seed=0, dtype=torch.bfloat16):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nvfp4(w, group=None, input_scale=None):
    values = rotate_fp32(w, group)
    scale = tensor_scale(values)
    codes, scales = quantize_nvfp4(values, scale)
    return Nvfp4Weight(codes, scales, scale, tuple(w.shape), group, input_scale)


def int8(w, group=None):
    q, scale = quantize_int8(w, group)
    return Int8Weight(q, scale, tuple(w.shape), group)


def fp8(w, dtype=torch.float8_e4m3fn, input_scale=None):
    data, scale = quantize_fp8(w, dtype)
    return Fp8Weight(data, scale, tuple(w.shape), input_scale)


def mxfp8(w):
    return Mxfp8Weight(*quantize_mxfp8(w), tuple(w.shape))


def parts(layer, packed):
    """The disk tensors of a packed weight by full name, without marker."""
    return {f"{layer}.{suffix}": tensor.contiguous() for suffix, tensor in packed.disk_tensors().items()}


def marker(content):
    """A marker tensor of a dict (default spacing), or of text as it is."""
    text = content if isinstance(content, str) else json.dumps(content)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()


def metadata(**layers):
    """Header metadata with a layer list; names are given with "/" for "."."""
    named = {name.replace("/", "."): content for name, content in layers.items()}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": named})}


def save(path: Path, tensors, header=None) -> Path:
    """A file by the reference library."""
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata=header)
    return path


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with exactly this header (JSON of an object, or bytes as they are)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path
