"""The ops as citizens of torch: opcheck, torch.compile, back ends, errors, lifetimes, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import hswq_lab as hl
from hswq_lab import _library, ops
from hswq_lab._backends import native

torch.set_num_threads(1)
needs_native = pytest.mark.skipif(native is None, reason="the extension is not built")


def make(rows: int = 20, cols: int = 64, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sample_calls() -> dict[str, tuple]:
    """One call of every registered op."""
    x, w = make(), make(24, 64, seed=1)
    s, w_s = ops.tensor_scale(x), ops.tensor_scale(w)
    # Scales as bytes: opcheck looks for changed inputs with arithmetic that torch lacks for float8.
    xc, xs = (t.view(torch.uint8) for t in ops.quantize_nvfp4(x, s))
    wc, ws = (t.view(torch.uint8) for t in ops.rotate_quantize_nvfp4(w, w_s, 64))
    q, q_s = ops.quantize_int8(w, 64)
    bias, cube = make(1, 24)[0], x.reshape(2, 10, 64)
    w8, rows = ops.fp8_weight(wc, ws, (24, 64))
    linear = torch.randint(0, 255, (24, 4), dtype=torch.uint8)
    return {
        "amax": (x,),
        "rotate": (cube, 64),
        "quantize_nvfp4": (x, s, 16, "sweep", torch.rand(64), 3),
        "requantize_nvfp4": (x, s, xs, None, 3),
        "dequantize_nvfp4": (xc, xs, s, [20, 64], torch.bfloat16, None),
        "fp4_gemm": (xc, xs, wc, ws, s * w_s, [20, 24], bias, torch.bfloat16),
        "linear_w4a4": (cube, wc, ws, w_s, s, 64, 24, bias),
        "linear_w4a8": (cube, wc, ws, w_s, s, 64, 24, None),
        "fp8_weight": (wc, ws, 24, 64),
        "linear_fp8": (cube, w8.view(torch.uint8), rows, w_s, s, 64, 24, bias),
        "linear_w4a16": (cube.bfloat16(), wc, ws, w_s, 64, 24, bias),
        "linear_int8": (cube, q, q_s, 64, bias),
        "quantize_int8": (w, 64, None),
        "requantize_int8": (w, q_s, 64, 5),
        "dequantize_int8": (q, q_s, 64, torch.float32),
        "swizzle": (linear,),
        "unswizzle": (ops.swizzle(linear), 24, 4),
    }


CALLS = sample_calls()


def test_every_op_has_a_sample_call():
    assert set(CALLS) == set(_library.FAKES)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.hswq_lab, name).default, CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_fake_kernels_agree_with_the_real_ones(name):
    op = getattr(torch.ops.hswq_lab, name).default
    real = op(*CALLS[name])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in CALLS[name]))
    for a, b in zip(*((r,) if isinstance(r, torch.Tensor) else r for r in (real, fake)), strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


class Block(nn.Module):
    """Two packed Linears and what stands around them in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        w1, w2 = make(96, 64, seed=1), make(64, 96, seed=2)
        self.s1 = ops.tensor_scale(w1)
        self.c1, self.b1 = ops.rotate_quantize_nvfp4(w1, self.s1, 64)
        self.q2, self.s2 = ops.quantize_int8(w2, 16)
        self.s_x = torch.tensor(0.002)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = ops.linear_w4a4(x, self.c1, self.b1, self.s1, self.s_x, 64, 96)
        h = torch.nn.functional.silu(h + ops.linear_w4a16(x, self.c1, self.b1, self.s1, 64, 96))
        return x + ops.linear_int8(h, self.q2, self.s2, 16)


def test_compile_fullgraph_gives_the_same_numbers():
    block = Block()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for rows in (5, 12, 33):  # the second size makes the graph dynamic
        x = make(rows, 64)
        assert torch.equal(compiled(x), block(x))
    assert torch.equal(compiled(make(6, 64).reshape(2, 3, 64)), block(make(6, 64).reshape(2, 3, 64)))


@needs_native
def test_compile_with_inductor():
    block = Block()
    torch._dynamo.reset()
    x = make(12, 64)
    assert torch.allclose(torch.compile(block, fullgraph=True)(x), block(x), atol=1e-5)


# ---- back ends --------------------------------------------------------------------------------


def test_backends_say_what_is_there():
    report = ops.backends()
    assert list(report) == ["reference", "cpu", "cuda"]
    assert report["reference"].usable
    assert report["cpu"].usable == (native is not None)
    assert not any(b.native_fp4 for b in report.values())
    for backend in report.values():
        assert backend.usable or backend.why
    assert ops.describe_backends().count("\n") == 2
    assert not ops.fp4_is_native("cpu")


def test_use_backend_is_undone_and_refuses_what_is_not_here():
    device = torch.device("cpu")
    before = ops.backend_for(device)
    with ops.use_backend("reference"):
        assert ops.backend_for(device) == "reference"
    with pytest.raises(ZeroDivisionError), ops.use_backend("reference"):
        _ = 1 / 0
    assert ops.backend_for(device) == before
    with pytest.raises(hl.HswqError, match="unknown back end"), ops.use_backend("abacus"):
        pass
    if not ops.backends()["cuda"].usable:
        with pytest.raises(hl.HswqError, match="cannot be used here"), ops.use_backend("cuda"):
            pass


