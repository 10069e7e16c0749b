"""The small pieces: E2M1 and E4M3 codes, nibbles, swizzle, Philox, one rounding from fp64."""

from __future__ import annotations

import math
from fractions import Fraction

import formats_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hswq_lab import HswqError
from hswq_lab.formats import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    philox4x32_10,
    swap_nibbles,
    swizzle,
    swizzled_shape,
    unpack_nibbles,
    unswizzle,
)
from hswq_lab.formats.philox import philox_rounds, uniform
from hswq_lab.formats.rounding import round_once


def around(points, steps=2):
    """Each point and the fp32 values next to it."""
    out = []
    for point in points:
        below = above = np.float32(point)
        out.append(below)
        for _ in range(steps):
            below, above = np.nextafter(below, np.float32(-1)), np.nextafter(above, np.float32(1e9))
            out += [below, above]
    return torch.tensor(np.array([x for x in out if x >= 0], np.float32))


class TestE2m1:
    def test_values(self):
        values = decode_e2m1(torch.arange(16, dtype=torch.uint8))
        assert values.tolist() == oracle.E2M1 + [-v for v in oracle.E2M1]
        assert math.copysign(1, values[8]) == -1

    def test_nearest_around_every_midpoint_and_value(self):
        midpoints = [(a + b) / 2 for a, b in zip(oracle.E2M1, oracle.E2M1[1:], strict=False)]
        x = around(midpoints + oracle.E2M1 + [6.5, 1e30, 1e-45, 0.0])
        expected = [oracle.nearest_code(float(v), oracle.E2M1) for v in x]
        assert encode_e2m1(x).tolist() == expected
        assert encode_e2m1(-x).tolist() == [code | 8 for code in expected]

    def test_ties_go_to_the_even_code(self):
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        assert decode_e2m1(encode_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]

    @pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
    def test_stochastic_keeps_representable_values(self, u):
        codes = torch.arange(16, dtype=torch.uint8)
        assert torch.equal(encode_e2m1(decode_e2m1(codes), torch.full((16,), u)), codes)
        assert encode_e2m1(torch.tensor([7.0, -100.0]), torch.full((2,), u)).tolist() == [7, 15]

    def test_stochastic_takes_neighbours_by_distance(self):
        x = torch.tensor([0.1, 0.6, 1.2, 1.9, 2.3, 3.75, 5.5, -5.5])
        for value in x:
            lower = max(v for v in oracle.E2M1 if v <= abs(value))
            upper = min(v for v in oracle.E2M1 if v > abs(value))
            fraction = (abs(float(value)) - lower) / (upper - lower)
            u = torch.tensor([0.0, fraction - 1e-6, fraction + 1e-6, 1 - 2**-24])
            rounded = decode_e2m1(encode_e2m1(value.expand(4), u)).abs().tolist()
            assert rounded == [upper, upper, lower, lower]


class TestE4m3:
    def test_values(self):
        codes = torch.arange(0x7F, dtype=torch.uint8)
        assert decode_e4m3(codes).tolist() == oracle.E4M3
        assert decode_e4m3(codes | 0x80).tolist() == [-v for v in oracle.E4M3]
        assert decode_e4m3(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all()
        assert oracle.E4M3[-1] == 448
        assert oracle.E4M3[1] == 2**-9

    def test_nearest_around_every_midpoint_and_value(self):
        midpoints = [(a + b) / 2 for a, b in zip(oracle.E4M3, oracle.E4M3[1:], strict=False)]
        x = around(midpoints + oracle.E4M3, steps=1)
        expected = [oracle.nearest_code(float(v), oracle.E4M3) for v in x]
        assert encode_e4m3(x).view(torch.uint8).tolist() == expected

    def test_saturates_beyond_448(self):
        x = torch.tensor([464.0, 465.0, 480.0, 1e30, torch.inf, -465.0])
        assert encode_e4m3(x).float().tolist() == [448.0] * 5 + [-448.0]

    def test_nan_stays(self):
        assert encode_e4m3(torch.tensor([torch.nan])).float().isnan().all()


class TestNibbles:
    def test_even_column_is_high(self):
        packed = pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
        assert packed.tolist() == [[0x12, 0xF0]]
        assert swap_nibbles(packed).tolist() == [[0x21, 0x0F]]

    def test_every_byte_there_and_back(self):
        packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
        assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)
        assert torch.equal(swap_nibbles(swap_nibbles(packed)), packed)
        assert torch.equal(unpack_nibbles(swap_nibbles(packed))[:, 0::2], unpack_nibbles(packed)[:, 1::2])

    def test_odd_number_of_columns_is_refused(self):
        with pytest.raises(HswqError, match="two codes"):
            pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))


