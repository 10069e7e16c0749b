"""The same work by comfy-kitchen and humming-kernels, where they are installed, for benchmarks/gpu_kernels.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

from torch import Tensor

from hswq_lab import formats

Call = Callable[[], object]
HAS_COMFY = importlib.util.find_spec("comfy_kitchen") is not None
HAS_HUMMING = importlib.util.find_spec("humming") is not None


def quantize_peers(x: Tensor, s: Tensor) -> Iterator[tuple[str, Call]]:
    """Rotation by a product with H and comfy-kitchen's quantiser, and that quantiser alone."""
    if not HAS_COMFY:
        return
    import comfy_kitchen  # noqa: PLC0415 - one of several, and optional

    h = formats.hadamard(256).to(x)
    yield (
        "rotate_quantize, comfy-kitchen",
        lambda: comfy_kitchen.quantize_nvfp4((x.reshape(-1, 256) @ h).reshape(x.shape), s),
    )
    yield "quantize, comfy-kitchen", lambda: comfy_kitchen.quantize_nvfp4(x, s)


def linear_peers(x: Tensor, w: Tensor, q: Tensor, q_scale: Tensor) -> Iterator[tuple[str, Call]]:
    """W4A16 of both, without a rotation, and comfy-kitchen's INT8 linear with it."""
    if HAS_COMFY:
        import comfy_kitchen  # noqa: PLC0415 - one of several, and optional

        s = w.abs().amax().float() / 2688.0
        codes, scales = comfy_kitchen.quantize_nvfp4(w, s)
        yield (
            "w4a16, comfy-kitchen",
            lambda: x @ comfy_kitchen.dequantize_nvfp4(codes, s, scales, x.dtype).t(),
        )
        yield "int8, comfy-kitchen", lambda: comfy_kitchen.int8_linear(x, q, q_scale, convrot=True)
    if HAS_HUMMING:
        yield "w4a16, humming", humming_linear(x, w)


def humming_linear(x: Tensor, w: Tensor) -> Call:
    """humming-kernels' NVFP4 weights with 16-bit activations: its own choice of kernel for this size."""
    from humming.layer import HummingLayer  # noqa: PLC0415 - one of several, and optional

    how = {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"}
    layer = HummingLayer(w.shape[0], w.shape[1], how, torch_dtype=x.dtype).to(x.device)
    layer.load_from_unquantized(w)
    layer.transform()
    return lambda: layer(x)
