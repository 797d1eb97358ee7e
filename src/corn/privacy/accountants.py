"""Three ways to account for privacy, by name: each turns any two of (μ, ε, δ) into the third.

``gdp`` is exact (:mod:`corn.privacy.gaussian`). The other two are the paper's bounds. With
sensitivity Δ, T steps and precision y = [R⁻¹]_jj write μ² = Δ² T y and L = ln(1/δ).

- ``rdp`` is Theorem 2, by Rényi divergences (Δ = 2C): ε ≤ μ²/2 + μ √(2L). It is never below the
  exact ε.
- ``paper`` is the constraint of eq. (13b), [R⁻¹]_ii ≤ ε²/(16 C² T L), kept to reproduce the
  paper's figures. In terms of μ it is μ = ε/(2√L). Put into Theorem 2 this gives ε²/(8L) + ε/√2,
  which is at most ε exactly when ε ≤ 8(1 − 1/√2)·L ≈ 2.343·L. Up to that limit the constraint is
  sound. Above it nothing is proved, and further up it is false: the exact ε exceeds the one asked
  for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from corn.checks import require, require_choice, require_in_range
from corn.errors import CornWarning
from corn.privacy import gaussian
from corn.privacy.gaussian import round_down
from corn.privacy.rounding import round_bound_down, round_up, write_exactly

Accounting: TypeAlias = Literal["gdp", "rdp", "paper"]

LIMIT_FACTOR = 8 * (1 - 1 / math.sqrt(2))
"""Theorem 2 proves eq. (13b) for ε up to this times ln(1/δ)."""


@dataclass(frozen=True)
class Accountant:
    """Three functions that agree with each other, and a description for people.

    ``mu_from`` rounds down, so that ``epsilon_from(mu_from(ε, δ), δ)`` is never above ε.
    """

    description: str
    delta_from: Callable[[float, float], float]
    epsilon_from: Callable[[float, float], float]
    mu_from: Callable[[float, float], float]


def find_accountant(accounting: Accounting) -> Accountant:
    """Return the accountant of that name."""
    return ACCOUNTANTS[require_choice("accounting", accounting, ACCOUNTANTS)]


def require_exact(accounting: Accounting) -> None:
    """Raise unless accounting is exact, as it must be under Poisson sampling."""
    require(
        accounting == "gdp",
        "accounting",
        "'gdp' under Poisson sampling",
        repr(accounting),
        advice="the paper's bounds do not cover sampling",
    )


def is_proved(epsilon: float, delta: float) -> bool:
    """Return whether Theorem 2 proves what eq. (13b) claims at this (ε, δ)."""
    # At δ = 0 the noise of eq. (13b) is infinite; at δ = 1 and at ε = ∞ nothing is promised.
    is_trivial = delta in (0, 1) or math.isinf(epsilon)
    return is_trivial or epsilon <= -LIMIT_FACTOR * math.log(delta)


def warn_if_unproved(epsilon: float, delta: float, *, stacklevel: int = 2) -> None:
    """Warn where eq. (13b) is not proved, with the ε that its noise really gives."""
    if is_proved(epsilon, delta):
        return
    exact = gaussian.epsilon_from(_paper_mu(epsilon, delta), delta)
    verdict = "above the target: the promise is broken" if exact > epsilon else "below the target"
    largest = round_bound_down(-LIMIT_FACTOR * math.log(delta), 4)
    warnings.warn(
        f"accounting 'paper' (eq. 13b) at epsilon={write_exactly(epsilon)}, "
        f"delta={write_exactly(delta)} is beyond what Theorem 2 proves, epsilon ≤ "
        f"{LIMIT_FACTOR:.4g}·ln(1/delta) = {largest}; the exact epsilon of its noise is "
        f"{round_up(exact, 4)}, {verdict}. Use accounting='gdp'",
        CornWarning,
        stacklevel=stacklevel + 1,
    )


def _renyi_epsilon(mu: float, delta: float) -> float:
    """Return the ε of Theorem 2.

    >>> round(_renyi_epsilon(1.0, 1e-5), 6)
    5.298526
    """
    require_in_range("mu", mu, 0)
    require_in_range("delta", delta, 0, 1)
    if mu == 0:
        return 0.0
    if delta == 0 or math.isinf(mu):
        return math.inf
    return mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))


def _renyi_delta(mu: float, epsilon: float) -> float:
    """Return δ = exp(−(ε − μ²/2)²/(2μ²)), or 1 where ε ≤ μ²/2 and Theorem 2 proves nothing."""
    require_in_range("mu", mu, 0)
    require_in_range("epsilon", epsilon, 0)
    if mu == 0 or (math.isinf(epsilon) and mu < math.inf):
        return 0.0
    # Divided before it is squared: ε² overflows long before the quotient does.
    excess = epsilon / mu - mu / 2 if mu < math.inf else -math.inf
    return math.exp(-excess * excess / 2) if excess > 0 else 1.0


def _renyi_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ for which Theorem 2 proves (ε, δ): √2 (√(L+ε) − √L), rounded down.

    >>> round(_renyi_mu(10, 1e-5), 8)
    1.76088343
    """
    require_in_range("epsilon", epsilon, 0)
    require_in_range("delta", delta, 0, 1)
    if delta == 0 or epsilon == 0:
        return 0.0
    if math.isinf(epsilon):
        return math.inf
    L = -math.log(delta)
    # Multiplied by its conjugate: the difference of two square roots loses the digits of a small ε.
    return round_down(math.sqrt(2) * epsilon / (math.sqrt(L + epsilon) + math.sqrt(L)))


