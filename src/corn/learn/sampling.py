"""Choice of samples for mini-batches: by whose random numbers, at which rates, from whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, final

import numpy as np
from scipy.special import bdtrik

from corn.arrays import FloatArray, IntArray
from corn.errors import InvalidArgumentError
from corn.noise.choices import COIN_BITS
from corn.privacy import ClippedQuery, PrivacyBudget
from corn.privacy.query import MOST_SAMPLES

# The first word of a seed, so that the two kinds of sampling never share random numbers.
_EPOCHS, _POISSON = 1, 2

# Batches wider than the usual width are this rare.
_RARE = 1e-9


class TooFewSamplesError(InvalidArgumentError):
    """An agent has fewer samples than its budget counts on."""


class Choices(Protocol):
    """A source of coins and orders: of a public seed, or ``SecretChoices`` where data is real."""

    def draw_coins(self, number: int, sizes: Sequence[int]) -> FloatArray:
        """Return one coin in [0, 1) for each sample of all agents, for the batches of a number."""

    def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
        """Return a permutation of an agent's samples for the pass of a number."""


@final
class SeededChoices:
    """Coins and orders that follow from a seed, for simulations: fast, and they protect nobody.

    Runs with equal seeds use the same batches (common random numbers), and a run that resumes uses
    those of an uninterrupted one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw_coins(self, number: int, sizes: Sequence[int]) -> FloatArray:
        """See ``Choices``."""
        # One draw for the samples of all agents: a generator for each would take longer.
        return np.random.default_rng([_POISSON, self._seed, number]).random(sum(sizes))

    def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
        """See ``Choices``."""
        return np.random.default_rng([_EPOCHS, self._seed, agent, number]).permutation(size)


def round_rate_down(rate: float) -> float:
    """Return the largest multiple of 2⁻⁵³, the unit of coins, that is at most ``rate``.

    A coin below it then has exactly this probability, never more than the rate that was counted.

    >>> round_rate_down(0.5), round_rate_down(0.1) <= 0.1
    (0.5, True)
    """
    # Powers of two scale exactly, so that ``floor`` is the only rounding, and it is downwards.
    return math.ldexp(math.floor(math.ldexp(rate, COIN_BITS)), -COIN_BITS)


def usual_width(num_samples: int, rate: float) -> int:
    """Return a number of samples that a Poisson batch exceeds once in 10⁹ steps; at least 1.

    >>> usual_width(2800, 128 / 2800), usual_width(5, 0.0)
    (199, 1)
    """
    # Without chance all samples are taken, or none.
    if not 0 < rate < 1:
        return max(1, round(rate * num_samples))
    # `scipy.stats` has this quantile too, but takes half a second of every agent's start.
    return max(1, math.ceil(float(bdtrik(1 - _RARE, num_samples, rate))))


def choose_rates(
    queries: tuple[ClippedQuery, ...], sizes: Sequence[int]
) -> tuple[float, ...] | None:
    """Return the rate of each agent under Poisson sampling, None under other samplings.

    ``queries`` are one for all agents, or one for each. The rate of a query is the largest that was
    counted. An agent with more samples than that rate was made for takes B/m, so that its batches
    have B samples on average. Under add-remove adjacency the number of samples is itself private,
    so all agents take the rate of the query.
    """
    if not queries or queries[0].sampling != "poisson":
        return None
    each = queries * len(sizes) if len(queries) == 1 else queries
    return tuple(_own_rate(query, size) for query, size in zip(each, sizes, strict=True))


def _own_rate(query: ClippedQuery, num_samples: int) -> float:
    counted = query.sampling_rate or 1.0
    if query.adjacency == "add-remove" or query.batch_size is None:
        return counted
    # Never above the rate that was counted: a smaller rate only adds privacy.
    return min(counted, query.batch_size / num_samples)


def require_fitting_samples(budget: PrivacyBudget, sizes: Sequence[int], *, first: int = 0) -> None:
    """Raise unless the agents have as many samples as the budget counts on, and not far more.

    Under Poisson sampling with add-remove adjacency fewer are accepted: the rate is then the
    budget's for any number, and a refusal would tell others a number that is private.

    ``first`` is the number of the first agent, for error messages.

    Raises:
        TooFewSamplesError: the sampling would not be the one that was counted.
    """
    count = len(sizes)
    promises = budget.promises * count if budget.num_agents is None else budget.promises
    planned = budget.samples_per_agent
    samples = planned if isinstance(planned, tuple) else (planned,) * count
    for agent, (size, promise, least) in enumerate(
        zip(sizes, promises, samples, strict=True), start=first
    ):
        # Passes are counted in whole batches: leftover samples may be missing.
        if budget.sampling == "passes":
            least = promise.query.least_samples
        elif budget.adjacency == "add-remove":
            least = None
        if least is not None and size < least:
            raise TooFewSamplesError(
                f"samples of agent {agent} must be at least {least:,}, on which its budget counts, "
                f"found {size:,}: count on {size} samples per agent"
            )
        _require_few(promise.query, size, agent)


def _require_few(query: ClippedQuery, size: int, agent: int) -> None:
    """Raise for more samples than the bound on floating-point errors covers."""
    if query.sampling_rate is None or query.batch_size is None:
        return
    # The bound that ``ClippedQuery.largest_norm`` and ``BatchSampler`` count on.
    most = int(MOST_SAMPLES * query.batch_size / query.sampling_rate)
    if size > most:
        raise InvalidArgumentError(
            f"samples must be at most {most:,} with a batch size of {query.batch_size} and a "
            f"sampling rate of {query.sampling_rate:g}, found {size:,} of agent {agent}: raise "
            "the batch size"
        )
