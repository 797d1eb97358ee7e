"""Both design problems as semidefinite programs: oracles for small networks, by cvxpy and Clarabel.

Against an eavesdropper there are two formulations of the same problem:

- ``single``: one linear matrix inequality [[R, I], [I, X]] ⪰ 0 with X_ii ≤ b, of size 2n;
- ``paper``: n inequalities [[R, e_i], [e_iᵀ, b]] ⪰ 0 of size n+1, the Schur complements of (13b).

Against insiders, each coalition has one inequality [[R^(I), I], [I, X_I]] ⪰ 0 with [X_I]_ii ≤ b for
the agents at stake. Neither result trusts the backend: covariances are rescaled to be exactly
feasible, and lower bounds are computed from the multipliers, of which any are valid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, final

import cvxpy as cp
import numpy as np

from corn.checks import FloatArray
from corn.covariance import DEFAULT_THREAT, ThreatModel
from corn.covariance.certificate import SplitSolution, certify, conclude_split, scale_split
from corn.covariance.coalitions import Assembly, list_coalitions
from corn.covariance.design import design_against_insiders
from corn.covariance.dual import evaluate
from corn.covariance.feasibility import invert_covariance, limit_noise
from corn.covariance.problem import (
    Design,
    DesignProblem,
    MechanismName,
    SolverName,
    Status,
    conclude,
)
from corn.covariance.threat import SeedGroups

Formulation: TypeAlias = Literal["single", "paper"]

_SMALLEST_MULTIPLIER = 1e-9  # relative to the largest; a bound needs positive ones
_SMALLEST_VARIANCE = 1e-12  # keeps R^(I) definite where the backend returns zero
_LIMIT_ACCURACY = 0.05  # a variance this close to its limit is held by it


@final
@dataclass(frozen=True)
class Sdp:
    """CorN's noise by semidefinite programming, for up to about forty agents, or ten with insiders.

    ``formulation`` applies against an eavesdropper. ``tolerance`` is the relative gap at which the
    result counts as optimal: by default 1e-6, and 1e-3 against insiders. The noise limit is part of
    the program against an eavesdropper.
    """

    formulation: Formulation = "single"
    tolerance: float | None = None
    max_noise_std: float | None = None
    name: ClassVar[MechanismName] = "corn"
    default_threat: ClassVar[ThreatModel] = DEFAULT_THREAT

    def solve(self, problem: DesignProblem) -> Design:
        """Return the optimum of Problem (13), or of Problem (16) where not all share one seed."""
        problem = replace(problem, max_noise_std=self.max_noise_std)
        groups = problem.threat.seed_groups(problem.graph)
        everybody = (tuple(range(problem.num_agents)),)
        if problem.threat.max_colluders == 0 and (groups == everybody or len(everybody[0]) == 1):
            return self._solve_whole(problem)
        split = SplitSdp() if self.tolerance is None else SplitSdp(self.tolerance)
        return design_against_insiders(problem, groups, solver=split)

    def _solve_whole(self, problem: DesignProblem) -> Design:
        n, A, most = problem.num_agents, problem.scaled_objective, problem.variance_ratio_limits
        tolerance = self.tolerance or 1e-6
        # In units of b = 1 and Tr A = n: the backend stops at absolute tolerances too.
        unit = float(np.trace(A)) / n
        R = cp.Variable((n, n), symmetric=True)
        private, multipliers = _POSE[self.formulation](R)
        limits = [cp.diag(R) <= most]
        program = cp.Problem(cp.Minimize(cp.sum(cp.multiply(A / unit, R))), [*private, *limits])
        # The repairs below cost some of the accuracy, and the gap is measured after them.
        accuracy = tolerance / 10
        _run(program, tol_gap_rel=accuracy, tol_feas=min(accuracy, 1e-8))
        lam = np.maximum(multipliers(), 0.0)
        lam = np.maximum(lam, _SMALLEST_MULTIPLIER * lam.max()) if lam.max() > 0 else np.ones(n)
        # Feasible only to the backend's accuracy: bring R within the noise limit exactly.
        near_limit = (R.value.diagonal() > (1 - _LIMIT_ACCURACY) * most).any()
        Y, _ = invert_covariance((R.value + R.value.T) / 2)
        repaired, limited = limit_noise(Y / Y.diagonal().max(), most)
        return conclude(
            problem,
            problem.restore(repaired),
            mechanism="corn",
            solver="search",
            lower_bound=evaluate(A, lam).lower_bound / problem.strictest_cap,
            iterations=int(program.solver_stats.num_iters or 0),
            status="noise limited" if limited or near_limit else "accuracy limit",
            tolerance=tolerance,
        )


@final
@dataclass(frozen=True)
class SplitSdp:
    """A solver of Problem (16), with one inequality for each coalition."""

    tolerance: float = 1e-3
    name: ClassVar[SolverName] = "search"
    shortfall: ClassVar[Status] = "accuracy limit"

    def solve_split(self, problem: DesignProblem, seed_groups: SeedGroups) -> SplitSolution:
        """Return the optimum."""
        A, n, threat = problem.scaled_objective, problem.num_agents, problem.threat
        coalitions = list_coalitions(seed_groups, num_agents=n, max_colluders=threat.max_colluders)
        assembly = Assembly(seed_groups, coalitions, n)
        common = threat.private_noise == "common"
        ridged = A + problem.ridge * float(np.trace(A)) / n * np.eye(n)
        theta, blocks, multipliers, iterations = _solve_split(ridged, assembly, common=common)
        factors = [_factor(block) for block in blocks]
        decomposition = scale_split(problem, theta, factors, assembly)
        scaled = decomposition.rescale(1 / problem.scales)
        bound = certify(A, assembly, scaled, multipliers, common=common)
        return conclude_split(
            problem,
            decomposition,
            lower_bound=bound / problem.strictest_cap,
            tolerance=self.tolerance,
            evaluations=iterations,
            num_coalitions=len(coalitions),
            multipliers=multipliers,
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


def _solve_split(
    A: FloatArray, assembly: Assembly, *, common: bool
) -> tuple[FloatArray, list[FloatArray], FloatArray, int]:
    """Return θ, stacked group covariances, multipliers (coalitions, n), iterations, for b = 1."""
    n, groups = assembly.num_agents, assembly.seed_groups
    theta = cp.Variable(1 if common else n, nonneg=True)
    private = cp.diag(theta[0] * np.ones(n) if common else theta)
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
    program = cp.Problem(cp.Minimize(cp.trace(A @ (private + sum(placed)))), constraints)
    _run(program)
    multipliers = np.zeros(assembly.coalitions.protected.shape)
    for row, cap in enumerate(caps):
        multipliers[row, assembly.coalitions.protected[row]] = np.maximum(cap.dual_value, 0)
    return (
        np.maximum(np.broadcast_to(theta.value, (n,)), _SMALLEST_VARIANCE),
        assembly.stack([np.asarray(C.value + C.value.T) / 2 for C in group_covariances]),
        multipliers,
        int(program.solver_stats.num_iters),
    )


def _factor(blocks: FloatArray) -> FloatArray:
    """Return F with F Fᵀ the nearest positive semidefinite matrix, for each block of a stack."""
    values, vectors = np.linalg.eigh(blocks)
    factors: FloatArray = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
    return factors


def _run(program: Any, **accuracy: float) -> None:
    # An inaccurate solution is no harm: it is repaired, and its gap is computed, not assumed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program.solve(solver=cp.CLARABEL, **accuracy)
    assert program.status in ("optimal", "optimal_inaccurate", "user_limit"), program.status
