"""The reserve for floating point is sufficient: each bound against an independent computation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from corn.errors import InfeasibleError
from corn.privacy import PrivacyBudget, account_precision
from corn.privacy.floats import RESERVE, FloatLoss, account_floats, find_promise, set_aside

BUDGETS = [
    PrivacyBudget(epsilon, delta, num_steps=1000, clip=0.1)
    for epsilon in (0.1, 1, 10, 40)
    for delta in (1e-9, 1e-5)
]


def test_an_epsilon_without_a_reserve_is_infeasible() -> None:
    """e^−ε₁ δ would be zero in floating point."""
    with pytest.raises(InfeasibleError, match="epsilon=1e\\+06 cannot be promised"):
        set_aside(PrivacyBudget(1e6, 1e-5, num_steps=1000, clip=0.1))
    with pytest.raises(InfeasibleError):
        find_promise(1e5, BUDGETS[0], num_steps=1000)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: f"{b.epsilon:g} {b.delta:g}")
def test_a_run_at_its_largest_size_keeps_the_budget(budget: PrivacyBudget) -> None:
    """Put the terms of the proof together again, with the exact loss of N/2 e^±2ξ-close pairs.

    Of all laws within e^±2ξ of each other, those of randomised response are the furthest apart
    (Kairouz, Oh and Viswanath 2015), and N/2 of them are binomial.
    """
    ratio = 1e-9 * math.sqrt(FloatLoss(1e-9, 0.0).max_values(budget) / 10_000)
    loss = FloatLoss(ratio, failure=1e-40)
    num_values = int(loss.max_values(budget))
    assert num_values == pytest.approx(10_000, abs=1)
    each, ideal = RESERVE * budget.promise.epsilon / 2, set_aside(budget)
    delta_1 = randomised_response_delta(2 * ratio, num_values // 2, each)
    added = delta_1 + num_values * loss.failure
    total = math.exp(each) * (
        ideal.promise.delta + added * (1 + math.exp(ideal.promise.epsilon + each))
    )
    assert ideal.promise.epsilon + 2 * each <= budget.promise.epsilon * (1 + 1e-12)
    assert total <= budget.promise.delta


def randomised_response_delta(ratio: float, num_values: int, epsilon: float) -> float:
    """δ(ε) of ``num_values`` answers that are true with odds e^ratio, from the binomial."""
    k = np.arange(num_values + 1)
    log_p = stats.binom.logpmf(k, num_values, special.expit(ratio))
    log_q = stats.binom.logpmf(k, num_values, special.expit(-ratio))
    return float(np.maximum(np.exp(log_p) - np.exp(epsilon + log_q), 0).sum())


@given(epsilon=st.floats(0.01, 60), delta=st.floats(1e-12, 1e-2), ratio=st.floats(1e-12, 1e-6))
def test_limits_shrink_with_the_square_of_the_ratio(
    epsilon: float, delta: float, ratio: float
) -> None:
    budget = PrivacyBudget(epsilon, delta, num_steps=1, clip=1)
    once, twice = (FloatLoss(k * ratio, 0.0).max_values(budget) for k in (1, 2))
    assert once == pytest.approx(4 * twice)
    assert once > 0


def test_failure_probabilities_limit_a_run() -> None:
    budget = PrivacyBudget(1, 1e-5, num_steps=1, clip=1)
    assert FloatLoss(0.0, 1e-20).max_values(budget) < 1e-5 / 1e-20
    assert FloatLoss(0.0, 0.0).max_values(budget) == math.inf
    assert FloatLoss(math.inf, 1.0).max_values(budget) == 0


def test_an_epsilon_too_large_for_floats_is_not_proved() -> None:
    # e^ε times the chance of a failure is more than δ.
    budget = PrivacyBudget(1000, 1e-5, num_steps=1, clip=1)
    assert FloatLoss(1e-12, 1e-40).max_values(budget) == 0


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: f"{b.epsilon:g} {b.delta:g}")
def test_a_run_at_the_cap_spends_exactly_the_budget(budget: PrivacyBudget) -> None:
    cap = set_aside(budget).precision_cap
    spent = account_floats([cap, cap / 2], budget, num_steps=1000)
    assert spent[0] == pytest.approx(budget.promise.epsilon, rel=1e-8)
    assert spent[0] <= budget.promise.epsilon * (1 + 1e-12)
    assert spent[1] < spent[0]
    real = account_precision([cap], budget.query, num_steps=10).epsilon(budget.promise.delta)
    assert account_floats([cap], budget, num_steps=10) > real
    assert account_floats([cap], budget, num_steps=0) == 0


def test_the_reserve_does_not_cover_agents_above_the_cap() -> None:
    budget = PrivacyBudget(1, 1e-5, num_steps=1000, clip=0.1)
    cap = set_aside(budget).precision_cap
    assert account_floats([1.01 * cap], budget, num_steps=1000) == math.inf
    weaker = find_promise(1.01 * cap, budget, num_steps=1000)
    assert 1 < weaker.promise.epsilon < 1.02
    assert set_aside(weaker).precision_cap == pytest.approx(1.01 * cap, rel=1e-6)
    assert account_floats([1.01 * cap], weaker, num_steps=1000)[0] <= weaker.promise.epsilon * (
        1 + 1e-12
    )


def test_subsampled_budgets_are_kept() -> None:
    budget = PrivacyBudget(
        1, 1e-5, num_steps=100, clip=1, unit="sample", batch_size=128, sampling_rate=0.05
    )
    cap = set_aside(budget).precision_cap
    assert 0.99 < account_floats([cap], budget, num_steps=100)[0] <= 1
