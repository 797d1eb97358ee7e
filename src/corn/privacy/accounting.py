"""Privacy of given noise: ε(δ), δ(ε) and curves of each agent, and the costs of samplings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from corn.checks import (
    FloatArray,
    as_symmetric_matrix,
    require_count,
    require_fraction,
    require_length,
)
from corn.errors import InvalidArgumentError
from corn.privacy import gaussian, subsampling
from corn.privacy.budget import AgentPromise, ClippedQuery, PrivacyBudget, Sampling
from corn.privacy.gaussian import (
    Accounting,
    find_accountant,
    is_proved,
    require_exact,
    warn_if_unproved,
)

_EPS = float(np.finfo(np.float64).eps)


def precision_diagonal(
    covariance: ArrayLike, *, relative_tolerance: float = 1e-9, num_terms: int = 0
) -> FloatArray:
    """Return an upper bound on [R⁻¹]_jj for each agent j, shape (n,), tight to rounding.

    Where R is singular, an agent j whose direction e_j lies in the range of R gets [R⁺]_jj. Any
    other agent is exposed, because some combination of messages shows its gradient without noise,
    and gets ∞. So do all agents under pure zero-sum noise.

    The bound is above the true value by about 4·n·1e-16·κ relative, with κ the condition number of
    the correlation matrix; where that nears 1 the matrix counts as singular.

    Args:
        covariance: R, shape (n, n), of the noise **really added**: mixing weights, clipping or
            rounding applied to the noise belong in it.
        relative_tolerance: the asymmetry of R, and the size of a negative eigenvalue, relative to
            the largest, up to which R is taken as singular rather than refused.
        num_terms: the number of products that were summed for each entry of R, whose rounding
            errors must not count as noise; 0 if R is exact.

    >>> precision_diagonal([[2.0, 1.0], [1.0, 2.0]]).round(6)
    array([0.666667, 0.666667])
    >>> precision_diagonal([[1.0, -1.0], [-1.0, 1.0]])
    array([inf, inf])
    """
    R = as_symmetric_matrix(covariance, name="covariance", relative_tolerance=relative_tolerance)
    variance = np.diag(R)
    if (variance < 0).any():
        agent = int(variance.argmin())
        raise InvalidArgumentError(
            f"covariance must have no negative variance, found {variance[agent]:.3g} for agent "
            f"{agent}"
        )
    # Scaling to unit variances makes the error independent of the ratios between agents' variances.
    scale = np.where(variance > 0, np.sqrt(variance), 1.0)
    eigenvalues, vectors = np.linalg.eigh(R / scale / scale[:, None])
    _require_semidefinite(eigenvalues, relative_tolerance)
    return _upper_diagonal(eigenvalues, vectors, num_terms) / scale / scale


def _require_semidefinite(eigenvalues: FloatArray, relative_tolerance: float) -> None:
    if eigenvalues[0] < -relative_tolerance * max(eigenvalues[-1], 1.0):
        raise InvalidArgumentError(
            "covariance must be positive semidefinite, found a correlation matrix with eigenvalue "
            f"{eigenvalues[0]:.3g}: no noise has this covariance"
        )


def _upper_diagonal(eigenvalues: FloatArray, vectors: FloatArray, num_terms: int) -> FloatArray:
    # The computed pair is exact for a matrix within `error` of the true one, S: S ⪰ VΛVᵀ − error·I.
    # The inverse of the right side is above S⁻¹, so it, and not the computed inverse, is reported.
    # A sum of k products is off by k·eps of the sum of their sizes at most, which in a correlation
    # matrix is at most 1 by Cauchy and Schwarz.
    error = eigenvalues.size * _EPS * (2 * max(eigenvalues[-1], 1.0) + num_terms)
    kept = eigenvalues > 2 * error
    weights = vectors**2
    diagonal: FloatArray = weights[:, kept] @ (1 / (eigenvalues[kept] - error))
    diagonal *= 1 + eigenvalues.size * _EPS
    diagonal[_is_exposed(weights[:, ~kept], eigenvalues[kept], error)] = np.inf
    return diagonal


def _is_exposed(null_weights: FloatArray, kept: FloatArray, error: float) -> NDArray[np.bool_]:
    # An agent is hidden if it has no part in the null space. Where the other eigenvalues are well
    # above zero, rounding rotates the null space by a known angle, and smaller parts are ignored.
    # Where they are close to zero, every agent with a part counts as exposed.
    rotation = 8 * error / max(kept[0], 0.1) if kept.size else 0.0
    exposed: NDArray[np.bool_] = np.sqrt(null_weights.sum(axis=1)) > rotation
    return exposed


@dataclass(frozen=True, eq=False)
class PrivacyCurve:
    """Pairs (ε, δ) of one accountant, as two arrays of one length: δ falls as ε rises."""

    epsilon: FloatArray
    delta: FloatArray


@dataclass(frozen=True, eq=False)
class TradeoffCurve:
    """The least false negative rate of any test for an agent's data, per false positive rate."""

    false_positive_rate: FloatArray
    false_negative_rate: FloatArray


