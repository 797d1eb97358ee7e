"""The design problem and its solution, which is private as far as a computed inverse says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import networkx as nx
import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike

from corn.checks import FloatArray, require
from corn.covariance.decomposition import Decomposition, split_blocks, split_pairs
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

# Limits on an agent's noise, in units of its own LDP standard deviation 1/√b_i. Correlated noise
# cancels in the average of models, and float32 cancels only what it represents: noise 32 times as
# strong as LDP's leaves a rounding error of 32 · 6e-8 = 2e-6 LDP deviations, far below the noise
# that privacy demands anyway. Beyond 3000, float64 itself cannot invert the covariance accurately.
_DEFAULT_NOISE_RATIO, _LARGEST_NOISE_RATIO = 32.0, 3e3
_MAX_RESCALINGS = 40
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class DesignProblem:
    """Minimise Tr(A R) over R ≻ 0 with [R⁻¹]_ii ≤ b_i: Problem (13) of the paper, for any A ⪰ 0.

    Solvers know one cap for all. With t_i = √(min b/b_i) and R = T R' T the problem is the same one
    for T A T, where R' keeps the strictest cap for every agent. So solvers minimise
    ``scaled_objective``, in units where that cap is 1, and ``rescale`` what they find.

    Attributes:
        objective_matrix: A, shape (n, n).
        precision_caps: b, shape (n,).
        graph: the links that seeds follow.
        threat: the adversary, and the seeds that agents share: Problem (16) if there are insiders.
        max_noise_std: a bound on √R_ii: None is 32/√b_i, ``math.inf`` no limit but float64's own
            (3000/√b_i).
        mixing_matrix: W of a step, for mechanisms that look at more than A.

    >>> DesignProblem(np.eye(2), np.array([1.0, 4.0])).strictest_cap
    1.0
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
        is_positive = bool(np.trace(self.objective_matrix) > 0)
        require(is_positive, "the objective", "positive for some agent's noise", "zero for all")
        limit = self.max_noise_std
        ldp_std = 1 / math.sqrt(self.strictest_cap)
        # R_ii ≥ 1/[R⁻¹]_ii ≥ 1/b_i for every positive definite R: a smaller limit has no solution.
        if limit is not None and not limit >= ldp_std * (1 - 1e-12):
            raise InfeasibleError(
                f"max_noise_std must be at least 1/√precision_cap = {ldp_std:.6g}, found {limit}"
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
        return self.rescale(self.objective_matrix)

    def rescale(self, matrix: FloatArray) -> FloatArray:
        """Return T A T of an objective, or T R' T of noise in units of the strictest cap."""
        if self.precision_caps.max() == self.strictest_cap:
            return matrix
        # The outer product is exactly symmetric, and so is the result.
        return matrix * np.outer(self.scales, self.scales)

    @property
    def variance_ratio_limits(self) -> FloatArray:
        """The largest b_i·R_ii allowed, at least 1, shape (n,)."""
        if self.max_noise_std is None:
            return np.full(self.num_agents, _DEFAULT_NOISE_RATIO**2)
        stds = np.minimum(self.max_noise_std, _LARGEST_NOISE_RATIO / np.sqrt(self.precision_caps))
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
        precision_caps: b, shape (n,).
        value: Tr(A R).
        lower_bound: a certified lower bound on Tr(A R) over every covariance under the caps, no
            limit on its noise; for the seed groups and coalitions of the threat, if it has any.
            Equal to the value for references.
        iterations: eigendecompositions or evaluations of CorN's solvers; 0 for all others.
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
    """

    mechanism: MechanismName
    solver: SolverName
    status: Status
    covariance: FloatArray
    precision_caps: FloatArray
    value: float
    lower_bound: float
    iterations: int = 0
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
    def noise_std(self) -> FloatArray:
        """√R_ii: the standard deviation of each agent's noise, shape (n,)."""
        return np.sqrt(self.covariance.diagonal())

    @property
    def average_noise_variance(self) -> float:
        """1ᵀR1/n²: the noise left in the average of all models."""
        return float(self.covariance.sum()) / self.num_agents**2

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
    """
    return float(np.sqrt(precision_caps / precision_caps.min()).mean() ** 2)


def conclude(
    problem: DesignProblem,
    covariance: FloatArray,
    mechanism: MechanismName,
    solver: SolverName,
    status: Status,
    *,
    lower_bound: float,
    iterations: int = 0,
    tolerance: float | None = None,
) -> Design:
    """Scale a covariance to the problem's caps, check it independently, and return the design.

    A gap within ``tolerance`` is ``optimal`` whatever explains a larger one; ``status`` is that
    explanation. Without a tolerance ``status`` stands.
    """
    R = scale_covariance(covariance, problem.precision_caps)
    value = problem.value(R)
    # At convergence rounding can leave the value a little below the bound; the smaller of two
    # lower bounds is one too.
    bound = min(lower_bound, value)
    if tolerance is not None and value <= (1 + tolerance) * bound:
        status = "optimal"
    caps = problem.precision_caps
    return Design(mechanism, solver, status, R, caps, value, bound, iterations, problem.threat)


def expand_caps(precision_caps: ArrayLike, num_agents: int) -> FloatArray:
    """Return the precision cap b_i of each agent, shape (n,); one number is the cap of all."""
    given = np.asarray(precision_caps)
    # A bool is a number to Python, and surely a mistake here, as is text that holds a number.
    require(given.dtype.kind in "iuf", "precision_caps", "numbers", f"{precision_caps!r:.60}")
    rule = f"one number, or {num_agents}, one for each agent"
    require(given.shape in ((), (num_agents,)), "precision_caps", rule, f"shape {given.shape}")
    wrong = given[~((given > 0) & (given < np.inf))]
    require(not wrong.size, "precision_caps", "positive and finite", wrong[:1].tolist())
    caps = np.broadcast_to(given, (num_agents,)).astype(np.float64)
    caps.setflags(write=False)
    return caps


def invert_covariance(covariance: FloatArray) -> FloatArray:
    """Return R⁻¹, exactly symmetric, by Cholesky; raise for a singular R.

    Singular noise leaves some combination of gradients without any noise, so that no finite ε
    holds: guideline (G1) of the paper.
    """
    # Rounding lets Cholesky pass on a singular matrix with pivots of the size of the error, which
    # is relative to each agent's own variance: scaling rows and columns does not change it.
    floors = 4 * len(covariance) * _EPS * covariance.diagonal()
    inverse = invert_definite(covariance, floors)
    if inverse is None:
        raise InfeasibleError(
            "the covariance is singular: some combination of agents carries no noise, so there is "
            "no privacy guarantee against an eavesdropper; add independent noise for every agent"
        )
    return inverse


def invert_definite(matrix: FloatArray, floors: FloatArray | float = -1.0) -> FloatArray | None:
    """Return the inverse of a positive definite matrix, exactly symmetric.

    None where Cholesky fails, or has a pivot that is at most its floor.
    """
    factor, info = scipy.linalg.lapack.dpotrf(matrix, lower=True, clean=True)
    if info != 0 or (np.square(factor.diagonal()) <= floors).any():
        return None
    # A positive diagonal, which Cholesky gives, is all that dpotri needs to succeed.
    inverse: FloatArray = scipy.linalg.lapack.dpotri(factor, lower=True)[0]
    # Row by row: a large network has no memory for another n×n array.
    for i in range(len(inverse) - 1):
        inverse[i, i + 1 :] = inverse[i + 1 :, i]
    return inverse


def scale_to_cap(worst_ratio: Callable[[float], float]) -> float:
    """Return the factor on all noise variances at which the worst [R⁻¹]_ii/b_i is just below 1.

    ``worst_ratio`` maps a factor to the largest ratio *as computed* for noise scaled by it. In
    exact arithmetic one evaluation would do. Scaling changes the rounding, so the result is
    computed again until it is on the private side, with a margin that doubles.
    """
    scale = worst_ratio(1.0)
    for attempt in range(_MAX_RESCALINGS):
        excess = worst_ratio(scale)
        if excess <= 1:
            return scale
        scale *= excess * (1 + 2**attempt * _EPS)
    raise InfeasibleError(
        "the covariance is too ill-conditioned to certify its privacy in float64; lower "
        "max_noise_std or raise ridge"
    )


def scale_covariance(covariance: FloatArray, precision_caps: FloatArray) -> FloatArray:
    """Return R scaled so that every computed [R⁻¹]_ii ≤ b_i, and one is just below.

    The distance from b is the rounding of such an inverse, (n + 4)·ε·max(b_i R_ii), so that the
    exact inverse, and one computed any other way, is below b as well.
    """

    def worst_ratio(scale: float) -> float:
        R = covariance * scale
        largest = float((invert_covariance(R).diagonal() / precision_caps).max())
        strongest = float((R.diagonal() * precision_caps).max())
        # Even one agent's root, reciprocal, square and ratio round seven times, by ε/2 each.
        return largest * (1 + (len(R) + 4) * _EPS * strongest * largest)

    return covariance * scale_to_cap(worst_ratio)
