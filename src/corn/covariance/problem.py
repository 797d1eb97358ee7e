"""The design problem and its solution as records: what is asked, what was found, how good it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import networkx as nx
import numpy as np

from corn.checks import FloatArray, require
from corn.covariance.decomposition import Decomposition, split_blocks, split_pairs
from corn.covariance.feasibility import expand_caps, scale_covariance
from corn.covariance.threat import EAVESDROPPER, ThreatModel
from corn.errors import InfeasibleError
from corn.topology.graphs import Graph

MechanismName: TypeAlias = Literal[
    "corn", "decor", "ldp", "zero-sum", "central", "none", "unclipped", "own"
]
SolverName: TypeAlias = Literal["dual", "split", "search", "formula"]
Status: TypeAlias = Literal[
    "optimal",
    "noise limited",
    "iteration limit",
    "accuracy limit",
    "loose bound",
    "family optimum",
    "given",
    "reference",
]

DEFAULT_NOISE_RATIO = 32.0
"""Default limit on an agent's noise, in units of its own LDP standard deviation 1/√b_i.

Correlated noise cancels in the average of models, and float32 cancels only what it represents:
noise 32 times as strong as LDP's leaves a rounding error of 32 · 6e-8 = 2e-6 LDP deviations, far
below the noise that privacy demands anyway.
"""

LARGEST_NOISE_RATIO = 3e3
"""Beyond this, float64 itself cannot invert the covariance to a useful accuracy."""


@dataclass(frozen=True, eq=False)
class DesignProblem:
    """Minimise Tr(A R) over R ≻ 0 with [R⁻¹]_ii ≤ b_i: Problem (13) of the paper, for any A ⪰ 0.

    Solvers know one cap for all. With t_i = √(min b/b_i) and R = T R' T the problem is the same one
    for T A T: Tr(A R) = Tr(T A T R'), and [R⁻¹]_ii = [R'⁻¹]_ii b_i/min b ≤ b_i where R' keeps the
    strictest cap for every agent. So solvers minimise ``scaled_objective``, in units where the
    strictest cap is 1, and ``restore`` what they find. Bounds carry over with the values.

    Attributes:
        objective_matrix: A, shape (n, n).
        precision_caps: b, shape (n,).
        graph: the links that seeds follow.
        threat: the adversary, and the seeds that agents share: Problem (16) if there are insiders.
        max_noise_std: a bound on √R_ii: None is 32/√b_i, ``math.inf`` no limit but float64's own
            (3000/√b_i).
        mixing_matrix: W of a step, for mechanisms that look at more than A.

    >>> problem = DesignProblem(np.eye(2), np.array([1.0, 4.0]))
    >>> problem.num_agents, problem.strictest_cap
    (2, 1.0)
    """

    objective_matrix: FloatArray
    precision_caps: FloatArray
    graph: Graph = field(default_factory=nx.Graph)
    threat: ThreatModel = EAVESDROPPER
    max_noise_std: float | None = None
    mixing_matrix: FloatArray | None = None

    def __post_init__(self) -> None:
        caps = expand_caps(self.precision_caps, self.num_agents)
        object.__setattr__(self, "precision_caps", caps)
        require(
            bool(np.trace(self.objective_matrix) > 0),
            "the objective",
            "positive for some agent's noise",
            "zero for every agent",
            advice="check mixing_matrix and objective",
        )
        limit = self.max_noise_std
        ldp_std = 1 / math.sqrt(self.strictest_cap)
        # R_ii ≥ 1/[R⁻¹]_ii ≥ 1/b_i for every positive definite R: a smaller limit has no solution.
        if limit is not None and not limit >= ldp_std * (1 - 1e-12):
            raise InfeasibleError(
                f"max_noise_std must be at least 1/√precision_cap = {ldp_std:.6g}, the noise that "
                f"an agent needs under the strictest cap, found {limit}; raise it, or the privacy "
                "budget"
            )

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return int(self.objective_matrix.shape[0])

    @property
    def strictest_cap(self) -> float:
        """The smallest b_i: the unit of solvers, and the cap of a trusted server."""
        return float(self.precision_caps.min())

    @property
    def scales(self) -> FloatArray:
        """t_i = √(min b/b_i), shape (n,): exactly 1 for every agent with the strictest cap."""
        return np.sqrt(self.strictest_cap / self.precision_caps)

    @cached_property
    def scaled_objective(self) -> FloatArray:
        """T A T, shape (n, n); A itself, not a copy, where all caps are equal."""
        return self._scale(self.objective_matrix)

    def restore(self, scaled_covariance: FloatArray) -> FloatArray:
        """Return T R' T: the covariance of agents whose noise is R' in units of their own."""
        return self._scale(scaled_covariance)

    def _scale(self, matrix: FloatArray) -> FloatArray:
        if self.precision_caps.max() == self.strictest_cap:
            return matrix
        # The outer product is exactly symmetric, and so is the result.
        return matrix * np.outer(self.scales, self.scales)

    @property
    def variance_ratio_limits(self) -> FloatArray:
        """The largest b_i·R_ii allowed, at least 1, shape (n,)."""
        if self.max_noise_std is None:
            return np.full(self.num_agents, DEFAULT_NOISE_RATIO**2)
        stds = np.minimum(self.max_noise_std, LARGEST_NOISE_RATIO / np.sqrt(self.precision_caps))
        return np.maximum(1.0, stds**2 * self.precision_caps)

    def value(self, covariance: FloatArray) -> float:
        """Return Tr(A R)."""
        return float(np.sum(self.objective_matrix * covariance))


@dataclass(frozen=True, eq=False)
class Design:
    """A noise covariance R under precision caps b_i, its value Tr(A R), and a bound on any other's.

    Attributes:
        mechanism: the rule that correlates the noise.
        solver: the method that chose the covariance.
        status: ``optimal``: the gap is within the tolerance. ``noise limited``: ``max_noise_std``
            holds the value above the optimum, by the gap. ``iteration limit``: out
            of iterations, or without progress; private, but not proved to be as good as asked.
            ``accuracy limit``: float64 or the backend gets no closer. ``loose bound``: it may be
            optimal, but nothing beyond the bound against an eavesdropper is proved: A is singular
            on a seed group, or the network is large. ``family optimum``: best of its family (LDP,
            DECOR, zero-sum), which need not contain the optimum. ``given``: a covariance of the
            user's own, scaled to the caps. ``reference``: no guarantee against an eavesdropper
            (central, none).
        covariance: R, shape (n, n).
        precision: R⁻¹, shape (n, n), from the Cholesky factor of R; its diagonal is at most
            b, exactly. None for references, whose R is singular.
        factor: F with R = F Fᵀ, shape (n, k); noise is F times k standard normals.
        precision_caps: b, shape (n,).
        value: Tr(A R).
        lower_bound: a certified lower bound on Tr(A R) over every covariance under the caps, no
            limit on its noise; for the seed groups and coalitions of the threat, if it has any.
            Equal to the value for references.
        iterations: eigendecompositions or evaluations that the solver took.
        threat: the adversary that the cap holds against; see ``adversary`` for references.
        shares: the split of the noise, where the design chose it; see ``decomposition``.
        multipliers: the proof of the lower bound against insiders, shape (coalitions, n); see
            `corn.covariance.insiders.certify`. None where the dual proves it from scratch.
        disagreement_ratio: κ, of `corn.covariance.objective`, for the run of the budget: 0 for
            exact sums and references. None if a cap was given in place of a budget, or a matrix in
            place of a network.

    >>> from corn.covariance import Horizon, design
    >>> from corn.topology import load_network
    >>> path = load_network("path:10", mixing="gossip")
    >>> noise = design(path, 1.0, objective=Horizon(1000), threat=EAVESDROPPER)
    >>> noise.status, round(noise.value, 2), round(noise.central_ratio, 2)
    ('optimal', 163.18, 1.28)
    >>> bool((noise.precision.diagonal() <= noise.precision_caps).all())
    True
    """

    mechanism: MechanismName
    solver: SolverName
    status: Status
    covariance: FloatArray
    precision: FloatArray | None
    factor: FloatArray
    precision_caps: FloatArray
    value: float
    lower_bound: float
    iterations: int
    threat: ThreatModel = EAVESDROPPER
    shares: Decomposition | None = None
    multipliers: FloatArray | None = None
    disagreement_ratio: float | None = None

    @property
    def adversary(self) -> str:
        """The adversary that the guarantee holds against, in words."""
        if self.status == "reference":
            return "nobody who sees messages (a reference, not a decentralised mechanism)"
        return self.threat.describe()

    @cached_property
    def decomposition(self) -> Decomposition:
        """The split into private noise and the noise of each seed group, which add up to R."""
        if self.shares is not None:
            return self.shares
        # These mechanisms fix who draws what; other covariances are split with one seed for all.
        if self.mechanism in ("ldp", "none", "unclipped"):
            return Decomposition(self.covariance.diagonal())
        if self.mechanism == "decor":
            return split_pairs(self.covariance)
        everyone = (tuple(range(self.num_agents)),)
        return split_blocks(self.covariance, everyone, precision_caps=self.precision_caps)

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.covariance)

    @property
    def gap(self) -> float:
        """The largest relative distance from the optimum, value/lower_bound − 1."""
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @property
    def strictest_cap(self) -> float:
        """The smallest b_i."""
        return float(self.precision_caps.min())

    @property
    def normalized_value(self) -> float:
        """Value × min b: the same for every budget, and for all budgets in the same proportion."""
        return self.value * self.strictest_cap

    @property
    def normalized_lower_bound(self) -> float:
        """Lower bound × min b."""
        return self.lower_bound * self.strictest_cap

    @property
    def noise_std(self) -> FloatArray:
        """√R_ii: the standard deviation of each agent's noise, shape (n,)."""
        return np.sqrt(self.covariance.diagonal())

    @property
    def average_noise_variance(self) -> float:
        """1ᵀR1/n²: the noise left in the average of all models."""
        return float(np.square(self.factor.sum(axis=0)).sum()) / self.num_agents**2

    @property
    def central_ratio(self) -> float:
        """The variance above, over the 1/(n² min b) that a trusted server would add to the average.

        That server keeps the strictest agent's promise for all. Nobody can go below in the plain
        average: 1ᵀR1 ≥ 1/[R⁻¹]_ii ≥ 1/b_i for every agent i.
        """
        return self.average_noise_variance * self.num_agents**2 * self.strictest_cap

    @property
    def weighted_central_ratio(self) -> float:
        """The same over a trusted server that weights agents by their caps: `weighting_gain`."""
        return self.central_ratio * weighting_gain(self.precision_caps)


