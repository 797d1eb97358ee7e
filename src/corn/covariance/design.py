"""The front door: one mixing matrix, one precision cap, one mechanism, one certified design."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from corn.arrays import FloatArray, as_square_matrix, as_symmetric_matrix
from corn.covariance.baselines import (
    ldp_covariance,
    search_ratio,
    support_laplacian,
    zero_sum_laplacian,
)
from corn.covariance.blocks import design_blocks
from corn.covariance.closed_form import solve_closed_form
from corn.covariance.dual import DualSolution, solve_dual
from corn.covariance.groups import SeedGroups
from corn.covariance.insider_design import design_against_insiders
from corn.covariance.noise_power import recover_covariance
from corn.covariance.objective import ONE_STEP, Objective
from corn.covariance.problem import DesignProblem
from corn.covariance.sdp import DEFAULT_SETTINGS, SdpSettings, solve_sdp
from corn.covariance.solution import Design, MechanismName, conclude
from corn.covariance.threat import EAVESDROPPER, ThreatModel
from corn.errors import InvalidArgumentError
from corn.topology.graphs import Graph
from corn.topology.mixing import graph_of

SolverChoice: TypeAlias = Literal["auto", "dual", "closed-form", "sdp"]

MECHANISMS: tuple[MechanismName, ...] = get_args(MechanismName)
SOLVERS: tuple[SolverChoice, ...] = get_args(SolverChoice)


def design(
    mixing_matrix: ArrayLike,
    precision_cap: float,
    *,
    mechanism: MechanismName = "corn",
    objective: Objective = ONE_STEP,
    solver: SolverChoice = "auto",
    threat: ThreatModel = EAVESDROPPER,
    tolerance: float | None = None,
    max_iterations: int = 100,
    max_noise_std: float | None = None,
    ridge: float = 0.0,
    drop_share: float = 0.0,
    num_workers: int = 1,
    graph: Graph | None = None,
    laplacian: ArrayLike | None = None,
    local_share: float | None = None,
    sdp_settings: SdpSettings = DEFAULT_SETTINGS,
) -> Design:
    """Choose the covariance R of the noise across agents: Problem (13) of the paper.

    The result minimises Tr(A R) within its mechanism, with [R⁻¹]_ii ≤ ``precision_cap`` for every
    agent, checked by an independent Cholesky inverse. For every private mechanism ``lower_bound``
    bounds the best of *all* covariances under the cap, so that DECOR's gap, say, is its distance
    from the best possible.

    Args:
        mixing_matrix: W, shape (n, n); need not be symmetric.
        precision_cap: b, from the privacy budget (`corn.privacy`).
        mechanism: ``corn`` any covariance; ``decor`` σ²I + τ²L; ``ldp`` I/b; ``zero-sum``
            σ²I + τ²(I − 11ᵀ/n); ``central`` 11ᵀ/(n²b), what a trusted server would add to the
            average, with no guarantee against an eavesdropper; ``none`` no noise.
        objective: what to minimise; the default is the paper's Tr(W R Wᵀ).
        threat: who shares which seed, and how many insiders may collude; by default one seed for
            all, against an eavesdropper.
        solver: for ``corn`` only. ``auto`` is ``dual``, whose first evaluation is the closed form;
            where seed groups overlap or insiders collude, it is the first-order method.
        tolerance: the relative gap at which ``corn`` stops: by default 1e-6, and 1e-3 for the
            first-order method.
        max_iterations: of the dual solver; running out is its own status.
        max_noise_std: a bound on √R_ii; None is 32/√b, which keeps float32 cancellation harmless;
            ``math.inf`` is no limit. What the limit costs shows in the gap.
        ridge: γ ≥ 0 adds γ·(Tr A/n)·I to what ``corn`` minimises: less noise, a larger gap.
        drop_share: leaves out the weakest seed groups, which together have this part of the noise
            power, and solves again: fewer streams to draw. Where seed groups overlap.
        num_workers: processes for the blocks of disjoint seed groups.
        graph: whose links the seeds follow; by default the links in the mixing matrix, which are
            fewer where some weights are zero.
        laplacian: L for ``decor``; by default of the links in the mixing matrix, either direction
            counting.
        local_share: for ``decor`` and ``zero-sum``: fixes σ²/(σ²+τ²) instead of searching it.
        sdp_settings: for ``solver="sdp"``: formulation, backend, custom constraints.

    >>> result = design(np.full((4, 4), 0.25), 2.0, mechanism="ldp")
    >>> round(result.value, 6), result.status, result.noise_std.round(3)
    (0.5, 'family optimum', array([0.707, 0.707, 0.707, 0.707]))
    """
    W = as_square_matrix(mixing_matrix, name="mixing_matrix")
    _check_choice("mechanism", mechanism, MECHANISMS)
    _check_choice("solver", solver, SOLVERS)
    if not 0 <= drop_share <= 1:
        raise InvalidArgumentError(f"drop_share must be in [0, 1], found {drop_share}")
    groups = threat.seed_groups(graph_of(W) if graph is None else graph)
    by_parts = _needs_parts(groups, threat, len(W))
    if drop_share and not by_parts:
        raise InvalidArgumentError(
            "drop_share applies where seed groups overlap or insiders collude, found disjoint "
            "groups against an eavesdropper"
        )
    if tolerance is None:
        tolerance = 1e-3 if by_parts and mechanism == "corn" else 1e-6
    problem = DesignProblem(
        objective.matrix(W),
        precision_cap,
        max_noise_std,
        ridge,
        tolerance,
        max_iterations,
    )
    if mechanism == "corn":
        if by_parts:
            return _solve_by_parts(problem, threat, groups, solver, drop_share)
        solve = _SOLVE.get(solver) or partial(solve_sdp, settings=sdp_settings)
        return replace(_solve_disjoint(problem, groups, solve, num_workers), threat=threat)
    _reject_corn_options(mechanism, solver=solver, threat=threat, drop_share=drop_share)
    if mechanism in ("central", "none"):
        return _refer(problem, mechanism)
    return replace(_design_baseline(problem, mechanism, W, laplacian, local_share), threat=threat)


def _needs_parts(groups: SeedGroups, threat: ThreatModel, num_agents: int) -> bool:
    """Whether private noise and group noise must be chosen together, rather than block by block."""
    members = [agent for group in groups for agent in group]
    overlap = len(members) > len(set(members))
    one_variance = threat.private_noise == "common" and groups != (tuple(range(num_agents)),)
    return threat.max_colluders > 0 or overlap or one_variance


def _solve_disjoint(
    problem: DesignProblem,
    groups: SeedGroups,
    solve: Callable[[DesignProblem], Design],
    num_workers: int,
) -> Design:
    """One block per group, and one for each agent that shares no seed."""
    n = problem.num_agents
    if groups == (tuple(range(n)),) or n == 1:
        return solve(problem)
    grouped = {agent for group in groups for agent in group}
    alone = tuple((agent,) for agent in range(n) if agent not in grouped)
    return design_blocks(problem, groups + alone, solve, num_workers=num_workers)


def _solve_by_parts(
    problem: DesignProblem,
    threat: ThreatModel,
    groups: SeedGroups,
    solver: SolverChoice,
    drop_share: float,
) -> Design:
    if solver not in ("auto", "sdp"):
        raise InvalidArgumentError(
            f"solver must be 'auto' or 'sdp' against insiders or with overlapping seed groups, "
            f"found {solver!r}"
        )
    return design_against_insiders(
        problem,
        threat,
        groups,
        solver="sdp" if solver == "sdp" else "first-order",
        drop_share=drop_share,
    )


def _solve_by_dual(problem: DesignProblem) -> Design:
    dual = _solve_dual(problem)
    return _conclude_dual(problem, dual, "dual")


def _solve_by_closed_form(problem: DesignProblem) -> Design:
    return _conclude_dual(problem, solve_closed_form(problem), "closed-form")


_SOLVE: dict[SolverChoice, Callable[[DesignProblem], Design]] = {
    "auto": _solve_by_dual,
    "dual": _solve_by_dual,
    "closed-form": _solve_by_closed_form,
}


def _solve_dual(problem: DesignProblem) -> DualSolution:
    return solve_dual(
        problem.objective_matrix,
        tolerance=problem.tolerance,
        max_iterations=problem.max_iterations,
    )


def _conclude_dual(
    problem: DesignProblem, dual: DualSolution, solver: Literal["dual", "closed-form"]
) -> Design:
    recovered = recover_covariance(problem, dual)
    return conclude(
        problem,
        recovered.covariance,
        mechanism="corn",
        solver=solver,
        lower_bound=dual.lower_bound / problem.precision_cap,
        iterations=dual.iterations,
        status=None if dual.converged else "iteration limit",
        shortfall=recovered.shortfall,
    )


def _design_baseline(
    problem: DesignProblem,
    mechanism: MechanismName,
    W: FloatArray,
    laplacian: ArrayLike | None,
    local_share: float | None,
) -> Design:
    n = problem.num_agents
    if mechanism == "ldp":
        R, evaluations = ldp_covariance(n), 1
    else:
        L = zero_sum_laplacian(n) if mechanism == "zero-sum" else _laplacian(W, laplacian)
        found = search_ratio(problem, L, local_share=local_share)
        R, evaluations = found.covariance, found.evaluations
    return conclude(
        problem,
        R,
        mechanism=mechanism,
        solver="formula" if mechanism == "ldp" else "search",
        lower_bound=_solve_dual(problem).lower_bound / problem.precision_cap,
        iterations=evaluations,
        status="family optimum",
    )


def _laplacian(W: FloatArray, laplacian: ArrayLike | None) -> FloatArray:
    if laplacian is None:
        return support_laplacian(W)
    L = as_symmetric_matrix(laplacian, name="laplacian")
    if L.shape != W.shape:
        raise InvalidArgumentError(
            f"laplacian has shape {L.shape}, mixing_matrix {W.shape}: they must agree"
        )
    return L


def _refer(problem: DesignProblem, mechanism: MechanismName) -> Design:
    """Central noise, the same for all agents, or no noise: no protection from an eavesdropper."""
    n, b = problem.num_agents, problem.precision_cap
    F = np.full((n, 1), 1 / (n * b**0.5) if mechanism == "central" else 0.0)
    R = F @ F.T
    value = float(np.sum(problem.objective_matrix * R))
    return Design(mechanism, "formula", "reference", R, None, F, b, value, value, 0)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(choices)}, found {value!r}")


def _reject_corn_options(
    mechanism: str, *, solver: str, threat: ThreatModel, drop_share: float
) -> None:
    if solver != "auto" or drop_share or threat.seeds != EAVESDROPPER.seeds:
        raise InvalidArgumentError(
            f"solver, drop_share and seeds apply to mechanism 'corn' only, found {mechanism!r}"
        )
    if threat.max_colluders and mechanism in ("decor", "zero-sum"):
        raise InvalidArgumentError(
            f"mechanism {mechanism!r} is designed against an eavesdropper only, found "
            f"max_colluders={threat.max_colluders}: use 'corn' with seeds='edges' or 'pairs'"
        )
