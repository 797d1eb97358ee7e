"""The exact dual of the design problem: a Newton method whose every step comes with a certificate.

    min Tr(A R)  s.t.  [R⁻¹]_ii ≤ b, R ≻ 0.

For multipliers λ > 0, D = diag(√λ) and S = (D A D)^{1/2} the Lagrangian is least at R = D S⁻¹ D,
with [R⁻¹]_ii = S_ii/λ_i. Hence, for *any* λ,

    (Tr S)² / (b Σλ)   ≤   optimum   ≤   Tr S · max_i(S_ii/λ_i) / b,

and both follow from one eigendecomposition. The right-hand side is reached by scaling R, or
approached where A is singular. It is first order in the distance from the optimum: scaling leaves
slack in every constraint but one. Raising the diagonal of R⁻¹ to the cap takes the slack back, and
with it exactly the first order, so that the covariance of a point is far better than its scaled
value says (`attained_value`). Everything here is in units of b = 1, and A is the scaled objective
of `DesignProblem`, in which agents with different caps have the same one.

Where the diagonal of A^{1/2} is constant, equal multipliers are optimal, and the first evaluation
is the closed form R = (Tr A^{1/2}/(n b)) · A^{-1/2}. That holds on vertex-transitive graphs whose
weights respect the symmetry: ring, torus, hypercube, complete, circulant.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg

from corn.checks import FloatArray
from corn.covariance.decomposition import split_blocks
from corn.covariance.problem import Design, DesignProblem, Status, conclude, invert_definite
from corn.covariance.threat import SeedGroups

TOLERANCE = 1e-6  # relative: the gap to stop at
MAX_ITERATIONS = 100

_SHRINK, _GROW = 0.02, 20.0  # limits on the change of a multiplier in one step
_NEGLIGIBLE_SHARE = 0.1  # of the tolerance: the price of keeping every multiplier positive
_DAMPINGS = (1e-6, 1e-3, 1.0)
_SECOND_ORDER = 3.0  # a scaled gap below this times √tolerance may attain the tolerance
_LARGEST_VARIANCE = 1e8  # beyond it an inverse says little about the value

# A ridge costs ten more solves, so less than a thousandth of the value is not worth it.
_WORTH_A_RIDGE = 1e-3
_RIDGE_TOLERANCE = 1e-4
_RIDGE_BISECTIONS = 10
_LOG10_RIDGES = (-8.0, 3.0)
_BLEND_BISECTIONS = 60
_SMALLEST_BLEND = 1e-12
_MARGIN = 1e-10  # below the noise limit, for the rounding of later steps

_LOG_STEP = 1.8  # of the grid of t; the quadrature error of 1/x is then about 2 %
_FIRST_NODE = 0.15  # times the smallest time scale, 1/s_max
_LAST_NODE = 1.5  # times the largest, 1/s_min
_SMALLEST_ROOT = 1e-9  # a share of the largest; roots below it cannot steer anything
_NEGLIGIBLE = 1e-2  # of a node's largest column; B ∘ B has its fourth power


def design_groups(problem: DesignProblem, groups: SeedGroups) -> Design:
    """Return the certified optimum on disjoint seed groups, within the problem's noise limit.

    R and R⁻¹ are then block-diagonal: the problem separates into Problem (13) on the diagonal
    blocks of A, whose values and lower bounds add up exactly.
    """
    A = problem.objective_matrix
    caps = problem.precision_caps
    # LDP noise for agents in no group, and where nobody receives the noise of a group.
    R = np.diag(problem.strictest_cap / caps)
    bounds = A.diagonal() / caps
    status: Status = "accuracy limit"
    iterations = 0
    for group in map(list, groups):
        inside = np.ix_(group, group)
        if not np.trace(A[inside]) > 0:
            continue
        block = replace(problem, objective_matrix=A[inside], precision_caps=caps[group])
        solution = solve_dual(
            block.scaled_objective, tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS
        )
        found, is_limited = _recover_covariance(block, solution)
        # Solvers and ``conclude`` work in units of the strictest cap, here of the block.
        R[inside] = block.rescale(found) * (problem.strictest_cap / block.strictest_cap)
        bounds[group] = 0
        bounds[group[0]] = solution.lower_bound / block.strictest_cap
        iterations = max(iterations, solution.iterations)
        if not solution.converged:
            status = "iteration limit"
        elif is_limited and status == "accuracy limit":
            status = "noise limited"
    design = conclude(
        problem,
        R,
        "corn",
        "dual",
        status,
        lower_bound=float(bounds.sum()),
        iterations=iterations,
        tolerance=TOLERANCE,
    )
    # The split of one group is left to ``Design.decomposition``: it costs an eigendecomposition.
    if groups == (tuple(range(problem.num_agents)),):
        return design
    return replace(design, shares=split_blocks(design.covariance, groups, precision_caps=caps))


def _recover_covariance(problem: DesignProblem, solution: DualSolution) -> tuple[FloatArray, bool]:
    """Return the scaled covariance of a solution within the noise limits, and if they matter.

    Where A is nearly singular, noise grows without bound along directions that mix away. Blending
    with LDP (`limit_noise`) is cheap. A ridge, Tr((A + γI)R), takes further solves and gives a
    better value where the limit is tight: tried when blending loses more than `_WORTH_A_RIDGE`.
    """
    A = problem.scaled_objective
    limits = problem.variance_ratio_limits

    def value(R: FloatArray) -> float:
        return float(np.sum(A * R))

    best, limited = limit_noise(solution.point.precision(), limits)
    if not limited or value(best) <= (1 + _WORTH_A_RIDGE) * solution.lower_bound:
        return best, limited
    # Bisect for the ridge at which the noise just meets the limit. A ridge that is too small is
    # blended the rest of the way, so every candidate is within the limit and the best counts.
    low, high = _LOG10_RIDGES
    for _ in range(_RIDGE_BISECTIONS):
        middle = (low + high) / 2
        ridged = A.copy()
        ridged[np.diag_indices_from(ridged)] += 10**middle * np.trace(A) / len(A)
        # The last solution is close, so a warm start saves iterations.
        start = solution.point.multipliers
        solution = solve_dual(ridged, tolerance=_RIDGE_TOLERANCE, start=start)
        candidate, limited = limit_noise(solution.point.precision(), limits)
        low, high = (middle, high) if limited else (low, middle)
        best = min(best, candidate, key=value)
    return best, True


def limit_noise(precision: FloatArray, variance_limits: FloatArray) -> tuple[FloatArray, bool]:
    """Return the inverse of a precision Y of unit diagonal with every R_ii ≤ its limit ≥ 1.

    Y may be singular. The second result is whether a limit changed anything. Y is blended with I:
    (1−t) Y + t I keeps the diagonal at the cap, so privacy is untouched, and every R_ii falls as t
    grows (each is convex in t with slope 0 at t = 1), down to LDP at t = 1.
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
        and with it the value. An agent whose noise nobody receives gets LDP noise that way.
        """
        scaled = self.vectors * np.sqrt(self.roots)
        scaled /= np.sqrt(self.multipliers)[:, None]
        Y = scaled @ scaled.T
        # Only then is the diagonal at most 1, and raising it to 1 adds a positive semidefinite
        # matrix to R⁻¹.
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
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
    start: FloatArray | None = None,
) -> DualSolution:
    """Maximise the lower bound over λ by Newton's method; each iteration is one ``eigh``.

    From equal multipliers, the default, a graph whose agents are all alike is solved by the first
    evaluation. The bound is concave in λ and the Newton direction points uphill: a step after which
    bound and gap are both worse is cut to a quarter.
    """
    trial = np.ones(len(objective_matrix)) if start is None else start
    base = trial
    base_bound = 0.0
    base_gap = np.inf
    step = np.zeros_like(trial)
    best: DualPoint | None = None
    bound = 0.0
    best_value = np.inf
    iteration = 0
    while True:
        iteration += 1
        point = evaluate(objective_matrix, trial)
        # Every point is a certificate: the best bound and the best value need not be of one point.
        bound = max(bound, point.lower_bound)
        gap = point.value / point.lower_bound - 1
        value = point.value
        # An inverse per iteration is worth it only where its value may end the search.
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
            base = point.multipliers
            base_bound = point.lower_bound
            base_gap = gap
            step = _newton_step(point)
        trial = _move(base, step, smallest_share=_NEGLIGIBLE_SHARE * tolerance)
    return DualSolution(best, bound, converged, iteration)


def evaluate(objective_matrix: FloatArray, multipliers: FloatArray) -> DualPoint:
    """Return the dual point at λ, which is rescaled so that Tr S = Σλ."""
    d = np.sqrt(multipliers)
    M = objective_matrix * d
    M *= d[:, None]
    # M is symmetric: its transpose is the Fortran-ordered array that LAPACK overwrites in place.
    mu, Q = scipy.linalg.eigh(M.T, driver="evd", overwrite_a=True, check_finite=False)
    # The root of a zero that rounding made 1e-16 would add 1e-8 to a bound that must be certified.
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

    A constraint with slack wants λ_i = 0; the slack on the diagonal turns its step into −1, as in a
    primal-dual interior-point method. Where S_ii > λ_i, the logarithm measures the distance better.
    """
    lam = point.multipliers
    S = point.diagonal
    residual = S - lam
    tight = lam < S
    residual[tight] = S[tight] * np.log(S[tight] / lam[tight])
    P = dual_curvature(point.vectors, point.roots)
    diagonal = P.diagonal() + np.maximum(lam - S, 0.0)
    # P may be singular to rounding; more damping turns the step towards the gradient.
    for damping in _DAMPINGS:
        np.fill_diagonal(P, diagonal + damping * lam)
        with suppress(np.linalg.LinAlgError):
            factor = scipy.linalg.cho_factor(P, check_finite=False)
            return np.asarray(scipy.linalg.cho_solve(factor, residual, check_finite=False))
    return residual / lam


