"""Tensors as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row order; a view where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
