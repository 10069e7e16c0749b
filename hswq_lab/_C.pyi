"""The native extension (csrc/bindings.cpp): addresses and sizes only; `hswq_lab._cpu_ops` is its one caller."""

cuda_built: bool
cuda_reason: str
cuda_targets: str
cuda_version: str
built_isas: list[str]

def isa() -> str: ...
def hardware_isa() -> str: ...
def limit_isa(name: str) -> None: ...
