"""Clip gradients to a norm: once per mini-batch, or once per sample, as the budget's unit says.

What is released is clipped in float64, so that its true norm is at most C as accounting assumes.
Simulations may clip in float32: what they draw protects nobody.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A norm in floating point is right to some ulps only, a sum of m numbers to m ulps. Gradients are
# clipped by this much more, so that the true norm is at most C: in float64 for up to 10⁹ numbers.
_MARGIN = {torch.float32: 1e-6, torch.float64: 1e-10}

# Adding up many more squares than this one by one loses more than the margin.
_BLOCK = 1 << 12


def gradient_norms(gradients: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ‖g‖ along the last dimension in a type, right to the margin that clipping allows for.

    >>> gradient_norms(torch.ones(2, 9)).tolist()
    [3.0, 3.0]
    """
    whole = gradients.shape[-1] // _BLOCK * _BLOCK
    rest: Tensor = torch.linalg.vector_norm(gradients[..., whole:], dim=-1, dtype=dtype)
    if not whole:
        return rest
    blocks = torch.unflatten(gradients[..., :whole], -1, (-1, _BLOCK))
    norms = torch.linalg.vector_norm(blocks, dim=-1, dtype=dtype)
    both: Tensor = torch.linalg.vector_norm(torch.cat([norms, rest.unsqueeze(-1)], -1), dim=-1)
    return both


def norms_at_least(values: Tensor) -> Tensor:
    """Return ‖x‖ along the last dimension, or somewhat more where squares would underflow.

    >>> norms_at_least(torch.tensor([[3.0, 4.0]])).tolist()
    [5.0]
    """
    norms = gradient_norms(values)
    tiny = norms < math.sqrt(torch.finfo(values.dtype).tiny) * 1e6
    if not bool(tiny.any()):
        return norms
    largest = torch.linalg.vector_norm(values, torch.inf, dim=-1)
    return torch.where(tiny, largest * math.sqrt(values.shape[-1]), norms)


def clip_factors(norms: Tensor, clip: Tensor | float, *, rounding: Tensor | float = 1.0) -> Tensor:
    """Return min(1, C/‖g‖) for gradients of these norms: what to multiply them with.

    ``clip`` broadcasts against ``norms``; an infinite one leaves gradients alone. A gradient whose
    norm is not finite gets 0: it must count as a zero gradient, see :func:`drop_broken`.

    Where clipped gradients are summed, the rounding of the sum can differ between neighbouring data
    sets, by up to ``rounding`` ulps of what one sample may move: m² for m samples. Factors make
    room for that. The number must be public: one that depended on the data would make other
    samples' parts depend on it.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0, torch.inf]), 2.0).round(decimals=4).tolist()
    [1.0, 1.0, 0.5, 0.0]
    """
    margin = torch.as_tensor(_MARGIN[norms.dtype], dtype=norms.dtype)
    if norms.dtype == torch.float64:
        # Rounding errors of both neighbours count.
        margin = margin + 2 * torch.finfo(norms.dtype).eps * rounding
    factors = (clip * (1 - margin).clamp(min=0.0) / norms).clamp(max=1.0)
    return factors.masked_fill(~torch.isfinite(norms), 0.0)


def drop_broken(values: Tensor, factors: Tensor) -> Tensor:
    """Set gradients, or what they are made of, to zero where their factor is 0, in place.

    To refuse such a gradient, or to tell others of it, would answer a question about the data that
    no noise covers.
    """
    broken = factors == 0
    return values.masked_fill_(broken.unsqueeze(-1), 0.0) if bool(broken.any()) else values


def drop_broken_inputs(inputs: Tensor, factors: Tensor) -> Tensor:
    """Return inputs without numbers that are not finite, if a gradient was dropped because of any.

    A gradient of zero times such an input would not be zero.
    """
    return torch.nan_to_num(inputs, 0.0, 0.0, 0.0) if bool((factors == 0).any()) else inputs


def fraction_clipped(factors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the fraction of factors below one along dim 1, of samples with weights if given."""
    shortened = (factors < 1).to(factors.dtype)
    if weights is None:
        return shortened.mean(dim=1)
    present = (weights > 0).to(factors.dtype).unsqueeze(-1)
    return (shortened * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)


def count_broken(factors: Tensor, weights: Tensor) -> Tensor:
    """Return how many samples along dim 1 had gradients that are not finite; padding has none."""
    return ((factors == 0) & (weights > 0).unsqueeze(-1)).sum(dim=1)
