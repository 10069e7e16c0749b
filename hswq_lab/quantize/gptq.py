"""GPTQ for NVFP4: weights that suit quantised inputs, rounded column by column, the error passed on.

Frantar et al., "GPTQ" (2023), with three changes. (1) The Hessian is that of the QUANTISED inputs x̂ in the
rotated basis, and the target is not W but the weight W* that best turns x̂ into W x (least squares): part of
what the activations' rounding does is undone by the weight. (2) A block's E4M3 scale is swept just before its
sixteen columns are rounded, on the values that they have by then, weighted by what an error of each column
costs. (3) How far the fit may go is not a constant: of several strengths of regularisation each layer takes the
one with the least error on inputs that it was not fitted to, crosswise over two sets of prompts, seeds and noise
levels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from hswq_lab import ops
from hswq_lab.formats import Nvfp4Weight, decode_e2m1, decode_e4m3, encode_e2m1, pack_nibbles, swizzle
from hswq_lab.formats.block_scales import choose_codes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hswq_lab.quantize.moments import LayerMoments, Moments

BLOCK = 16
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Regularisations to choose from, in units of the inputs' mean square."""

UNCHECKED = 1.0
"""The regularisation where there is no second fold to check on."""


def gptq_weight(w: Tensor, moments: LayerMoments) -> Nvfp4Weight:
    """Packs a dense weight by GPTQ.

    Args:
        w: [N, K], any float dtype, unrotated.
        moments: of the layer's inputs; their rotation group becomes the weight's.

    Returns:
        The packed weight on the moments' device, without input_scale.
    """
    shape = (w.shape[0], w.shape[1])
    device = moments.folds[0].gram.device
    rotated = ops.rotate(w.to(device).float(), moments.group).double()
    folds = [fold for fold in moments.folds if fold.rows]
    strength = choose_strength(rotated, folds) if len(folds) > 1 else UNCHECKED
    everything = sum(folds[1:], start=folds[0])
    target = best_weight(rotated, everything, [strength])[0]
    scale = ops.tensor_scale(target.float())
    values, block_codes = _round_columns(target, _damped(everything, strength), scale)
    rows16, _columns16 = _ceil16(shape[0]), values.shape[1]
    codes = pack_nibbles(pad(values, (0, 0, 0, rows16 - shape[0])))
    block_codes = pad(block_codes, (0, 0, 0, rows16 - shape[0]))
    return Nvfp4Weight(codes, swizzle(block_codes.view(torch.float8_e4m3fn)), scale, shape, moments.group)


def best_weight(w: Tensor, moments: Moments, strengths: Sequence[float]) -> list[Tensor]:
    """The W* that minimises Σ‖W x − W* x̂‖² + λ‖W* − W‖², for each λ = strength · mean of G's diagonal.

    W* = (W C + λ W)(G + λ)⁻¹ with G = Σ x̂ᵀx̂ and C = Σ xᵀx̂.

    Args:
        w: W in the basis of the moments, fp64 [N, K].
        moments: G and C.
        strengths: above 0.

    Returns:
        fp64 [N, K] for each strength.
    """
    gram = moments.gram.double()
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    wanted, own = w @ moments.cross.double() @ vectors, w @ vectors
    unit = gram.diagonal().mean()
    return [
        (wanted + strength * unit * own) / (values + strength * unit) @ vectors.T for strength in strengths
    ]


def choose_strength(w: Tensor, folds: Sequence[Moments], strengths: Sequence[float] = STRENGTHS) -> float:
    """The strength whose `best_weight` on one fold has the least output error on the other, summed crosswise.

    Args:
        w: W in the basis of the moments, fp64 [N, K].
        folds: two.
        strengths: to choose from; the stronger one wins a tie.
    """
    errors = torch.zeros(len(strengths), dtype=torch.float64, device=w.device)
    for fitted, checked in (folds, reversed(folds)):
        candidates = best_weight(w, fitted, strengths)
        errors += torch.stack([_output_error(w, candidate, checked) for candidate in candidates])
    ordered = sorted(range(len(strengths)), key=lambda i: (float(errors[i]), -strengths[i]))
    return strengths[ordered[0]]


def _output_error(w: Tensor, candidate: Tensor, moments: Moments) -> Tensor:
    """Σ‖W x − Ŵ x̂‖² per row of inputs, but for Σ‖W x‖², which no candidate changes."""
    gram, cross = moments.gram.double(), moments.cross.double()
    return ((candidate @ gram) * candidate - 2 * (w @ cross) * candidate).sum() / moments.rows


def _damped(moments: Moments, strength: float) -> Tensor:
    gram = moments.gram.double()
    return gram + strength * gram.diagonal().mean() * torch.eye(
        len(gram), dtype=gram.dtype, device=gram.device
    )


def _round_columns(target: Tensor, hessian: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 codes uint8 [N, K16] and E4M3 codes uint8 [N, K16/16] of the target [N, K] under a Hessian."""
    columns = target.shape[1]
    spare = _ceil16(columns) - columns
    target = pad(target, (0, spare))
    hessian = pad(hessian, (0, spare, 0, spare))
    hessian.diagonal()[columns:] = 1.0
    # The upper Cholesky factor of the inverse: row j says how later columns make up for an error of column j.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    values = torch.zeros(target.shape, dtype=torch.uint8, device=target.device)
    block_codes = torch.zeros(
        (target.shape[0], target.shape[1] // BLOCK), dtype=torch.uint8, device=target.device
    )
    for start in range(0, target.shape[1], BLOCK):
        inside = slice(start, start + BLOCK)
        block, local = target[:, inside].clone(), factor[inside, inside]
        cost = (1 / local.diagonal().square()).float()
        codes = choose_codes(block.float().unsqueeze(1), scale, "sweep", cost.unsqueeze(0))
        block_codes[:, start // BLOCK] = codes[:, 0]
        step = scale * decode_e4m3(codes[:, 0])
        errors = torch.zeros_like(block)
        for j in range(BLOCK):
            rounded = encode_e2m1(block[:, j].float() / step) * (step > 0)
            values[:, start + j] = rounded
            errors[:, j] = (block[:, j] - decode_e2m1(rounded).double() * step.double()) / local[j, j]
            block[:, j + 1 :] -= errors[:, j : j + 1] * local[j, j + 1 :]
        target[:, start + BLOCK :] -= errors @ factor[inside, start + BLOCK :]
    return values, block_codes


def _ceil16(number: int) -> int:
    return -(-number // BLOCK) * BLOCK
