"""Privacy as floating point can certify it: inverses by Cholesky, scaling to the cap, noise limits.

A covariance is private only as far as its computed inverse says so; every design ends here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike

from corn.checks import FloatArray, require
from corn.errors import InfeasibleError, InvalidArgumentError

# The margin doubles each time, from one unit in the last place: the last one is about 10⁻⁴.
_MAX_RESCALINGS = 40
_BLEND_BISECTIONS = 60
_SMALLEST_BLEND = 1e-12
_MARGIN = 1e-10  # below the noise limit, for the rounding of later steps
_EPS = float(np.finfo(np.float64).eps)


def expand_caps(precision_caps: ArrayLike, num_agents: int) -> FloatArray:
    """Return the precision cap b_i of each agent, shape (n,); one number is the cap of all.

    >>> expand_caps(2.0, 3)
    array([2., 2., 2.])
    """
    try:
        given = np.array(precision_caps, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"precision_caps must be numbers: {error}") from error
    rule = f"one number, or {num_agents}, one for each agent"
    require(given.shape in ((), (num_agents,)), "precision_caps", rule, f"shape {given.shape}")
    wrong = given[~((given > 0) & (given < np.inf))]
    require(not wrong.size, "precision_caps", "positive and finite", wrong[:1].tolist())
    caps = np.broadcast_to(given, (num_agents,)).copy()
    caps.setflags(write=False)
    return caps


def invert_covariance(covariance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (R⁻¹, F) with R = F Fᵀ and F lower triangular; raise for a singular R.

    An eavesdropper who sees singular noise sees some combination of gradients without any noise at
    all, so no finite ε holds: guideline (G1) of the paper. Zero-sum noise without a local share,
    and a bare graph Laplacian, are the usual causes.

    >>> invert_covariance(np.array([[2.0, 0.0], [0.0, 4.0]]))[0].diagonal()
    array([0.5 , 0.25])
    """
    F = _try_cholesky(covariance)
    # Rounding lets Cholesky pass on a singular matrix with pivots of the size of the error, which
    # is relative to each agent's own variance: scaling rows and columns does not change it.
    floors = 4 * len(covariance) * _EPS * covariance.diagonal()
    if F is None or (np.square(F.diagonal()) <= floors).any():
        raise InfeasibleError(
            "the covariance is singular: some combination of agents carries no noise, so there is "
            "no privacy guarantee against an eavesdropper; add independent noise for every agent"
        )
    return _invert_from_factor(F), F


def invert_definite(matrix: FloatArray) -> FloatArray | None:
    """Return the inverse of a positive definite matrix, or None where Cholesky fails."""
    F = _try_cholesky(matrix)
    return None if F is None else _invert_from_factor(F)


def scale_to_cap(worst_ratio: Callable[[float], float]) -> float:
    """Return the factor on all noise variances at which the worst [R⁻¹]_ii/b_i is just below 1.

    ``worst_ratio`` maps a factor to the largest ratio *as computed* for noise scaled by it. In
    exact arithmetic one evaluation would do. Scaling changes the rounding, so the result is
    computed again until it is on the private side, with a margin that doubles.
    """
    scale = worst_ratio(1.0)
    for attempt in range(_MAX_RESCALINGS):
        excess = worst_ratio(scale)
        if excess <= 1:
            return scale
        scale *= excess * (1 + 2**attempt * _EPS)
    raise InfeasibleError(
        "the covariance is too ill-conditioned to certify its privacy in float64; lower "
        "max_noise_std or raise ridge"
    )


def scale_covariance(
    covariance: FloatArray, precision_caps: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (R, R⁻¹, F), R scaled so that every computed [R⁻¹]_ii ≤ b_i, and one is just below.

    The distance from b is the rounding of such an inverse, (n + 4)·ε·max(b_i R_ii), so that the
    exact inverse, and one computed any other way, is below b as well.
    """

    def worst_ratio(scale: float) -> float:
        R = covariance * scale
        largest = float((invert_covariance(R)[0].diagonal() / precision_caps).max())
        strongest = float((R.diagonal() * precision_caps).max())
        # Even one agent's root, reciprocal, square and ratio round seven times, by ε/2 each.
        return largest * (1 + (len(R) + 4) * _EPS * strongest * largest)

    R = covariance * scale_to_cap(worst_ratio)
    return R, *invert_covariance(R)


def limit_noise(precision: FloatArray, variance_limits: FloatArray) -> tuple[FloatArray, bool]:
    """Return the inverse of a precision Y of unit diagonal with every R_ii ≤ its limit ≥ 1.

    ``precision`` has shape (n, n) and may be singular, ``variance_limits`` shape (n,). The second
    result is whether a limit changed anything. Y is blended with I: (1−t) Y + t I keeps the
    diagonal at the cap, so privacy is untouched, and every R_ii falls as t grows (each is convex in
    t with slope 0 at t = 1), down to LDP at t = 1. Hence one number is bisected.
    """
    R = invert_definite(precision)
    if R is not None and (R.diagonal() <= variance_limits).all():
        return R, False
    theta, U = scipy.linalg.eigh(precision, driver="evd", check_finite=False)
    # With eigenvectors at hand, the diagonal of an inverse costs n² per t instead of n³.
    theta = np.maximum(theta, 0.0)
    squares = np.square(U)
    low, high = np.log(_SMALLEST_BLEND), 0.0
    for _ in range(_BLEND_BISECTIONS):
        middle = (low + high) / 2
        t = np.exp(middle)
        variances = squares @ (1 / ((1 - t) * theta + t))
        fits = (variances <= (1 - _MARGIN) * variance_limits).all()
        low, high = (low, middle) if fits else (middle, high)
    # The upper end, which is known to fit; the middle may not.
    t = np.exp(high)
    R = (U / ((1 - t) * theta + t)) @ U.T
    return (R + R.T) / 2, True


def _try_cholesky(matrix: FloatArray) -> FloatArray | None:
    factor, info = scipy.linalg.lapack.dpotrf(matrix, lower=True, clean=True)
    return factor if info == 0 else None


def _invert_from_factor(factor: FloatArray) -> FloatArray:
    """Return (F Fᵀ)⁻¹, exactly symmetric, for F lower triangular."""
    # A positive diagonal, which Cholesky gives, is all that dpotri needs to succeed.
    inverse: FloatArray = scipy.linalg.lapack.dpotri(factor, lower=True)[0]
    # Row by row: a large network has no memory for another n×n array.
    for i in range(len(inverse) - 1):
        inverse[i, i + 1 :] = inverse[i + 1 :, i]
    return inverse
