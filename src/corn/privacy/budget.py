"""The privacy budget of a run, and the largest [R⁻¹]_ii of each agent that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from corn.arrays import FloatArray
from corn.checks import require, require_count, require_length
from corn.errors import InvalidArgumentError
from corn.privacy import subsampling
from corn.privacy.accountants import Accounting, find_accountant, require_exact, warn_if_unproved
from corn.privacy.query import (
    Adjacency,
    ClippedQuery,
    Sampling,
    Unit,
    choose_sampling,
    describe_queries,
    describe_range,
)
from corn.privacy.rounding import write_range_exactly

# Beyond these no promise has a meaning, and arithmetic would not be exact.
LARGEST_EPSILON = 1e9
_MOST_STEPS = 10**15
_MOST_SAMPLES = 10**15

# Sizes within this factor of the least count as the least.
_SAME_SIZE = 1.02

# The fields that may have a value for each agent.
_PER_AGENT = ("epsilon", "delta", "sampling_rate", "samples_per_agent")


class AgentPromise(NamedTuple):
    """Promise to one agent, and the query that it is made for."""

    epsilon: float
    delta: float
    query: ClippedQuery


@dataclass(frozen=True)
class PrivacyBudget:
    """A promise of (ε, δ) for a run of ``num_steps`` steps and a unit of data (``ClippedQuery``).

    Against an adversary who observes every message, a run with noise of covariance R, drawn afresh
    at each step, keeps the promise for agent i if [R⁻¹]_ii ≤ ``precision_caps(n)[i]``. With exact
    accounting this is also necessary, except that the secret order of passes is counted as known.

    ``epsilon`` and ``delta`` are one number for all agents, or a tuple with one for each agent.
    So are the two that describe how agents sample (unit ``"sample"`` only):

    - ``sampling_rate``: for ``sampling="poisson"``, the largest probability that a sample is in a
      batch.
    - ``samples_per_agent``: the public number of samples m that each agent declares, instead of a
      rate: Poisson sampling then has the rate B/m (at most 1), passes have ⌊m/B⌋ batches. The
      number that an agent really has changes neither, only how full its batches are.

    ``accounting``: ``"gdp"`` is exact; ``"rdp"`` inverts the paper's Theorem 2; ``"paper"`` is its
    eq. (13b), which wastes noise for small ε and warns where it is not proved. Under Poisson
    sampling only ``"gdp"`` is accepted: the composition is then computed numerically, by privacy
    loss distributions, because the paper has no bound for it.

    >>> budget = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=5000, clip=0.1)
    >>> budget.sensitivity, round(budget.mu, 6), round(budget.precision_cap, 7)
    (0.2, 2.000446, 0.0200089)
    >>> print(budget.describe())
    ε = 10, δ = 1e-05 over 5000 steps for one agent's whole data set (its mini-batch gradient
    is clipped once to 0.1; replace-one adjacency; exact Gaussian DP)
    >>> strict = PrivacyBudget((1, 10), 1e-5, num_steps=5000, clip=0.1)
    >>> strict.of_agent(1) == budget, strict.precision_caps(2).round(7)
    (True, array([0.0003593, 0.0200089]))
    """

    epsilon: float | tuple[float, ...]
    delta: float | tuple[float, ...]
    num_steps: int
    clip: float
    unit: Unit = "agent"
    accounting: Accounting = "gdp"
    adjacency: Adjacency = "replace"
    batch_size: int | None = None
    sampling: Sampling | None = None
    sampling_rate: float | tuple[float, ...] | None = None
    samples_per_agent: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in _PER_AGENT:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                raise InvalidArgumentError(
                    f"{name} must be a number or a tuple with one for each agent, found a mapping: "
                    "corn.privacy.order_promises puts it in the order of agents"
                )
            if isinstance(value, list | np.ndarray):
                object.__setattr__(self, name, tuple(np.asarray(value).tolist()))
        object.__setattr__(self, "sampling", choose_sampling(self.unit, self.sampling))
        require_count("num_steps", self.num_steps, most=_MOST_STEPS)
        find_accountant(self.accounting)
        self._check_sampling()
        # Making the queries checks clip, adjacency, batch size and sampling rates.
        for promise in dict.fromkeys(self.promises):
            _check_promise(promise)
            if promise.query.is_subsampled:
                require_exact(self.accounting)
                subsampling.require_meaningful(
                    promise.delta, num_steps=self.num_steps, query=promise.query
                )
            if self.accounting == "paper":
                warn_if_unproved(promise.epsilon, promise.delta, stacklevel=3)

    @classmethod
    def for_sizes(cls, sizes: Sequence[int], **fields: Any) -> PrivacyBudget:
        """Make a budget for data sets of these sizes, from which the sampling follows.

        The unit is ``"sample"``; ``fields`` are the others of a budget. See ``fit_sampling``. Where
        neighbouring data sets differ in size, sizes are private, and refused: a budget is public.

        >>> promise = {"epsilon": 1, "delta": 1e-5, "num_steps": 500, "clip": 1, "batch_size": 10}
        >>> PrivacyBudget.for_sizes([80, 120], **promise).query.sampling_rate
        0.1
        """
        size: Any = fields.get("batch_size")
        require(size is not None, "batch_size", "given for unit='sample'", size)
        rate, samples = fit_sampling(sizes, size, fields.get("sampling"))
        budget = cls(**fields, unit="sample", sampling_rate=rate, samples_per_agent=samples)
        if budget.adjacency == "add-remove" and budget.sampling == "poisson":
            raise InvalidArgumentError(
                "adjacency must be 'replace' for a rate from the data's sizes, found 'add-remove', "
                "under which sizes are private: give a public number as samples_per_agent"
            )
        return budget

    @property
    def num_agents(self) -> int | None:
        """The number of agents that some field has values for; None if all have one for all."""
        values = (getattr(self, name) for name in _PER_AGENT)
        return next((len(value) for value in values if isinstance(value, tuple)), None)

    @cached_property
    def promises(self) -> tuple[AgentPromise, ...]:
        """The promise of each agent, or one for all agents if ``num_agents`` is None."""
        return tuple(
            AgentPromise(epsilon, delta, self._make_query(rate, samples))
            for epsilon, delta, rate, samples in zip(*self._columns(), strict=True)
        )

    @property
    def queries(self) -> tuple[ClippedQuery, ...]:
        """The query of each agent, or one for all agents if ``num_agents`` is None."""
        return tuple(promise.query for promise in self.promises)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all agents have the same promise, sampling included."""
        return len(set(self.promises)) == 1

    def of_agent(self, agent: int) -> PrivacyBudget:
        """Return the budget of one agent, in which every field has one value."""
        if self.num_agents is None:
            return self
        require(0 <= agent < self.num_agents, "agent", f"below {self.num_agents}", agent)
        values = {name: getattr(self, name) for name in _PER_AGENT}
        own = {name: v[agent] if isinstance(v, tuple) else v for name, v in values.items()}
        return replace(self, **own)

    @property
    def promise(self) -> AgentPromise:
        """The promise that all agents have; raises if they differ."""
        if not self.is_uniform:
            raise InvalidArgumentError(
                "this budget has different promises or samplings for different agents, so it has "
                "no single one: use of_agent(i) for agent i, or precision_caps for all"
            )
        return self.promises[0]

    @property
    def query(self) -> ClippedQuery:
        """The clipped gradient that each agent releases at each step; raises if they differ."""
        return self.promise.query

    @property
    def sensitivity(self) -> float:
        """Δ: the largest distance between the releases of neighbouring data sets at one step."""
        # Agents can differ in sampling, which does not change it.
        return self.promises[0].query.sensitivity

    @cached_property
    def mu(self) -> float:
        """The Gaussian-DP parameter of the whole run when every [R⁻¹]_ii is at the cap.

        Raises ``InvalidArgumentError`` for a subsampled budget: no single μ describes such a run.
        """
        promise = self.promise
        if promise.query.is_subsampled:
            raise InvalidArgumentError(
                f"mu is not defined with sampling_rate={promise.query.sampling_rate:g}: no single "
                "μ describes a subsampled run; use precision_cap"
            )
        return self._mu_of(promise)

    @property
    def precision_cap(self) -> float:
        """b: the largest [R⁻¹]_ii that the budget allows, μ²/(Δ²K) for K participations.

        Rounded down: accounting for a run at the cap gives an ε of at most ``epsilon``. Raises if
        agents have different promises: see ``precision_caps``.
        """
        return self._caps[self.promise]

    def precision_caps(self, num_agents: int) -> FloatArray:
        """Return the largest [R⁻¹]_ii of each agent, shape (n,); see ``precision_cap``."""
        return self._each(num_agents, lambda promise: self._caps[promise])

    def epsilons(self, num_agents: int) -> FloatArray:
        """Return the ε promised to each agent, shape (n,)."""
        return self._each(num_agents, lambda promise: promise.epsilon)

    def deltas(self, num_agents: int) -> FloatArray:
        """Return the δ promised to each agent, shape (n,)."""
        return self._each(num_agents, lambda promise: promise.delta)

    @property
    def independent_noise_std(self) -> float:
        """The standard deviation of an agent that draws its noise alone (LDP): 1/√b."""
        return 1 / math.sqrt(self.precision_cap)

    def describe(self) -> str:
        """Return one line with the promise, the protected data, the sampling and the accounting."""
        steps = f"{self.num_steps} step" + ("s" if self.num_steps > 1 else "")
        queries = [promise.query for promise in self.promises]
        counted = find_accountant(self.accounting).description
        if any(query.is_subsampled for query in queries):
            counted = "privacy loss distributions"
        if self.sampling == "passes":
            most = describe_range([query.participations(self.num_steps) for query in queries])
            counted = f"{counted} of at most {most} steps with a sample"
        epsilon = write_range_exactly([promise.epsilon for promise in self.promises])
        delta = write_range_exactly([promise.delta for promise in self.promises])
        is_common = len({(promise.epsilon, promise.delta) for promise in self.promises}) == 1
        whose = "" if is_common else ", each agent with its own,"
        promise = f"ε = {epsilon}, δ = {delta}{whose} over {steps}"
        return f"{promise} for {queries[0].protects} ({describe_queries(queries)}; {counted})"

    @cached_property
    def _caps(self) -> dict[AgentPromise, float]:
        # Calibration under Poisson sampling takes a second: once for each distinct promise.
        return {promise: self._find_cap(promise) for promise in dict.fromkeys(self.promises)}

    def _find_cap(self, promise: AgentPromise) -> float:
        query, steps = promise.query, self.num_steps
        if query.is_subsampled:
            return subsampling.calibrate_precision(
                promise.epsilon, promise.delta, num_steps=steps, query=query
            )
        ratio = self._mu_of(promise) / query.sensitivity
        return ratio * ratio / query.participations(steps)

    def _mu_of(self, promise: AgentPromise) -> float:
        return find_accountant(self.accounting).mu_from(promise.epsilon, promise.delta)

    def _each(self, num_agents: int, value_of: Callable[[AgentPromise], float]) -> FloatArray:
        values = [value_of(promise) for promise in self.promises]
        if self.num_agents is None:
            return np.full(num_agents, values[0], dtype=np.float64)
        require_length("promises of the budget", len(values), num_agents, per="agent")
        return np.array(values, dtype=np.float64)

    def _columns(self) -> list[tuple[float, ...]]:
        """Return ε, δ, rates and samples, with one value for each agent, or a single one."""
        count = self.num_agents or 1
        values = [getattr(self, name) for name in _PER_AGENT]
        return [value if isinstance(value, tuple) else (value,) * count for value in values]

    def _make_query(self, rate: float | None, samples: float | None) -> ClippedQuery:
        size, steps_per_pass = self.batch_size, None
        if size is not None and samples is not None:
            if self.sampling == "poisson":
                rate = min(1.0, size / samples)
            elif self.sampling == "passes":
                # An agent with less than one batch uses all its samples at every step.
                steps_per_pass = max(1, int(samples) // size)
        return ClippedQuery(
            self.clip,
            unit=self.unit,
            adjacency=self.adjacency,
            batch_size=size,
            sampling=self.sampling,
            sampling_rate=rate,
            steps_per_pass=steps_per_pass,
        )

    def _check_sampling(self) -> None:
        """Check the fields that may differ between agents, and that the sampling has its number."""
        for name in _PER_AGENT:
            value = getattr(self, name)
            if isinstance(value, tuple):
                require(len(value) > 0, name, "a number or one for each agent", value)
                require_length(name, len(value), self.num_agents or 0, per="agent")
        rate, samples = self.sampling_rate, self.samples_per_agent
        for count in samples if isinstance(samples, tuple) else (samples,):
            if count is not None:
                require_count("samples_per_agent", count, most=_MOST_SAMPLES)
        if self.batch_size is None:
            # The query refuses a rate, and a missing batch size; samples never reach it.
            is_allowed = samples is None or self.unit == "sample"
            require(is_allowed, "samples_per_agent", "None for unit='agent'", samples)
            return
        require_count("batch_size", self.batch_size)
        if self.sampling == "poisson" and (rate is None) == (samples is None):
            found = "neither" if rate is None else "both"
            raise InvalidArgumentError(
                "sampling='poisson' needs either sampling_rate or samples_per_agent, found "
                f"{found}: {_SAMPLINGS}"
            )
        if self.sampling == "passes" and samples is None:
            raise InvalidArgumentError(
                f"sampling='passes' needs samples_per_agent, found None: {_SAMPLINGS}"
            )


def fit_sampling(
    sizes: Sequence[int], batch_size: int, sampling: Sampling | None
) -> tuple[float | None, int | tuple[int, ...] | None]:
    """Return the sampling rate, or else the samples per agent, for data sets of these sizes.

    Poisson sampling has one rate, at which an agent of average size draws ``batch_size`` samples.
    The largest rate decides how much noise all agents add, so a higher rate for a small agent would
    cost all others. At the common rate, an agent's batches are in proportion to its samples.
    Passes are counted for each agent; sizes within 2 % of each other count as the least.

    >>> fit_sampling([80, 120], 10, "poisson")
    (0.1, None)
    >>> fit_sampling([1000, 1020], 10, "passes"), fit_sampling([1000, 1021], 10, "passes")
    ((None, 1000), (None, (1000, 1021)))
    """
    require(len(sizes) > 0, "sizes", "one number for each agent", "none")
    if choose_sampling("sample", sampling) == "poisson":
        return min(1.0, batch_size * len(sizes) / sum(sizes)), None
    least = min(sizes)
    is_same = max(sizes) <= _SAME_SIZE * least
    return None, least if is_same else tuple(sizes)


_SAMPLINGS = (
    "give a public number of samples of an agent as samples_per_agent, or sampling_rate "
    "with sampling='poisson'; sampling is 'poisson' (each sample by a coin, the least noise), "
    "'passes' (batches of fixed size, a sample counts once for each pass) or 'every-step' (a "
    "sample counts at every step, the most noise; needs no number)"
)


def _check_promise(promise: AgentPromise) -> None:
    require(
        0 < promise.epsilon <= LARGEST_EPSILON,
        "epsilon",
        f"positive, at most {LARGEST_EPSILON:g}",
        promise.epsilon,
        advice="try 1 to 10",
    )
    require(
        0 < promise.delta < 1,
        "delta",
        "in (0, 1)",
        promise.delta,
        advice="try 1e-5, or less than one over the number of people",
    )
