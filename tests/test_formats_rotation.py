"""The rotation: order of additions, exactness, involution, groups, and what it refuses."""

from __future__ import annotations

import formats_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hswq_lab import HswqError
from hswq_lab.formats import GROUPS, group_for, hadamard, rotate, rotate_fp32
from hswq_lab.formats import _rows as chunking


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("k", "group"),
    [
        (12, 4),
        (16, 16),
        (40, 4),
        (64, 64),
        (96, 16),
        (2560, 256),
        (3840, 256),
        (10240, 256),
        (13696, 64),
        (7, None),
        (30, None),
        (1, None),
        (0, None),
    ],
)
def test_group_for(k, group):
    assert group_for(k) == group


@pytest.mark.parametrize("group", GROUPS)
class TestDefinition:
    def test_bits_are_those_of_the_documented_order(self, group):
        x = noise(3, 2 * group) * torch.tensor([[1.0], [1e30], [1e-40]])
        x[0, :4] = torch.tensor([1e8, 1.0, -1e8, 1.0])  # an order that cancels late loses the ones
        expected = np.stack([oracle.butterflies(row, group) for row in x.numpy()])
        assert rotate_fp32(x, group).numpy().tobytes() == expected.tobytes()

    def test_close_to_the_dense_matrix(self, group):
        x = noise(5, 3 * group)
        expected = oracle.rotate(x.numpy(), group)
        assert np.abs(rotate_fp32(x, group).numpy() - expected).max() < 2e-6

    def test_constant_stays_itself(self, group):
        # 16 after a Sylvester matrix of 256: a Gaussian test could not tell them apart.
        ones = torch.ones(2, 2 * group)
        assert torch.equal(rotate_fp32(ones, group), ones)

    def test_one_hot_becomes_a_row_of_the_matrix(self, group):
        rotated = rotate_fp32(torch.eye(group), group)
        assert torch.equal(rotated, hadamard(group))
        assert torch.equal(rotated.abs(), torch.full((group, group), group**-0.5))

    def test_matrix(self, group):
        h = hadamard(group)
        assert torch.equal(h, torch.from_numpy(oracle.hadamard(group)).float())
        assert torch.equal(h, h.T)
        assert torch.equal(h @ h, torch.eye(group))
        assert torch.equal(h.sum(1), torch.ones(group))

    def test_twice_gives_the_input_back(self, group):
        x = noise(4, group)
        torch.testing.assert_close(rotate_fp32(rotate_fp32(x, group), group), x, rtol=0, atol=2e-6)
        integers = torch.arange(2.0 * group).reshape(1, -1)
        assert torch.equal(rotate_fp32(rotate_fp32(integers, group), group), integers)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_fp32_inside_one_rounding_at_the_end(self, group, dtype):
        x = noise(3, group).to(dtype)
        y = rotate(x, group)
        assert y.dtype == dtype
        assert torch.equal(y, rotate_fp32(x.float(), group).to(dtype))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (33, 64), (0, 64)])
def test_any_leading_dimensions(shape):
    x = noise(*shape)
    y = rotate(x, 64)
    assert y.shape == x.shape
    assert torch.equal(y.reshape(-1, 64), rotate(x.reshape(-1, 64), 64))


def test_no_group_is_the_identity():
    x = noise(2, 7).to(torch.bfloat16)
    assert torch.equal(rotate(x, None), x)
    assert torch.equal(rotate_fp32(x, None), x.float())


def test_strided_input():
    x = noise(64, 6).T
    assert torch.equal(rotate(x, 16), rotate(x.contiguous(), 16))


def test_chunks_change_nothing(monkeypatch):
    x = noise(10, 64)
    whole = rotate_fp32(x, 16)
    monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", 64 * 3)
    assert torch.equal(rotate_fp32(x, 16), whole)


@pytest.mark.parametrize(("k", "group"), [(16, 8), (16, 1024), (20, 16), (16, 0), (16, -4)])
def test_refused_groups(k, group):
    with pytest.raises(HswqError, match="group"):
        rotate(torch.ones(1, k), group)


def test_default_dtype_does_not_matter():
    x = noise(1, 16)
    expected = rotate_fp32(x, 16)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(rotate_fp32(x, 16), expected)
        assert hadamard(16).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**115), max_value=2.0**115),
        min_size=16,
        max_size=16,
    )
)
def test_any_16_values_as_documented(values):
    x = torch.tensor([values])
    assert rotate_fp32(x, 16).numpy().tobytes() == oracle.butterflies(x.numpy()[0], 16).tobytes()
