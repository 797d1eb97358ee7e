"""Gaussian differential privacy: μ, (ε, δ), and the accountants that calibrate noise.

Under every mechanism of this package an agent's data are as hard to distinguish as one draw from
N(0, 1) and one from N(μ, 1) (Dong, Roth and Su, "Gaussian differential privacy", 2022). Nothing
here is a bound: the worst pair of data sets attains this μ.

Results are rounded to the side that promises less privacy (:func:`round_down`, :func:`bisect`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import erfcx

from corn.checks import require, require_choice, require_in_range
from corn.errors import CornWarning
from corn.privacy.rounding import round_bound_down, round_up, write_exactly

_SQRT2 = math.sqrt(2)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)

# 16 units in the last place: more than a square, a square root and a few products lose.
_MARGIN = 2.0**-48


def delta_from(mu: float, epsilon: float) -> float:
    """Return δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), the least δ at this ε.

    The relative error is below 1e-12·(1 + μ) wherever δ is a normal number, against 60-digit
    arithmetic. Both ends are defined: μ = 0 gives 0, μ = ∞ gives 1, and no ε overflows.
    """
    require_in_range("mu", mu, 0)
    require_in_range("epsilon", epsilon, 0)
    if mu == 0 or math.isinf(epsilon):
        return 0.0
    if math.isinf(mu):
        return 1.0
    ratio = epsilon / mu
    upper = mu / 2 - ratio
    if upper > 9:
        return 1.0  # 1 − δ < 1e-18 is below the last digit
    # e^ε φ(−μ/2 − ε/μ) = φ(μ/2 − ε/μ), so the density is a common factor and e^ε, which overflows,
    # never appears. (x*x, not x**2: the latter raises where it should be infinite.)
    density = math.exp(-upper * upper / 2) / 2
    if density == 0:
        return 0.0  # δ is below the smallest float
    if mu < 1:
        return density * _erfcx_drop(ratio / _SQRT2, mu / (2 * _SQRT2))
    drop = float(erfcx(-upper / _SQRT2) - erfcx((ratio + mu / 2) / _SQRT2))
    return min(density * drop, 1.0)


def epsilon_from(mu: float, delta: float) -> float:
    """Return the least ε ≥ 0 for which δ(ε) ≤ ``delta``, rounded up: ``delta_from`` confirms it.

    It is infinite where no finite ε suffices: ``delta`` = 0 or μ = ∞.
    """
    require_in_range("mu", mu, 0)
    require_in_range("delta", delta, 0, 1)
    if mu == 0 or delta == 1:
        return 0.0
    # A smaller target keeps the true δ within ``delta`` despite the error of the computed one.
    target = delta * (1 - _delta_error(mu)) if mu < math.inf else 0.0
    if target <= 0:
        return math.inf
    if delta_from(mu, 0) <= target:
        return 0.0
    enough = 1.0
    while delta_from(mu, enough) > target:
        enough *= 2
    if math.isinf(enough):
        return math.inf
    return bisect(lambda epsilon: delta_from(mu, epsilon) <= target, accepted=enough, rejected=0.0)


def mu_from(epsilon: float, delta: float) -> float:
    """Return the largest μ that is (ε, δ)-DP, rounded down.

    The margin is four times the rounding error of ``delta_from``, of which ``epsilon_from`` uses up
    one: so ``epsilon_from(mu_from(ε, δ), δ)`` is never above ε, also after a few operations.
    """
    require_in_range("epsilon", epsilon, 0)
    require_in_range("delta", delta, 0, 1)
    if delta == 0:
        return 0.0
    if delta == 1 or math.isinf(epsilon):
        return math.inf

    def is_private(mu: float) -> bool:
        return delta_from(mu, epsilon) <= delta * (1 - 4 * _delta_error(mu))

    # δ rises with μ, from 0 at μ = 0: doubling finds a bracket for the bisection.
    too_much = 1.0
    while is_private(too_much):
        too_much *= 2
    return round_down(bisect(is_private, accepted=0.0, rejected=too_much))


def round_down(value: float) -> float:
    """Return ``value`` lowered by 16 units in the last place: more than later rounding adds."""
    return value * (1 - _MARGIN)


def bisect(accepts: Callable[[float], bool], *, accepted: float, rejected: float) -> float:
    """Return an accepted number, tested unless it is ``accepted``, right beside a rejected one."""
    middle = accepted + (rejected - accepted) / 2
    while middle not in (accepted, rejected):
        if accepts(middle):
            accepted = middle
        else:
            rejected = middle
        middle = accepted + (rejected - accepted) / 2
    return accepted


def _delta_error(mu: float) -> float:
    # The relative error of delta_from. It grows with μ because μ/2 and ε/μ cancel.
    return min(1e-12 * (1 + mu), 0.125)


def _erfcx_drop(centre: float, half_width: float) -> float:
    """Return erfcx(c − h) − erfcx(c + h) for small h, without subtracting equal numbers.

    It is the integral of −erfcx′(z) = 2/√π − 2z·erfcx(z), which eight Gauss points integrate to the
    last digit for h < 0.36; the plain difference loses all digits as h → 0.
    """
    z = centre + half_width * _NODES
    slope = 2 / math.sqrt(math.pi) - 2 * z * erfcx(z)
    return half_width * float(_WEIGHTS @ slope)


Accounting: TypeAlias = Literal["gdp", "rdp", "paper"]

# Theorem 2 proves eq. (13b) for ε up to this times ln(1/δ).
LIMIT_FACTOR = 8 * (1 - 1 / math.sqrt(2))


class Accountant(NamedTuple):
    """Two functions with ``epsilon_from(mu_from(ε, δ), δ)`` ≤ ε, and a description for people."""

    description: str
    epsilon_from: Callable[[float, float], float]
    mu_from: Callable[[float, float], float]


def find_accountant(accounting: Accounting) -> Accountant:
    """Return the accountant of that name."""
    return ACCOUNTANTS[require_choice("accounting", accounting, ACCOUNTANTS)]


def require_exact(accounting: Accounting) -> None:
    """Raise unless accounting is exact: the paper's bounds do not cover Poisson sampling."""
    rule = "'gdp' under Poisson sampling"
    require(accounting == "gdp", "accounting", rule, repr(accounting))


