"""The public grid of releases, and how far floats on it are from real numbers.

An agent releases γ·rint((g + v)/γ): its clipped gradient g and its whole share v of the noise are
added in float64, and only the sum is rounded. For a real v that is post-processing of g + v, so it
is exactly as private. ``docs/floats.md`` bounds the effect of the float64 sum; :func:`bound_loss`
is that bound.
"""

from __future__ import annotations

import math

import numpy as np

from corn.checks import FloatArray, require
from corn.covariance.decomposition import Decomposition
from corn.errors import InfeasibleError
from corn.noise.normals import ERROR, FAILURE, LARGEST, OFFSET_BITS
from corn.privacy import PrivacyBudget
from corn.privacy.floats import FloatLoss

# The most that rounding may add to the variance of the average noise, relative to it.
VARIANCE_SHARE = 2.0**-9
_UNIT_ROUNDOFF = 2.0**-53
# A normal exceeds 23 standard deviations, one less than the proof allows, with a probability below
# _FAR. These cases count as failures.
_DEVIATIONS = 24.0
_FAR = 1e-115
# The least standard deviation of an agent's private noise under masks, in units of γ.
_LEAST_STD = 6.5
# The distance of a sum of grid values from a sampled continuous sum, for up to 10⁹ agents whose
# private noise has that much (docs/floats.md).
_ALIASING = 1e-140


def choose_grid(noise: Decomposition, precision_caps: FloatArray) -> float:
    """Return γ: the largest power of two that costs next to no accuracy; b has shape (n,).

    The error of rounding is uniform, because the noise is far wider than γ, and independent between
    agents: it adds γ²/(12n) to the variance of the average, of which it may be ``VARIANCE_SHARE``.
    A coarser grid hides more of the rounding errors, so the largest γ is taken, but at most an
    eighth of 1/√b_i of every agent, the standard deviation of one that draws alone.
    """
    average = noise.total_variance / noise.num_agents**2
    largest = 0.125 / math.sqrt(float(precision_caps.max()))
    if average > 0:
        largest = min(largest, math.sqrt(12 * noise.num_agents * VARIANCE_SHARE * average))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1)


def check_grid(grid: float) -> float:
    """Return the grid if it is a power of two, by which floats are divided exactly."""
    is_power = math.isfinite(grid) and grid > 0 and math.frexp(grid)[0] == 0.5
    require(is_power, "grid", "a power of two", repr(grid))
    return grid


def bound_loss(
    decomposition: Decomposition, grid: float, *, precision_caps: FloatArray, budget: PrivacyBudget
) -> FloatLoss:
    """Bound the effect of float64 on one coordinate of a step, released by all agents on the grid.

    The bound holds against an eavesdropper and against every coalition whose honest agents keep
    [(R^(I))⁻¹]_ii ≤ b_i, shape (n,), because a coalition observes fewer honest agents and a part of
    their noise. The promises' clipped gradients bound how large a release can be.
    """
    n = decomposition.num_agents
    roots = np.sqrt(precision_caps)
    largest_norm = max(promise.query.largest_norm for promise in budget.promises)
    errors = _bound_errors(decomposition, largest_norm)
    # Stretching a cell by e on both sides multiplies its volume by (1 + 2e/γ) and moves its points
    # by e at most, where the density changes by e√b for each standard deviation.
    deviations = _DEVIATIONS + grid * float(roots.sum())
    if decomposition.is_masked:
        # Before releases are summed, each has its own private noise, independent of the others'.
        # The sum of release and offset is rounded once.
        roots = 1 / np.sqrt(decomposition.private_variance)
        deviations = _DEVIATIONS + grid * float(roots.max())
        largest = (LARGEST + 1) / roots + largest_norm
        errors = errors + 1.01 * _UNIT_ROUNDOFF * (largest + 2 * grid)
    worst = float(errors.max())
    if worst > grid / 1000 or worst * float(roots.sum()) > 0.5:
        return FloatLoss(math.inf, 1.0)
    log_ratio = float((errors * (2.01 / grid + (deviations + 1) * roots)).sum())
    num_streams = np.count_nonzero(decomposition.private_variance) + sum(
        factor.shape[1] for factor in decomposition.factors
    )
    num_sums = sum(decomposition.count_streams())
    failure = FAILURE * float(num_streams + num_sums) + 4 * n * _FAR
    if decomposition.is_masked:
        failure += _ALIASING
        log_ratio += bound_offset_loss(n, OFFSET_BITS)
    return FloatLoss(log_ratio, failure)


def bound_offset_loss(num_agents: int, bits: int) -> float:
    """Bound |ln| of the ratio of a sum on the grid to a continuous one, by the offset's bits.

    With its offset, a sum of h releases is the density of the continuous sum on a lattice of
    spacing gcd(h, 2^bits)/2^bits ≤ h/2^bits, up to the second derivative in a cell
    (docs/floats.md).
    """
    spacing = math.ldexp(num_agents, -bits)
    noise_std = _LEAST_STD * math.sqrt(num_agents)
    deviations = _DEVIATIONS + 1 + num_agents / 2 / noise_std
    slope = spacing * deviations / noise_std
    return 1.01 * slope * slope / 24


def count_parameters(loss: FloatLoss, budget: PrivacyBudget) -> int:
    """Return the most parameters for which the budget covers all steps in floating point."""
    return int(min(loss.max_values(budget) / budget.num_steps, 2.0**62))


def require_provable(loss: FloatLoss, budget: PrivacyBudget, num_parameters: int) -> None:
    """Raise ``InfeasibleError`` if a model has too many parameters for the promise to be proved."""
    most = count_parameters(loss, budget)
    if num_parameters <= most:
        return
    raise InfeasibleError(
        f"the promise is proved in floating point for models of up to {most:,} parameters over "
        f"{budget.num_steps} steps, found {num_parameters:,}: plan fewer steps or "
        "agents, or another epsilon of at most 50"
    )


def _bound_errors(decomposition: Decomposition, largest_norm: float) -> FloatArray:
    """Bound |computed − real| of g_i + v_i for each agent, failures aside, shape (n,)."""
    theta = decomposition.private_variance
    weights = np.sqrt(theta)
    variance = theta.copy()
    if not decomposition.is_masked:
        for group, factor in zip(decomposition.seed_groups, decomposition.factors, strict=True):
            weights[list(group)] += np.abs(factor).sum(axis=1)
            variance[list(group)] += (factor**2).sum(axis=1)
    # Each normal is off by ERROR, and its product with a weight is rounded once.
    products = weights * (ERROR + 2 * LARGEST * _UNIT_ROUNDOFF)
    # Partial sums of the streams are normal with at most the variance of the whole. Each of them,
    # and the sum with the gradient, is rounded once.
    counts = np.array(decomposition.count_streams(), dtype=np.float64)
    sums = counts * (LARGEST + 1) * np.sqrt(variance) * _UNIT_ROUNDOFF
    return (products + sums + largest_norm * _UNIT_ROUNDOFF) * 1.01
