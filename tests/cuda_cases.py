"""What the tests of the CUDA kernels share: the card, and the card's answer beside the definition's."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, same_bits

from hswq_lab import ops

CARD = ops.backends()["cuda"]
NEEDS_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CARD.usable, reason=f"no usable card: {CARD.why}"),
    pytest.mark.usefixtures("poisoned"),
]
DEVICE = torch.device("cuda:0")


@pytest.fixture
def poisoned():
    """Freed memory that the next outputs are made of is full of 0xAB, not of yesterday's right results."""
    junk = torch.full((64 << 20,), 0xAB, dtype=torch.uint8, device=DEVICE)
    del junk
    yield
    torch.cuda.synchronize()


def on(device, value):
    """Tensors, also in tuples, on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(on(device, v) for v in value) if isinstance(value, tuple) else value


def canonical(x: torch.Tensor) -> torch.Tensor:
    """One NaN for all: which bits a sum of infinities has, nobody defines."""
    return torch.where(x.isnan(), torch.nan, x) if x.dtype in DTYPES else x


def both(op, *args):
    """What the card says, brought back, and what the definition says."""
    with ops.use_backend("reference"):
        theirs = op(*args)
    with ops.use_backend("cuda"):
        mine = op(*(on(DEVICE, a) for a in args))
    return on("cpu", mine), theirs


def assert_same(op, *args) -> None:
    mine, theirs = both(op, *args)
    if isinstance(mine, torch.Tensor):
        mine, theirs = (mine,), (theirs,)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert same_bits(canonical(a), canonical(b)), (
            f"result {i}: {(a.float() != b.float()).sum()} of {a.numel()} differ"
        )
