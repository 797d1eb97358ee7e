"""Choice of samples for mini-batches: by whose random numbers, at which rates, from whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, final

import numpy as np
from scipy.special import pdtrc

from corn.arrays import FloatArray, IntArray
from corn.errors import InvalidArgumentError
from corn.noise.choices import COIN_BITS
from corn.privacy import ClippedQuery, PrivacyBudget
from corn.privacy.budget import MOST_SAMPLES
from corn.privacy.rounding import write_exactly

# The first word of a seed, so that the kinds of choices never share random numbers.
_EPOCHS, _POISSON, _POSITIONS = 1, 2, 3

# Batches wider than the public width are this rare, where an agent has as many samples as its plan
# counts on.
_RARE = 1e-12

# An agent's owner is told where batches have less than this part of the planned size.
_SMALL = 0.5
# Owners hear of batches that exceed the public width more often than this.
_NOTED = 1e-6


class Choices(Protocol):
    """A source of random choices: of a public seed, or ``SecretChoices`` where data is real."""

    def draw_coins(self, number: int, sizes: Sequence[int]) -> FloatArray:
        """Return one coin in [0, 1) for each sample of all agents, for the batches of a number."""

    def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
        """Return a permutation of an agent's samples for the pass of a number."""

    def draw_positions(self, agent: int, number: int, *, size: int) -> IntArray:
        """Return a permutation of the positions in an agent's batch of a number."""


@final
class SeededChoices:
    """Choices that follow from a seed, for simulations: fast, and they protect nobody.

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

    def draw_positions(self, agent: int, number: int, *, size: int) -> IntArray:
        """See ``Choices``."""
        return np.random.default_rng([_POSITIONS, self._seed, agent, number]).permutation(size)


def round_rate_down(rate: float) -> float:
    """Return the largest multiple of 2⁻⁵³, the unit of coins, that is at most ``rate``.

    A coin below it then has exactly this probability, never more than the rate that was counted.

    >>> round_rate_down(0.5), round_rate_down(0.1) <= 0.1
    (0.5, True)
    """
    # Powers of two scale exactly, so that ``floor`` is the only rounding, and it is downwards.
    return math.ldexp(math.floor(math.ldexp(rate, COIN_BITS)), -COIN_BITS)


def public_width(batch_size: int) -> int:
    """Return a number of samples that a Poisson batch of this expected size rarely exceeds.

    It follows from the batch size alone, which is public. For any number of samples with this
    expected batch, the tail of the binomial is below that of the Poisson law used here (Anderson
    and Samuels 1967), so a batch exceeds the width with a probability of at most 10⁻¹².

    >>> public_width(128), public_width(1)
    (215, 14)
    """
    # The width at which the normal law would stop, then as far as the exact tail asks.
    width = batch_size + int(6 * math.sqrt(batch_size))
    while pdtrc(width, batch_size) > _RARE:
        width += 1
    return width


def require_fitting_samples(budget: PrivacyBudget, sizes: Sequence[int], *, first: int = 0) -> None:
    """Raise for more samples than the bound on floating-point errors covers.

    Fewer samples than the budget counts on are accepted: sampling follows from the plan alone, so
    batches are smaller and the guarantee is the same. ``first`` is the number of the first agent,
    for error messages.
    """
    queries = budget.queries * len(sizes) if budget.num_agents is None else budget.queries
    for agent, (query, size) in enumerate(zip(queries, sizes, strict=True), start=first):
        if query.sampling_rate is None or query.batch_size is None:
            continue
        # The bound that ``ClippedQuery.largest_norm`` and ``BatchSampler`` count on.
        most = int(MOST_SAMPLES * query.batch_size / query.sampling_rate)
        if size > most:
            raise InvalidArgumentError(
                f"samples must be at most {most:,} with a batch size of {query.batch_size} and a "
                f"sampling rate of {query.sampling_rate:g}, found {size:,} of agent {agent}: raise "
                "the batch size"
            )


def note_batch_size(query: ClippedQuery, num_samples: int) -> str | None:
    """Return what the owner of so many samples should know about its batches; None if all is well.

    The note has the number of samples, which is private.
    """
    if query.batch_size is None or query.sampling == "every-step":
        return None
    if query.sampling_rate is not None:
        usual = query.sampling_rate * num_samples
    else:
        usual = min(num_samples / (query.steps_per_pass or 1), query.batch_size)
    counts = f"{num_samples:,} samples give batches of {usual:.3g} on average"
    if usual < _SMALL * query.batch_size:
        return (
            f"{counts}, where the plan counts on {query.batch_size}: this agent's part in the "
            "average is smaller, and noise weighs more; plan with fewer --samples-per-agent"
        )
    if usual > query.batch_size and pdtrc(public_width(query.batch_size), usual) > _NOTED:
        return (
            f"{counts}, which can exceed the public width of {public_width(query.batch_size)} "
            "positions: one sample more may then change how others are rounded (docs/floats.md); "
            "plan with more --samples-per-agent"
        )
    return None


def note_large_delta(budget: PrivacyBudget, agent: int, num_samples: int) -> str | None:
    """Return a note for an agent's owner if its promised δ is more than one over its samples."""
    delta = budget.of_agent(agent).promise.delta
    # A mechanism that publishes one random sample in full keeps any ε at such a δ.
    if delta * num_samples <= 1:
        return None
    return (
        f"the plan's δ = {write_exactly(delta)} is more than one over the number of samples here, "
        f"{num_samples}: publishing a whole sample would satisfy it; ask for a plan with a smaller "
        "δ, or set a limit on ε at a δ of your own with --require"
    )
