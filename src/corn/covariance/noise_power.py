"""From multipliers to a covariance whose noise stays within what float32 can cancel.

Where A is singular, or nearly so, the optimum lets noise grow without bound along directions that
mix away. Two remedies, both on the private side whatever they do:

- blending: Y_t = (1−t) Y + t b I keeps the diagonal of the precision at the cap, and every R_ii
  falls as t grows (each is convex in t with slope 0 at t = 1), down to LDP at t = 1. One number is
  bisected.
- a ridge: minimise Tr((A + γI)R) instead. It costs further solves and gives a better value where
  the limit is tight, so it is tried when blending alone loses more than `_WORTH_A_RIDGE`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from corn.arrays import FloatArray
from corn.covariance.dual import DualSolution, solve_dual
from corn.covariance.feasibility import invert_definite
from corn.covariance.problem import DesignProblem
from corn.covariance.solution import Status

_WORTH_A_RIDGE = 1e-3
_RIDGE_TOLERANCE = 1e-4
_RIDGE_BISECTIONS = 10
_LOG10_RIDGES = (-8.0, 3.0)
_BLEND_BISECTIONS = 60
_SMALLEST_BLEND = 1e-12
_MARGIN = 1e-10  # for the rounding of what follows


@dataclass(frozen=True, eq=False)
class LimitedCovariance:
    """A covariance for the cap b = 1 within the noise limit, and whether the limit changed it."""

    covariance: FloatArray
    limited: bool

    @property
    def shortfall(self) -> Status:
        """What explains a gap beyond the tolerance."""
        return "noise limited" if self.limited else "accuracy limit"


def recover_covariance(problem: DesignProblem, dual: DualSolution) -> LimitedCovariance:
    """Return the covariance that the dual solution stands for, within the problem's noise limit."""
    if problem.ridge > 0:
        dual = _solve_with_ridge(problem, problem.ridge, dual, tolerance=problem.tolerance)
    found = limit_noise(dual.point.precision(), problem.variance_ratio_limit)
    if found.limited and _value(problem, found) > (1 + _WORTH_A_RIDGE) * dual.lower_bound:
        found = _search_ridge(problem, dual, found)
    return LimitedCovariance(found.covariance, limited=found.limited or problem.ridge > 0)


def limit_noise(precision: FloatArray, variance_limit: float) -> LimitedCovariance:
    """Invert a precision matrix of unit diagonal, blended with I until every R_ii ≤ the limit ≥ 1.

    ``precision`` has shape (n, n) and may be singular.
    """
    R = invert_definite(precision)
    if R is not None and R.diagonal().max() <= variance_limit:
        return LimitedCovariance(R, limited=False)
    theta, U = scipy.linalg.eigh(precision, driver="evd", check_finite=False)
    theta = np.maximum(theta, 0.0)
    t = _bisect_blend(theta, np.square(U), (1 - _MARGIN) * variance_limit)
    R = (U / ((1 - t) * theta + t)) @ U.T
    return LimitedCovariance((R + R.T) / 2, limited=True)


def _bisect_blend(theta: FloatArray, squared_vectors: FloatArray, variance_limit: float) -> float:
    low, high = np.log(_SMALLEST_BLEND), 0.0
    for _ in range(_BLEND_BISECTIONS):
        middle = (low + high) / 2
        t = np.exp(middle)
        variances = squared_vectors @ (1 / ((1 - t) * theta + t))
        low, high = (low, middle) if variances.max() <= variance_limit else (middle, high)
    return float(np.exp(high))


def _search_ridge(
    problem: DesignProblem, dual: DualSolution, best: LimitedCovariance
) -> LimitedCovariance:
    """Bisect for the ridge at which the noise just meets the limit; return the best on the way.

    A ridge that is too small is blended the rest of the way: every candidate is within the limit.
    """
    low, high = _LOG10_RIDGES
    for _ in range(_RIDGE_BISECTIONS):
        middle = (low + high) / 2
        dual = _solve_with_ridge(problem, 10**middle, dual, tolerance=_RIDGE_TOLERANCE)
        candidate = limit_noise(dual.point.precision(), problem.variance_ratio_limit)
        low, high = (middle, high) if candidate.limited else (low, middle)
        if _value(problem, candidate) < _value(problem, best):
            best = LimitedCovariance(candidate.covariance, limited=True)
    return best


def _solve_with_ridge(
    problem: DesignProblem, ridge: float, warm: DualSolution, *, tolerance: float
) -> DualSolution:
    A = problem.objective_matrix.copy()
    A[np.diag_indices_from(A)] += ridge * np.trace(A) / len(A)
    start = warm.point.multipliers
    limit = problem.max_iterations
    return solve_dual(A, tolerance=tolerance, max_iterations=limit, start=start)


def _value(problem: DesignProblem, candidate: LimitedCovariance) -> float:
    return float(np.sum(problem.objective_matrix * candidate.covariance))