@dataclass(frozen=True, eq=False)
class PrivacyLoss:
    """The privacy loss of each agent's data in a run, to an adversary who observes every message.

    The run has phases k: ``num_steps[k]`` steps, each with **fresh** noise of precision diagonal
    ``precision[k]``; ``precision`` has shape (phases, n). Changing agent j's data moves only row
    j, by at most Δ, so the run is exactly μ_j-GDP with μ_j² = Δ² Σ_k T_k [R_k⁻¹]_jj, where the
    paper's Theorem 2 has an upper bound. In passes of ``steps_per_pass`` steps, counted from the
    first step, a sample moves one step of each pass, and the largest [R_k⁻¹]_jj of each pass begun
    is summed; with one phase that also bounds longer passes. Made by ``account`` and
    ``account_precision``.
    """

    precision: FloatArray
    num_steps: tuple[int, ...]
    query: ClippedQuery

    @cached_property
    def mu(self) -> FloatArray:
        """μ of each agent, shape (n,); ∞ for an agent that the noise does not hide.

        Raises ``InvalidArgumentError`` under Poisson sampling, which no single μ describes.
        """
        if self.query.is_subsampled:
            raise InvalidArgumentError(
                f"mu is not defined with sampling_rate={self.query.sampling_rate}: no single μ "
                "describes a subsampled run; use epsilon or delta"
            )
        # Gaussian mechanisms compose exactly: the squares of their μ add up.
        return self.query.sensitivity * np.sqrt(self._total_precision)

    @property
    def worst_agent(self) -> int:
        """The least protected agent: the one with the largest total precision.

        Under Poisson sampling with several phases the order may depend on δ; ``worst_epsilon`` and
        ``worst_delta`` then compare all agents.
        """
        return int(self._total_precision.argmax())

    def epsilon(self, delta: float, *, accounting: Accounting = "gdp") -> FloatArray:
        """Return ε at this δ for each agent, shape (n,); ∞ for an agent that is exposed."""
        epsilons = self._of_each_agent(lambda agent: self._epsilon_of(agent, delta, accounting))
        if accounting == "paper":
            warn_if_unproved(float(epsilons.max()), delta)
        return epsilons

    def delta(self, epsilon: float, *, accounting: Accounting = "gdp") -> FloatArray:
        """Return δ at this ε for each agent, shape (n,); 1 for an agent that is exposed."""
        deltas = self._of_each_agent(lambda agent: self._delta_of(agent, epsilon, accounting))
        if accounting == "paper":
            warn_if_unproved(epsilon, float(deltas.max()))
        return deltas

    def worst_epsilon(self, delta: float, *, accounting: Accounting = "gdp") -> float:
        """Return the largest ε of any agent at this δ."""
        return float(self._least_protected().epsilon(delta, accounting=accounting).max())

    def worst_delta(self, epsilon: float, *, accounting: Accounting = "gdp") -> float:
        """Return the largest δ of any agent at this ε."""
        return float(self._least_protected().delta(epsilon, accounting=accounting).max())

    def curve(
        self,
        epsilons: ArrayLike | None = None,
        *,
        agent: int | None = None,
        accounting: Accounting = "gdp",
    ) -> PrivacyCurve:
        """Return δ at every ε, for one agent (the worst if not given).

        The default is 200 values of ε, from 0 to where δ has fallen to 1e-10.
        """
        agent = self.worst_agent if agent is None else agent
        if epsilons is None:
            # An exposed agent has δ = 1 at every ε, which any finite range shows.
            top = self._epsilon_of(agent, 1e-10, accounting)
            epsilons = np.linspace(0, top if top < math.inf else 1.0, 200)
        grid = np.array(epsilons, dtype=np.float64, ndmin=1)
        deltas = [self._delta_of(agent, float(epsilon), accounting) for epsilon in grid]
        if accounting == "paper":
            # One warning for the whole curve, at the point furthest beyond the proof.
            points = zip(grid.tolist(), deltas, strict=True)
            unproved = [point for point in points if not is_proved(*point)]
            if unproved:
                warn_if_unproved(*max(unproved))
        return PrivacyCurve(grid, np.array(deltas))

    def tradeoff(
        self, false_positive_rates: ArrayLike | None = None, *, agent: int | None = None
    ) -> TradeoffCurve:
        """Return f(α) = Φ(Φ⁻¹(1 − α) − μ) for one agent (the worst if not given).

        The default is 201 rates, from 0 to 1.
        """
        mu = float(self.mu[self.worst_agent if agent is None else agent])
        if false_positive_rates is None:
            false_positive_rates = np.linspace(0, 1, 201)
        rates = np.array(false_positive_rates, dtype=np.float64, ndmin=1)
        return TradeoffCurve(
            rates, np.array([gaussian.tradeoff(mu, float(rate)) for rate in rates])
        )

    @property
    def _total_precision(self) -> FloatArray:
        return _sum_over_passes(self.precision, self.num_steps, self.query.steps_per_pass or 1)

    def _least_protected(self) -> PrivacyLoss:
        # Under Poisson sampling, losses of several phases cannot be ordered by one number.
        if self.query.is_subsampled and len(self.num_steps) > 1:
            return self
        return replace(self, precision=self.precision[:, [self.worst_agent]])

    def _of_each_agent(self, loss_of: Callable[[int], float]) -> FloatArray:
        # Agents with the same noise are computed once: on symmetric graphs that is all of them.
        _, first, group = np.unique(self.precision, axis=1, return_index=True, return_inverse=True)
        return np.array([loss_of(int(agent)) for agent in first])[group.ravel()]

    def _epsilon_of(self, agent: int, delta: float, accounting: Accounting) -> float:
        accountant = find_accountant(accounting)
        if not self.query.is_subsampled:
            return accountant.epsilon_from(float(self.mu[agent]), delta)
        require_exact(accounting)
        return subsampling.bound_epsilon(
            self.precision[:, agent].tolist(), delta, num_steps=self.num_steps, query=self.query
        )

    def _delta_of(self, agent: int, epsilon: float, accounting: Accounting) -> float:
        accountant = find_accountant(accounting)
        if not self.query.is_subsampled:
            return accountant.delta_from(float(self.mu[agent]), epsilon)
        require_exact(accounting)
        return subsampling.bound_delta(
            self.precision[:, agent].tolist(), epsilon, num_steps=self.num_steps, query=self.query
        )


