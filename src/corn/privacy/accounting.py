"""Privacy of given noise: ε(δ), δ(ε) and whole curves, for each agent and for the worst."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from corn.arrays import FloatArray
from corn.checks import require_count, require_fraction, require_length
from corn.errors import InvalidArgumentError
from corn.privacy import gaussian, subsampling
from corn.privacy.accountants import (
    Accounting,
    find_accountant,
    is_proved,
    require_exact,
    warn_if_unproved,
)
from corn.privacy.budget import AgentPromise, PrivacyBudget
from corn.privacy.precision import precision_diagonal
from corn.privacy.query import ClippedQuery


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