class TestSwizzle:
    @pytest.mark.parametrize("n", [1, 16, 130, 576])
    @pytest.mark.parametrize("k", [16, 48, 704, 2048])
    def test_there_and_back_and_the_published_offset(self, n, k):
        rows, cols = n, k // 16
        linear = torch.randint(
            1, 255, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + k)
        )
        swizzled = swizzle(linear)
        assert tuple(swizzled.shape) == swizzled_shape(rows, cols)
        assert swizzled.shape[0] % 128 == 0
        assert swizzled.shape[1] % 4 == 0
        assert np.array_equal(swizzled.numpy(), oracle.swizzle(linear.numpy()))
        assert torch.equal(unswizzle(swizzled, rows, cols), linear)

    @given(st.integers(0, 300), st.integers(1, 20), st.integers(0, 2**31))
    @settings(deadline=None, max_examples=40)
    def test_any_shape(self, rows, cols, seed):
        linear = torch.randint(
            0, 255, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        assert torch.equal(unswizzle(swizzle(linear), rows, cols), linear)
        assert swizzle(linear).sum(dtype=torch.int64) == linear.sum(dtype=torch.int64)

    def test_float8_views(self):
        linear = torch.arange(64, dtype=torch.uint8).reshape(16, 4).view(torch.float8_e4m3fn)
        swizzled = swizzle(linear)
        assert swizzled.dtype == torch.float8_e4m3fn
        assert torch.equal(unswizzle(swizzled, 16, 4).view(torch.uint8), linear.view(torch.uint8))

    def test_transposed_input(self):
        linear = torch.arange(64, dtype=torch.uint8).reshape(4, 16).T
        assert torch.equal(swizzle(linear), swizzle(linear.contiguous()))

    def test_wrong_shape_is_refused(self):
        with pytest.raises(HswqError, match="swizzled scales"):
            unswizzle(torch.zeros(128, 8, dtype=torch.uint8), 128, 4)


class TestPhilox:
    # The known answers that come with Random123 (kat_vectors, philox4x32 10).
    @pytest.mark.parametrize(
        ("counter", "key", "words"),
        [
            (
                "00000000 00000000 00000000 00000000",
                "00000000 00000000",
                "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
            ),
            (
                "ffffffff ffffffff ffffffff ffffffff",
                "ffffffff ffffffff",
                "408f276d 41c83b0e a20bc7c6 6d5451fd",
            ),
            (
                "243f6a88 85a308d3 13198a2e 03707344",
                "a4093822 299f31d0",
                "d16cfe09 94fdcceb 5001e420 24126ea1",
            ),
        ],
    )
    def test_known_answers(self, counter, key, words):
        counter, key, words = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
        found = philox_rounds(tuple(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
        assert [int(word) for word in found] == words
        assert list(oracle.philox(tuple(key), tuple(counter))) == words

    @given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**63 - 1))
    @settings(deadline=None)
    def test_key_and_counter_words(self, seed, index):
        key = seed % 2**64
        words = oracle.philox((key % 2**32, key >> 32), (index % 2**32, index >> 32, 0, 0))
        assert tuple(int(word) for word in philox4x32_10(seed, torch.tensor(index))) == words

    def test_uniform_numbers_do_not_depend_on_the_pieces(self, monkeypatch):
        whole = uniform(7, slice(1, 6), 5)
        monkeypatch.setattr("hswq_lab.formats.philox._PIECE", 4)
        assert torch.equal(uniform(7, slice(1, 6), 5), whole)

    def test_uniform_numbers_of_rows(self):
        whole = uniform(7, slice(0, 6), 5)
        assert torch.equal(uniform(7, slice(2, 4), 5), whole[2:4])
        assert [Fraction(float(u)) for u in whole.flatten()] == [oracle.uniform(7, i) for i in range(30)]

    def test_uniform_over_more_than_a_piece(self):
        u = uniform(1, slice(0, 100), 1000)
        assert torch.equal(u[99], uniform(1, slice(99, 100), 1000)[0])
        assert abs(float(u.mean()) - 0.5) < 4 * (1 / 12 / 1e5) ** 0.5
        assert 0 <= float(u.min()) < 1e-4 < 1 - 1e-4 < float(u.max()) < 1
        assert (uniform(2, slice(0, 1), 1000) != u[0]).all()


class TestOneRounding:
    @given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e38, max_value=1e38))
    @settings(deadline=None, max_examples=200)
    def test_any_value(self, value):
        y = torch.tensor([value], dtype=torch.float64)
        for dtype, mantissa, least in (
            (torch.bfloat16, 7, -126),
            (torch.float16, 10, -14),
            (torch.float32, 23, -126),
        ):
            exact = oracle.round_to(Fraction(value), mantissa, least)
            if abs(exact) <= torch.finfo(dtype).max:
                assert Fraction(float(round_once(y, dtype))) == exact

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_just_beside_a_tie(self, dtype):
        # By way of fp32 the tiny part is lost and the tie goes to even.
        half_step = torch.finfo(dtype).eps / 2
        above, below = 1 + half_step + 2**-40, 1 + 3 * half_step - 2**-40
        y = torch.tensor([above, below, -above, -below], dtype=torch.float64)
        step = 2 * half_step
        assert round_once(y, dtype).tolist() == [1 + step, 1 + step, -1 - step, -1 - step]
        assert y.to(torch.float32).to(dtype).tolist() == [1, 1 + 2 * step, -1, -1 - 2 * step]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_not_finite(self, dtype):
        y = torch.tensor([torch.inf, -torch.inf, 1e300, -1e300, torch.nan], dtype=torch.float64)
        assert round_once(y, dtype)[:4].tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf]
        assert round_once(y, dtype)[4].isnan()
