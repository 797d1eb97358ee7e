"""Both design problems as semidefinite programs: oracles for small networks, by cvxpy and Clarabel.

Against an eavesdropper there are two formulations of the same problem:

- ``single``: one linear matrix inequality [[R, I], [I, X]] ⪰ 0 with X_ii ≤ b, of size 2n;
- ``paper``: n inequalities [[R, e_i], [e_iᵀ, b]] ⪰ 0 of size n+1, the Schur complements of (13b).

Against insiders, each coalition has one inequality [[R^(I), I], [I, X_I]] ⪰ 0 with [X_I]_ii ≤ b for
the agents at stake, and the optimal value is that of the backend. Against an eavesdropper the
result does not trust it: the covariance is rescaled to be exactly feasible, and the lower bound is
computed from the multipliers, of which any are valid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar, Literal, TypeAlias, final

import cvxpy as cp
import numpy as np

from corn.checks import FloatArray
from corn.covariance import EAVESDROPPER, ThreatModel
from corn.covariance.dual import evaluate, limit_noise
from corn.covariance.problem import (
    Design,
    DesignProblem,
    MechanismName,
    conclude,
    invert_covariance,
)
from corn.covariance.threat import SeedGroups

Formulation: TypeAlias = Literal["single", "paper"]

_SMALLEST_MULTIPLIER = 1e-9  # relative to the largest; a bound needs positive ones
_LIMIT_ACCURACY = 0.05  # a variance this close to its limit is held by it


@final
@dataclass(frozen=True)
class Sdp:
    """CorN's noise against an eavesdropper by semidefinite programming, for about forty agents.

    ``tolerance`` is the relative gap at which the result counts as optimal. The noise limit is part
    of the program.
    """

    formulation: Formulation = "single"
    tolerance: float = 1e-6
    max_noise_std: float | None = None
    name: ClassVar[MechanismName] = "corn"
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return the optimum of Problem (13)."""
        problem = replace(problem, max_noise_std=self.max_noise_std)
        n, A, most = problem.num_agents, problem.scaled_objective, problem.variance_ratio_limits
        # In units of b = 1 and Tr A = n: the backend stops at absolute tolerances too.
        unit = float(np.trace(A)) / n
        R = cp.Variable((n, n), symmetric=True)
        private, multipliers = _POSE[self.formulation](R)
        limits = [cp.diag(R) <= most]
        program = cp.Problem(cp.Minimize(cp.sum(cp.multiply(A / unit, R))), [*private, *limits])
        # The repairs below cost some of the accuracy, and the gap is measured after them.
        accuracy = self.tolerance / 10
        _run(program, tol_gap_rel=accuracy, tol_feas=min(accuracy, 1e-8))
        lam = np.maximum(multipliers(), 0.0)
        lam = np.maximum(lam, _SMALLEST_MULTIPLIER * lam.max()) if lam.max() > 0 else np.ones(n)
        # Feasible only to the backend's accuracy: bring R within the noise limit exactly.
        near_limit = (R.value.diagonal() > (1 - _LIMIT_ACCURACY) * most).any()
        Y = invert_covariance((R.value + R.value.T) / 2)
        repaired, limited = limit_noise(Y / Y.diagonal().max(), most)
        return conclude(
            problem,
            problem.rescale(repaired),
            mechanism="corn",
            solver="search",
            lower_bound=evaluate(A, lam).lower_bound / problem.strictest_cap,
            iterations=int(program.solver_stats.num_iters or 0),
            status="noise limited" if limited or near_limit else "accuracy limit",
            tolerance=self.tolerance,
        )


def _pose_single(R: Any) -> tuple[list[Any], Callable[[], FloatArray]]:
    n = R.shape[0]
    X = cp.Variable((n, n), symmetric=True)
    diagonal = cp.diag(X) <= 1
    inverse = cp.bmat([[R, np.eye(n)], [np.eye(n), X]]) >> 0
    return [inverse, diagonal], lambda: np.reshape(diagonal.dual_value, n)


def _pose_paper(R: Any) -> tuple[list[Any], Callable[[], FloatArray]]:
    n = R.shape[0]
    unit_vectors = np.eye(n)
    inequalities = [
        cp.bmat([[R, unit_vectors[:, [i]]], [unit_vectors[[i]], np.ones((1, 1))]]) >> 0
        for i in range(n)
    ]
    # The corner of each dual matrix multiplies [R⁻¹]_ii ≤ b.
    return inequalities, lambda: np.array([float(c.dual_value[-1, -1]) for c in inequalities])


_POSE = {"single": _pose_single, "paper": _pose_paper}


def solve_split(
    A: FloatArray,
    seed_groups: SeedGroups,
    caps: FloatArray,
    *,
    max_colluders: int,
    common: bool = False,
) -> float:
    """Return the optimum of Problem (16); ``common`` is the paper's form, one θ for all agents."""
    n = len(A)
    # In units of Tr A = n, as the backend stops at absolute tolerances too.
    unit = float(np.trace(A)) / n
    theta = cp.Variable(1 if common else n, nonneg=True)
    private = cp.diag(theta[0] * np.ones(n) if common else theta)
    placed = []
    for group in seed_groups:
        place = np.eye(n)[:, list(group)]
        placed.append(place @ cp.Variable((len(group), len(group)), PSD=True) @ place.T)
    constraints = []
    for coalition in combinations(range(n), max_colluders):
        unknown = [
            own
            for own, group in zip(placed, seed_groups, strict=True)
            if not set(coalition) & set(group)
        ]
        X = cp.Variable((n, n), symmetric=True)
        honest = [agent for agent in range(n) if agent not in coalition]
        constraints += [
            cp.bmat([[private + sum(unknown), np.eye(n)], [np.eye(n), X]]) >> 0,
            cp.diag(X)[honest] <= caps[honest],
        ]
    program = cp.Problem(cp.Minimize(cp.trace(A / unit @ (private + sum(placed)))), constraints)
    _run(program)
    return float(program.value) * unit


def _run(program: Any, **accuracy: float) -> None:
    # An inaccurate solution is no harm: it is repaired, and its gap is computed, not assumed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program.solve(solver=cp.CLARABEL, **accuracy)
    assert program.status in ("optimal", "optimal_inaccurate", "user_limit"), program.status