def account(
    covariance: ArrayLike | Sequence[ArrayLike],
    query: ClippedQuery,
    *,
    num_steps: int | Sequence[int],
) -> PrivacyLoss:
    """Return the privacy loss of a run with this noise.

    Args:
        covariance: R of the noise **really added** at each step, shape (n, n); or, if it changes
            during the run, one for each phase. For singular R see ``precision_diagonal``.
        query: the clipped gradient that the noise is added to.
        num_steps: the number of steps, each with noise drawn afresh; or one number per phase.

    >>> loss = account([[50.0, 0.0], [0.0, 100.0]], ClippedQuery(0.1), num_steps=5000)
    >>> loss.mu.round(6), loss.epsilon(1e-5).round(3), loss.worst_agent
    (array([2.      , 1.414214]), array([9.997, 6.573]), 0)
    """
    phases, steps = _split_phases(covariance, num_steps)
    return _loss([precision_diagonal(R) for R in phases], steps, query)


def account_precision(
    precision: ArrayLike | Sequence[ArrayLike],
    query: ClippedQuery,
    *,
    num_steps: int | Sequence[int],
) -> PrivacyLoss:
    """Return the privacy loss of a run, given the diagonal of R⁻¹, shape (n,), or one per phase.

    An infinite entry is an agent without protection, zero an agent whose data is never used.
    """
    phases, steps = _split_phases(precision, num_steps)
    return _loss([_checked_diagonal(diagonal) for diagonal in phases], steps, query)


def account_promises(precision: ArrayLike, budget: PrivacyBudget, *, num_steps: int) -> FloatArray:
    """Return each agent's exact ε at its own δ, shape (n,), after ``num_steps`` of a budget's run.

    Args:
        precision: [R⁻¹]_ii of each agent, shape (n,).
        budget: the promises, whose queries the noise is added to.
        num_steps: the steps that were released; without any, nothing is spent.

    >>> budget = PrivacyBudget((1, 10), 1e-5, num_steps=5000, clip=0.1)
    >>> account_promises(budget.precision_caps(2), budget, num_steps=5000).round(6)
    array([ 1., 10.])
    """
    diagonal = _checked_diagonal(precision)
    spent = np.zeros(diagonal.size)
    if num_steps == 0:
        return spent
    for promise, agents in group_agents(budget, diagonal.size).items():
        loss = account_precision(diagonal[agents], promise.query, num_steps=num_steps)
        spent[agents] = loss.epsilon(promise.delta)
    return spent


