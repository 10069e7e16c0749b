"""Packs and comfy-kitchen's own layout objects: what one writes the other reads, byte for byte and value for value."""

from __future__ import annotations

import json

import pytest
import torch
from comfy_kitchen.backends import eager  # noqa: F401 - registers the ops that the layouts call
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class
from safetensors import safe_open
from safetensors.torch import save_file

from hswq_lab import packing
from hswq_lab.checkpoint import Checkpoint, check, write
from hswq_lab.formats import rotate_fp32

LAYOUTS = {
    "nvfp4": "TensorCoreNVFP4Layout",
    "int8_tensorwise": "TensorWiseINT8Layout",
    "float8_e4m3fn": "TensorCoreFP8Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
}
SHAPES = [(48, 256), (128, 1024), (40, 24)]  # 48 rows are padded in MXFP8, the last one in NVFP4 too
WAYS = [
    ("nvfp4", None),
    ("nvfp4", 256),
    ("int8_tensorwise", None),
    ("int8_tensorwise", 256),
    ("float8_e4m3fn", None),
    ("mxfp8", None),
]
PREFIX = "model.diffusion_model."
REORDERED = 2**-20
"""It turns INT8 back by a matrix product, in an order of the processor's choice: √256 roundings of fp32."""


def weight(shape, seed=0):
    w = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    w[:, 3] *= 9
    return w.bfloat16()


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def cases(rotations):
    return [
        (s, form, group) for s in SHAPES for form, group in rotations if group is None or s[1] % group == 0
    ]


def opened_there(path, layer, shape, dtype=torch.float32):
    """A layer of a file as a tensor of comfy-kitchen's, put together from the stored names as ComfyUI does it."""
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, no dict
    key = f"{PREFIX}{layer}."
    marker = json.loads(bytes(stored[f"{key}comfy_quant"].tolist()))
    layout = LAYOUTS[marker["format"]]
    made_for = {"orig_dtype": dtype, "orig_shape": tuple(marker.get("orig_shape", shape))}
    scale = stored[f"{key}weight_scale"]
    match marker["format"]:
        case "nvfp4":
            scales = {"scale": stored[f"{key}weight_scale_2"], "block_scale": scale}
        case "int8_tensorwise":
            rotation = {name: marker[name] for name in ("convrot", "convrot_groupsize") if name in marker}
            scales = {"scale": scale, **rotation}
        case _:
            scales = {"scale": scale}
    return QuantizedTensor(
        stored[f"{key}weight"], layout, get_layout_class(layout).Params(**scales, **made_for)
    )


@pytest.mark.parametrize(("shape", "form", "group"), cases(WAYS))
@pytest.mark.parametrize("scales", ["rtn", "sweep"])
def test_a_pack_of_ours_loads_there_and_has_our_values(shape, form, group, scales, tmp_path):
    packed = packing.pack_weight(weight(shape), form, group, scales)
    path = write(tmp_path / "ours.safetensors", [("layers.0.w.weight", packed)])
    theirs = opened_there(path, "layers.0.w", shape)
    assert tuple(theirs.shape) == shape
    values, mine = theirs.dequantize(), packing.dequantize(packed)
    if form == "nvfp4" and group:
        # Its NVFP4 layout knows no rotation: it gives the values as they are stored.
        mine = rotate_fp32(values, group)
        assert torch.equal(mine, packing.dequantize(packed))
    elif form == "int8_tensorwise" and group:
        torch.testing.assert_close(values, mine, rtol=0, atol=REORDERED * float(mine.abs().max()))
    else:
        assert torch.equal(values, mine)


def test_the_rotation_is_the_same_one_to_the_last_bit_where_sums_are_exact(tmp_path):
    packed = packing.pack_weight(weight((48, 1024)), "int8_tensorwise", 256)
    exact = type(packed)(packed.q, torch.full_like(packed.scale, 2.0**-9), packed.shape, packed.group)
    path = write(tmp_path / "ours.safetensors", [("layers.0.w.weight", exact)])
    assert torch.equal(opened_there(path, "layers.0.w", (48, 1024)).dequantize(), packing.dequantize(exact))


def written_there(path, layer, tensor, marker):
    """A file of one layer with comfy-kitchen's tensors, and the marker that ComfyUI puts beside them."""
    stored = tensor.state_dict(f"{PREFIX}{layer}.weight")
    stored[f"{PREFIX}{layer}.comfy_quant"] = torch.frombuffer(
        bytearray(json.dumps(marker).encode()), dtype=torch.uint8
    )
    save_file({name: value.contiguous() for name, value in stored.items()}, path)
    return path


@pytest.mark.parametrize(("shape", "form", "group"), cases(WAYS))
def test_a_file_of_theirs_loads_here_and_has_their_values(shape, form, group, tmp_path):
    source = weight(shape, 1).float()
    options, marker = {}, {"format": form}
    if form == "int8_tensorwise":
        options = {"per_channel": True, "convrot": group is not None, "convrot_groupsize": group or 256}
    if group:
        marker |= {"convrot": True, "convrot_groupsize": group}
        source = rotate_fp32(source, group) if form == "nvfp4" else source
    tensor = QuantizedTensor.from_float(source, LAYOUTS[form], **options)
    if tensor.is_padded:
        marker["orig_shape"] = list(shape)
    path = written_there(tmp_path / "theirs.safetensors", "layers.0.w", tensor, marker)
    assert not [finding for finding in check(path).findings if finding.severity == "error"]
    packed = Checkpoint.open(path)["layers.0.w.weight"]
    assert (packed.format, packed.shape, packed.group) == (form, shape, group)
    for suffix, stored in tensor.state_dict("weight").items():
        mine = packed.disk_tensors()[suffix]
        assert torch.equal(raw(mine), raw(stored)), suffix
    values, theirs = packing.dequantize(packed), tensor.dequantize()
    if form == "nvfp4" and group:
        theirs = rotate_fp32(theirs, group)
    if form == "int8_tensorwise" and group:
        torch.testing.assert_close(values, theirs, rtol=0, atol=REORDERED * float(theirs.abs().max()))
    else:
        assert torch.equal(values, theirs)
    # Written again here, it is the same layer.
    again = write(tmp_path / "again.safetensors", [("layers.0.w.weight", packed)])
    assert Checkpoint.open(again)["layers.0.w.weight"].same_bits(packed)
    assert torch.equal(opened_there(again, "layers.0.w", shape).dequantize(), tensor.dequantize())


@pytest.mark.parametrize("form", ["nvfp4", "int8_tensorwise"])
def test_both_quantise_the_same_values_to_the_same_bytes(form):
    w = weight((128, 1024), 2).float()
    options = {"per_channel": True} if form == "int8_tensorwise" else {}
    theirs = QuantizedTensor.from_float(w, LAYOUTS[form], **options).state_dict("weight")
    for suffix, mine in packing.pack_weight(w, form, None).disk_tensors().items():
        assert torch.equal(raw(mine), raw(theirs[suffix])), suffix


def test_a_tensorwise_int8_file_of_theirs_loads_too(tmp_path):
    tensor = QuantizedTensor.from_float(weight((48, 256)).float(), LAYOUTS["int8_tensorwise"])
    marker = {"format": "int8_tensorwise"}
    path = written_there(tmp_path / "theirs.safetensors", "layers.0.w", tensor, marker)
    packed = Checkpoint.open(path)["layers.0.w.weight"]
    assert packed.scale.dim() == 0
    assert torch.equal(packing.dequantize(packed), tensor.dequantize())