def test_backend_is_a_context_variable():
    seen = []
    with ops.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(ops.backend_for(torch.device("cpu"))))
        thread.start()
        thread.join()
    assert seen == ["cpu" if native is not None else "reference"]


@needs_native
def test_the_instruction_set_can_be_limited_from_outside():
    script = "from hswq_lab._backends import native; print(native.isa())"

    def run(level: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "HSWQ_LAB_ISA": level}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run("baseline").stdout.strip() == "baseline"
    assert "HSWQ_LAB_ISA names no instruction set" in run("mmx").stderr


# ---- bad input --------------------------------------------------------------------------------


def bad_calls() -> dict[str, object]:
    x, w = make(), make(24, 64, seed=1)
    s = ops.tensor_scale(x)
    wc, ws = ops.quantize_nvfp4(w, s)
    q, q_s = ops.quantize_int8(w, None)
    f64 = torch.float64
    return {
        "vector": lambda: ops.quantize_nvfp4(x[0], s),
        "integers": lambda: ops.quantize_nvfp4(x.int(), s),
        "method": lambda: ops.quantize_nvfp4(x, s, "best"),
        "importance of rtn": lambda: ops.quantize_nvfp4(x, s, "rtn", torch.ones(64)),
        "importance size": lambda: ops.quantize_nvfp4(x, s, "sweep", torch.ones(63)),
        "two scales": lambda: ops.quantize_nvfp4(x, torch.ones(2)),
        "group": lambda: ops.rotate(x, 32),
        "group of k": lambda: ops.rotate(x, 256),
        "group of 0 columns": lambda: ops.rotate(x[:, :0], 4),
        "rotate quantise group": lambda: ops.rotate_quantize_nvfp4(x, s, 256),
        "codes shape": lambda: ops.dequantize_nvfp4(wc[:16], ws, s, (24, 64)),
        "scales shape": lambda: ops.dequantize_nvfp4(wc, ws[:, :2], s, (24, 64)),
        "kept scales": lambda: ops.requantize_nvfp4(x, s, ws[:, :2], 1),
        "unswizzle": lambda: ops.unswizzle(ws, 24, 9),
        "k of gemm": lambda: ops.fp4_gemm(wc[:, :16], ws, wc, ws, s, (24, 24)),
        "k of w4a4": lambda: ops.linear_w4a4(make(3, 48), wc, ws, s, s, None, 24),
        "k of w4a16": lambda: ops.linear_w4a16(make(3, 48), wc, ws, s, None, 24),
        "k of w4a16 bf16": lambda: ops.linear_w4a16(make(3, 48).bfloat16(), wc, ws, s, None, 24),
        "k of w4a8": lambda: ops.linear_w4a8(make(3, 48), wc, ws, s, s, None, 24),
        "k of int8": lambda: ops.linear_int8(make(3, 48), q, q_s, None),
        "bias": lambda: ops.linear_w4a4(x, wc, ws, s, s, None, 24, torch.ones(23)),
        "int8 bias": lambda: ops.linear_int8(x, q, q_s, None, torch.ones(1)),
        "int8 scales": lambda: ops.linear_int8(x, q, q_s[:5], None),
        "int8 weights": lambda: ops.linear_int8(x, q.float(), q_s, None),
        "fp64 x": lambda: ops.linear_w4a4(x.to(f64), wc, ws, s, s, None, 24),
    }


BAD = bad_calls()


@needs_native
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_our_error(name):
    with pytest.raises(hl.HswqError):
        BAD[name]()


# ---- lifetimes and threads --------------------------------------------------------------------------------


@needs_native
def test_temporaries_live_until_the_kernel_is_done():
    """Scales in another dtype and strided inputs make copies; they must not be freed before they are read."""
    x = make(64, 128)
    wide = torch.stack((x, x), 2)[:, :, 0]
    s = ops.tensor_scale(x)
    expected = ops.quantize_nvfp4(x, s)
    for _ in range(50):
        got = ops.quantize_nvfp4(wide, s.double())
        assert torch.equal(got[0], expected[0])
        assert ops.tensor_scale(wide) == s


@needs_native
def test_calls_from_many_threads_and_after_a_fork():
    torch.set_num_threads(2)
    try:
        x = make(700, 1024)
        s = ops.tensor_scale(x)
        expected = ops.quantize_nvfp4(x, s)[0]
        right = []

        def work():
            right.extend(torch.equal(ops.quantize_nvfp4(x, s)[0], expected) for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(right) == 20
        assert all(right)
    finally:
        torch.set_num_threads(1)
    script = (
        "import os, torch; from hswq_lab import ops; torch.set_num_threads(2); x = torch.randn(700, 1024);"
        "s = ops.tensor_scale(x); a = ops.quantize_nvfp4(x, s)[0]; pid = os.fork();\n"
        "ok = torch.equal(ops.quantize_nvfp4(x, s)[0], a)\n"
        "if pid == 0: os._exit(0 if ok else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0 and ok"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True)
