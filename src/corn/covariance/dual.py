"""The exact dual of the design problem: a Newton method whose every step comes with a certificate.

    min Tr(A R)  s.t.  [R⁻¹]_ii ≤ b, R ≻ 0.

For multipliers λ > 0, D = diag(√λ) and S = (D A D)^{1/2} the Lagrangian is least at R = D S⁻¹ D,
with [R⁻¹]_ii = S_ii/λ_i. Hence, for *any* λ,

    (Tr S)² / (b Σλ)   ≤   optimum   ≤   Tr S · max_i(S_ii/λ_i) / b,

and both follow from one eigendecomposition. The right-hand side is reached by scaling R, or
approached where A is singular. It is first order in the distance from the optimum: scaling leaves
slack in every constraint but one. Raising the diagonal of R⁻¹ to the cap takes the slack back, and
with it exactly the first order, so that the covariance of a point is better by far than its scaled
value says (`attained_value`). Everything here is in units of b = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from corn.arrays import FloatArray
from corn.covariance.curvature import dual_curvature
from corn.covariance.feasibility import invert_definite

_SHRINK, _GROW = 0.02, 20.0  # what one step may do to a multiplier
_NEGLIGIBLE_SHARE = 0.1  # of the tolerance: the price of keeping every multiplier positive
_DAMPINGS = (1e-6, 1e-3, 1.0)
_SECOND_ORDER = 3.0  # a scaled gap below this times √tolerance may attain the tolerance
_LARGEST_VARIANCE = 1e8  # beyond it an inverse says little about the value


@dataclass(frozen=True, eq=False)
class DualPoint:
    """Multipliers λ, scaled so that Tr S = Σλ, and the eigendecomposition S = Q diag(s) Qᵀ."""

    multipliers: FloatArray
    roots: FloatArray
    vectors: FloatArray
    diagonal: FloatArray

    @property
    def lower_bound(self) -> float:
        """(Tr S)²/Σλ: no covariance under the cap b = 1 does better."""
        return float(self.roots.sum())

    @property
    def value(self) -> float:
        """Tr S · max_i(S_ii/λ_i): what scaling R to the cap b = 1 achieves."""
        return self.lower_bound * float((self.diagonal / self.multipliers).max())

    def precision(self) -> FloatArray:
        """Return R⁻¹ = D⁻¹ S D⁻¹ under the cap: unit diagonal, perhaps singular, shape (n, n).

        Where a constraint has slack, its diagonal entry is raised to the cap: R⁻¹ grows, R shrinks,
        and with it the value. An agent whose noise no one sees gets LDP noise that way.
        """
        scaled = self.vectors * np.sqrt(self.roots)
        scaled /= np.sqrt(self.multipliers)[:, None]
        Y = scaled @ scaled.T
        Y /= Y.diagonal().max()
        np.fill_diagonal(Y, 1.0)
        return Y


@dataclass(frozen=True, eq=False)
class DualSolution:
    """The best point found, the best bound found, and whether their gap is within the tolerance."""

    point: DualPoint
    lower_bound: float
    converged: bool
    iterations: int


def solve_dual(
    objective_matrix: FloatArray,
    *,
    tolerance: float,
    max_iterations: int,
    start: FloatArray | None = None,
) -> DualSolution:
    """Maximise the lower bound over λ by Newton's method; each iteration is one ``eigh``.

    The search starts from equal multipliers unless told otherwise, so that a graph whose agents are
    all alike is solved by the first evaluation. The bound is concave in λ and the Newton direction
    points uphill: a step after which bound and gap are both worse is cut to a quarter.
    """
    trial = np.ones(len(objective_matrix)) if start is None else start
    base, base_bound, base_gap, step = trial, 0.0, np.inf, np.zeros_like(trial)
    best: DualPoint | None = None
    bound, best_value, iteration, converged = 0.0, np.inf, 0, False
    while True:
        iteration += 1
        point = evaluate(objective_matrix, trial)
        bound, gap = max(bound, point.lower_bound), point.value / point.lower_bound - 1
        value = point.value
        if tolerance < gap <= _SECOND_ORDER * np.sqrt(tolerance):
            value = attained_value(objective_matrix, point)
        if best is None or value < best_value:
            best, best_value = point, value
        converged = best_value <= (1 + tolerance) * bound
        if converged or iteration == max_iterations:
            break
        if point.lower_bound < base_bound and gap > base_gap:
            step = step / 4
        else:
            base, base_bound, base_gap = point.multipliers, point.lower_bound, gap
            step = _newton_step(point)
        trial = _move(base, step, smallest_share=_NEGLIGIBLE_SHARE * tolerance)
    return DualSolution(best, bound, converged, iteration)


def evaluate(objective_matrix: FloatArray, multipliers: FloatArray) -> DualPoint:
    """Return the dual point at λ, which is rescaled so that Tr S = Σλ.

    Eigenvalues of D A D are lowered by their rounding error before the root is taken: the root of a
    zero that rounding made 1e-16 would add 1e-8 to a bound that claims to be certified.
    """
    d = np.sqrt(multipliers)
    M = objective_matrix * d
    M *= d[:, None]
    # M is symmetric: its transpose is the Fortran-ordered array that LAPACK overwrites in place.
    mu, Q = scipy.linalg.eigh(M.T, driver="evd", overwrite_a=True, check_finite=False)
    rounding = len(mu) * np.finfo(np.float64).eps * mu[-1]
    s = np.sqrt(np.maximum(mu - rounding, 0.0))
    scale = s.sum() / multipliers.sum()
    s *= scale
    return DualPoint(multipliers * scale**2, s, Q, np.square(Q) @ s)


def attained_value(objective_matrix: FloatArray, point: DualPoint) -> float:
    """Return Tr(A R) for the covariance of a point, or its scaled value if R is near singular."""
    R = invert_definite(point.precision())
    if R is None or R.diagonal().max() > _LARGEST_VARIANCE:
        return point.value
    return min(point.value, float(np.vdot(objective_matrix, R.T)))


def _newton_step(point: DualPoint) -> FloatArray:
    """Return the relative change of λ: (P + slack) x = S_ii − λ_i, damped until P is definite.

    A constraint with slack has S_ii < λ_i and wants λ_i = 0; the slack on the diagonal turns its
    step into −1, as in a primal-dual interior-point method. Where S_ii > λ_i by a factor, the
    logarithm is the better measure of the distance.
    """
    lam, S = point.multipliers, point.diagonal
    residual = S - lam
    tight = lam < S
    residual[tight] = S[tight] * np.log(S[tight] / lam[tight])
    P = dual_curvature(point.vectors, point.roots)
    diagonal = P.diagonal() + np.maximum(lam - S, 0.0)
    for damping in _DAMPINGS:
        np.fill_diagonal(P, diagonal + damping * lam)
        try:
            factor = scipy.linalg.cho_factor(P, check_finite=False)
        except np.linalg.LinAlgError:
            continue
        step: FloatArray = scipy.linalg.cho_solve(factor, residual, check_finite=False)
        return step
    return residual / lam


def _move(multipliers: FloatArray, step: FloatArray, *, smallest_share: float) -> FloatArray:
    """Grow by the exponential and shrink linearly, so that a slack multiplier falls fast."""
    factor = np.where(step > 0, np.exp(np.minimum(step, np.log(_GROW))), 1 + step)
    moved = multipliers * np.maximum(factor, _SHRINK)
    # A multiplier this small is worth less than the tolerance, and larger than needed it only makes
    # its constraint slack.
    return np.asarray(np.maximum(moved, smallest_share * moved.mean()))
