"""A change of one weight: the pass through the kernel against the steps it stands for, bit for bit."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
import torch

from hswq_lab import ops
from hswq_lab.errors import HswqError
from hswq_lab.lora.change import Change, bake, change_sums
from hswq_lab.packing import dequantize, pack_weight

NAME = "layers.0.attention.qkv"
# Panels of 16 rows, chunks of 256 columns, blocks of 16: whole ones and ends of each.
SHAPES = [(1, 16), (16, 256), (33, 272), (40, 520), (100, 1024), (7, 24)]
FORMATS = [("nvfp4", 4), ("nvfp4", None), ("nvfp4", 256), ("int8_tensorwise", 4), ("int8_tensorwise", None)]


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _pack(n: int, k: int, form: str, group: int | None):
    return pack_weight(_normal(n, k) * 0.04, form, group if group is None or k % group == 0 else 4)


def _factors(n: int, k: int, rank: int = 5) -> Change:
    """Low-rank, with rows that it does not touch and zeros among the factors, as split parts have."""
    left = _normal(n, rank, seed=1) * 0.004
    left[::3] = 0
    left[1::3, 2:] = 0
    return Change(left, _normal(rank, k, seed=2))


@pytest.mark.parametrize(("form", "group"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["factors", "dense"])
def test_the_pass_gives_the_bytes_of_the_steps(isa, form, group, shape, kind):
    pack, change = _pack(*shape, form, group), _factors(*shape)
    if kind == "dense":
        change = Change(change.dense)
    with ops.use_backend("reference"):
        expected = bake(pack, change, NAME)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert bake(pack, change, NAME).same_bits(expected), (isa, threads)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["nvfp4", "int8_tensorwise"])
def test_many_rows_on_many_threads_are_the_rows_of_one(form, monkeypatch):
    pack, change = _pack(1024, 1024, form, 256), _factors(1024, 1024, rank=16)
    results = []
    for threads in (1, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append((bake(pack, change, NAME), change_sums(pack, pack, change, None)))
    assert results[0][0].same_bits(results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_scales_that_must_grow_grow_as_in_the_steps(form, group):
    pack = _pack(48, 512, form, group)
    for factor in (30.0, 3000.0):  # larger block scales; a larger tensor scale
        change = replace(_factors(48, 512), left=_factors(48, 512).left * factor)
        with ops.use_backend("reference"):
            expected = bake(pack, change, NAME)
        assert bake(pack, change, NAME).same_bits(expected)
    nothing = pack_weight(torch.zeros(48, 512), form, group)
    with ops.use_backend("reference"):
        expected = bake(nothing, change, NAME)
    assert bake(nothing, change, NAME).same_bits(expected)


@pytest.mark.parametrize("form", ["nvfp4", "int8_tensorwise"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_is_refused_by_name(form, bad):
    pack, change = _pack(48, 512, form, 256), _factors(48, 512)
    change.left[1, 0] = bad
    with pytest.raises(HswqError, match=r"not finite|too large") as error:
        bake(pack, change, NAME)
    assert error.value.tensor == NAME


@pytest.mark.parametrize(("form", "group"), [*FORMATS, ("float8_e4m3fn", None), ("bf16", None)])
@pytest.mark.parametrize("truth", [None, torch.bfloat16, torch.float64])
def test_the_sums_are_those_of_their_definitions(isa, form, group, truth):
    n, k = 40, 520
    source = None if truth is None else _normal(n, k, seed=3).bfloat16().to(truth) * 0.04
    pack = (_normal(n, k) * 0.04).bfloat16() if form == "bf16" else _pack(n, k, form, group)
    change = _factors(n, k)
    after = bake(pack, change, NAME)
    found = change_sums(pack, after, change, source)
    with ops.use_backend("reference"):
        steps = change_sums(pack, after, change, source)
    w, new = (x.double() if isinstance(x, torch.Tensor) else dequantize(x).double() for x in (pack, after))
    d = change.dense.double()
    touched = (d != 0).any(1)
    turned = ops.rotate(d.float(), None if form == "bf16" else pack.group).double()
    s = torch.zeros_like(w) if source is None else source.double()
    c, w_here, d_here = (new - w)[touched], w[touched], d[touched]
    pairs = [
        (c, c),
        (c, d_here),
        (d_here, d_here),
        (w_here, w_here),
        (w_here, d_here),
        (c - d_here, c - d_here),
        (c, turned[touched]),
    ]
    errors = [w - s, s, new - s - d, s + d] if source is not None else [torch.zeros(1)] * 4
    expected = [float(touched.sum()), *(float((a * b).sum()) for a, b in pairs)]
    expected += [float(x.double().square().sum()) for x in errors]
    scale = [1.0, *(float(a.norm() * b.norm()) for a, b in pairs), *([float(s.square().sum()) + 1.0] * 4)]
    for sums in (found, steps):
        for value, truth, unit in zip(astuple(sums), expected, scale, strict=True):
            assert value == pytest.approx(truth, abs=1e-5 * unit)


def test_a_change_of_no_rank_touches_nothing():
    empty = Change(torch.zeros(4, 0), torch.zeros(0, 16))
    assert not empty.any()
    assert not empty.touched.any()
    assert torch.equal(empty.dense, torch.zeros(4, 16))
    w, source = _normal(4, 16), _normal(4, 16, seed=1)
    found = change_sums(w, w, empty, source)
    assert found.rows == found.cc == found.dd == 0
    assert found.source == pytest.approx(found.source_after) == pytest.approx(float(source.square().sum()))
    pack = pack_weight(w, "nvfp4", 4)
    assert bake(pack, empty, NAME).same_bits(pack)


# -- on a card ------------------------------------------------------------------------------------------


def _moved(change: Change) -> Change:
    return Change(change.left.cuda(), None if change.down is None else change.down.cuda())


@pytest.mark.gpu
@pytest.mark.skipif(not ops.backends()["cuda"].usable, reason="no usable card")
@pytest.mark.parametrize(("form", "group"), [*FORMATS, ("float8_e4m3fn", None)])
def test_a_card_gives_the_bytes_and_the_sums_of_the_cpu(form, group):
    for factor in (1.0, 3000.0):
        change = replace(_factors(100, 1024), left=_factors(100, 1024).left * factor)
        for kind in (change, Change(change.dense)):
            pack, source = _pack(100, 1024, form, group), _normal(100, 1024, seed=3).bfloat16() * 0.04
            here, there = bake(pack, kind, NAME), bake(pack.to("cuda"), _moved(kind), NAME)
            assert there.device.type == "cuda"
            assert there.to("cpu").same_bits(here)
            sums = change_sums(pack, here, kind, source)
            on_card = change_sums(pack.to("cuda"), there, _moved(kind), source.cuda())
            assert astuple(on_card) == pytest.approx(astuple(sums), rel=1e-4, abs=1e-4)