def _move(multipliers: FloatArray, step: FloatArray, *, smallest_share: float) -> FloatArray:
    """Grow by the exponential and shrink linearly, so that a slack multiplier falls fast."""
    factor = np.where(step > 0, np.exp(np.minimum(step, np.log(_GROW))), 1 + step)
    moved = multipliers * np.maximum(factor, _SHRINK)
    # A multiplier this small is worth less than the tolerance, and larger than needed it only makes
    # its constraint slack.
    return np.asarray(np.maximum(moved, smallest_share * moved.mean()))


def dual_curvature(vectors: FloatArray, roots: FloatArray) -> FloatArray:
    """Return the scaled Hessian P of the dual by a short sum of exponentials, upper triangle only.

    With S = Q diag(s) Qᵀ, the dual function ψ(λ) = Tr S − bΣλ/2 is concave, and

        −2 λ_i λ_j ∂²ψ/∂λ_i∂λ_j = P_ij = Σ_kl Q_ik Q_il Q_jk Q_jl · s_k s_l / (s_k + s_l).

    Written out, P costs n⁴. But 1/(s_k + s_l) = ∫ exp(−t s_k) exp(−t s_l) dt separates, so that

        P = ∫ B_t ∘ B_t dt,    B_t = Q diag(s e^{−ts}) Qᵀ,

    and on a logarithmic grid of t a handful of products gives P to a few per cent: enough for a
    Newton step, which only steers. Single precision is far more accurate than the quadrature.
    """
    n = len(roots)
    largest = float(roots[-1])
    s = roots / largest
    nodes, weights = _quadrature(s)
    Q = np.asfortranarray(vectors, dtype=np.float32)
    P = np.zeros((n, n), dtype=np.float32, order="F")
    B = np.zeros_like(P)
    for t, weight in zip(nodes, weights, strict=True):
        # ssyrk multiplies the columns by themselves and B ∘ B squares again, so each factor enters
        # to the fourth power.
        column = weight**0.25 * np.sqrt(s * np.exp(-t * s))
        # It rises and falls with s once, and s ascends: one slice of columns has all that counts.
        kept = np.flatnonzero(column > _NEGLIGIBLE * column.max())
        window = slice(kept[0], kept[-1] + 1)
        scaled = Q[:, window] * column[window].astype(np.float32)
        B = scipy.linalg.blas.ssyrk(1.0, scaled, beta=0.0, c=B, overwrite_c=1)
        B *= B
        P += B
    return P.astype(np.float64) * largest


def _quadrature(roots: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return nodes t and weights w with Σ w e^{−tx} ≈ 1/x for x any sum of two roots, largest 1."""
    smallest = float(roots[roots > _SMALLEST_ROOT][0])
    count = 2 + math.floor(math.log(_LAST_NODE / (_FIRST_NODE * smallest)) / _LOG_STEP)
    nodes = _FIRST_NODE * np.exp(_LOG_STEP * np.arange(count))
    weights = _LOG_STEP * nodes
    # The nodes left out below the first form a geometric series in which e^{−tx} is about the same.
    weights[0] /= 1 - math.exp(-_LOG_STEP)
    return nodes, weights
