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

# The kernels take thread counts, addresses, sizes and flags; `hswq_lab._cpu_ops` calls them,
# and `hswq_lab._cpu_bake` the two for baking.
amax: Callable[..., None]
rotate: Callable[..., None]
quantize: Callable[..., None]
dequantize: Callable[..., None]
quantize_int8: Callable[..., None]
dequantize_int8: Callable[..., None]
bake: Callable[..., None]
change_sums: Callable[..., None]
swizzle: Callable[..., None]
unswizzle: Callable[..., None]
fp4_gemm: Callable[..., None]
linear_w4a4: Callable[..., None]
linear_w4a8: Callable[..., None]
linear_w4a16: Callable[..., None]
linear_int8: Callable[..., None]

# A submodule, there where cuda_built: device number, stream address, then as above.
class cuda:  # noqa: N801
    library_version: Callable[[], int]
    probe_fp4: Callable[[int], str]
    has_w4_product: Callable[[int], bool]
    skinny: Callable[..., None]
    w4_product: Callable[..., None]
    multiply: Callable[..., str]
    amax: Callable[..., None]
    rotate: Callable[..., None]
    quantize: Callable[..., None]
    rounded_values: Callable[..., None]
    dequantize: Callable[..., None]
    quantize_int8: Callable[..., None]
    dequantize_int8: Callable[..., None]
    quantize_fp8: Callable[..., None]
    fp8_weight: Callable[..., None]
    swizzle: Callable[..., None]
    unswizzle: Callable[..., None]
    finish: Callable[..., None]
    int8_product: Callable[..., None]
    has_int8_product: Callable[[int], bool]
    alpha_beta: Callable[..., None]
