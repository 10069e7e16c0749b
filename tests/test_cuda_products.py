"""Matrix products on a card against fp64 and the definition, and how ops run there: graphs, streams, torch.compile."""

from __future__ import annotations

import warnings

import pytest
import torch
from cuda_cases import DEVICE, NEEDS_CARD, assert_same, both, on, poisoned  # noqa: F401 - a fixture
from kernel_cases import DTYPES, gaussian

import hswq_lab as hl
from hswq_lab import formats, ops
from hswq_lab._backends import native

pytestmark = NEEDS_CARD

LINEARS = [
    (1, 768, 256, 70),
    (33, 768, 256, 70),
    (6, 64, 64, 48),
    (5, 40, None, 70),
    (300, 1280, 256, 512),
    (130, 512, 256, 264),
    (70, 96, None, 72),
    (600, 320, 64, 200),
    (12, 512, 256, 264),
]


def close(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, sums: float = 2.0**-20) -> None:
    """As near to the fp64 result as one rounding of it allows, and the rounding of sums, relative to the largest."""
    step = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[mine.dtype]
    assert mine.dtype == theirs.dtype
    assert mine.shape == theirs.shape
    size = exact.abs().max() if exact.numel() else 1.0
    bound = step * exact.abs() + sums * size
    assert bool(((mine.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize(("m", "k", "group", "n"), LINEARS)
def test_linears(m, k, group, n, bias_dtype, dtype):
    x, w = gaussian(m, k, dtype), gaussian(n, k, seed=2)
    s = ops.tensor_scale(w)
    wc, ws = ops.rotate_quantize_nvfp4(w, s, group)
    q, qs = ops.quantize_int8(w, group)
    s_x = torch.tensor(0.002)
    bias = None if bias_dtype is None else gaussian(1, n, bias_dtype, seed=3)[0]
    exact = ops.linear_w4a4(x.double().float(), wc, ws, s, s_x, group, n, None).double()
    exact += 0 if bias is None else bias.double()
    close(*both(ops.linear_w4a4, x, wc, ws, s, s_x, group, n, bias), exact)
    rotated = formats.rotate(x, group).double()
    w16 = formats.dequantize_nvfp4(wc, ws, torch.ones(()), (n, k), torch.float32).double() * s.double()
    exact = rotated @ w16.T + (0 if bias is None else bias.double())
    close(*both(ops.linear_w4a16, x, wc, ws, s, group, n, bias), exact)
    exact = ops.linear_w4a8(x.float(), wc, ws, s, s_x, group, n, bias).double()
    # FP8 tensor cores add 32 products with some 14 bits, and all of them where bf16 results put up with it.
    sums = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-11
    close(*both(ops.linear_w4a8, x, wc, ws, s, s_x, group, n, bias), exact, sums)
    w8, rows = (v.to(DEVICE) for v in ops.fp8_weight(wc, ws, (n, k)))
    args = on(DEVICE, (s, s_x)), group, n, on(DEVICE, bias)
    kept = ops.linear_fp8(x.to(DEVICE), w8, rows, *args[0], *args[1:])
    assert torch.equal(kept, ops.linear_w4a8(x.to(DEVICE), wc.to(DEVICE), ws.to(DEVICE), *args[0], *args[1:]))
    assert_same(ops.linear_int8, x, q, qs, group, bias)
    assert_same(ops.linear_int8, x, q, qs[0, 0], group, bias)


@pytest.mark.parametrize("m", [1, 12])
def test_few_rows_of_a_tall_weight(m):
    """The skinny product takes two tiles of rows at once where there are many."""
    x, w = gaussian(m, 256, torch.bfloat16), gaussian(8200, 256, seed=2)
    s = ops.tensor_scale(w)
    codes, scales = ops.quantize_nvfp4(w, s)
    w16 = formats.dequantize_nvfp4(codes, scales, torch.ones(()), (8200, 256), torch.float32).double()
    exact = (x.double() @ w16.T) * s.double()
    close(*both(ops.linear_w4a16, x, codes, scales, s, None, 8200, None), exact)


# Between a few rows and some thousand: tiles of 64, 128 and 256 rows of x; K whole or shared out among up to 8 blocks;
# one tile a block or several; K that ends within what is fetched at once.
MIDDLE = [
    (17, 8, 32),
    (64, 264, 96),
    (100, 72, 1280),
    (129, 520, 320),
    (300, 4224, 384),
    (700, 11520, 160),
    (1000, 136, 3840),
    (2048, 2560, 256),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), MIDDLE)
def test_middle_rows(m, n, k, with_bias, dtype):
    """Rows of w of very different size, against fp64 on the card."""
    w = gaussian(n, k, seed=2).to(DEVICE) * torch.logspace(-3, 1, n, device=DEVICE)[:, None]
    s = ops.tensor_scale(w)
    codes, scales = ops.quantize_nvfp4(w, s)
    x = gaussian(m, k, dtype).to(DEVICE)
    bias = gaussian(1, n, seed=3)[0].to(DEVICE) if with_bias else None
    w64 = ops.dequantize_nvfp4(codes, scales, torch.ones((), device=DEVICE), (n, k), torch.float32).double()
    exact = x.double() @ w64.T * s.double() + (0 if bias is None else bias.double())
    mine = ops.linear_w4a16(x, codes, scales, s, None, n, bias)
    close(mine, mine, exact)
    assert torch.equal(mine, ops.linear_w4a16(x, codes, scales, s, None, n, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [12, 40, 200])
def test_every_code_times_every_scale(m, dtype):
    """All 16 codes with all 256 block scales, NaN and negative ones too: x picks columns out, one a row."""
    n, k = 256, 64
    codes = (
        torch.arange(256, dtype=torch.uint8).repeat(n, 1)[:, torch.arange(k // 2) * 7 % 256]
    ).contiguous()
    codes = (codes + torch.arange(n, dtype=torch.uint8)[:, None] * 8).contiguous()
    scales = formats.swizzle(torch.arange(n, dtype=torch.uint8)[:, None].repeat(1, 4)).view(
        torch.float8_e4m3fn
    )
    picked = torch.arange(m) * 5 % k
    x = torch.nn.functional.one_hot(picked, k).to(dtype)
    values = formats.dequantize_nvfp4(codes, scales, torch.ones(()), (n, k), torch.float32)
    one = torch.ones(())
    mine = ops.linear_w4a16(*(v.to(DEVICE) for v in (x, codes, scales, one)), None, n)
    finite = values.isfinite().all(1)
    assert torch.equal(mine.cpu()[:, finite], values.T[picked][:, finite].to(dtype))
    assert bool(mine.cpu()[:, ~finite].isnan().all())


@pytest.mark.parametrize("m", [12, 40, 200])
@pytest.mark.parametrize("k", [96, 160, 224])
def test_what_fills_up_block_scales_is_not_read(m, k):
    """Scales of columns beyond K may be anything in a file."""
    w, x = gaussian(136, k, seed=2).to(DEVICE), gaussian(m, k, torch.bfloat16).to(DEVICE)
    s = ops.tensor_scale(w)
    codes, scales = ops.quantize_nvfp4(w, s)
    clean = ops.linear_w4a16(x, codes, scales, s, None, 136)
    whole = torch.full((256, (k // 16 + 3) // 4 * 4), 0x7F, dtype=torch.uint8)
    whole[:136, : k // 16] = formats.unswizzle(scales.cpu(), 136, k // 16).view(torch.uint8)
    padded = formats.swizzle(whole).view(scales.dtype).to(DEVICE)
    assert padded.shape == scales.shape
    assert torch.equal(clean, ops.linear_w4a16(x, codes, padded, s, None, 136))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 5, 16), (33, 130, 80), (0, 16, 32), (3, 0, 32), (256, 256, 512)]
)
def test_fp4_gemm(m, n, k, dtype):
    x, w = gaussian(m, k, spread=1.0), gaussian(n, k, seed=2, spread=1.0)
    (xc, xs), (wc, ws) = (ops.quantize_nvfp4(v, torch.tensor(0.002)) for v in (x, w))
    alpha = torch.tensor(0.002 * 0.002)
    exact = ops.fp4_gemm(xc, xs, wc, ws, alpha, (m, n), None, torch.float32).double()
    close(*both(ops.fp4_gemm, xc, xs, wc, ws, alpha, (m, n), None, dtype), exact)


def test_linears_keep_leading_dimensions():
    w = gaussian(48, 64, seed=2)
    s = ops.tensor_scale(w)
    wc, ws = (v.to(DEVICE) for v in ops.rotate_quantize_nvfp4(w, s, 64))
    x = gaussian(6, 64).to(DEVICE)
    whole = ops.linear_w4a16(x, wc, ws, s.to(DEVICE), 64, 48)
    assert torch.equal(ops.linear_w4a16(x.view(2, 3, 64), wc, ws, s.to(DEVICE), 64, 48), whole.view(2, 3, 48))


# ---- how they run -----------------------------------------------------------------------------------------------


def calls():
    """Every op on activations with a static scale, as a model runs them: name → call on the card."""
    x = gaussian(40, 512, torch.bfloat16).to(DEVICE)
    w = gaussian(96, 512, seed=2)
    s, s_x = ops.tensor_scale(w).to(DEVICE), torch.tensor(0.002, device=DEVICE)
    wc, ws = (v.to(DEVICE) for v in ops.rotate_quantize_nvfp4(w, s.cpu(), 256))
    q, qs = (v.to(DEVICE) for v in ops.quantize_int8(w, 256))
    return {
        "rotate_quantize": lambda: ops.rotate_quantize_nvfp4_counted(x, s_x, 256)[0],
        "w4a4": lambda: ops.linear_w4a4(x, wc, ws, s, s_x, 256, 96),
        "w4a16": lambda: ops.linear_w4a16(x, wc, ws, s, 256, 96),
        "w4a8": lambda: ops.linear_w4a8(x, wc, ws, s, s_x, 256, 96),
        "int8": lambda: ops.linear_int8(x, q, qs, 256),
    }


NAMES = ["rotate_quantize", "w4a4", "w4a16", "w4a8", "int8"]


@pytest.mark.parametrize("name", NAMES)
def test_repeats_bit_for_bit_and_never_waits(name):
    call = calls()[name]
    first = call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        again = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_stream_and_in_a_graph(name):
    call = calls()[name]
    expected = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(call(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


def test_under_torch_compile():
    x, w = gaussian(8, 256, torch.bfloat16).to(DEVICE), gaussian(32, 256, seed=2)
    s = ops.tensor_scale(w).to(DEVICE)
    wc, ws = (v.to(DEVICE) for v in ops.rotate_quantize_nvfp4(w, s.cpu(), 256))
    plain = ops.linear_w4a16(x, wc, ws, s, 256, 32)
    compiled = torch.compile(
        lambda v: ops.linear_w4a16(v, wc, ws, s, 256, 32), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_on_a_second_card():
    x = gaussian(40, 512)
    codes, _ = ops.quantize_nvfp4(x.to("cuda:1"), torch.tensor(0.002, device="cuda:1"))
    assert torch.equal(codes.cpu(), ops.quantize_nvfp4(x, torch.tensor(0.002))[0])


def test_tensors_on_two_devices_are_refused():
    x = gaussian(4, 256)
    s = ops.tensor_scale(x)
    wc, ws = ops.rotate_quantize_nvfp4(x, s, 256)
    with pytest.raises(hl.HswqError, match="different devices"):
        ops.linear_w4a16(x.to(DEVICE), wc, ws, s, 256, 4)


def test_fp4_is_probed_not_assumed():
    """Below capability 10 the library's heuristic says no, and that is what the back end reports."""
    answer = native.cuda.probe_fp4(0)
    assert bool(answer) == (torch.cuda.get_device_capability(0) < (10, 0))
    assert ops.fp4_is_native(DEVICE) == (not answer)
    assert native.cuda.library_version() >= 120000


def test_a_product_the_library_lacks_takes_the_portable_way(monkeypatch):
    from hswq_lab import _cuda_products  # noqa: PLC0415 - not there without the extension's CUDA part

    x, w = gaussian(20, 64, spread=1.0), gaussian(24, 64, seed=2)
    (xc, xs), (wc, ws) = (ops.quantize_nvfp4(v, torch.tensor(0.002)) for v in (x, w))
    args = (xc, xs, wc, ws, torch.tensor(4e-6), (20, 24), None, torch.float32)
    _cuda_products._warn_once.cache_clear()
    monkeypatch.setattr(
        _cuda_products, "why_no_fp4", lambda _: ""
    )  # as if the card had FP4: the library will refuse
    with pytest.warns(RuntimeWarning, match="slower way"):
        mine, theirs = both(ops.fp4_gemm, *args)
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the second time it is silent
        both(ops.fp4_gemm, *args)


def test_a_layer_keeps_its_fp8_weight_when_asked(monkeypatch):
    from hswq_lab.layers import make_linear  # noqa: PLC0415 - beside the one test that needs it
    from hswq_lab.modes import ModeRequest, resolve  # noqa: PLC0415 - the same

    w = gaussian(96, 512, seed=2)
    s = ops.tensor_scale(w)
    codes, scales = ops.rotate_quantize_nvfp4(w, s, 256)
    weight = formats.Nvfp4Weight(codes, scales, s, (96, 512), 256, torch.tensor(0.002)).to(DEVICE)
    x = gaussian(40, 512, torch.bfloat16).to(DEVICE)
    layers = {}
    for how in ("per_call", "keep"):
        request = ModeRequest("tc8", fp8_weights=how)
        resolved = resolve("layer", "nvfp4", request, calibrated=True, fp4_is_native=False)
        layers[how] = make_linear("layer", weight, None, resolved)
    expected = layers["per_call"](x)
    assert torch.equal(layers["keep"](x), expected)
    monkeypatch.setattr(ops, "fp8_weight", None)  # and does not convert it again
    monkeypatch.setattr(ops, "linear_w4a8", None)
    assert torch.equal(layers["keep"](x), expected)
