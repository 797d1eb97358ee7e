"""The last word on privacy: a covariance counts only as far as its Cholesky inverse says."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from corn.arrays import FloatArray
from corn.errors import InfeasibleError

_MAX_RESCALINGS = 40
_SLACK = 1e-12


def invert_covariance(covariance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (R⁻¹, F) with R = F Fᵀ and F lower triangular; refuse a singular R.

    An eavesdropper who sees singular noise sees some combination of gradients without any noise at
    all, so no finite ε holds: guideline (G1) of the paper. Zero-sum noise without a local share,
    and a bare graph Laplacian, are the usual ways to get there.

    >>> invert_covariance(np.array([[2.0, 0.0], [0.0, 4.0]]))[0].diagonal()
    array([0.5 , 0.25])
    """
    F = _try_cholesky(covariance)
    # Rounding lets Cholesky pass on a singular matrix with pivots of the size of the error.
    floor = 4 * len(covariance) * np.finfo(np.float64).eps * covariance.diagonal().max()
    if F is None or F.diagonal().min() ** 2 <= floor:
        raise InfeasibleError(
            "the covariance is singular: some combination of agents carries no noise, so there is "
            "no privacy guarantee against an eavesdropper; add independent noise for every agent"
        )
    return invert_from_factor(F), F


def is_private(covariance: FloatArray, precision_cap: float) -> bool:
    """Whether R ≻ 0 and [R⁻¹]_ii ≤ b for every agent."""
    try:
        precision, _ = invert_covariance(covariance)
    except InfeasibleError:
        return False
    return bool(precision.diagonal().max() <= precision_cap)


def scale_to_cap(
    covariance: FloatArray, precision_cap: float, *, shrink: bool = True
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (R, R⁻¹, F), R scaled so that the largest computed [R⁻¹]_ii is just below b.

    What it stays below b by is the rounding of such an inverse, n·ε·max(b R_ii), so that an inverse
    computed any other way is below b as well. With ``shrink`` False a covariance that is private
    already stays as it is. Scaling changes the rounding, hence the repeated check.
    """
    R, eps = covariance, float(np.finfo(np.float64).eps)
    for attempt in range(_MAX_RESCALINGS):
        Y, F = invert_covariance(R)
        largest = float(Y.diagonal().max())
        ratio = largest / precision_cap + len(R) * eps * float(R.diagonal().max()) * largest
        settled = ratio >= 1 - _SLACK or attempt > 1 or not shrink
        if ratio <= 1 and settled:
            return R, Y, F
        del Y, F  # before there is a second pair of them
        R = R * (ratio * (1 + 2**attempt * eps))
    raise InfeasibleError(
        "the covariance is too ill-conditioned to certify its privacy in float64; lower "
        "max_noise_std or raise ridge"
    )


def invert_definite(matrix: FloatArray) -> FloatArray | None:
    """Return the inverse of a positive definite matrix, or None where Cholesky fails."""
    F = _try_cholesky(matrix)
    return None if F is None else invert_from_factor(F)


def invert_from_factor(factor: FloatArray) -> FloatArray:
    """Return (F Fᵀ)⁻¹, exactly symmetric, for F lower triangular."""
    # A positive diagonal, which Cholesky gives, is all that dpotri needs to succeed.
    inverse: FloatArray = scipy.linalg.lapack.dpotri(factor, lower=True)[0]
    # Row by row: a large network has no room for another n×n array.
    for i in range(len(inverse) - 1):
        inverse[i, i + 1 :] = inverse[i + 1 :, i]
    return inverse


def _try_cholesky(matrix: FloatArray) -> FloatArray | None:
    factor, info = scipy.linalg.lapack.dpotrf(matrix, lower=True, clean=True)
    return factor if info == 0 else None
