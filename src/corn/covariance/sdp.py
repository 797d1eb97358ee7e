"""The design problem as a semidefinite program: an oracle, and a place for more constraints.

Two formulations of the same problem:

- ``single``: one linear matrix inequality [[R, I], [I, X]] ⪰ 0 with X_ii ≤ b, of size 2n;
- ``paper``: n inequalities [[R, e_i], [e_iᵀ, b]] ⪰ 0 of size n+1, the Schur complements of (13b).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from corn.arrays import FloatArray
from corn.covariance.dual import evaluate
from corn.covariance.feasibility import invert_covariance
from corn.covariance.noise_power import LimitedCovariance, limit_noise
from corn.covariance.problem import DesignProblem
from corn.covariance.solution import Design, conclude
from corn.errors import InfeasibleError, InvalidArgumentError, MissingExtraError

Formulation: TypeAlias = Literal["single", "paper"]
Backend: TypeAlias = Literal["clarabel", "scs", "mosek"]

_SMALLEST_MULTIPLIER = 1e-9
_LIMIT_ACCURACY = 0.05
_ACCURACY: dict[str, Callable[[float], dict[str, object]]] = {
    "clarabel": lambda tolerance: {"tol_gap_rel": tolerance, "tol_feas": min(tolerance, 1e-8)},
    "scs": lambda tolerance: {"eps_rel": tolerance, "eps_abs": tolerance, "max_iters": 100_000},
    "mosek": lambda _: {},
}


@dataclass(frozen=True)
class SdpSettings:
    """How to pose and solve the program.

    ``constraints`` takes R as a cvxpy expression of shape (n, n) and returns more cvxpy constraints
    on it. They can only raise the optimum, so the lower bound stays valid. The noise limit joins
    the program as R_ii ≤ max_noise_std².

    R is scaled up afterwards, by a factor within the backend's accuracy of 1, until the privacy cap
    holds exactly: a constraint that scaling can break holds to that accuracy only.
    """

    formulation: Formulation = "single"
    backend: Backend = "clarabel"
    constraints: Callable[[Any], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        if self.formulation not in ("single", "paper"):
            raise InvalidArgumentError(
                f"formulation must be 'single' or 'paper', found {self.formulation!r}"
            )
        if self.backend not in _ACCURACY:
            raise InvalidArgumentError(
                f"backend must be 'clarabel', 'scs' or 'mosek', found {self.backend!r}"
            )


DEFAULT_SETTINGS = SdpSettings()


def solve_sdp(problem: DesignProblem, settings: SdpSettings = DEFAULT_SETTINGS) -> Design:
    """Design by cvxpy; the lower bound comes from the multipliers through the closed formula.

    Any positive multipliers give a valid bound, so the certificate does not rest on the backend.
    ``ridge`` has no meaning here and is ignored.
    """
    cp = _import_cvxpy()
    n, b = problem.num_agents, problem.precision_cap
    # In units of b = 1 and Tr A = n: backends stop at absolute tolerances too.
    unit = float(np.trace(problem.objective_matrix)) / n
    R = cp.Variable((n, n), symmetric=True)
    private, multipliers = _POSE[settings.formulation](cp, R)
    limits = [cp.diag(R) <= problem.variance_ratio_limit]
    custom = [] if settings.constraints is None else list(settings.constraints(R / b))
    cost = cp.Minimize(cp.sum(cp.multiply(problem.objective_matrix / unit, R)))
    program = cp.Problem(cost, [*private, *limits, *custom])
    ran_out = _run(cp, program, settings, problem)
    lam = np.maximum(multipliers(), 0.0)
    lam = np.maximum(lam, _SMALLEST_MULTIPLIER * lam.max()) if lam.max() > 0 else np.ones(n)
    found = _repair((R.value + R.value.T) / 2, problem, custom=bool(custom))
    return conclude(
        problem,
        found.covariance / b,
        mechanism="corn",
        solver="sdp",
        lower_bound=evaluate(problem.objective_matrix, lam).lower_bound / b,
        iterations=int(program.solver_stats.num_iters or 0),
        status="iteration limit" if ran_out else None,
        shortfall="constrained" if custom else found.shortfall,
        shrink=not custom,
    )


def _pose_single(cp: Any, R: Any) -> tuple[list[Any], Callable[[], FloatArray]]:
    n = R.shape[0]
    X = cp.Variable((n, n), symmetric=True)
    diagonal = cp.diag(X) <= 1
    inverse = cp.bmat([[R, np.eye(n)], [np.eye(n), X]]) >> 0
    return [inverse, diagonal], lambda: np.reshape(diagonal.dual_value, n)


def _pose_paper(cp: Any, R: Any) -> tuple[list[Any], Callable[[], FloatArray]]:
    n = R.shape[0]
    unit_vectors = np.eye(n)
    inequalities = [
        cp.bmat([[R, unit_vectors[:, [i]]], [unit_vectors[[i]], np.ones((1, 1))]]) >> 0
        for i in range(n)
    ]
    # The corner of each dual matrix multiplies [R⁻¹]_ii ≤ b.
    return inequalities, lambda: np.array([float(c.dual_value[-1, -1]) for c in inequalities])


_POSE = {"single": _pose_single, "paper": _pose_paper}


def _run(cp: Any, program: Any, settings: SdpSettings, problem: DesignProblem) -> bool:
    """Solve, and return whether the backend ran out of iterations."""
    name = settings.backend.upper()
    if name not in cp.installed_solvers():
        raise InvalidArgumentError(
            f"backend {settings.backend!r} is not installed; cvxpy finds {cp.installed_solvers()}"
        )
    options = _ACCURACY[settings.backend](problem.tolerance / 10)
    try:
        # Inaccurate solutions are told by the gap, which is computed here and not taken on trust.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program.solve(solver=name, **options)
    except cp.error.SolverError as error:
        raise InfeasibleError(
            f"{settings.backend} could not solve the program: {error}; for MOSEK check the "
            "licence, else raise tolerance or try another backend"
        ) from error
    if program.status in ("infeasible", "infeasible_inaccurate"):
        raise InfeasibleError("no covariance satisfies the privacy cap and the given constraints")
    if program.status not in ("optimal", "optimal_inaccurate", "user_limit"):
        raise InfeasibleError(f"{settings.backend} stopped with status {program.status!r}")
    return bool(program.status == "user_limit")


def _repair(R: FloatArray, problem: DesignProblem, *, custom: bool) -> LimitedCovariance:
    """Bring R within the noise limit exactly, unless that could break custom constraints."""
    limit = problem.variance_ratio_limit
    limited = bool(R.diagonal().max() > (1 - _LIMIT_ACCURACY) * limit)
    if custom:
        return LimitedCovariance(R, limited)
    Y, _ = invert_covariance(R)
    repaired = limit_noise(Y / Y.diagonal().max(), limit)
    return LimitedCovariance(repaired.covariance, limited or repaired.limited)


def _import_cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise MissingExtraError("the semidefinite program", extra="sdp") from error
    return cvxpy
