"""What (ε, δ) means for an attacker who wants to know whether a record was used.

Both bounds are exact: for every (ε, δ) there is a mechanism with which an attacker reaches them,
and none with which it does better (Kairouz, Oh and Viswanath 2015, theorem 2.1). They hold for any
attacker, whatever it knows besides.
"""

from __future__ import annotations

import math

from corn.checks import require_fraction, require_in_range


def bound_guess(epsilon: float, delta: float) -> float:
    """Return the largest probability of a right guess between two neighbouring data sets.

    Both are equally likely before, as for a coin that decides whether a record is used. At errors
    (α, β) with e^ε α + β ≥ 1 − δ and α + e^ε β ≥ 1 − δ, the guess is right with probability
    1 − (α + β)/2, at most (e^ε + δ)/(e^ε + 1).

    >>> round(bound_guess(1, 0), 4), bound_guess(0, 0)
    (0.7311, 0.5)
    """
    _check(epsilon, delta)
    # By e^−ε, which cannot overflow.
    inverse = math.exp(-epsilon)
    return (1 + delta * inverse) / (1 + inverse)


def bound_detection(epsilon: float, delta: float, false_alarms: float) -> float:
    """Return the largest fraction of used records that an attack finds.

    ``false_alarms`` is the fraction of unused records that the attack takes for used ones.

    >>> round(bound_detection(1, 0, 0.01), 4)
    0.0272
    """
    _check(epsilon, delta)
    require_fraction("false_alarms", false_alarms)
    # Beyond e^700 the first bound is above one in any case.
    steep = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    flat = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(steep, flat, 1.0)


def _check(epsilon: float, delta: float) -> None:
    require_in_range("epsilon", epsilon, 0)
    require_in_range("delta", delta, 0, 1)