def weighting_gain(precision_caps: FloatArray) -> float:
    """Return by how much less variance a trusted server adds that weights agents by their caps.

    A server that releases Σ w_i g_i + N(0, s²), with weights that add up to 1, must have
    s² ≥ w_i²/b_i for every agent i. Hence s Σ √b_i ≥ Σ w_i = 1, and w_i ∝ √b_i attains the least
    s² = 1/(Σ √b_i)². The plain average needs s² = 1/(n² min b). The two are equal if all caps are.
    The weighted average leans towards the data of agents with a weak promise.

    >>> weighting_gain(np.array([1.0, 1.0])), weighting_gain(np.array([1.0, 9.0]))
    (1.0, 4.0)
    """
    return float(np.sqrt(precision_caps / precision_caps.min()).mean() ** 2)


def conclude(
    problem: DesignProblem,
    covariance: FloatArray,
    *,
    mechanism: MechanismName,
    solver: SolverName,
    lower_bound: float,
    iterations: int,
    status: Status,
    tolerance: float | None = None,
) -> Design:
    """Scale a covariance to the problem's caps, check it independently, and return the design.

    A gap within ``tolerance`` is ``optimal`` whatever explains a larger one; ``status`` is that
    explanation. Without a tolerance ``status`` stands.
    """
    R, Y, F = scale_covariance(covariance, problem.precision_caps)
    value = problem.value(R)
    # At convergence rounding can leave the value a little below the bound; the smaller of two
    # lower bounds is one too.
    bound = min(lower_bound, value)
    if tolerance is not None and value <= (1 + tolerance) * bound:
        status = "optimal"
    return Design(
        mechanism=mechanism,
        solver=solver,
        status=status,
        covariance=R,
        precision=Y,
        factor=F,
        precision_caps=problem.precision_caps,
        value=value,
        lower_bound=bound,
        iterations=iterations,
        threat=problem.threat,
    )
