"""From a threat with insiders to a design: which solver, how much noise, which seeds to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from corn.arrays import FloatArray
from corn.covariance.dual import solve_dual
from corn.covariance.feasibility import invert_covariance
from corn.covariance.groups import SeedGroups
from corn.covariance.insiders import InsiderSolution, drop_weak_groups, solve_insiders
from corn.covariance.insiders_sdp import solve_insiders_sdp
from corn.covariance.problem import DesignProblem
from corn.covariance.solution import Design, Solver, Status
from corn.covariance.threat import ThreatModel

_SINGULAR = 1e-12
_SMALLEST_RIDGE = 1e-6
_BOUND_ITERATIONS = 30


def design_against_insiders(
    problem: DesignProblem,
    threat: ThreatModel,
    seed_groups: SeedGroups,
    *,
    solver: Solver,
    drop_share: float = 0.0,
) -> Design:
    """Minimise Tr(A R) over private noise and the noise of each seed group: Problem (16).

    Every coalition of ``threat.max_colluders`` meets the cap, exactly. With ``drop_share`` the seed
    groups that are weak after a first solution are left out of a second; the lower bound stays that
    of all groups, so the gap shows what dropping cost.
    """
    solve = partial(
        solve_insiders_sdp if solver == "sdp" else solve_insiders,
        precision_cap=problem.precision_cap,
        max_colluders=threat.max_colluders,
        common_private_noise=threat.private_noise == "common",
        tolerance=problem.tolerance,
    )
    first, limited = _solve_within_noise_limit(problem, seed_groups, solve)
    kept = drop_weak_groups(first, drop_share=drop_share) if drop_share > 0 else seed_groups
    dropped = len(first.decomposition.seed_groups) - len(kept) if drop_share > 0 else 0
    final = first
    if dropped:
        final, limited = _solve_within_noise_limit(problem, kept, solve)
    unlimited = _eavesdropper_bound(problem)
    shortfall: Status = "noise limited" if limited else "iteration limit"
    if first.lower_bound < unlimited:
        shortfall = "loose bound"
    elif dropped:
        shortfall = "constrained"
    result = _conclude(problem, threat, final, max(first.lower_bound, unlimited), solver, shortfall)
    return replace(
        result,
        multipliers=first.multipliers,
        num_dropped_groups=dropped,
        value_before_dropping=first.value,
    )


def _solve_within_noise_limit(
    problem: DesignProblem, seed_groups: SeedGroups, solve: Callable[..., InsiderSolution]
) -> tuple[InsiderSolution, bool]:
    """Raise a ridge on A until no agent's noise is above the limit; say whether it had to."""
    A = problem.objective_matrix
    limit = problem.variance_ratio_limit / problem.precision_cap
    ridge = problem.ridge
    if _is_singular(A):
        ridge = max(ridge, _SMALLEST_RIDGE)
    while True:
        solution = solve(A, seed_groups=seed_groups, ridge=ridge)
        if solution.decomposition.covariance.diagonal().max() <= limit * (1 + 1e-9):
            return solution, ridge > 0
        ridge = max(10 * ridge, _SMALLEST_RIDGE)


def _is_singular(A: FloatArray) -> bool:
    eigenvalues = np.linalg.eigvalsh(A)
    return bool(eigenvalues[0] <= _SINGULAR * eigenvalues[-1])


def _eavesdropper_bound(problem: DesignProblem) -> float:
    """What noise against an eavesdropper alone cannot go below; insiders only ask for more."""
    bound = solve_dual(
        problem.objective_matrix, tolerance=1e-6, max_iterations=_BOUND_ITERATIONS
    ).lower_bound
    return bound / problem.precision_cap


def _conclude(
    problem: DesignProblem,
    threat: ThreatModel,
    solution: InsiderSolution,
    lower_bound: float,
    solver: Solver,
    shortfall: Status,
) -> Design:
    R = solution.decomposition.covariance
    precision, factor = invert_covariance(R)
    bound = min(lower_bound, solution.value)
    return Design(
        mechanism="corn",
        solver=solver,
        status="optimal" if solution.value <= (1 + problem.tolerance) * bound else shortfall,
        covariance=R,
        precision=precision,
        factor=factor,
        precision_cap=problem.precision_cap,
        value=solution.value,
        lower_bound=bound,
        iterations=solution.evaluations,
        threat=threat,
        shares=solution.decomposition,
        num_coalitions=len(solution.coalitions),
    )