def group_agents(budget: PrivacyBudget, num_agents: int) -> dict[AgentPromise, list[int]]:
    """Return the agents that have each of a budget's promises, in increasing order."""
    if budget.num_agents is None:
        return {budget.promise: list(range(num_agents))}
    require_length("precision", num_agents, budget.num_agents, per="agent")
    groups: dict[AgentPromise, list[int]] = {}
    for agent, promise in enumerate(budget.promises):
        groups.setdefault(promise, []).append(agent)
    return groups


@dataclass(frozen=True, eq=False)
class BudgetCheck:
    """Every agent's [R⁻¹]_ii, its cap, and whether it is within it, each of shape (n,)."""

    precision: FloatArray
    precision_caps: FloatArray
    met: NDArray[np.bool_]

    @property
    def passed(self) -> bool:
        """Whether the budget is met for all agents."""
        return bool(self.met.all())

    @property
    def worst_agent(self) -> int:
        """The agent whose [R⁻¹]_ii is the largest relative to its cap."""
        return int((self.precision / self.precision_caps).argmax())

    def describe(self) -> str:
        """Return one line that compares the worst agent with its cap."""
        worst = self.worst_agent
        verdict = "met for all" if self.passed else f"broken for {np.count_nonzero(~self.met)} of"
        return (
            f"{verdict} {self.precision.size} agents: the worst is agent {worst}, whose [R⁻¹]_ii "
            f"is {self.precision[worst]:.6g}, its cap {self.precision_caps[worst]:.6g}"
        )


def check_budget(
    covariance: ArrayLike, budget: PrivacyBudget, *, relative_tolerance: float = 1e-9
) -> BudgetCheck:
    """Check that noise of this covariance, drawn afresh at each step, meets the budget.

    The diagonal is rounded up and the cap down. A design that was scaled to the cap meets it up to
    rounding, which ``relative_tolerance`` allows for.

    >>> budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    >>> print(check_budget([[60.0, 0.0], [0.0, 40.0]], budget).describe())
    broken for 1 of 2 agents: the worst is agent 1, whose [R⁻¹]_ii is 0.025, its cap 0.0200089
    """
    require_fraction("relative_tolerance", relative_tolerance)
    precision = precision_diagonal(covariance)
    caps = budget.precision_caps(precision.size)
    return BudgetCheck(precision, caps, precision <= caps * (1 + relative_tolerance))


def _sum_over_passes(
    precision: FloatArray, num_steps: tuple[int, ...], steps_per_pass: int
) -> FloatArray:
    """Return Σ over the passes begun of the largest [R_k⁻¹]_jj of their phases, shape (n,)."""
    total = np.zeros(precision.shape[1])
    parts: dict[int, FloatArray] = {}
    start = 0
    for own, count in zip(precision, num_steps, strict=True):
        stop = start + count
        whole = stop // steps_per_pass - -(-start // steps_per_pass)
        if whole > 0:
            total += whole * own
        # A pass that a phase begins or ends in may belong to several phases. The sample may be in
        # any of its steps, so it counts with the least noise of them.
        for edge in (start, stop):
            if edge % steps_per_pass:
                index = edge // steps_per_pass
                parts[index] = np.maximum(parts.get(index, own), own)
        start = stop
    return total + sum(parts.values(), np.zeros(precision.shape[1]))


def _split_phases(noise: Any, num_steps: Any) -> tuple[list[Any], tuple[int, ...]]:
    if np.ndim(num_steps) == 0:
        return [noise], (require_count("num_steps", num_steps),)
    phases = list(noise)
    if not phases or len(phases) != len(num_steps):
        raise InvalidArgumentError(
            f"num_steps must have one number for each phase, found {len(num_steps)} for "
            f"{len(phases)} phases"
        )
    return phases, tuple(require_count("num_steps", steps) for steps in num_steps)


def _checked_diagonal(value: ArrayLike) -> FloatArray:
    diagonal = np.array(value, dtype=np.float64)
    if diagonal.ndim != 1 or diagonal.size == 0:
        raise InvalidArgumentError(
            f"precision must have one entry for each agent, found shape {diagonal.shape}"
        )
    # Written so that NaN, for which every comparison is false, is refused too.
    if not (diagonal >= 0).all():
        agent = int(np.flatnonzero(~(diagonal >= 0))[0])
        raise InvalidArgumentError(
            f"precision must be non-negative, found {diagonal[agent]} for agent {agent}"
        )
    return diagonal


