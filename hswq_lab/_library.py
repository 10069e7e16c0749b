"""The kernels as torch custom ops, torch.ops.hswq_lab.*: schemas, fake kernels, choice of implementation a call.

One low-level `torch.library.Library` registration, not a decorator an op: it costs less a call, and a step of the mini
model makes some 130 calls. Implementations never see autograd; they are for inference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hswq_lab import _reference
from hswq_lab._backends import backend_for, native
from hswq_lab.formats._rows import ceil_to

SCHEMAS = """
amax(Tensor x) -> Tensor
rotate(Tensor x, int? group) -> Tensor
quantize_nvfp4(Tensor x, Tensor tensor_scale, int? group, str method, Tensor? importance, int? seed) -> NVFP4_COUNTED
requantize_nvfp4(Tensor x, Tensor tensor_scale, Tensor scales, int? group, int seed) -> (Tensor, Tensor)
dequantize_nvfp4(NVFP4 w, Tensor tensor_scale, SymInt[] shape, ScalarType dtype, int? group) -> Tensor
fp4_gemm(NVFP4 x, NVFP4 w, Tensor alpha, SymInt[] shape, Tensor? bias, ScalarType dtype) -> Tensor
linear_w4a4(Tensor x, NVFP4 w, Tensor w_scale, Tensor input_scale, int? group, SymInt n, Tensor? bias) -> Tensor
linear_w4a8(Tensor x, NVFP4 w, Tensor w_scale, Tensor input_scale, int? group, SymInt n, Tensor? bias) -> Tensor
fp8_weight(NVFP4 w, SymInt n, SymInt k) -> (Tensor, Tensor)
linear_fp8(Tensor x, Tensor w, Tensor rows, Tensor w_scale, Tensor s_x, int? group, SymInt n, Tensor? bias) -> Tensor
linear_w4a16(Tensor x, NVFP4 w, Tensor w_scale, int? group, SymInt n, Tensor? bias) -> Tensor
linear_int8(Tensor x, Tensor q, Tensor s, int? group, Tensor? bias) -> Tensor
quantize_int8(Tensor w, int? group, int? seed) -> (Tensor, Tensor)
requantize_int8(Tensor w, Tensor scale, int? group, int seed) -> (Tensor, Tensor)
dequantize_int8(Tensor q, Tensor scale, int? group, ScalarType dtype) -> Tensor
swizzle(Tensor linear) -> Tensor
unswizzle(Tensor swizzled, SymInt rows, SymInt cols) -> Tensor
"""


def _nvfp4_like(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = ceil_to(x.shape[0], 16), ceil_to(x.shape[1], 16)
    scales = x.new_empty((ceil_to(rows, 128), ceil_to(cols // 16, 4)), dtype=torch.float8_e4m3fn)
    return x.new_empty((rows, cols // 2), dtype=torch.uint8), scales


def _fake_quantize_nvfp4(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_nvfp4_like(x), x.new_empty((), dtype=torch.int64)


def _fake_linear(x: Tensor, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


FAKES: dict[str, Callable[..., Any]] = {
    "amax": lambda x: x.new_empty((), dtype=torch.float32),
    "rotate": lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format),
    "quantize_nvfp4": _fake_quantize_nvfp4,
    "requantize_nvfp4": lambda x, *_: _nvfp4_like(x),
    "dequantize_nvfp4": lambda codes, scales, s, shape, dtype, group: codes.new_empty(shape, dtype=dtype),
    "fp4_gemm": lambda x, xs, w, ws, alpha, shape, bias, dtype: x.new_empty(shape, dtype=dtype),
    "linear_w4a4": lambda x, w, ws, s, input_scale, group, n, bias: _fake_linear(x, n),
    "linear_w4a8": lambda x, w, ws, s, input_scale, group, n, bias: _fake_linear(x, n),
    "fp8_weight": lambda codes, scales, n, k: (
        codes.new_empty((ceil_to(n, 16), ceil_to(k, 16)), dtype=torch.float8_e4m3fn),
        codes.new_empty((ceil_to(n, 16), 1), dtype=torch.float32),
    ),
    "linear_fp8": lambda x, w8, row_scale, ws, s, group, n, bias: _fake_linear(x, n),
    "linear_w4a16": lambda x, w, ws, s, group, n, bias: _fake_linear(x, n),
    "linear_int8": lambda x, q, s, group, bias: _fake_linear(x, q.shape[0]),
    "quantize_int8": lambda w, group, seed: (
        w.new_empty(w.shape, dtype=torch.int8),
        w.new_empty((w.shape[0], 1), dtype=torch.float32),
    ),
    "requantize_int8": lambda w, scale, group, seed: (
        w.new_empty(w.shape, dtype=torch.int8),
        scale.new_empty(scale.shape, dtype=torch.float32),
    ),
    "dequantize_int8": lambda q, scale, group, dtype: q.new_empty(q.shape, dtype=dtype),
    "swizzle": lambda linear: linear.new_empty((ceil_to(linear.shape[0], 128), ceil_to(linear.shape[1], 4))),
    "unswizzle": lambda swizzled, rows, cols: swizzled.new_empty((rows, cols)),
}


def _implementations() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {"reference": _reference}
    if native is not None:
        from hswq_lab import _cpu_ops  # noqa: PLC0415 - it cannot be imported without the extension

        found["cpu"] = _cpu_ops
        if hasattr(native, "cuda"):
            from hswq_lab import _cuda_ops  # noqa: PLC0415 - nor this one without its CUDA part

            found["cuda"] = _cuda_ops
    return found


def _choosing(name: str, implementations: dict[str, ModuleType]) -> Callable[..., Any]:
    """The function that torch calls: it looks up who computes, once a call."""
    functions = {backend: getattr(module, name) for backend, module in implementations.items()}

    def run(*args: Any) -> Any:
        return functions[backend_for(args[0].device)](*args)

    return run


def _register() -> torch.library.Library:
    library = torch.library.Library("hswq_lab", "DEF")
    implementations = _implementations()
    schemas = SCHEMAS.replace("NVFP4_COUNTED", "(Tensor, Tensor, Tensor)")
    for schema in re.sub(r"NVFP4 (\w)", r"Tensor \1_codes, Tensor \1_scales", schemas).split("\n")[1:-1]:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.split("(", 1)[0]
        library.impl(name, _choosing(name, implementations), "CompositeExplicitAutograd")
        torch.library.register_fake(f"hswq_lab::{name}", FAKES[name], lib=library)
    return library


_LIBRARY = _register()  # torch drops the registrations when this object dies
OPS = torch.ops.hswq_lab
