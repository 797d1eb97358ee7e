"""One step of Algorithm 1 up to the message, for a simulation and for an agent alike.

Clip the gradient, add the noise, round the sum to the public grid, and take the half step from the
model. The order is what privacy rests on: everything after :func:`release` is computed from what is
public already, so it may round as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.clipping import clip_factors, drop_broken, gradient_norms
from corn.learn.tasks import Task
from corn.noise import find_compiled

_VALUES_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """What a step did, averaged over agents; each of shape (seeds, trials).

    Attributes:
        gradient_norm: of what each agent computed: before clipping its mini-batch gradient, or
            after clipping and averaging its samples'.
        fraction_clipped: of mini-batch gradients, or of samples' gradients, that were clipped.
        noise_norm: of each agent's noise.
    """

    gradient_norm: Tensor
    fraction_clipped: Tensor
    noise_norm: Tensor


@dataclass(frozen=True, eq=False)
class ClippedGradients:
    """Gradients as they may be released with noise; what else is here is for their owner alone.

    Attributes:
        values: shape (cells, trials, parameters), yet to be multiplied by ``factors``.
        factors: shape (cells, trials): what clips each; 1 where samples were clipped.
        norms: shape (cells, trials), before an agent's gradient is clipped.
        fraction_clipped: shape (cells, trials).
        num_broken: shape (cells, trials): gradients, of the batch or of samples, that were not
            finite and count as zero.
    """

    values: Tensor
    factors: Tensor
    norms: Tensor
    fraction_clipped: Tensor
    num_broken: Tensor


def compute_gradients(
    task: Task, parameters: Tensor, batch: Batch, clip: Tensor, *, clips_samples: bool
) -> ClippedGradients:
    """Compute and clip one gradient for each model.

    Args:
        task: what is trained.
        parameters: shape (cells, trials, parameters).
        batch: one mini-batch per cell.
        clip: C of each trial, shape (trials,), in the type to clip in: float64 for releases.
        clips_samples: clip every sample's gradient rather than the mini-batch's.
    """
    found = task.gradient(parameters, batch, sample_clip=clip if clips_samples else None)
    norms = gradient_norms(found.values, clip.dtype)
    if clips_samples:
        if found.fraction_clipped is None or found.num_broken is None:
            raise InvalidArgumentError(
                f"a budget for samples needs a task that clips each of them, found "
                f"{type(task).__name__}, whose gradient() takes no notice of sample_clip"
            )
        if found.values.dtype != clip.dtype:
            raise InvalidArgumentError(
                f"clipped samples must be summed in {clip.dtype}, found {found.values.dtype} of "
                f"{type(task).__name__}"
            )
        factors = torch.ones_like(norms)
        return ClippedGradients(
            found.values, factors, norms, found.fraction_clipped, found.num_broken
        )
    factors = clip_factors(norms, clip)
    values = drop_broken(found.values, factors)
    return ClippedGradients(values, factors, norms, (factors < 1).to(norms), (factors == 0).long())


def join_gradients(parts: Iterable[ClippedGradients]) -> ClippedGradients:
    """Put the gradients of several cells together."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return ClippedGradients(*(torch.cat(column) for column in columns))


def release(gradient: Tensor, factor: Tensor, noise: Tensor, grid: Tensor) -> Tensor:
    """Return γ·rint((f g + v)/γ), in the type of factor and noise: float64 for releases.

    Nothing of the gradient is left but in the sum, which the noise covers, and the low-order bits
    of the sum are gone. To round the gradient, or the noise, by itself would not do. Where the grid
    is 0, the sum is returned as it is, for comparisons that nobody is protected by.

    >>> g, f, v, grid = torch.tensor([[0.6], [0.5], [1.1], [0.5]], dtype=torch.float64)
    >>> release(g, f, v, grid).tolist()
    [1.5]
    """
    total = torch.mul(gradient, factor).add_(noise)
    rounded = torch.div(total, grid).round_().mul_(grid)
    return rounded if bool((grid > 0).all()) else torch.where(grid > 0, rounded, total)


def take_half_step(
    parameters: Tensor,
    gradient: Tensor,
    factor: Tensor,
    noise: Tensor,
    *,
    grid: float,
    step_size: float,
) -> Tensor:
    """Return one agent's message X − η·release, shape (d,), in the type of the model.

    By compiled code where there is some, which releases the same bits; else in pieces that stay in
    a core's cache. The gradient's memory is used again if it has the type of the model: new memory
    would cost more than the step.
    """
    half = gradient if gradient.dtype == parameters.dtype else torch.empty_like(parameters)
    compiled = find_compiled()
    if compiled is not None:
        arrays = (each.numpy() for each in (half, parameters, gradient, noise))
        compiled.write_half_step(*arrays, float(factor), grid, step_size)
        return half
    grids = torch.full((1,), grid, dtype=noise.dtype)
    pieces = (torch.split(each, _VALUES_AT_ONCE) for each in (half, parameters, gradient, noise))
    for out, x, g, v in zip(*pieces, strict=True):
        torch.sub(x, release(g, factor, v, grids).to(x.dtype), alpha=step_size, out=out)
    return half
