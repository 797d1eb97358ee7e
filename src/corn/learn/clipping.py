"""Clip gradients to a norm: once per mini-batch, or once per sample, as the budget's unit says."""

from __future__ import annotations

import torch
from torch import Tensor

# A norm in floating point is right to some ulps only. What is clipped is clipped by this much more,
# so that its true norm is at most C, as accounting assumes.
_MARGIN = {torch.float32: 1e-6, torch.float64: 1e-13}

# Adding up many more squares than this one by one loses more than the margin in single precision:
# 5e-6 for 7850 equal numbers, 7e-4 for a million.
_BLOCK = 1 << 12


def gradient_norms(gradients: Tensor) -> Tensor:
    """‖g‖ along the last dimension, right to the margin that clipping allows for.

    >>> gradient_norms(torch.ones(2, 9)).tolist()
    [3.0, 3.0]
    """
    blocks = [torch.linalg.vector_norm(g, dim=-1) for g in torch.split(gradients, _BLOCK, dim=-1)]
    norms: Tensor = blocks[0]
    if len(blocks) > 1:
        norms = torch.linalg.vector_norm(torch.stack(blocks, dim=-1), dim=-1)
    return norms


def clip_factors(norms: Tensor, clip: Tensor | float) -> Tensor:
    """min(1, C/‖g‖) for gradients of these norms: what to multiply them with.

    ``clip`` broadcasts against ``norms``; an infinite one leaves gradients alone. A norm that is
    not finite gives a factor that is not finite or zero: a run that diverged is not repaired here.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0]), 2.0).round(decimals=4).tolist()
    [1.0, 1.0, 0.5]
    """
    factors = clip * (1 - _MARGIN[norms.dtype]) / norms
    return factors.clamp(max=1.0)


def fraction_clipped(factors: Tensor, weights: Tensor | None = None) -> Tensor:
    """The fraction of factors below one along dim 1; weighted samples (0 is padding) if given."""
    shortened = (factors < 1).to(factors.dtype)
    if weights is None:
        return shortened.mean(dim=1)
    present = (weights > 0).to(factors.dtype).unsqueeze(-1)
    return (shortened * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
