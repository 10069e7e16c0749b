"""The same Linears through other libraries, in the run of `full_size.py`: comfy-kitchen, torchao where it installs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from hswq_lab import ops
from hswq_lab.bench.timing import seconds_per_call
from hswq_lab.formats.rotation import hadamard

GROUP = 256
SHAPES = [(11520, 3840), (3840, 3840), (10240, 3840), (3840, 10240)]
ROWS = 4352  # 4096 image and 256 caption tokens
Calls = dict[str, Callable[[], object]]


def peer_rows(device: torch.device, *, toy: bool) -> tuple[list[tuple[str, float, float]], dict[str, str]]:
    """Every Linear in every library.

    Returns:
        (which, seconds, seconds of bf16) for each, and for a library that could not be measured the reason.
    """
    rows, why = [], {}
    shapes, m, repeats = ([(512, 256)], 64, 2) if toy else (SHAPES, ROWS, 20)
    for n, k in shapes:
        x = torch.randn(m, k, device=device).bfloat16()
        w = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
        plain = seconds_per_call(lambda x=x, w=w: functional.linear(x, w), device, repeats)
        for name, make in (("hswq_lab", _ours), ("comfy-kitchen", _kitchen), ("torchao", _torchao)):
            try:
                for what, call in _named(make(x, w)):
                    took = seconds_per_call(call, device, repeats)
                    rows.append((f"{n}×{k}, M {m}: {name} {what}", took, plain))
            except Exception as error:  # noqa: BLE001 - another library's failure is a result to tell
                why[name] = f"{type(error).__name__}: {error}"[:300]
    return rows, why


def _named(calls: Calls) -> Iterator[tuple[str, Callable[[], object]]]:
    with torch.inference_mode():
        yield from calls.items()


def _ours(x: torch.Tensor, w: torch.Tensor) -> Calls:
    n, s_x = w.shape[0], ops.tensor_scale(ops.rotate(x.float(), GROUP))
    s = ops.tensor_scale(ops.rotate(w.float(), GROUP))
    codes, scales = ops.rotate_quantize_nvfp4(w, s, GROUP)
    q, qs = ops.quantize_int8(w, GROUP)
    return {
        "parity": lambda: ops.linear_w4a16(x, codes, scales, s, GROUP, n),
        "tc": lambda: ops.linear_w4a4(x, codes, scales, s, s_x, GROUP, n),
        "tc8": lambda: ops.linear_w4a8(x, codes, scales, s, s_x, GROUP, n),
        "INT8": lambda: ops.linear_int8(x, q, qs, GROUP),
    }


def _kitchen(x: torch.Tensor, w: torch.Tensor) -> Calls:
    """Its NVFP4 layout has no rotation: the input is turned by a product with H, as its own ConvRot code does."""
    import comfy_kitchen  # noqa: PLC0415 - optional

    h = hadamard(GROUP).to(x.device, x.dtype)
    s = ops.tensor_scale(ops.rotate(w.float(), GROUP))
    codes, scales = comfy_kitchen.quantize_nvfp4(ops.rotate(w, GROUP), s)
    q, qs = ops.quantize_int8(w, GROUP)

    def parity() -> torch.Tensor:
        rotated = (x.reshape(-1, GROUP) @ h).reshape(x.shape)
        return functional.linear(rotated, comfy_kitchen.dequantize_nvfp4(codes, s, scales, x.dtype))

    def int8() -> torch.Tensor:
        return comfy_kitchen.int8_linear(x, q, qs, None, x.dtype, convrot=True, convrot_groupsize=GROUP)

    return {"NVFP4, dequantised, x rotated": parity, "INT8 ConvRot": int8}


def _torchao(x: torch.Tensor, w: torch.Tensor) -> Calls:
    """NVFP4 weights only, unrotated, 16-bit activations."""
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig  # noqa: PLC0415 - optional
    from torchao.quantization import quantize_  # noqa: PLC0415 - optional

    linear: Any = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
    linear.weight.data.copy_(w)
    quantize_(linear, NVFP4WeightOnlyConfig())
    return {"NVFP4 weights only": lambda: linear(x)}