def _paper_epsilon(mu: float, delta: float) -> float:
    """Return the ε that eq. (13b) claims, 2μ√L, proved or not: see ``warn_if_unproved``."""
    require_in_range("mu", mu, 0)
    require_in_range("delta", delta, 0, 1)
    if mu == 0:
        return 0.0
    if delta == 0 or math.isinf(mu):
        return math.inf
    return 2 * mu * math.sqrt(-math.log(delta))


def _paper_delta(mu: float, epsilon: float) -> float:
    """Return the δ that eq. (13b) claims, exp(−ε²/(4μ²)), proved or not."""
    require_in_range("mu", mu, 0)
    require_in_range("epsilon", epsilon, 0)
    if mu == 0 or (math.isinf(epsilon) and mu < math.inf):
        return 0.0
    # At μ = ∞ the quotient ∞/∞ would be no number; the limit for any finite ε is δ = 1.
    ratio = epsilon / mu if mu < math.inf else 0.0
    return math.exp(-ratio * ratio / 4)


def _paper_mu(epsilon: float, delta: float) -> float:
    """Return ε/(2√L), rounded down.

    >>> round(_paper_mu(10, 1e-5), 8)
    1.47359167
    """
    require_in_range("epsilon", epsilon, 0)
    require_in_range("delta", delta, 0, 1)
    if delta == 0 or epsilon == 0:
        return 0.0
    if delta == 1:
        return math.inf
    return round_down(epsilon / (2 * math.sqrt(-math.log(delta))))


ACCOUNTANTS: dict[Accounting, Accountant] = {
    "gdp": Accountant(
        description="exact Gaussian DP",
        delta_from=gaussian.delta_from,
        epsilon_from=gaussian.epsilon_from,
        mu_from=gaussian.mu_from,
    ),
    "rdp": Accountant(
        description="Rényi DP, Theorem 2",
        delta_from=_renyi_delta,
        epsilon_from=_renyi_epsilon,
        mu_from=_renyi_mu,
    ),
    "paper": Accountant(
        description="the paper's eq. (13b)",
        delta_from=_paper_delta,
        epsilon_from=_paper_epsilon,
        mu_from=_paper_mu,
    ),
}
"""The accountant of each name: ``gdp`` is exact, ``rdp`` and ``paper`` are bounds (see above)."""
