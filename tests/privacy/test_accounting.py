"""From noise to ε and δ, per agent and worst, in one phase or several."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import CornWarning, InvalidArgumentError
from corn.privacy import (
    ACCOUNTANTS,
    Accounting,
    ClippedQuery,
    PrivacyBudget,
    account,
    account_precision,
    check_budget,
    gaussian,
    precision_diagonal,
)

AGENT = ClippedQuery(0.1)
R1 = np.array([[60.0, 20.0, 0.0], [20.0, 80.0, -10.0], [0.0, -10.0, 100.0]])
R2 = np.diag([10.0, 500.0, 70.0])


def test_mu_follows_from_the_diagonal_of_the_inverse() -> None:
    loss = account(R1, AGENT, num_steps=5000)
    np.testing.assert_allclose(
        loss.mu, 0.2 * np.sqrt(5000 * np.diag(np.linalg.inv(R1))), rtol=1e-12
    )
    assert loss.worst_agent == 0


def test_mu_is_the_distance_of_two_runs_in_the_whitened_noise() -> None:
    # Brute force: stack T steps of n agents, move agent j by Δ at each, and measure against R ⊗ I.
    steps, agent = 4, 1
    joint = np.kron(np.eye(steps), R1)
    shift = np.kron(np.ones(steps), 0.2 * np.eye(3)[agent])
    distance = math.sqrt(shift @ np.linalg.solve(joint, shift))
    assert account(R1, AGENT, num_steps=steps).mu[agent] == pytest.approx(distance, rel=1e-12)


def test_phases_add_their_precisions() -> None:
    loss = account([R1, R2], AGENT, num_steps=[1000, 300])
    expected = 1000 * precision_diagonal(R1) + 300 * precision_diagonal(R2)
    np.testing.assert_allclose(loss.mu, 0.2 * np.sqrt(expected), rtol=1e-12)
    same = account(np.stack([R1, R1]), AGENT, num_steps=[1000, 300])
    np.testing.assert_allclose(same.mu, account(R1, AGENT, num_steps=1300).mu, rtol=1e-12)


def test_account_and_account_precision_agree() -> None:
    from_precision = account_precision(
        [precision_diagonal(R1), precision_diagonal(R2)], AGENT, num_steps=(1000, 300)
    )
    assert from_precision.mu.tolist() == account([R1, R2], AGENT, num_steps=(1000, 300)).mu.tolist()


@pytest.mark.parametrize("accounting", ["gdp", "rdp", "paper"])
def test_each_accountant_is_applied_to_each_agent(accounting: Accounting) -> None:
    loss = account(R1, AGENT, num_steps=500)
    accountant = ACCOUNTANTS[accounting]
    epsilons = loss.epsilon(1e-5, accounting=accounting)
    assert epsilons.tolist() == [accountant.epsilon_from(float(mu), 1e-5) for mu in loss.mu]
    assert loss.worst_epsilon(1e-5, accounting=accounting) == epsilons.max()
    deltas = loss.delta(3.0, accounting=accounting)
    assert deltas.tolist() == [accountant.delta_from(float(mu), 3.0) for mu in loss.mu]
    assert loss.worst_delta(3.0, accounting=accounting) == deltas.max()


def test_pure_zero_sum_noise_has_no_finite_epsilon_by_any_accountant() -> None:
    loss = account(np.eye(4) - 0.25, AGENT, num_steps=10)
    for accounting in ACCOUNTANTS:
        assert np.isinf(loss.epsilon(1e-5, accounting=accounting)).all()
        assert (loss.delta(100.0, accounting=accounting) == 1).all()
    curve = loss.curve()
    assert (curve.delta == 1).all()
    assert loss.tradeoff([0.0, 0.1, 1.0]).false_negative_rate.tolist() == [1.0, 0.0, 0.0]


def test_one_exposed_phase_exposes_the_run() -> None:
    loss = account([np.eye(2), np.zeros((2, 2))], AGENT, num_steps=[1000, 1])
    assert np.isinf(loss.epsilon(1e-5)).all()


def test_an_agent_whose_data_is_unused_has_zero_epsilon() -> None:
    loss = account_precision([0.0, 1.0], AGENT, num_steps=10)
    assert loss.epsilon(1e-5)[0] == 0 == loss.delta(0.0)[0]


@given(
    variance=st.floats(0.1, 1e4),
    steps=st.integers(1, 10**5),
    delta=st.floats(-10, -1).map(lambda exponent: 10**exponent),
    factor=st.floats(1.1, 5),
)
def test_epsilon_rises_with_steps_and_clip_and_falls_with_noise(
    variance: float, steps: int, delta: float, factor: float
) -> None:
    def spent(noise: float, clip: float, num_steps: int, at: float) -> float:
        return account([[noise]], ClippedQuery(clip), num_steps=num_steps).worst_epsilon(at)

    epsilon = spent(variance, 0.1, steps, delta)
    assert spent(variance * factor, 0.1, steps, delta) <= epsilon
    assert spent(variance, 0.1 * factor, steps, delta) >= epsilon
    assert spent(variance, 0.1, steps * 2, delta) >= epsilon
    assert spent(variance, 0.1, steps, delta / factor) >= epsilon


def test_the_curve_falls_from_total_variation_to_nothing() -> None:
    loss = account(R1, AGENT, num_steps=5000)
    curve = loss.curve()
    assert curve.epsilon.size == curve.delta.size == 200
    assert curve.epsilon[0] == 0
    assert curve.delta[0] == gaussian.delta_from(float(loss.mu[0]), 0.0)
    assert curve.delta[-1] == pytest.approx(1e-10, rel=1e-6)
    assert (np.diff(curve.delta) < 0).all()
    assert loss.curve([2.0], agent=2).delta[0] == loss.delta(2.0)[2]


def test_the_tradeoff_curve_is_the_gaussian_one() -> None:
    loss = account(R1, AGENT, num_steps=5000)
    curve = loss.tradeoff()
    assert curve.false_positive_rate.size == 201
    middle = gaussian.tradeoff(float(loss.mu[0]), 0.5)
    assert curve.false_negative_rate[100] == pytest.approx(middle, rel=1e-14)
    assert loss.tradeoff([0.5], agent=1).false_negative_rate[0] > middle


def test_eq_13b_warns_once_for_the_worst_agent() -> None:
    loss = account(np.diag([50.0, 5.0, 500.0]), AGENT, num_steps=5000)
    with pytest.warns(CornWarning, match=r"epsilon=42\.\d+, delta=1e-05 is beyond") as caught:
        loss.epsilon(1e-5, accounting="paper")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(CornWarning, match="is beyond") as caught:
        loss.curve(accounting="paper")
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: account(R1, AGENT, num_steps=0),
            "num_steps must be an integer of at least 1, found 0",
        ),
        (
            lambda: account([R1], AGENT, num_steps=[1, 2]),
            "one number for each phase, found 2 for 1",
        ),
        (lambda: account([], AGENT, num_steps=[]), "one number for each phase, found 0 for 0"),
        (lambda: account([R1, np.eye(1)], AGENT, num_steps=[1, 2]), r"same agents, found \[1, 3\]"),
        (lambda: account([R1, R2], AGENT, num_steps=[1, True]), "num_steps must be .* found True"),
        (lambda: account_precision([1.0, -2.0], AGENT, num_steps=1), "found -2.0 for agent 1"),
        (lambda: account_precision([math.nan], AGENT, num_steps=1), "found nan for agent 0"),
        (lambda: account_precision(1.0, AGENT, num_steps=1), r"each agent, found shape \(\)"),
        (
            lambda: account(R1, AGENT, num_steps=1).epsilon(1e-5, accounting="zcdp"),  # type: ignore[arg-type]
            "accounting must be one of gdp, rdp, paper, found 'zcdp'",
        ),
    ],
)
def test_errors_name_the_argument_and_the_value(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_check_budget_reports_each_agent() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    check = check_budget(np.diag([49.0, 51.0]), budget)
    assert check.met.tolist() == [False, True]
    assert not check.passed
    assert check.worst_agent == 0
    assert check.describe().startswith("broken for 1 of 2 agents")


def test_noise_scaled_to_the_cap_passes_without_tolerance() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    scaled = R1 * precision_diagonal(R1).max() / budget.precision_cap
    assert check_budget(scaled, budget).passed
    assert check_budget(scaled, budget).describe().startswith("met for all 3 agents")
    assert check_budget(scaled * (1 + 1e-13), budget, relative_tolerance=0.0).passed
    assert not check_budget(scaled * (1 - 1e-7), budget).passed
    loss = account(scaled * (1 + 1e-13), budget.query, num_steps=5000)
    assert loss.worst_epsilon(1e-5) <= 10


def test_zero_sum_noise_fails_every_budget() -> None:
    budget = PrivacyBudget(100, 0.1, num_steps=1, clip=1e-6)
    assert not check_budget(1e9 * (np.eye(3) - 1 / 3), budget).met.any()


def test_a_tolerance_outside_its_range_is_refused() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    with pytest.raises(InvalidArgumentError, match=r"relative_tolerance must be in \[0, 1\)"):
        check_budget(R1, budget, relative_tolerance=-1.0)
