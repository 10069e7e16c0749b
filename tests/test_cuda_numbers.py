"""csrc/cuda/numbers.cuh, the scalar formats of the CUDA kernels, compiled for the host and held to the definition."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hswq_lab import formats
from hswq_lab.formats import e2m1, e4m3, philox

CSRC = Path(__file__).resolve().parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(
    COMPILER is None or not CSRC.is_dir(), reason="no C++ compiler, or not run from a checkout"
)
SOURCE = """
#include <cmath>
#include "cuda/numbers.cuh"
using namespace hswq::cuda;
#define EACH(name, type, expression) \\
    extern "C" void name(const float* x, const float* u, long n, type* y) { \\
        for (long i = 0; i < n; ++i) y[i] = expression; \\
    }
EACH(e2m1_nearest, unsigned char, e2m1_code(x[i]) + 0 * (u != nullptr))
EACH(e2m1_stochastic, unsigned char, e2m1_code_stochastic(x[i], u[i]))
EACH(e4m3_nearest, unsigned char, e4m3_signed(x[i]) + 0 * (u != nullptr))
EACH(quotient, float, divide(x[i], u[i], 1.0f / u[i]))
EACH(random_number, float, uniform(0xfffffffffffffffbull, i) + 0 * x[0] * u[0])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "numbers.cpp").write_text(SOURCE, encoding="utf-8")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, "numbers.cpp", "-o", "numbers.so"], cwd=folder, check=True, timeout=100)
    return ctypes.CDLL(str(folder / "numbers.so"))


def apply(function, x: torch.Tensor, u: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (x, u, out)]
    function(addresses[0], addresses[1], ctypes.c_long(x.numel()), addresses[2])
    return out


def values() -> torch.Tensor:
    """Gaussians, every tie of E2M1 and E4M3 and their neighbours, extremes."""
    g = torch.Generator().manual_seed(0)
    scales = e4m3.decode_e4m3(torch.arange(127, dtype=torch.uint8))
    ties = torch.cat(
        [torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), (scales[1:] + scales[:-1]) / 2, scales]
    )
    around = [torch.nextafter(ties, torch.tensor(torch.inf)), torch.nextafter(ties, torch.tensor(0.0))]
    extremes = torch.tensor([0.0, -0.0, 1e-42, 448.0, 464.0, 465.0, 1e30, torch.inf])
    x = torch.cat([torch.randn(200000, generator=g) * 3, ties, *around, extremes])
    return torch.cat([x, -x])


def test_e2m1(compiled):
    x = values()
    u = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(apply(compiled.e2m1_nearest, x, u, torch.uint8), e2m1.encode_e2m1(x))
    for random in (u, torch.zeros_like(u)):  # 0 takes every value up but those that have a code
        mine = apply(compiled.e2m1_stochastic, x, random, torch.uint8)
        assert torch.equal(mine, e2m1.encode_e2m1(x, random))


def test_e4m3(compiled):
    x = values() * 20
    mine = apply(compiled.e4m3_nearest, x, x, torch.uint8)
    assert torch.equal(mine, formats.e4m3.encode_e4m3(x).view(torch.uint8))


def test_the_quick_quotient_is_the_rounded_one(compiled):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(500000, generator=g) * 2.0 ** torch.randint(-30, 30, (500000,), generator=g)
    t = (torch.rand(500000, generator=g) + 1) * 2.0 ** torch.randint(-60, 60, (500000,), generator=g)
    t[:1000] = torch.nextafter(
        torch.tensor(2.0), torch.tensor(0.0)
    )  # a mantissa of ones, the method's hard case
    assert torch.equal(apply(compiled.quotient, x, t, torch.float32), x / t)


def test_philox(compiled):
    x = torch.zeros(1000)
    expected = philox.uniform(2**64 - 5, slice(0, 1), 1000).flatten()
    assert torch.equal(apply(compiled.random_number, x, x, torch.float32), expected)
