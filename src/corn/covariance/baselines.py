"""The mechanisms that CorN is compared with, each as good as its family allows.

One of them, `OwnMechanism`, has a covariance of the user's own. Only its shape counts: it is scaled
to the precision caps and checked like every other design.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, final

import networkx as nx
import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike

from corn.checks import FloatArray, as_symmetric_matrix, require
from corn.covariance.decomposition import Decomposition
from corn.covariance.dual import solve_dual
from corn.covariance.problem import Design, DesignProblem, MechanismName, SolverName, conclude
from corn.covariance.threat import DEFAULT_THREAT, EAVESDROPPER, ThreatModel
from corn.errors import InvalidArgumentError

_LOG_RATIOS = (-18.0, 18.0)  # of τ²/σ²: from LDP to noise that cancels but for rounding
# Steps of 0.25 in log r at first. Each zoom keeps two steps and divides them by 20, so eight zooms
# end at 10⁻⁹.
_GRID = 145
_ZOOM_GRID = 21
_ZOOMS = 8
_TOLERANCE = 1e-12  # relative, of the noise limit


@final
@dataclass(frozen=True)
class Ldp:
    """Local differential privacy, R = diag(1/b_i): every agent draws its noise alone.

    It shares no seed, so it holds against any number of insiders.
    """

    name: ClassVar[MechanismName] = "ldp"
    default_threat: ClassVar[ThreatModel] = DEFAULT_THREAT

    def solve(self, problem: DesignProblem) -> Design:
        """Return diag(1/b_i)."""
        # Seeds that nobody uses would only cost tables of coalitions to whoever checks the design.
        threat = replace(problem.threat, seeds="global")
        threat.check(len(problem.graph))
        R = np.diag(1 / problem.precision_caps)
        return conclude_in_family(
            replace(problem, threat=threat), R, self.name, "formula", evaluations=1
        )


@final
@dataclass(frozen=True, eq=False)
class Decor:
    """DECOR: R = σ² I + τ² L, pairwise cancelling noise along the links, best ratio σ² : τ².

    L is the Laplacian of the network's links. ``max_noise_std`` is a bound on √R_ii; None is
    32/√b_i, ``math.inf`` no limit.

    The scale of the noise is one for all agents and follows from the strictest, max_i [R⁻¹]_ii/b_i:
    an agent with a looser promise gets more privacy than it asked for.
    """

    max_noise_std: float | None = None
    name: ClassVar[MechanismName] = "decor"
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return the best covariance of the family."""
        links = nx.laplacian_matrix(problem.graph, range(problem.num_agents), None)
        return _search_family(self, problem, links.toarray())


@final
@dataclass(frozen=True)
class ZeroSum:
    """Zero-sum noise with a local share: R = σ² I + τ² (I − 11ᵀ/n), best ratio σ² : τ².

    ``max_noise_std`` as for `Decor`.
    """

    max_noise_std: float | None = None
    name: ClassVar[MechanismName] = "zero-sum"
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return the best covariance of the family."""
        n = problem.num_agents
        return _search_family(self, problem, np.eye(n) - 1 / n)


@final
@dataclass(frozen=True)
class Central:
    """A trusted server's noise on the average, 11ᵀ/(n² min b): a reference without messages.

    All agents have the same noise in the average, so that the strictest promise decides.
    """

    name: ClassVar[MechanismName] = "central"
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return 11ᵀ/(n² min b)."""
        return _refer(problem, self.name, 1 / (problem.num_agents * problem.strictest_cap**0.5))


