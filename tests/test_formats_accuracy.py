"""How good the three ways to choose block scales are: SQNR on the synthetic data of the published table."""

from __future__ import annotations

import pytest
import torch

from hswq_lab.formats import (
    dequantize_nvfp4,
    quantize_nvfp4,
    rotate_fp32,
    tensor_scale,
    tensor_scale_four_six,
)

K = 3840


def data(kind, rows):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((rows, K), generator=generator)
    if kind == "student":  # t with 4 degrees of freedom
        chi = torch.randn((4, rows, K), generator=generator).square().mean(0)
        return x / chi.sqrt()
    if kind == "outliers":
        x[:, torch.randperm(K, generator=generator)[:20]] *= 20
    return x


def sqnr(x, method):
    """Signal to quantisation noise in dB."""
    s = tensor_scale_four_six(x) if method == "four_six" else tensor_scale(x)
    back = dequantize_nvfp4(*quantize_nvfp4(x, s, method), s, tuple(x.shape), torch.float32)
    return float(10 * torch.log10(x.square().sum() / (back - x).square().sum()))


TABLE = [
    ("gaussian", None, 20.44, 21.22, 21.81),
    ("gaussian", 256, 20.44, 21.22, 21.81),
    ("student", None, 20.75, 21.22, 21.65),
    ("student", 256, 20.41, 21.21, 21.81),
    ("outliers", None, 20.76, 21.04, 21.22),
    ("outliers", 256, 20.10, 21.11, 21.78),
]


@pytest.mark.parametrize(("kind", "group", "rtn", "four_six", "sweep"), TABLE)
def test_table(kind, group, rtn, four_six, sweep):
    x = rotate_fp32(data(kind, 96), group)
    found = [sqnr(x, method) for method in ("rtn", "four_six", "sweep")]
    assert found == [pytest.approx(expected, abs=0.1) for expected in (rtn, four_six, sweep)]
