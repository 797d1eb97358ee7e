"""Designs for overlapping seed groups and for insiders: noise limits, weak seeds, the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from corn.arrays import FloatArray
from corn.covariance.certificate import SplitSolution
from corn.covariance.coalition_bounds import require_few_coalitions
from corn.covariance.dual import solve_dual
from corn.covariance.feasibility import invert_covariance
from corn.covariance.problem import Design, DesignProblem, SolverName, Status
from corn.covariance.threat import SeedGroups

_SINGULAR = 1e-12  # smallest eigenvalue of A, relative to the largest
_SMALLEST_RIDGE = 1e-6
# Any point of the dual is a bound, so it need not converge.
_BOUND_ITERATIONS = 30
# Parts of the noise power that may be left out, tried in this order.
_WEAK_SHARES = (0.03, 0.1, 0.2, 0.3)


class SplitSolver(Protocol):
    """A solver of Problem (16), which chooses private noise and the noise of groups together."""

    @property
    def name(self) -> SolverName:
        """The solver's name in results."""
        ...

    @property
    def shortfall(self) -> Status:
        """The status of a solution whose gap is beyond the tolerance."""
        ...

    def solve_split(self, problem: DesignProblem, seed_groups: SeedGroups) -> SplitSolution:
        """Return a split that every coalition of the threat leaves under the cap."""
        ...


def design_against_insiders(
    problem: DesignProblem,
    seed_groups: SeedGroups,
    *,
    solver: SplitSolver,
    drop_cost: float = 0.0,
) -> Design:
    """Minimise Tr(A R) over private noise and the noise of each seed group: Problem (16).

    Every coalition of the problem's threat meets the caps, exactly. With ``drop_cost`` the weakest
    seed groups are left out as long as the value rises by at most that part; the threat and the
    lower bound of the result are then those of the seed groups that are left.
    """
    # Before a search of hours whose result could not be checked.
    require_few_coalitions(problem.num_agents, problem.threat.max_colluders)
    first, limited = final, _ = _solve_within_noise_limit(problem, seed_groups, solver)
    interrupted = first.interrupted
    for share in _WEAK_SHARES if drop_cost > 0 else ():
        # The user wants the design now, not after further searches.
        if interrupted:
            break
        kept = _keep_strong_groups(first, share)
        lean, is_limited = _solve_within_noise_limit(problem, kept, solver)
        interrupted = lean.interrupted
        if lean.value > (1 + drop_cost) * first.value:
            break
        final, limited = lean, is_limited
    groups, threat = final.decomposition.seed_groups, problem.threat
    num_dropped = len(first.decomposition.seed_groups) - len(groups)
    # The threat must list the seeds that are left: coalitions are checked against those.
    if num_dropped:
        threat = replace(threat, seeds=groups)
    # Insiders only ask for more noise, so the bound against an eavesdropper holds as well. It is
    # the better one where A is singular on a seed group: the bound for insiders is then 0.
    dual = solve_dual(problem.scaled_objective, tolerance=1e-6, max_iterations=_BOUND_ITERATIONS)
    eavesdropper_bound = dual.lower_bound / problem.strictest_cap
    bound = min(max(final.lower_bound, eavesdropper_bound), final.value)
    status: Status = "noise limited" if limited else solver.shortfall
    if final.value <= (1 + final.tolerance) * bound:
        status = "optimal"
    elif interrupted:
        status = "interrupted"
    elif final.lower_bound < eavesdropper_bound:
        status = "loose bound"
    R = final.decomposition.covariance
    precision, factor = invert_covariance(R)
    return Design(
        mechanism="corn",
        solver=solver.name,
        status=status,
        covariance=R,
        precision=precision,
        factor=factor,
        precision_caps=problem.precision_caps,
        value=final.value,
        lower_bound=bound,
        iterations=final.evaluations,
        threat=threat,
        shares=final.decomposition,
        num_coalitions=final.num_coalitions,
        multipliers=final.multipliers,
        num_dropped_groups=num_dropped,
        value_before_dropping=first.value,
    )


def _solve_within_noise_limit(
    problem: DesignProblem, seed_groups: SeedGroups, solver: SplitSolver
) -> tuple[SplitSolution, bool]:
    """Return a solution without noise above the limit, and whether that needed a ridge on A."""
    limits = problem.variance_ratio_limits / problem.precision_caps
    ridge = problem.ridge
    # With an A that is singular on a group, noise grows without bound and no bound is proved.
    if _is_singular_on_a_group(problem.scaled_objective, seed_groups):
        ridge = max(ridge, _SMALLEST_RIDGE)
    while True:
        solution = solver.solve_split(replace(problem, ridge=ridge), seed_groups)
        is_within = (solution.decomposition.covariance.diagonal() <= limits * (1 + 1e-9)).all()
        if is_within or solution.interrupted:
            return solution, ridge > 0
        # Noise variance falls about as the root of the ridge, and each solve is expensive.
        ridge = max(10 * ridge, _SMALLEST_RIDGE)


def _keep_strong_groups(solution: SplitSolution, weak_share: float) -> SeedGroups:
    """Return the seed groups without the weakest, which have ``weak_share`` of the power."""
    parts = solution.decomposition
    power = np.array([np.square(factor).sum() for factor in parts.factors])
    order = np.argsort(power)
    weak = order[np.cumsum(power[order]) <= weak_share * power.sum()]
    return tuple(group for k, group in enumerate(parts.seed_groups) if k not in weak)


def _is_singular_on_a_group(A: FloatArray, seed_groups: SeedGroups) -> bool:
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in seed_groups:
        by_size.setdefault(len(group), []).append(group)
    for groups in by_size.values():
        members = np.array(groups)
        values = np.linalg.eigvalsh(A[members[:, :, None], members[:, None, :]])
        if (values[:, 0] <= _SINGULAR * values[:, -1]).any():
            return True
    return False
