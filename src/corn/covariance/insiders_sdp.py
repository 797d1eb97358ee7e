"""Problem (16) as a semidefinite program: an oracle for small networks.

One linear matrix inequality per coalition, [[R^(I), I], [I, X_I]] ⪰ 0 with [X_I]_ii ≤ b, says that
[(R^(I))⁻¹]_ii ≤ b for everyone at stake.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from corn.arrays import FloatArray
from corn.covariance.assembly import Assembly
from corn.covariance.certificate import certify, scale_to_cap
from corn.covariance.coalitions import list_coalitions
from corn.covariance.groups import SeedGroups
from corn.covariance.insiders import InsiderSolution
from corn.errors import InfeasibleError, MissingExtraError


def solve_insiders_sdp(
    objective_matrix: FloatArray,
    precision_cap: float,
    *,
    seed_groups: SeedGroups,
    max_colluders: int,
    common_private_noise: bool = False,
    ridge: float = 0.0,
    tolerance: float = 1e-3,
) -> InsiderSolution:
    """As :func:`~corn.covariance.insiders.solve_insiders`, by cvxpy with Clarabel.

    Meant for up to about ten agents. The result is rescaled to be exactly feasible, and the lower
    bound is computed from the multipliers in closed form, so neither trusts the solver.
    """
    A = objective_matrix
    n = len(A)
    coalitions = list_coalitions(seed_groups, num_agents=n, max_colluders=max_colluders)
    assembly = Assembly(seed_groups, coalitions, n)
    penalised = A + ridge * float(np.trace(A)) / n * np.eye(n)
    theta, blocks, multipliers, iterations = _solve(
        penalised, assembly, common=common_private_noise
    )
    factors = [_factor(block) for block in blocks]
    decomposition = scale_to_cap(theta, factors, assembly, precision_cap)
    value = float((A * decomposition.covariance).sum())
    bound = certify(A, assembly, decomposition, multipliers, common=common_private_noise)
    lower_bound = min(bound / precision_cap, value)
    return InsiderSolution(
        decomposition=decomposition,
        value=value,
        lower_bound=lower_bound,
        converged=value <= (1 + tolerance) * lower_bound,
        evaluations=iterations,
        coalitions=coalitions,
        multipliers=multipliers,
    )


def _solve(
    A: FloatArray, assembly: Assembly, *, common: bool
) -> tuple[FloatArray, list[FloatArray], FloatArray, int]:
    """θ, stacked group covariances, multipliers (coalitions, n) and iterations, for b = 1."""
    try:
        import cvxpy as cp
    except ImportError as error:
        raise MissingExtraError("the insider SDP", extra="sdp") from error
    n = assembly.num_agents
    theta = cp.Variable(1 if common else n, nonneg=True)
    private = cp.diag(theta[0] * np.ones(n) if common else theta)
    groups = assembly.seed_groups
    group_covariances = [cp.Variable((len(group), len(group)), PSD=True) for group in groups]
    places = [np.eye(n)[:, list(group)] for group in groups]
    placed = [P @ C @ P.T for P, C in zip(places, group_covariances, strict=True)]
    caps, constraints = [], []
    for unknown, protected in zip(
        assembly.coalitions.unknown, assembly.coalitions.protected, strict=True
    ):
        hidden = private + sum(placed[k] for k in np.flatnonzero(unknown))
        X = cp.Variable((n, n), symmetric=True)
        caps.append(cp.diag(X)[np.flatnonzero(protected)] <= 1)
        constraints += [cp.bmat([[hidden, np.eye(n)], [np.eye(n), X]]) >> 0, caps[-1]]
    problem = cp.Problem(cp.Minimize(cp.trace(A @ (private + sum(placed)))), constraints)
    with warnings.catch_warnings():
        # An inaccurate solution is no harm: it is repaired, and its gap is computed, not assumed.
        warnings.filterwarnings(
            "ignore", message="Solution may be inaccurate", category=UserWarning
        )
        problem.solve(solver=cp.CLARABEL)
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        raise InfeasibleError(f"the insider SDP ended with status {problem.status!r}")
    multipliers = np.zeros(assembly.coalitions.protected.shape)
    for row, cap in enumerate(caps):
        multipliers[row, assembly.coalitions.protected[row]] = np.maximum(cap.dual_value, 0)
    stacked = assembly.stack([_symmetric(covariance) for covariance in group_covariances])
    return (
        np.maximum(np.broadcast_to(theta.value, (n,)), 1e-12),
        stacked,
        multipliers,
        int(problem.solver_stats.num_iters),
    )


def _symmetric(variable: Any) -> FloatArray:
    value: FloatArray = np.asarray(variable.value, dtype=np.float64)
    return (value + value.T) / 2


def _factor(blocks: FloatArray) -> FloatArray:
    """F with F Fᵀ the nearest positive semidefinite matrix, for each block of a stack."""
    values, vectors = np.linalg.eigh(blocks)
    factors: FloatArray = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
    return factors
