"""The mechanisms that CorN is compared with, each as good as its family allows, and users' own."""

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

# Of log r: from LDP to noise that cancels but for rounding, in steps of 0.25 at first. Each zoom
# keeps two steps and divides them by 20, so eight zooms end at 10⁻⁹.
_GRID = np.linspace(-18.0, 18.0, 145)
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
        return _conclude(replace(problem, threat=threat), R, self.name, "formula")


@final
@dataclass(frozen=True, eq=False)
class Decor:
    """DECOR: R = σ² I + τ² L, pairwise cancelling noise along the links, best ratio σ² : τ².

    L is the Laplacian of the network's links. ``max_noise_std`` is a bound on √R_ii; None is
    32/√b_i, ``math.inf`` no limit. All agents have one scale, which the strictest promise decides.
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
class Reference:
    """Noise that protects nobody from an eavesdropper, for comparison.

    ``central`` is a trusted server's noise on the average, 11ᵀ/(n² min b): all agents have the same
    noise in it, so that the strictest promise decides. ``none`` and ``unclipped`` have no noise;
    training clips all the same with ``none``.
    """

    name: Literal["central", "none", "unclipped"]
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return noise that is the same for all agents."""
        n = problem.num_agents
        std = 1 / (n * problem.strictest_cap**0.5) if self.name == "central" else 0.0
        R = np.full((n, n), std * std)
        value = problem.value(R)
        # Its value is its own bound.
        return Design(self.name, "formula", "reference", R, problem.precision_caps, value, value)


def _search_family(
    mechanism: Decor | ZeroSum, problem: DesignProblem, laplacian: FloatArray
) -> Design:
    """Return the best c·(I + r L), or raise for a threat that it does not hold against."""
    _refuse_insiders(problem.threat, mechanism.name)
    has_own, found = problem.threat.seeds == EAVESDROPPER.seeds, repr(problem.threat.seeds)
    require(has_own, "seeds", f"left to the mechanism {mechanism.name!r}", found)
    problem = replace(problem, max_noise_std=mechanism.max_noise_std)
    R = _search_covariance(problem, laplacian)
    return _conclude(problem, R, mechanism.name, "search")


def _refuse_insiders(threat: ThreatModel, mechanism: str) -> None:
    """Raise for insiders: they know all shared noise of a mechanism with one seed, or of pairs."""
    rule = f"0 for mechanism {mechanism!r}, which holds against an eavesdropper only"
    advice = "use 'corn' or 'ldp', or ask for no insiders (ThreatModel(0), --colluders 0)"
    require(threat.max_colluders == 0, "max_colluders", rule, threat.max_colluders, advice=advice)


def _conclude(
    problem: DesignProblem, covariance: FloatArray, mechanism: MechanismName, solver: SolverName
) -> Design:
    """Return the design, with the bound of the dual: the best of *all* covariances."""
    # Insiders only ask for more noise, so the bound against an eavesdropper holds for any threat.
    bound = solve_dual(problem.scaled_objective).lower_bound / problem.strictest_cap
    return conclude(problem, covariance, mechanism, solver, "family optimum", lower_bound=bound)


def _search_covariance(problem: DesignProblem, laplacian: FloatArray) -> FloatArray:
    """Return the best c·(I + r L) under the caps and noise limits.

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
    grid = _GRID
    for _ in range(_ZOOMS):
        best = int(np.argmin(find_values(np.exp(grid))))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        grid = np.linspace(low, high, _ZOOM_GRID)
    # r = 0 is LDP at the strictest cap, which is always within the family and any noise limit.
    ratios = np.append(np.exp(grid), 0.0)
    ratio = ratios[[int(np.argmin(find_values(ratios)))]]
    scale = float(find_scales(ratio)[0])
    return np.asarray(scale * (np.eye(len(laplacian)) + float(ratio[0]) * laplacian))


CovarianceRule: TypeAlias = Callable[[DesignProblem], ArrayLike]
"""(design problem) → covariance R of the agents' noise, up to scale, shape (n, n)."""


@final
@dataclass(frozen=True, eq=False)
class OwnMechanism:
    """Noise with a covariance R of the user's own, or of a function of a design problem.

    All agents draw it from one seed, so it holds against an eavesdropper only. A diagonal R needs
    no seed and holds against insiders too. ``label`` is the name of the mechanism in tables.
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
            names = ("objective_matrix", "precision_caps", "mixing_matrix")
            copies: Any = {name: np.array(getattr(problem, name)) for name in names}
            given = given(replace(problem, **copies))
        n = problem.num_agents
        of = f"covariance of {self.label!r}"
        R = as_symmetric_matrix(given, name=of)
        require(R.shape == (n, n), of, f"of shape ({n}, {n}), as the network", R.shape)
        is_independent = not np.any(R - np.diag(R.diagonal()))
        if not is_independent:
            _refuse_insiders(problem.threat, self.label)
        problem = replace(problem, threat=replace(problem.threat, seeds="global"))
        found = _conclude(problem, R, self.name, "formula")
        # Independent noise needs no seed, so no insider knows any of it.
        shares = Decomposition(found.covariance.diagonal()) if is_independent else None
        return replace(found, status="given", shares=shares)
