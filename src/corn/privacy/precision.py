"""The diagonal of R⁻¹, which determines privacy: never understated, infinite if exposed."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from corn.arrays import FloatArray, as_symmetric_matrix
from corn.errors import InvalidArgumentError

_EPS = float(np.finfo(np.float64).eps)


def precision_diagonal(
    covariance: ArrayLike, *, relative_tolerance: float = 1e-9, num_terms: int = 0
) -> FloatArray:
    """Return an upper bound on [R⁻¹]_jj for each agent j, shape (n,), tight to rounding.

    Where R is singular, an agent j whose direction e_j lies in the range of R gets [R⁺]_jj. Any
    other agent is exposed, because some combination of messages shows its gradient without noise,
    and gets ∞. So do all agents under pure zero-sum noise.

    The bound is above the true value by about 4·n·1e-16·κ relative, with κ the condition number of
    the correlation matrix; where that nears 1 the matrix counts as singular.

    Args:
        covariance: R, shape (n, n), of the noise **really added**: mixing weights, clipping or
            rounding applied to the noise belong in it.
        relative_tolerance: the asymmetry of R, and the size of a negative eigenvalue, relative to
            the largest, up to which R is taken as singular rather than refused.
        num_terms: the number of products that were summed for each entry of R, whose rounding
            errors must not count as noise; 0 if R is exact.

    >>> precision_diagonal([[2.0, 1.0], [1.0, 2.0]]).round(6)
    array([0.666667, 0.666667])
    >>> precision_diagonal([[1.0, -1.0], [-1.0, 1.0]])
    array([inf, inf])
    """
    R = as_symmetric_matrix(covariance, name="covariance", relative_tolerance=relative_tolerance)
    variance = np.diag(R)
    if (variance < 0).any():
        agent = int(variance.argmin())
        raise InvalidArgumentError(
            f"covariance must have no negative variance, found {variance[agent]:.3g} for agent "
            f"{agent}"
        )
    # Scaling to unit variances makes the error independent of the ratios between agents' variances.
    scale = np.where(variance > 0, np.sqrt(variance), 1.0)
    eigenvalues, vectors = np.linalg.eigh(R / scale / scale[:, None])
    _require_semidefinite(eigenvalues, relative_tolerance)
    return _upper_diagonal(eigenvalues, vectors, num_terms) / scale / scale


def _require_semidefinite(eigenvalues: FloatArray, relative_tolerance: float) -> None:
    if eigenvalues[0] < -relative_tolerance * max(eigenvalues[-1], 1.0):
        raise InvalidArgumentError(
            "covariance must be positive semidefinite, found a correlation matrix with eigenvalue "
            f"{eigenvalues[0]:.3g}: no noise has this covariance"
        )


def _upper_diagonal(eigenvalues: FloatArray, vectors: FloatArray, num_terms: int) -> FloatArray:
    # The computed pair is exact for a matrix within `error` of the true one, S: S ⪰ VΛVᵀ − error·I.
    # The inverse of the right side is above S⁻¹, so it, and not the computed inverse, is reported.
    # A sum of k products is off by k·eps of the sum of their sizes at most, which in a correlation
    # matrix is at most 1 by Cauchy and Schwarz.
    error = eigenvalues.size * _EPS * (2 * max(eigenvalues[-1], 1.0) + num_terms)
    kept = eigenvalues > 2 * error
    weights = vectors**2
    diagonal: FloatArray = weights[:, kept] @ (1 / (eigenvalues[kept] - error))
    diagonal *= 1 + eigenvalues.size * _EPS
    diagonal[_is_exposed(weights[:, ~kept], eigenvalues[kept], error)] = np.inf
    return diagonal


def _is_exposed(null_weights: FloatArray, kept: FloatArray, error: float) -> NDArray[np.bool_]:
    # An agent is hidden if it has no part in the null space. Where the other eigenvalues are well
    # above zero, rounding rotates the null space by a known angle, and smaller parts are ignored.
    # Where they are close to zero, every agent with a part counts as exposed.
    rotation = 8 * error / max(kept[0], 0.1) if kept.size else 0.0
    exposed: NDArray[np.bool_] = np.sqrt(null_weights.sum(axis=1)) > rotation
    return exposed
