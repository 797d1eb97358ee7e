"""Theorem 2, eq. (13b) and the limit up to which it is proved."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import CornWarning
from corn.privacy import ACCOUNTANTS, Accounting, gaussian
from corn.privacy.gaussian import is_proved, warn_if_unproved

RENYI, PAPER = ACCOUNTANTS["rdp"], ACCOUNTANTS["paper"]
epsilons = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
deltas = st.floats(-15, -0.1).map(lambda exponent: 10.0**exponent)


def test_theorem_2_as_printed() -> None:
    T, C, y, delta = 5000, 0.1, 0.013, 1e-5
    printed = 2 * C**2 * T * y + 2 * C * math.sqrt(2 * T * math.log(1 / delta) * y)
    assert RENYI.epsilon_from(2 * C * math.sqrt(T * y), delta) == pytest.approx(printed, rel=1e-14)


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_theorem_2_is_the_best_renyi_order(mu: float, delta: float) -> None:
    # α μ²/2 + L/(α − 1), minimised over a fine grid of α: an oracle without calculus.
    orders = (1 + 10 ** (-3 + 6 * k / 20000) for k in range(20001))
    best = min(order * mu**2 / 2 + math.log(1 / delta) / (order - 1) for order in orders)
    assert RENYI.epsilon_from(mu, delta) == pytest.approx(best, rel=1e-6)


def test_the_inverse_of_theorem_2_as_printed() -> None:
    L = math.log(1e5)
    assert RENYI.mu_from(10, 1e-5) ** 2 == pytest.approx(
        2 * (math.sqrt(L + 10) - math.sqrt(L)) ** 2, rel=1e-12
    )


def test_a_small_epsilon_keeps_its_digits() -> None:
    assert RENYI.mu_from(1e-12, 1e-5) == pytest.approx(
        1e-12 / math.sqrt(2 * math.log(1e5)), rel=1e-12
    )


@pytest.mark.parametrize("accounting", ["rdp", "paper"])
@given(epsilon=epsilons, delta=deltas)
def test_round_trips_end_on_the_private_side(
    accounting: Accounting, epsilon: float, delta: float
) -> None:
    accountant = ACCOUNTANTS[accounting]
    mu = accountant.mu_from(epsilon, delta)
    assert epsilon * (1 - 1e-8) <= accountant.epsilon_from(mu, delta) <= epsilon


@given(mu=st.floats(0.001, 30), delta=deltas)
def test_theorem_2_never_understates_epsilon(mu: float, delta: float) -> None:
    assert gaussian.epsilon_from(mu, delta) <= RENYI.epsilon_from(mu, delta)


@pytest.mark.parametrize("accounting", ["gdp", "rdp", "paper"])
def test_limits_of_every_accountant(accounting: Accounting) -> None:
    accountant = ACCOUNTANTS[accounting]
    assert accountant.epsilon_from(0.0, 1e-5) == 0
    assert accountant.epsilon_from(math.inf, 1e-5) == math.inf
    assert not math.isnan(accountant.epsilon_from(math.inf, 1.0))
    assert accountant.epsilon_from(1.0, 0.0) == math.inf
    assert accountant.mu_from(1.0, 0.0) == 0
    assert accountant.mu_from(math.inf, 1e-5) == math.inf


@given(delta=deltas, share=st.floats(0.01, 0.9999))
def test_eq_13b_is_proved_up_to_its_limit_only(delta: float, share: float) -> None:
    limit = 8 * (1 - 1 / math.sqrt(2)) * math.log(1 / delta)
    inside, outside = share * limit, limit / share
    assert RENYI.epsilon_from(PAPER.mu_from(inside, delta), delta) <= inside
    assert RENYI.epsilon_from(PAPER.mu_from(outside, delta), delta) > outside
    assert is_proved(inside, delta)
    assert not is_proved(outside, delta)


@pytest.mark.parametrize(
    ("epsilon", "exact", "verdict"),
    [(30, "27.93", "below the target"), (40, "41.77", "above the target: the promise is broken")],
)
def test_eq_13b_beyond_its_limit_warns_with_the_exact_epsilon(
    epsilon: float, exact: str, verdict: str
) -> None:
    with pytest.warns(CornWarning, match=f"= 26.97; the exact epsilon .* is {exact}, {verdict}"):
        warn_if_unproved(epsilon, 1e-5)


@pytest.mark.parametrize(("epsilon", "delta"), [(26.9, 1e-5), (1.0, 0.5), (100, 1e-20), (5, 1.0)])
def test_eq_13b_within_its_limit_does_not_warn(epsilon: float, delta: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unproved(epsilon, delta)
