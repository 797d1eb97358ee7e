"""The mechanisms that CorN is measured against, each as good as its family allows.

Covariances are for the cap b = 1; dividing by b gives any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from corn.arrays import FloatArray
from corn.covariance.problem import DesignProblem
from corn.errors import InfeasibleError, InvalidArgumentError

_LOG_RATIOS = (-18.0, 18.0)
_GRID, _ZOOM_GRID, _ZOOMS = 145, 21, 8
_TOLERANCE = 1e-12


def ldp_covariance(num_agents: int) -> FloatArray:
    """Return I: every agent on its own."""
    return np.eye(num_agents)


def support_laplacian(mixing_matrix: FloatArray) -> FloatArray:
    """Return the Laplacian of the links in a mixing matrix, either direction counting as a link.

    A weight off the diagonal that is not zero is a link. DECOR's pairs share noise both ways, so a
    directed graph is taken as undirected.
    """
    adjacency = (mixing_matrix != 0) | (mixing_matrix.T != 0)
    np.fill_diagonal(adjacency, False)
    return np.asarray(np.diag(adjacency.sum(axis=1)) - adjacency, dtype=np.float64)


def zero_sum_laplacian(num_agents: int) -> FloatArray:
    """Return I − 11ᵀ/n: what is drawn at random but sums to zero over all agents."""
    return np.eye(num_agents) - 1 / num_agents


@dataclass(frozen=True, eq=False)
class RatioSearch:
    """The best covariance of a family c·(I + r L), and how many ratios r were tried."""

    covariance: FloatArray
    evaluations: int


def search_ratio(
    problem: DesignProblem, laplacian: FloatArray, *, local_share: float | None = None
) -> RatioSearch:
    """Return the best c·(I + r L) with [R⁻¹]_ii ≤ 1; c follows from r.

    ``local_share`` fixes r instead: the share of σ² in σ² + τ² for R = σ² I + τ² L. A share of zero
    leaves a singular R, which has no guarantee, and is refused.
    """
    family = _Family(problem, laplacian)
    if local_share is not None:
        ratio = _ratio_of_share(local_share)
        if np.isinf(family.values(np.array([ratio]))).any():
            raise InfeasibleError(
                f"local_share = {local_share:g} needs more noise than max_noise_std allows: raise "
                "either, or leave local_share to the search"
            )
        return RatioSearch(family.covariance(ratio), 1)
    # The value need not have one minimum only: look everywhere first, then zoom in on the best.
    grid = np.linspace(*_LOG_RATIOS, _GRID)
    evaluations = len(grid)
    for _ in range(_ZOOMS):
        best = int(np.argmin(family.values(np.exp(grid))))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        grid = np.linspace(low, high, _ZOOM_GRID)
        evaluations += len(grid)
    # r = 0 is LDP, which is always within the family and within any noise limit.
    ratios = np.append(np.exp(grid), 0.0)
    ratio = ratios[int(np.argmin(family.values(ratios)))]
    return RatioSearch(family.covariance(ratio), evaluations)


class _Family:
    """One eigendecomposition of L, after which each ratio costs n²."""

    def __init__(self, problem: DesignProblem, laplacian: FloatArray) -> None:
        self._laplacian = laplacian
        self._limit = problem.variance_ratio_limit * (1 + _TOLERANCE)
        self._eigenvalues, U = scipy.linalg.eigh(laplacian, driver="evd", check_finite=False)
        self._squared_vectors = np.square(U)
        A = problem.objective_matrix
        self._traces = float(np.trace(A)), float(np.sum(A * laplacian))

    def values(self, ratios: FloatArray) -> FloatArray:
        """Return Tr(A R) for each ratio, infinite where the noise limit does not hold."""
        scales = self._scales(ratios)
        strongest = scales * (1 + ratios * self._laplacian.diagonal().max())
        values = scales * (self._traces[0] + ratios * self._traces[1])
        return np.where(strongest <= self._limit, values, np.inf)

    def covariance(self, ratio: float) -> FloatArray:
        """Return c·(I + r L)."""
        scale = self._scales(np.array([ratio]))[0]
        return np.asarray(scale * (np.eye(len(self._laplacian)) + ratio * self._laplacian))

    def _scales(self, ratios: FloatArray) -> FloatArray:
        spectra = 1 / (1 + np.outer(np.maximum(self._eigenvalues, 0.0), ratios))
        return np.asarray((self._squared_vectors @ spectra).max(axis=0))


def _ratio_of_share(local_share: float) -> float:
    if not 0 <= local_share <= 1:
        raise InvalidArgumentError(f"local_share must be in [0, 1], found {local_share}")
    if local_share == 0:
        raise InfeasibleError(
            "local_share is 0: noise that cancels exactly is singular, and an eavesdropper who "
            "adds all messages sees the sum of the gradients without noise; there is no privacy "
            "guarantee. Give every agent a share of its own"
        )
    return (1 - local_share) / local_share
