"""The privacy budget of a run: queries, promises, and the largest [R⁻¹]_ii that keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from corn.checks import (
    FloatArray,
    is_number,
    require,
    require_choice,
    require_count,
    require_in_range,
    require_length,
)
from corn.errors import InvalidArgumentError
from corn.privacy import subsampling
from corn.privacy.gaussian import Accounting, find_accountant, require_exact, warn_if_unproved
from corn.privacy.rounding import write_exactly, write_range

Unit: TypeAlias = Literal["agent", "sample"]
Adjacency: TypeAlias = Literal["replace", "add-remove"]
Relation: TypeAlias = Literal["replace-one", "add-or-remove-one", "zero-out"]
Sampling: TypeAlias = Literal["poisson", "passes", "every-step"]

# The data that a unit protects, in words.
PROTECTED: dict[Unit, str] = {
    "agent": "one agent's whole data set",
    "sample": "one sample of one agent",
}
MOST_SAMPLES = 16.0  # that an agent may have, as a multiple of batch_size/sampling_rate
# Beyond these, squares of gradients leave single precision: norms would come out as 0 or ∞.
_SMALLEST_CLIP, _LARGEST_CLIP = 1e-15, 1e15
_LARGEST_BATCH = 10**12


@dataclass(frozen=True)
class ClippedQuery:
    """A clipped gradient, as one agent releases it (with noise) at every step.

    ``unit`` states whose data is protected, and so what must be clipped:

    - ``"agent"``: one agent's whole data set. Its mini-batch gradient is clipped **once** to norm
      ``clip``. Clipping each sample does not give this unit, however the samples are averaged.
    - ``"sample"``: one sample of one agent. **Each** sample's gradient is clipped, and their sum
      divided by ``batch_size``, the fixed divisor: never by the number of samples in the batch.

    ``sampling`` states which steps may use one sample:

    - ``"poisson"`` (the default for samples): each sample is in a batch with probability
      ``sampling_rate``, independently, by secret coins. ``batch_size`` is the *expected* size.
    - ``"passes"``: passes of ``steps_per_pass`` batches with ``batch_size`` slots each, filled in a
      new secret order. A sample is in at most one batch of a pass.
    - ``"every-step"``: a sample may be in every batch. The only one for unit ``"agent"``.

    ``adjacency`` defines neighbouring data sets: ``"replace"`` (the unit's data becomes any other)
    or ``"add-remove"`` (its gradient is present, or is zero). Under Poisson sampling the latter is
    adding or removing one sample; with batches of fixed size and for agents it is known as
    zero-out.
    """

    clip: float
    unit: Unit = "agent"
    adjacency: Adjacency = "replace"
    batch_size: int | None = None
    sampling: Sampling | None = None
    sampling_rate: float | None = None
    steps_per_pass: int | None = None

    def __post_init__(self) -> None:
        require_in_range("clip", self.clip, _SMALLEST_CLIP, _LARGEST_CLIP, advice="try 0.1")
        object.__setattr__(self, "sampling", choose_sampling(self.unit, self.sampling))
        require_choice("adjacency", self.adjacency, get_args(Adjacency))
        # A number that is not used would be ignored in silence. An agent's mean over the batch is
        # clipped as a whole: its norm is at most C for any batch size, and all of it may change
        # with the agent's data, so that Δ must not be divided by the batch size.
        needed = {
            "batch_size": self.unit == "sample",
            "sampling_rate": self.sampling == "poisson",
            "steps_per_pass": self.sampling == "passes",
        }
        where = f"for unit={self.unit!r} and sampling={self.sampling!r}"
        advice = "if each sample is clipped, use unit='sample'" * (self.unit == "agent")
        for name, is_needed in needed.items():
            found, rule = getattr(self, name), f"{'given' if is_needed else 'None'} {where}"
            require((found is not None) == is_needed, name, rule, found, advice=advice)
        for name, most in (("batch_size", _LARGEST_BATCH), ("steps_per_pass", _MOST_DECLARED)):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), most=most)
        rate = self.sampling_rate
        if rate is not None:
            require(0 < rate <= 1, "sampling_rate", "in (0, 1]", rate, advice="it is B/m")

    @property
    def contribution(self) -> float:
        """The largest norm of the unit's part of the release: C, or C/B for a sample."""
        return self.clip if self.batch_size is None else self.clip / self.batch_size

    @property
    def sensitivity(self) -> float:
        """Δ: the largest distance between the releases of neighbouring data sets."""
        return 2 * self.contribution if self.adjacency == "replace" else self.contribution

    @property
    def largest_norm(self) -> float:
        """The largest norm of one agent's gradient before noise.

        Under Poisson sampling all of an agent's samples, up to MOST_SAMPLES·B/p, may be in a batch.
        """
        if self.sampling_rate is None:
            return self.clip
        # Up to MOST_SAMPLES·B/p samples of norm C each, divided by B.
        return MOST_SAMPLES * self.clip / self.sampling_rate

    @property
    def is_subsampled(self) -> bool:
        """Whether Poisson sampling amplifies privacy; a rate of 1 uses all data and does not."""
        return self.sampling_rate is not None and self.sampling_rate < 1

    @property
    def least_samples(self) -> int:
        """The fewest samples with which an agent's batches have their planned size, on average."""
        if self.batch_size is None:
            return 1
        if self.steps_per_pass is not None:
            return self.batch_size * self.steps_per_pass if self.steps_per_pass > 1 else 1
        if not self.is_subsampled or self.sampling_rate is None:
            return 1
        least = math.ceil(self.batch_size / self.sampling_rate)
        # Division rounds: the rate that was computed from m samples must accept m samples.
        fewer = max(least - 1, 1)
        return fewer if self.batch_size / fewer <= self.sampling_rate else least

    def require_mu(self) -> None:
        """Raise if no single μ describes a run."""
        if self.is_subsampled:
            raise InvalidArgumentError(
                f"mu is not defined with sampling_rate={self.sampling_rate:g}: no single μ "
                "describes a subsampled run; use epsilon, delta or precision_cap"
            )

    def participations(self, num_steps: int) -> int:
        """Return the most steps of a run that use the unit's data: all, or one for each pass begun.

        >>> every_21 = {"batch_size": 128, "sampling": "passes", "steps_per_pass": 21}
        >>> ClippedQuery(1, unit="sample", **every_21).participations(1000)
        48
        """
        return -(-num_steps // (self.steps_per_pass or 1))

    @property
    def protects(self) -> str:
        """The data that the noise protects, in words."""
        return PROTECTED[self.unit]

    @property
    def relation(self) -> Relation:
        """The adjacency in words."""
        if self.adjacency == "replace":
            return "replace-one"
        return "add-or-remove-one" if self.sampling == "poisson" else "zero-out"

    @property
    def recipe(self) -> str:
        """The clipping, the sampling and the adjacency, in words."""
        return describe_queries([self])


def choose_sampling(unit: Unit, sampling: Sampling | None) -> Sampling:
    """Return the sampling, or the default of the unit: Poisson for samples."""
    require_choice("unit", unit, get_args(Unit))
    if sampling is None:
        return "every-step" if unit == "agent" else "poisson"
    require_choice("sampling", sampling, get_args(Sampling))
    if unit == "agent":
        rule, advice = "'every-step' for unit='agent'", "to protect samples, use unit='sample'"
        require(sampling == "every-step", "sampling", rule, repr(sampling), advice=advice)
    return sampling


def describe_queries(queries: Sequence[ClippedQuery]) -> str:
    """Return clipping, sampling and adjacency in words; the queries differ in sampling at most."""
    query = queries[0]
    clipping = f"each sample's gradient is clipped to {write_exactly(query.clip)}"
    batches = f"{clipping} and averaged over batches of {query.batch_size}"
    rates = write_range([q.sampling_rate or 1.0 for q in queries], "{:.6g}".format)
    lengths = write_range([q.steps_per_pass or 1 for q in queries], "{:.12g}".format)
    recipe = {
        "poisson": f"{clipping}, taken with probability {rates} (Poisson sampling), and the sum "
        f"divided by {query.batch_size}",
        "passes": f"{batches}, each once in a pass of {lengths} batches in a new secret order",
        "every-step": f"{batches}, of which each may have the sample",
    }[query.sampling or "every-step"]
    if query.unit == "agent":
        recipe = f"its mini-batch gradient is clipped once to {write_exactly(query.clip)}"
    # Printed beside every ε: under zero-out, Δ and with it μ are half of those of replace-one.
    return f"{recipe}; {query.relation} adjacency"


def describe_adversary(max_colluders: int) -> str:
    """Return an adversary in words, to stand next to every ε."""
    if max_colluders == 0:
        return "an eavesdropper who sees every message but knows no seed"
    insiders = describe_insiders(max_colluders)
    return f"an eavesdropper together with {insiders}, who know every seed they share"


def describe_insiders(count: int) -> str:
    """Return a number of insiders in words."""
    return {0: "no insider", 1: "one insider"}.get(count, f"{count} insiders")


# Beyond these no promise has a meaning, and arithmetic would not be exact.
LARGEST_EPSILON = 1e9
_MOST_STEPS = 10**15
_LARGEST_WHOLE = 2**53
_MOST_DECLARED = 10**15
_SAME_SIZE = 1.02  # sizes within this factor of the least count as the least
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
    >>> round(budget.mu, 6), round(budget.precision_cap, 7)
    (2.000446, 0.0200089)
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
        for name in ("clip", *_PER_AGENT):
            value = getattr(self, name)
            if isinstance(value, list | np.ndarray):
                value = tuple(np.asarray(value).tolist())
            rule = "a number or a tuple with one for each agent, in their order"
            require(not isinstance(value, Mapping), name, rule, repr(value))
            # 5 and 5.0 are one promise, whose plans must have one fingerprint.
            if name != "samples_per_agent":
                is_one = not isinstance(value, tuple)
                value = _as_float(value) if is_one else tuple(map(_as_float, value))
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sampling", choose_sampling(self.unit, self.sampling))
        require_count("num_steps", self.num_steps, most=_MOST_STEPS)
        if self.batch_size is not None:
            require_count("batch_size", self.batch_size)
        find_accountant(self.accounting)
        self._check_fields()
        # Making the queries checks clip, adjacency, batch size and sampling rates.
        for epsilon, delta, query in dict.fromkeys(self.promises):
            rule = f"positive, at most {LARGEST_EPSILON:g}"
            for name, value in (("epsilon", epsilon), ("delta", delta)):
                require(is_number(value), name, "a number", repr(value))
            require(0 < epsilon <= LARGEST_EPSILON, "epsilon", rule, epsilon, advice="try 1 to 10")
            require(0 < delta < 1, "delta", "in (0, 1)", delta, advice="try 1e-5")
            if query.is_subsampled:
                require_exact(self.accounting)
                subsampling.require_meaningful(delta, num_steps=self.num_steps, query=query)
            if self.accounting == "paper":
                warn_if_unproved(epsilon, delta, stacklevel=3)

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
        is_public = budget.adjacency == "replace" or budget.sampling != "poisson"
        rule, advice = "'replace' for a rate from sizes", "give a public samples_per_agent"
        require(is_public, "adjacency", rule, repr(budget.adjacency), advice=advice)
        return budget

    @property
    def num_agents(self) -> int | None:
        """The number of agents that some field has values for; None if all have one for all."""
        values = (getattr(self, name) for name in _PER_AGENT)
        return next((len(value) for value in values if isinstance(value, tuple)), None)

    @cached_property
    def promises(self) -> tuple[AgentPromise, ...]:
        """The promise of each agent, or one for all agents if ``num_agents`` is None."""
        values = [getattr(self, name) for name in _PER_AGENT]
        columns = [v if isinstance(v, tuple) else (v,) * (self.num_agents or 1) for v in values]
        return tuple(
            AgentPromise(epsilon, delta, self._make_query(rate, samples))
            for epsilon, delta, rate, samples in zip(*columns, strict=True)
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
        require_in_range("agent", agent, 0, self.num_agents - 1)
        values = {name: getattr(self, name) for name in _PER_AGENT}
        return replace(self, **{k: v[agent] for k, v in values.items() if isinstance(v, tuple)})

    @property
    def promise(self) -> AgentPromise:
        """The promise that all agents have; raises if they differ."""
        rule = "one promise and sampling for all agents here"
        require(self.is_uniform, "budget", rule, "several", advice="use of_agent(i)")
        return self.promises[0]

    @property
    def query(self) -> ClippedQuery:
        """The clipped gradient that each agent releases at each step; raises if they differ."""
        return self.promise.query

    @cached_property
    def mu(self) -> float:
        """The Gaussian-DP parameter of the whole run when every [R⁻¹]_ii is at the cap."""
        epsilon, delta, query = self.promise
        query.require_mu()
        return find_accountant(self.accounting).mu_from(epsilon, delta)

    @property
    def precision_cap(self) -> float:
        """b: the largest [R⁻¹]_ii that the budget allows, μ²/(Δ²K) for K participations.

        It is rounded down. Raises if agents have different promises: see ``precision_caps``.
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
        steps = f"{self.num_steps} step{'s' * (self.num_steps > 1)}"
        epsilons, deltas, queries = zip(*self.promises, strict=True)
        counted = find_accountant(self.accounting).description
        if any(query.is_subsampled for query in queries):
            counted = "privacy loss distributions"
        if self.sampling == "passes":
            uses = [query.participations(self.num_steps) for query in queries]
            most = write_range(uses, "{:.12g}".format)
            counted = f"{counted} of at most {most} steps with a sample"
        is_one = len(set(zip(epsilons, deltas, strict=True))) == 1
        whose = "" if is_one else ", each agent with its own,"
        promise = f"ε = {write_range(epsilons)}, δ = {write_range(deltas)}{whose} over {steps}"
        return f"{promise} for {queries[0].protects} ({describe_queries(queries)}; {counted})"

    @cached_property
    def _caps(self) -> dict[AgentPromise, float]:
        caps: dict[AgentPromise, float] = {}
        steps = self.num_steps
        # Calibration under Poisson sampling takes a second: once for each distinct promise.
        for epsilon, delta, query in dict.fromkeys(self.promises):
            if query.is_subsampled:
                cap = subsampling.calibrate_precision(epsilon, delta, num_steps=steps, query=query)
            else:
                mu = find_accountant(self.accounting).mu_from(epsilon, delta)
                ratio = mu / query.sensitivity
                cap = ratio * ratio / query.participations(steps)
            caps[AgentPromise(epsilon, delta, query)] = cap
        return caps

    def _each(self, num_agents: int, value_of: Callable[[AgentPromise], float]) -> FloatArray:
        values = [value_of(promise) for promise in self.promises]
        if self.num_agents is None:
            values *= num_agents
        require_length("promises of the budget", len(values), num_agents, per="agent")
        return np.array(values, dtype=np.float64)

    def _make_query(self, rate: float | None, samples: float | None) -> ClippedQuery:
        size = self.batch_size
        steps_per_pass = None
        if size is not None and samples is not None:
            if self.sampling == "poisson":
                rate = min(1.0, size / samples)
            elif self.sampling == "passes":
                # An agent with less than one batch uses all its samples at every step.
                steps_per_pass = max(1, int(samples) // size)
        return ClippedQuery(
            self.clip, self.unit, self.adjacency, size, self.sampling, rate, steps_per_pass
        )

    def _check_fields(self) -> None:
        """Check the fields that may differ between agents, and that the sampling has its number."""
        for name in _PER_AGENT:
            value = getattr(self, name)
            if isinstance(value, tuple):
                require(len(value) > 0, name, "a number or one for each agent", value)
                require_length(name, len(value), self.num_agents or 0, per="agent")
        samples = self.samples_per_agent
        for count in samples if isinstance(samples, tuple) else (samples,):
            if count is not None:
                require_count("samples_per_agent", count, most=_MOST_DECLARED)
        if self.unit == "agent":
            require(samples is None, "samples_per_agent", "None for unit='agent'", samples)
        # Beside samples, a rate would be ignored; without both, nothing is known of the sampling.
        given = [name for name in _PER_AGENT[2:] if getattr(self, name) is not None]
        is_enough = samples is not None or self.sampling == "every-step"
        is_known = len(given) == 1 if self.sampling == "poisson" else is_enough
        if self.unit == "sample" and not is_known:
            raise InvalidArgumentError(
                f"sampling={self.sampling!r} needs samples_per_agent, which is public (poisson: or "
                f"sampling_rate), found {' and '.join(given) or 'neither'}; 'poisson' needs the "
                "least noise, 'passes' more, and 'every-step' the most, but no number"
            )


def _as_float(value: Any) -> Any:
    """Return a whole number as a float; whatever is none is refused by later checks."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return float(value) if is_whole and abs(value) < _LARGEST_WHOLE else value


def fit_sampling(
    sizes: Sequence[int], batch_size: int, sampling: Sampling | None
) -> tuple[float | None, int | tuple[int, ...] | None]:
    """Return the sampling rate, or else the samples per agent, for data sets of these sizes.

    Poisson sampling has one rate, at which an agent of average size draws ``batch_size`` samples:
    the largest rate decides how much noise all agents add. Passes are counted for each agent; sizes
    within 2 % of each other count as the least.

    >>> fit_sampling([1000, 1020], 10, "passes"), fit_sampling([1000, 1021], 10, "passes")
    ((None, 1000), (None, (1000, 1021)))
    """
    rule = "a positive number for each agent"
    require(len(sizes) > 0 and min(sizes) > 0, "sizes", rule, list(sizes))
    if choose_sampling("sample", sampling) == "poisson":
        return min(1.0, batch_size * len(sizes) / sum(sizes)), None
    least = min(sizes)
    is_same = max(sizes) <= _SAME_SIZE * least
    return None, least if is_same else tuple(sizes)