def is_proved(epsilon: float, delta: float) -> bool:
    """Return whether Theorem 2 proves what eq. (13b) claims at this (ε, δ)."""
    # At δ = 0 the noise of eq. (13b) is infinite; at δ = 1 and at ε = ∞ nothing is promised.
    is_trivial = delta in (0, 1) or math.isinf(epsilon)
    return is_trivial or epsilon <= -LIMIT_FACTOR * math.log(delta)


def warn_if_unproved(epsilon: float, delta: float, *, stacklevel: int = 2) -> None:
    """Warn where eq. (13b) is not proved, with the ε that its noise really gives."""
    if is_proved(epsilon, delta):
        return
    exact = epsilon_from(ACCOUNTANTS["paper"].mu_from(epsilon, delta), delta)
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


def _make_bound(
    description: str,
    *,
    epsilon_of: Callable[[float, float], float],
    mu_of: Callable[[float, float], float],
) -> Accountant:
    """Return the accountant of formulas in positive μ and L, or ε and L, with L = ln(1/δ) ≥ 0."""

    def find_epsilon(mu: float, delta: float) -> float:
        require_in_range("mu", mu, 0)
        require_in_range("delta", delta, 0, 1)
        if mu == 0:
            return 0.0
        return math.inf if delta == 0 or math.isinf(mu) else epsilon_of(mu, -math.log(delta))

    def find_mu(epsilon: float, delta: float) -> float:
        require_in_range("epsilon", epsilon, 0)
        require_in_range("delta", delta, 0, 1)
        if delta == 0 or epsilon == 0:
            return 0.0
        return math.inf if math.isinf(epsilon) else round_down(mu_of(epsilon, -math.log(delta)))

    return Accountant(description, find_epsilon, find_mu)


# ``gdp`` is exact; ``rdp`` is a bound, and so is ``paper`` as far as Theorem 2 proves it.
ACCOUNTANTS: dict[Accounting, Accountant] = {
    "gdp": Accountant("exact Gaussian DP", epsilon_from, mu_from),
    "rdp": _make_bound(
        "Rényi DP, Theorem 2",
        epsilon_of=lambda mu, L: mu * mu / 2 + mu * math.sqrt(2 * L),
        # √2 (√(L+ε) − √L) times its conjugate: the difference loses the digits of a small ε.
        mu_of=lambda epsilon, L: math.sqrt(2) * epsilon / (math.sqrt(L + epsilon) + math.sqrt(L)),
    ),
    "paper": _make_bound(
        "the paper's eq. (13b)",
        epsilon_of=lambda mu, L: 2 * mu * math.sqrt(L),
        mu_of=lambda epsilon, L: epsilon / (2 * math.sqrt(L)) if L else math.inf,
    ),
}
