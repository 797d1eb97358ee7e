"""How samples are chosen for mini-batches: by whose random numbers, and at which rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, final

import numpy as np
from scipy import stats

from corn.arrays import FloatArray, IntArray
from corn.noise.choices import COIN_BITS

# The first word of a seed, so that the two kinds of sampling never share random numbers.
_EPOCHS, _POISSON = 1, 2

# Batches wider than the usual width are this rare.
_RARE = 1e-9


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
    return math.ldexp(math.floor(math.ldexp(rate, COIN_BITS)), -COIN_BITS)


def usual_width(num_samples: int, rate: float) -> int:
    """Return a number of samples that a Poisson batch exceeds once in 10⁹ steps; at least 1.

    >>> usual_width(2800, 128 / 2800), usual_width(5, 0.0)
    (199, 1)
    """
    return max(1, int(stats.binom.isf(_RARE, num_samples, rate)))
