"""What a design returns: the covariance, how good it is, and the certificate that says so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import scipy.linalg

from corn.arrays import FloatArray
from corn.covariance.decomposition import Decomposition, split_blocks, split_pairs
from corn.covariance.feasibility import scale_to_cap
from corn.covariance.problem import DesignProblem
from corn.covariance.threat import EAVESDROPPER, ThreatModel

MechanismName: TypeAlias = Literal["corn", "decor", "ldp", "zero-sum", "central", "none"]
Solver: TypeAlias = Literal["dual", "closed-form", "sdp", "first-order", "search", "formula"]
Status: TypeAlias = Literal[
    "optimal",
    "noise limited",
    "constrained",
    "iteration limit",
    "accuracy limit",
    "loose bound",
    "family optimum",
    "reference",
]


@dataclass(frozen=True, eq=False)
class Design:
    """A noise covariance R under a precision cap b, its value Tr(A R), and a bound on any other's.

    Attributes:
        mechanism: how the covariance was chosen.
        solver: what chose it.
        status: ``optimal``: the gap is within the tolerance. ``noise limited``: ``max_noise_std``
            or ``ridge`` holds the value above the optimum, by the gap. ``constrained``: a caller's
            own constraints do. ``iteration limit``: out of iterations; private, but not as good as
            asked. ``accuracy limit``: float64 or the backend gets no closer.
            ``loose bound``: it may be optimal, but A is singular on a seed group, so that nothing
            but the bound against an eavesdropper is proved. ``family optimum``: best of its family
            (LDP, DECOR, zero-sum), which need not hold the optimum.
            ``reference``: no guarantee against an eavesdropper (central, none).
        covariance: R, shape (n, n).
        precision: R⁻¹, shape (n, n), from the Cholesky factor of R; its diagonal is at most b,
            exactly. None for references, whose R is singular.
        factor: F with R = F Fᵀ, shape (n, k); noise is F times k standard normals.
        precision_cap: b.
        value: Tr(A R).
        lower_bound: a certified lower bound on Tr(A R) over every covariance under the cap, with no
            limit on its noise; for the seed groups and coalitions of the threat, if it has any.
            Equal to the value for references.
        iterations: eigendecompositions or evaluations that the solver took.
        threat: who the cap holds against: an eavesdropper, or coalitions of insiders.
        shares: who draws what, where the design chose it; see ``decomposition``.
        num_coalitions: how many sets of constraints insiders brought, after pruning.
        multipliers: what proves the lower bound against insiders, shape (coalitions, n); see
            `corn.covariance.certificate.certify`. None where the dual proves it from scratch.
        num_dropped_groups: seed groups left out because their noise was weak.
        value_before_dropping: the value with them.
    """

    mechanism: MechanismName
    solver: Solver
    status: Status
    covariance: FloatArray
    precision: FloatArray | None
    factor: FloatArray
    precision_cap: float
    value: float
    lower_bound: float
    iterations: int
    threat: ThreatModel = EAVESDROPPER
    shares: Decomposition | None = None
    num_coalitions: int | None = None
    multipliers: FloatArray | None = None
    num_dropped_groups: int = 0
    value_before_dropping: float | None = None

    @cached_property
    def decomposition(self) -> Decomposition:
        """Who draws what: private noise and the noise of each seed group, which add up to R."""
        if self.shares is not None:
            return self.shares
        if self.mechanism in ("ldp", "none"):
            return Decomposition(self.covariance.diagonal())
        if self.mechanism == "decor":
            return split_pairs(self.covariance)
        return split_blocks(self.covariance, (tuple(range(self.num_agents)),))

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.covariance)

    @property
    def gap(self) -> float:
        """How far the value may be from the best possible, value/lower_bound − 1."""
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @property
    def normalized_value(self) -> float:
        """Value × b: the same for every budget."""
        return self.value * self.precision_cap

    @property
    def normalized_lower_bound(self) -> float:
        """Lower bound × b."""
        return self.lower_bound * self.precision_cap

    @property
    def noise_std(self) -> FloatArray:
        """√R_ii: how strong each agent's noise is, shape (n,)."""
        return np.sqrt(self.covariance.diagonal())

    @property
    def average_noise_variance(self) -> float:
        """1ᵀR1/n²: the noise left in the average of all models."""
        return float(np.square(self.factor.sum(axis=0)).sum()) / self.num_agents**2

    @property
    def central_ratio(self) -> float:
        """The variance above, over the floor 1/(n² b) that a trusted server would add."""
        return self.average_noise_variance * self.num_agents**2 * self.precision_cap

    @cached_property
    def independent_variance(self) -> float:
        """σ_mix², the most independent noise with R = σ_mix² I + R_cor, R_cor ⪰ 0: eq. (12).

        It is the smallest eigenvalue of R, or the inverse of the largest of R⁻¹, which is accurate.
        """
        if self.precision is None:
            return 0.0
        last = self.num_agents - 1
        largest = scipy.linalg.eigvalsh(self.precision, subset_by_index=[last, last])[0]
        return 1 / float(largest)

    @property
    def correlated_covariance(self) -> FloatArray:
        """R_cor of the same split, shape (n, n)."""
        return self.covariance - self.independent_variance * np.eye(self.num_agents)


def conclude(
    problem: DesignProblem,
    covariance: FloatArray,
    *,
    mechanism: MechanismName,
    solver: Solver,
    lower_bound: float,
    iterations: int,
    status: Status | None = None,
    shortfall: Status = "accuracy limit",
    shrink: bool = True,
) -> Design:
    """Scale a covariance to the problem's cap, check it independently, and state how good it is.

    ``status`` None means a search that converged: ``optimal``, or ``shortfall`` if the gap is
    beyond the tolerance. ``shrink`` False scales up only.
    """
    R, Y, F = scale_to_cap(covariance, problem.precision_cap, shrink=shrink)
    value = float(np.sum(problem.objective_matrix * R))
    # At convergence rounding can leave the value a hair below the bound; the smaller is one too.
    bound = min(lower_bound, value)
    if status is None:
        status = "optimal" if value <= (1 + problem.tolerance) * bound else shortfall
    cap = problem.precision_cap
    return Design(mechanism, solver, status, R, Y, F, cap, value, bound, iterations)