@final
@dataclass(frozen=True)
class NoNoise:
    """No noise: a reference without privacy. Training clips all the same, unless ``unclipped``."""

    name: Literal["none", "unclipped"] = "none"
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return a covariance of zero."""
        return _refer(problem, self.name, 0.0)


def _search_family(
    mechanism: Decor | ZeroSum, problem: DesignProblem, laplacian: FloatArray
) -> Design:
    """Return the best c·(I + r L), or raise for a threat that it does not hold against.

    An insider subtracts every cancelling pair that it shares, so a covariance of these families
    says nothing about insiders.
    """
    name = mechanism.name
    threat = problem.threat
    if threat.max_colluders:
        raise InvalidArgumentError(
            f"mechanism {name!r} is designed against an eavesdropper only, found "
            f"max_colluders={threat.max_colluders}: use 'corn' or 'ldp', or ask for a threat "
            "without insiders (ThreatModel(0), --colluders 0)"
        )
    if threat.seeds != EAVESDROPPER.seeds:
        raise InvalidArgumentError(
            f"seeds apply to mechanism 'corn', while {name!r} has seeds of its own, found "
            f"{threat.seeds!r}: leave seeds to the mechanism"
        )
    problem = replace(problem, max_noise_std=mechanism.max_noise_std)
    R, evaluations = _search_covariance(problem, laplacian)
    return conclude_in_family(problem, R, name, "search", evaluations)


def conclude_in_family(
    problem: DesignProblem,
    covariance: FloatArray,
    mechanism: MechanismName,
    solver: SolverName,
    evaluations: int,
) -> Design:
    """Return the design, with the bound of the dual: the best of *all* covariances."""
    # Insiders only ask for more noise, so the bound against an eavesdropper holds for any threat.
    best = solve_dual(problem.scaled_objective)
    return conclude(
        problem,
        covariance,
        mechanism=mechanism,
        solver=solver,
        lower_bound=best.lower_bound / problem.strictest_cap,
        iterations=evaluations,
        status="family optimum",
    )


def _refer(problem: DesignProblem, mechanism: MechanismName, noise_std: float) -> Design:
    """Return noise that is the same for all agents: no protection from an eavesdropper."""
    F = np.full((problem.num_agents, 1), noise_std)
    R = F @ F.T
    value = problem.value(R)
    return Design(
        mechanism=mechanism,
        solver="formula",
        status="reference",
        covariance=R,
        precision=None,
        factor=F,
        precision_caps=problem.precision_caps,
        value=value,
        lower_bound=value,
        iterations=0,
    )


def _search_covariance(problem: DesignProblem, laplacian: FloatArray) -> tuple[FloatArray, int]:
    """Return the best c·(I + r L) under the caps and noise limits, and how many r were tried.

    The scale c follows from r: [(I + r L)⁻¹]_ii of each agent follows from the eigenvalues of L.
    """
    slack = np.square(problem.scales)  # min b/b_i: what an agent may exceed the strictest cap by
    # No member of the family has less noise than the strictest agent needs, for anybody.
    limits = np.maximum(problem.variance_ratio_limits * slack, 1.0) * (1 + _TOLERANCE)
    eigenvalues, U = scipy.linalg.eigh(laplacian, driver="evd", check_finite=False)
    # Rounding may leave the smallest eigenvalue of a Laplacian, which is zero, slightly below it.
    eigenvalues = np.maximum(eigenvalues, 0.0)
    weights = slack[:, None] * np.square(U)
    A = problem.objective_matrix
    traces = float(np.trace(A)), float(np.sum(A * laplacian))

    def find_scales(ratios: FloatArray) -> FloatArray:
        return np.asarray((weights @ (1 / (1 + np.outer(eigenvalues, ratios)))).max(axis=0))

    def find_values(ratios: FloatArray) -> FloatArray:
        scales = find_scales(ratios)
        variances = scales * (1 + np.outer(laplacian.diagonal(), ratios))
        is_within = (variances <= limits[:, None]).all(axis=0)
        return np.where(is_within, scales * (traces[0] + ratios * traces[1]), np.inf)

    # The value can have several minima: look everywhere first, then zoom in on the best.
    grid = np.linspace(*_LOG_RATIOS, _GRID)
    evaluations = len(grid)
    for _ in range(_ZOOMS):
        best = int(np.argmin(find_values(np.exp(grid))))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        grid = np.linspace(low, high, _ZOOM_GRID)
        evaluations += len(grid)
    # r = 0 is LDP at the strictest cap, which is always within the family and any noise limit.
    ratios = np.append(np.exp(grid), 0.0)
    ratio = ratios[[int(np.argmin(find_values(ratios)))]]
    scale = float(find_scales(ratio)[0])
    return np.asarray(scale * (np.eye(len(laplacian)) + float(ratio[0]) * laplacian)), evaluations


CovarianceRule: TypeAlias = Callable[[DesignProblem], ArrayLike]
"""(design problem) → covariance R of the agents' noise, up to scale, shape (n, n)."""


@final
@dataclass(frozen=True, eq=False)
class OwnMechanism:
    """Noise with a covariance of the user's own, scaled to the privacy budget.

    All agents draw the noise from one seed that they share, so it holds against an eavesdropper
    only. A diagonal covariance needs no seed and holds against insiders too.

    Attributes:
        covariance: R, shape (n, n), or a function that returns it for a design problem, which has
            links, mixing matrix, precision caps and objective.
        label: the name of the mechanism in tables.
    """

    covariance: ArrayLike | CovarianceRule
    label: str = "own"
    name: ClassVar[MechanismName] = "own"
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return the covariance, scaled until every agent's cap holds."""
        given: Any = self.covariance
        if callable(given):
            # Of copies: the user's function must not change the problem.
            given = given(
                replace(
                    problem,
                    objective_matrix=problem.objective_matrix.copy(),
                    precision_caps=problem.precision_caps.copy(),
                    mixing_matrix=np.array(problem.mixing_matrix),
                )
            )
        n = problem.num_agents
        of = f"covariance of {self.label!r}"
        R = as_symmetric_matrix(given, name=of)
        require(R.shape == (n, n), of, f"of shape ({n}, {n}), as the network", R.shape)
        is_independent = not np.any(R - np.diag(R.diagonal()))
        threat = problem.threat
        if threat.max_colluders and not is_independent:
            raise InvalidArgumentError(
                f"mechanism {self.label!r} draws correlated noise from one seed, which holds "
                f"against an eavesdropper only, found max_colluders={threat.max_colluders}: ask "
                "for a threat without insiders (ThreatModel(0), --colluders 0)"
            )
        problem = replace(problem, threat=replace(threat, seeds="global"))
        found = conclude_in_family(problem, R, self.name, "formula", 1)
        # Independent noise needs no seed, so no insider knows any of it.
        shares = Decomposition(found.covariance.diagonal()) if is_independent else None
        return replace(found, status="given", shares=shares)
