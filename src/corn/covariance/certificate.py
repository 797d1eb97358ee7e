"""Certificates of splits: every coalition meets the cap, and no split is much better.

The proof needs no solver: for any matrices Y_I with Σ_{I: k unknown} [Y_I Y_Iᵀ]_{H_k} ⪯ A_{H_k} for
every seed group and every agent's private noise,

    Tr(A R) ≥ Σ_I Tr(Y_Iᵀ R^(I) Y_I) ≥ Σ_{I,i} (Y_I)_ii² / [(R^(I))⁻¹]_ii ≥ Σ_{I,i} (Y_I)_ii² / b,

the second step by Cauchy and Schwarz. Agents with different caps have the same cap b after the
scaling of `DesignProblem`, which is applied to A and to the noise of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from corn.checks import FloatArray
from corn.covariance.coalitions import Assembly
from corn.covariance.decomposition import Decomposition
from corn.covariance.feasibility import scale_to_cap
from corn.covariance.problem import DesignProblem

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class SplitSolution:
    """A split that keeps the cap against every coalition, and a bound on any other.

    ``lower_bound`` holds for every split over the same seed groups and the same coalitions.
    ``multipliers``, shape (coalitions, n), let anyone compute it again: see ``certify``.
    ``tolerance`` is the relative gap that the solver was asked for.
    """

    decomposition: Decomposition
    value: float
    lower_bound: float
    tolerance: float
    evaluations: int
    num_coalitions: int
    multipliers: FloatArray | None

    @property
    def converged(self) -> bool:
        """Whether the gap is within the tolerance."""
        return self.value <= (1 + self.tolerance) * self.lower_bound


def conclude_split(
    problem: DesignProblem,
    decomposition: Decomposition,
    *,
    lower_bound: float,
    tolerance: float,
    evaluations: int,
    num_coalitions: int,
    multipliers: FloatArray | None,
) -> SplitSolution:
    """Return the solution that a feasible split is; independent noise replaces a worse split."""
    value = problem.value(decomposition.covariance)
    # LDP shares no seed, so it holds against every coalition.
    independent = float((problem.objective_matrix.diagonal() / problem.precision_caps).sum())
    if value >= independent:
        value = independent
        decomposition = Decomposition(1 / problem.precision_caps)
    return SplitSolution(
        decomposition=decomposition,
        value=value,
        # Rounding can leave the bound above the value, and the smaller of the two is still a bound.
        lower_bound=min(lower_bound, value),
        tolerance=tolerance,
        evaluations=evaluations,
        num_coalitions=num_coalitions,
        multipliers=multipliers,
    )


def scale_split(
    problem: DesignProblem, theta: FloatArray, factors: Sequence[FloatArray], assembly: Assembly
) -> Decomposition:
    """Return the split, restored and scaled so that every coalition just meets the problem's caps.

    ``theta`` and ``factors``, stacked as the buckets of the assembly, solve the scaled problem.
    """
    n, caps, units = assembly.num_agents, problem.precision_caps, problem.scales
    # Back from units of the strictest cap: R = T R' T (docs/theory.md, "A promise for each agent").
    theta = theta * units**2
    factors = [
        units[bucket.members][:, :, None] * F
        for bucket, F in zip(assembly.buckets, factors, strict=True)
    ]

    def worst_ratio(scale: float) -> float:
        """Return the largest [(R^(I))⁻¹]_ii/b_i at stake, by Cholesky factors: Σ_j (L⁻¹)_ji²."""
        # Rounded as the factors of the result, whose squares differ from scaled squares.
        scaled = [np.sqrt(scale) * F for F in factors]
        blocks = [F @ F.transpose(0, 2, 1) for F in scaled]
        worst = 0.0
        for number, chunk in enumerate(assembly.chunks):
            hidden = assembly.hidden(scale * theta, blocks, number)
            x = np.square(np.linalg.inv(np.linalg.cholesky(hidden))).sum(axis=1) / caps
            # The rounding of an inverse, as in ``scale_covariance``: what is computed below the
            # cap must be below it in exact arithmetic too.
            variances = np.diagonal(hidden, axis1=1, axis2=2) * caps
            x = x * (1 + n * _EPS * variances.max(axis=1, keepdims=True) * x)
            worst = max(worst, float(x[assembly.coalitions.protected[chunk]].max()))
        return worst

    # One factor on all noise keeps the ratios that the solver chose, and the worst coalition
    # decides it.
    scale = scale_to_cap(worst_ratio)
    placed: dict[int, FloatArray] = {}
    for bucket, stacked in zip(assembly.buckets, factors, strict=True):
        placed |= {int(k): np.sqrt(scale) * F for k, F in zip(bucket.groups, stacked, strict=True)}
    groups = assembly.seed_groups
    return Decomposition(scale * theta, groups, tuple(placed[k] for k in range(len(groups))))


def certify(
    A: FloatArray,
    assembly: Assembly,
    decomposition: Decomposition,
    multipliers: FloatArray,
    *,
    common: bool,
) -> float:
    """Return the lower bound for b = 1 that a split and multipliers λ ≥ 0 prove.

    ``multipliers`` has shape (coalitions, n). The bound is that of ``relative_pressure`` with
    Y_I = (R^(I))⁻¹ Λ_I^{1/2}. It is over all splits on the seed groups of the assembly, of which
    the given one may leave out some. Any λ is valid, so a certificate can be checked without
    trusting its maker; overflow, or a singular split, proves nothing: the bound is then 0.
    """
    largest = float(multipliers.max(initial=0.0))
    if not 0 < largest < np.inf:
        return 0.0
    # The bound does not depend on the scale of λ; squares of it must not overflow.
    weights = multipliers / largest
    theta = decomposition.private_variance
    given = dict(zip(decomposition.seed_groups, decomposition.factors, strict=True))
    # The bound is over all groups of the assembly; a group left out of the split has no noise.
    empty = [np.zeros((len(group), 1)) for group in assembly.seed_groups]
    factors = [given.get(g, none) for g, none in zip(assembly.seed_groups, empty, strict=True)]
    blocks = assembly.stack([F @ F.T for F in factors])
    private = np.zeros(len(A))
    pressure = [np.zeros_like(block) for block in blocks]
    squares = 0.0
    for number, chunk in enumerate(assembly.chunks):
        try:
            M = np.linalg.inv(assembly.hidden(theta, blocks, number))
        except np.linalg.LinAlgError:
            return 0.0
        # Y Yᵀ is M Λ Mᵀ; rounding leaves an inverse not quite symmetric.
        G = (M * weights[chunk][:, None, :]) @ M.transpose(0, 2, 1)
        # A member adds nothing: its row of M is diagonal, and its own privacy has no weight.
        private += np.einsum("cii->i", G)
        pulled = assembly.pull_back(G, number)
        pressure = [old + new for old, new in zip(pressure, pulled, strict=True)]
        squares += float((np.diagonal(M, axis1=1, axis2=2) ** 2 * weights[chunk]).sum())
    own = [bucket.take(A) for bucket in assembly.buckets]
    t = relative_pressure(np.diag(A), own, private=private, pressure=pressure, common=common)
    return squares / t if 0 < t < np.inf and squares < np.inf else 0.0


def relative_pressure(
    diagonal: FloatArray,
    blocks: Sequence[FloatArray],
    *,
    private: FloatArray,
    pressure: Sequence[FloatArray],
    common: bool,
) -> float:
    """Return the least t with Σ_I Y_I Y_Iᵀ ⪯ t A on every seed group and all private noise.

    ``diagonal`` and ``blocks`` are those of A; ``private`` and ``pressure`` those of the sum, each
    over the coalitions that do not know the noise in question. Σ (Y_I)_ii² / (t b) is then a lower
    bound. Near the optimum Y_I = (R^(I))⁻¹ Λ_I^{1/2} makes it tight. Infinite where A is singular
    on a group.
    """
    if common:
        # One θ for all has one constraint, the sum of those of the agents.
        pressures = [float(private.sum() / diagonal.sum())]
    else:
        with np.errstate(divide="ignore"):
            pressures = [float((private / diagonal).max())]
    for A, S in zip(blocks, pressure, strict=True):
        pressures.append(_largest_relative_eigenvalue(S, A))
    return float(np.max(pressures))


def _largest_relative_eigenvalue(S: FloatArray, A: FloatArray) -> float:
    """Return the largest eigenvalue of S relative to A over all blocks; inf if A is singular."""
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(A))
    except np.linalg.LinAlgError:
        return np.inf
    return float(np.linalg.eigvalsh(inverse @ S @ inverse.transpose(0, 2, 1)).max())
