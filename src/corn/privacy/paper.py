"""The paper's own constraint, eq. (13b): [R⁻¹]_ii ≤ ε²/(16 C² T L), kept to reproduce its figures.

In terms of μ it is μ = ε/(2√L), L = ln(1/δ). Put into Theorem 2 this gives ε²/(8L) + ε/√2, which is
at most ε exactly when ε ≤ 8(1 − 1/√2)·L ≈ 2.343·L. Above that limit nothing is proved, and further
up it is false: the exact ε exceeds the one asked for. Below it the constraint is sound.
"""

from __future__ import annotations

import math
import warnings

from corn.errors import CornWarning
from corn.privacy import gaussian
from corn.privacy.rounding import require_in_range, round_down

LIMIT_FACTOR = 8 * (1 - 1 / math.sqrt(2))
"""Theorem 2 proves eq. (13b) for ε up to this times ln(1/δ)."""


def epsilon_from(mu: float, delta: float) -> float:
    """Return the ε that eq. (13b) claims, 2μ√L, proved or not: see ``warn_if_unproved``."""
    require_in_range("mu", mu, 0, math.inf)
    require_in_range("delta", delta, 0, 1)
    if mu == 0:
        return 0.0
    if delta == 0 or math.isinf(mu):
        return math.inf
    return 2 * mu * math.sqrt(-math.log(delta))


def delta_from(mu: float, epsilon: float) -> float:
    """Return the δ that eq. (13b) claims, exp(−ε²/(4μ²)), proved or not."""
    require_in_range("mu", mu, 0, math.inf)
    require_in_range("epsilon", epsilon, 0, math.inf)
    if mu == 0 or (math.isinf(epsilon) and mu < math.inf):
        return 0.0
    ratio = epsilon / mu if mu < math.inf else 0.0
    return math.exp(-ratio * ratio / 4)


def mu_from(epsilon: float, delta: float) -> float:
    """Return ε/(2√L), rounded down.

    >>> round(mu_from(10, 1e-5), 8)
    1.47359167
    """
    require_in_range("epsilon", epsilon, 0, math.inf)
    require_in_range("delta", delta, 0, 1)
    if delta == 0 or epsilon == 0:
        return 0.0
    if delta == 1:
        return math.inf
    return round_down(epsilon / (2 * math.sqrt(-math.log(delta))))


def is_proved(epsilon: float, delta: float) -> bool:
    """Tell whether Theorem 2 proves what eq. (13b) claims at this (ε, δ)."""
    is_trivial = delta in (0, 1) or math.isinf(epsilon)
    return is_trivial or epsilon <= -LIMIT_FACTOR * math.log(delta)


def warn_if_unproved(epsilon: float, delta: float, *, stacklevel: int = 2) -> None:
    """Warn above the limit, and say what ε the noise of eq. (13b) really gives."""
    if is_proved(epsilon, delta):
        return
    exact = gaussian.epsilon_from(mu_from(epsilon, delta), delta)
    verdict = "above the target: the promise is broken" if exact > epsilon else "below the target"
    warnings.warn(
        f"accounting 'paper' (eq. 13b) at epsilon={epsilon:g}, delta={delta:g} is beyond what "
        f"Theorem 2 proves, epsilon ≤ {LIMIT_FACTOR:.4g}·ln(1/delta) = "
        f"{-LIMIT_FACTOR * math.log(delta):.4g}; the exact epsilon of its noise is {exact:.4g}, "
        f"{verdict}. Use accounting='gdp'",
        CornWarning,
        stacklevel=stacklevel + 1,
    )
