from collections.abc import Callable

cuda_built: bool
cuda_reason: str
cuda_targets: str
cuda_version: str

def built_isas() -> list[str]: ...
def isa() -> str: ...
def hardware_isa() -> str: ...
def limit_isa(name: str) -> None: ...
def has_w4() -> bool: ...

# The kernels take thread counts, addresses, sizes and flags; `hswq_lab._cpu_ops` is their one caller.
amax: Callable[..., None]
rotate: Callable[..., None]
quantize: Callable[..., None]
dequantize: Callable[..., None]
quantize_int8: Callable[..., None]
dequantize_int8: Callable[..., None]
swizzle: Callable[..., None]
unswizzle: Callable[..., None]
fp4_gemm: Callable[..., None]
linear_w4a4: Callable[..., None]
linear_w4a8: Callable[..., None]
linear_w4a16: Callable[..., None]
linear_int8: Callable[..., None]