def _loss(
    diagonals: list[FloatArray], num_steps: tuple[int, ...], query: ClippedQuery
) -> PrivacyLoss:
    # Phases of different sizes would be networks of different agents, whose losses do not add up.
    sizes = sorted({diagonal.size for diagonal in diagonals})
    if len(sizes) > 1:
        raise InvalidArgumentError(f"all phases must have the same agents, found {sizes} of them")
    return PrivacyLoss(np.stack(diagonals), num_steps, query)


@dataclass(frozen=True, eq=False)
class SamplingCost:
    """The noise that one sampling needs, and its ε with the least noise of all samplings.

    Attributes:
        budget: the promise with this sampling, counted exactly.
        noise_std: standard deviation of each agent that draws its noise alone, 1/√b_i, shape (n,),
            or (1,) if all agents have the same promise.
        variance_ratio: noise variance of all agents together, relative to the sampling with the
            least.
        epsilon_at_least: each agent's ε if it samples like this with the noise of the sampling with
            the least, of the shape of ``noise_std``.
    """

    budget: PrivacyBudget
    noise_std: FloatArray
    variance_ratio: float
    epsilon_at_least: FloatArray

    @property
    def sampling(self) -> Sampling:
        """The rule by which samples enter batches."""
        return self.budget.promises[0].query.sampling or "every-step"

    @property
    def mu(self) -> FloatArray | None:
        """μ of each agent's whole run, of the shape of ``noise_std``; None under Poisson sampling.

        There, no single μ describes a run.
        """
        promises = self.budget.promises
        if any(promise.query.is_subsampled for promise in promises):
            return None
        return np.array([self.budget.of_agent(agent).mu for agent in range(len(promises))])


def compare_samplings(budget: PrivacyBudget) -> tuple[SamplingCost, ...]:
    """Return the cost of each sampling that the budget has the numbers for; least noise first.

    A budget for unit ``agent`` has one sampling only. A sampling for which δ is out of range is
    left out.

    >>> budget = PrivacyBudget(
    ...     1, 1e-5, num_steps=1000, clip=1, unit="sample", batch_size=128, samples_per_agent=2800
    ... )
    >>> [(cost.sampling, round(cost.variance_ratio)) for cost in compare_samplings(budget)]
    [('poisson', 1), ('passes', 23), ('every-step', 479)]
    """
    budgets = [own for name in get_args(Sampling) if (own := _with_sampling(budget, name))]
    caps = [own.precision_caps(own.num_agents or 1) for own in budgets]
    ordered = sorted(zip(budgets, caps, strict=True), key=lambda pair: float((1 / pair[1]).sum()))
    least = ordered[0][1]
    return tuple(
        SamplingCost(
            own,
            noise_std=1 / np.sqrt(cap),
            variance_ratio=float((1 / cap).sum() / (1 / least).sum()),
            epsilon_at_least=_account_each(own, least),
        )
        for own, cap in ordered
    )


def _with_sampling(budget: PrivacyBudget, sampling: Sampling) -> PrivacyBudget | None:
    """Return the same promise with another sampling; None if that cannot be counted."""
    if budget.unit == "agent" and sampling != "every-step":
        return None
    samples = budget.samples_per_agent
    if samples is None and budget.sampling_rate is not None:
        # The fewest samples for which batches of this size have at most this rate.
        fewest = tuple(promise.query.least_samples for promise in budget.promises)
        samples = fewest if budget.num_agents else fewest[0]
    if samples is None and sampling != "every-step":
        return None
    is_own = sampling == budget.sampling
    try:
        return replace(
            budget,
            # The paper's bounds do not cover sampling, and would not compare with what does.
            accounting="gdp",
            sampling=sampling,
            sampling_rate=budget.sampling_rate if is_own else None,
            samples_per_agent=budget.samples_per_agent if is_own else samples,
        )
    except InvalidArgumentError:
        # Numerical accounting needs δ within a range; the budget itself was already accepted.
        if is_own:
            raise
        return None


def _account_each(budget: PrivacyBudget, caps: Sequence[float] | FloatArray) -> FloatArray:
    """Return each agent's ε with noise at these caps, whatever it is promised."""
    found: dict[tuple[float, object], float] = {}
    for cap, promise in zip(caps, budget.promises, strict=True):
        if (cap, promise) not in found:
            loss = account_precision([cap], promise.query, num_steps=budget.num_steps)
            found[cap, promise] = float(loss.epsilon(promise.delta)[0])
    return np.array([found[key] for key in zip(caps, budget.promises, strict=True)])
