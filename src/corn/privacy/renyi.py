"""The paper's Theorem 2: (ε, δ) from Rényi divergences, a bound above the exact ``gaussian``.

With sensitivity Δ, T steps and precision y = [R⁻¹]_jj write μ² = Δ² T y. Theorem 2 (Δ = 2C) is

    ε ≤ μ²/2 + μ √(2L),   L = ln(1/δ).
"""

from __future__ import annotations

import math

from corn.privacy.rounding import require_in_range, round_down


def epsilon_from(mu: float, delta: float) -> float:
    """Return the ε of Theorem 2.

    >>> round(epsilon_from(1.0, 1e-5), 6)
    5.298526
    """
    require_in_range("mu", mu, 0, math.inf)
    require_in_range("delta", delta, 0, 1)
    if mu == 0:
        return 0.0
    if delta == 0:
        return math.inf
    return mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))


def delta_from(mu: float, epsilon: float) -> float:
    """Return δ = exp(−(ε − μ²/2)²/(2μ²)), or 1 where ε ≤ μ²/2 and Theorem 2 says nothing."""
    require_in_range("mu", mu, 0, math.inf)
    require_in_range("epsilon", epsilon, 0, math.inf)
    if mu == 0 or (math.isinf(epsilon) and mu < math.inf):
        return 0.0
    excess = epsilon / mu - mu / 2 if mu < math.inf else -math.inf
    return math.exp(-excess * excess / 2) if excess > 0 else 1.0


def mu_from(epsilon: float, delta: float) -> float:
    """Return the largest μ for which Theorem 2 proves (ε, δ): √2 (√(L+ε) − √L), rounded down.

    >>> round(mu_from(10, 1e-5), 8)
    1.76088343
    """
    require_in_range("epsilon", epsilon, 0, math.inf)
    require_in_range("delta", delta, 0, 1)
    if delta == 0 or epsilon == 0:
        return 0.0
    if math.isinf(epsilon):
        return math.inf
    L = -math.log(delta)
    # Multiplied by its conjugate: the difference of two square roots loses the digits of a small ε.
    return round_down(math.sqrt(2) * epsilon / (math.sqrt(L + epsilon) + math.sqrt(L)))
