"""The part of ε and δ that is set aside for floating point.

Privacy is proved for real numbers, but a program releases floats. Releases are rounded to a public
grid, and ``docs/floats.md`` proves how close the distribution of a computed release is to that of
the ideal one: the probabilities of one coordinate of a step differ by a factor within e^±ξ, up to a
total variation β. Over N coordinates of all steps that is (ε₁, δ₁)-close with

    ε₁ = ρ + 2 √(ρ ln(1/δ₁)),    ρ = N ξ²,

once for each of the two neighbouring data sets. So if the ideal releases are (ε₀, δ₀)-private, the
computed ones are (ε₀ + 2ε₁, e^ε₁ δ₀ + e^ε₁ (δ₁ + Nβ)(1 + e^(ε₀ + ε₁)))-private. A budget (ε, δ)
sets ``RESERVE`` aside: noise is designed for the ε₀ and δ₀ of :func:`set_aside`, and a run is
allowed only if its N is within :meth:`FloatLoss.max_values`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from corn.checks import FloatArray
from corn.errors import InfeasibleError
from corn.privacy.accounting import account_precision, account_promises
from corn.privacy.budget import LARGEST_EPSILON, PrivacyBudget
from corn.privacy.rounding import write_exactly

# The part of ε, and of δ, that is set aside for floating point.
RESERVE = 2.0**-9
# Of ε₁, for which the proof needs e^ε₁ < 2.
_LARGEST_LOG_RATIO = math.log(2)
_ROUNDING = 1e-9
_MAX_ROUNDS = 10


@dataclass(frozen=True)
class FloatLoss:
    """The distance of one coordinate of a step, over all agents, from a release of real numbers.

    The logarithm of the ratio of probabilities is at most ξ, up to a total variation β.
    """

    log_ratio: float
    failure: float

    def max_values(self, budget: PrivacyBudget) -> float:
        """Return how many coordinates, steps × parameters, the reserve of a budget covers."""
        # The strictest promise decides: all agents release values of the same model.
        return min(self._max_values(p.epsilon, p.delta) for p in set(budget.promises))

    def _max_values(self, epsilon: float, delta: float) -> float:
        each = RESERVE * epsilon / 2  # ε₁, of which there are two
        # ln(1/δ₁), where δ₁ and Nβ are a quarter of the reserve of δ each, so that with the factor
        # e^ε₁ < 2 both are within it. Computed as a logarithm, because e^ε overflows.
        log_inverse = math.log(4 / (RESERVE * delta)) + float(np.logaddexp(0, epsilon))
        # √ρ from ε₁ = ρ + 2√(ρ ln(1/δ₁)), without the difference of two almost equal roots.
        root = each / (math.sqrt(log_inverse + each) + math.sqrt(log_inverse))
        by_ratio = (root / self.log_ratio) ** 2 if self.log_ratio > 0 else math.inf
        by_failure = math.exp(-log_inverse) / self.failure if self.failure > 0 else math.inf
        return min(by_ratio, by_failure) if each < _LARGEST_LOG_RATIO else 0.0


def set_aside(budget: PrivacyBudget) -> PrivacyBudget:
    """Return the budget that releases of real numbers must keep, so that floats keep ``budget``."""
    largest = max(p.epsilon for p in budget.promises)
    # Beyond, δ₀ could be rounded to zero.
    if RESERVE * largest / 2 >= _LARGEST_LOG_RATIO:
        raise InfeasibleError(
            f"epsilon={write_exactly(largest)} cannot be promised in floating point: try 1 to 10"
        )
    # ε₀ + 2ε₁ = ε with ε₁ = RESERVE·ε/2; and e^ε₁ δ₀ leaves RESERVE·δ for the failures.
    epsilons = tuple(p.epsilon * (1 - RESERVE) for p in budget.promises)
    deltas = tuple(
        p.delta * (1 - RESERVE) * math.exp(-RESERVE * p.epsilon / 2) for p in budget.promises
    )
    if budget.num_agents is None:
        return replace(budget, epsilon=epsilons[0], delta=deltas[0])
    return replace(budget, epsilon=epsilons, delta=deltas)


def bound_reserve(budget: PrivacyBudget) -> tuple[float, float]:
    """Return ε₁ and δ′ = e^ε₁ (δ₁ + Nβ), at the most, of a run within a budget of one promise.

    On the same data, the computed releases are (ε₁, δ′)-close to the ideal ones.
    """
    epsilon, delta, _ = budget.promise
    each = RESERVE * epsilon / 2
    # δ₁ and Nβ are a quarter of the reserve of δ each: see ``FloatLoss.max_values``.
    log_failure = math.log(RESERVE * delta / 2) - float(np.logaddexp(0, epsilon))
    return each, math.exp(each + log_failure)


def account_floats(precision: ArrayLike, budget: PrivacyBudget, *, num_steps: int) -> FloatArray:
    """Return each agent's ε at its own δ, reserve included, for a run within the budget's limits.

    ``precision`` is [R⁻¹]_ii of each agent, shape (n,). For an agent with less privacy than
    ``budget`` promises ε is infinite: the reserve is not proved to be sufficient (`find_promise`).
    """
    ideal = set_aside(budget)
    real = account_promises(precision, ideal, num_steps=num_steps)
    if num_steps == 0:
        return real
    promised, kept = budget.epsilons(real.size), ideal.epsilons(real.size)
    # Not RESERVE·ε, but the rest of ε: at the cap the sum is then ε itself, to the last digit.
    return np.where(real <= kept * (1 + _ROUNDING), real + (promised - kept), math.inf)


def find_promise(precision: float, budget: PrivacyBudget, *, num_steps: int) -> PrivacyBudget:
    """Return the smallest budget at the δ of a promise that steps at this [R⁻¹]_ii keep."""
    loss = account_precision([precision], budget.query, num_steps=num_steps)
    promise = replace(budget, num_steps=num_steps, accounting="gdp")
    # The reserve of δ depends on ε, if only a little. Each round comes closer from below.
    for _ in range(_MAX_ROUNDS):
        needed = float(loss.epsilon(set_aside(promise).promise.delta)[0]) / (1 - RESERVE)
        if not 0 < needed <= LARGEST_EPSILON:
            raise InfeasibleError(f"no budget is kept at a precision of {precision:.6g}")
        promise = replace(promise, epsilon=needed)
    return replace(promise, epsilon=needed * (1 + _ROUNDING))
