"""ConvRot: the regular Hadamard rotation of groups of channels, in a fixed order of fp32 sums.

The definition, to be met bit for bit by every kernel. H is a Kronecker power of H4 =
[[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]], divided by sqrt(n). Within a group of n = 4^L consecutive
values, for each stride in 1, 4, 16, 64 below n, in this order, every quad ``(a, b, c, d) = v[i],
v[i+stride], v[i+2*stride], v[i+3*stride]`` is replaced, in place, by::

    p = a + b;  m = a - b;  s = c + d;  t = c - d
    v[i] = p + t;  v[i+stride] = p - t;  v[i+2*stride] = m + s;  v[i+3*stride] = s - m

Each ``+`` and ``-`` is one fp32 operation rounded to nearest even, none is fused, subnormals are kept.
After the last stage each value is multiplied once by 1/sqrt(n) = 1/2, 1/4, 1/8 or 1/16, which is exact
unless the result is subnormal. Values whose sums pass the fp32 maximum become infinite or NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hswq_lab.errors import HswqError
from hswq_lab.formats._rows import row_chunks

GROUPS = (256, 64, 16, 4)
_H4 = ((1.0, 1.0, 1.0, -1.0), (1.0, 1.0, -1.0, 1.0), (1.0, -1.0, 1.0, 1.0), (-1.0, 1.0, 1.0, 1.0))


def group_for(k: int) -> int | None:
    """The group in which k channels are rotated: the largest of 256, 64, 16, 4 that divides k, or None."""
    return next((group for group in GROUPS if k > 0 and k % group == 0), None)


def hadamard(n: int) -> Tensor:
    """The normalised regular Hadamard matrix, fp32 [n, n]: symmetric, its own inverse, every row sums to 1.

    Raises:
        HswqError: n is not a rotation group.
    """
    _check_group(n)
    h4 = torch.tensor(_H4, dtype=torch.float32)
    h = h4
    while h.shape[0] < n:
        h = torch.kron(h, h4)
    return h * _normalisation(n)


def rotate_fp32(x: Tensor, group: int | None) -> Tensor:
    """Rotates the last dimension in groups and returns the unrounded fp32 values: what the quantisers see.

    Args:
        x: [..., K], any float dtype; taken to fp32 first.
        group: 4, 16, 64 or 256, a divisor of K; None leaves the values as they are.

    Returns:
        fp32, the shape of x.

    Raises:
        HswqError: the group is not one of these or does not divide K.
    """
    if group is None:
        return x.float()
    _check_group(group)
    k = x.shape[-1] if x.dim() else 0
    if k == 0 or k % group:
        raise HswqError(
            "the rotation group does not divide the number of channels",
            found=f"group {group}, shape {list(x.shape)}",
            expected="a last dimension that is a multiple of the group",
        )
    flat = x.reshape(-1, k)
    out = torch.empty(flat.shape, dtype=torch.float32, device=x.device)
    for rows in row_chunks(flat.shape[0], k):
        out[rows] = _butterflies(flat[rows].float(), group)
    return out.reshape(x.shape)


def rotate(x: Tensor, group: int | None) -> Tensor:
    """`rotate_fp32` rounded once to the dtype of x. Rotating twice gives x back, up to rounding."""
    return rotate_fp32(x, group).to(x.dtype)


def _butterflies(x: Tensor, group: int) -> Tensor:
    """The definition in the module's docstring, on fp32 [rows, K]."""
    rows, k = x.shape
    stride = 1
    while stride < group:
        a, b, c, d = x.reshape(rows, k // (4 * stride), 4, stride).unbind(2)
        p, m, s, t = a + b, a - b, c + d, c - d
        x = torch.stack((p + t, p - t, m + s, s - m), dim=2)
        stride *= 4
    return x.reshape(rows, k) * _normalisation(group)


def _normalisation(group: int) -> float:
    return {4: 0.5, 16: 0.25, 64: 0.125, 256: 0.0625}[group]


def _check_group(group: int) -> None:
    if group not in GROUPS:
        raise HswqError(
            "not a rotation group", found=group, expected="4, 16, 64 or 256, or None for no rotation"
        )
