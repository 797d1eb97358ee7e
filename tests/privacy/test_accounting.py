"""From noise to ε and δ, per agent and worst."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from corn.errors import CornWarning, InvalidArgumentError
from corn.privacy import (
    ACCOUNTANTS,
    Accounting,
    ClippedQuery,
    PrivacyBudget,
    account,
    account_precision,
    gaussian,
    precision_diagonal,
)

AGENT = ClippedQuery(0.1)
R1 = np.array([[60.0, 20.0, 0.0], [20.0, 80.0, -10.0], [0.0, -10.0, 100.0]])


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


@pytest.mark.parametrize("accounting", ["gdp", "rdp", "paper"])
def test_each_accountant_is_applied_to_each_agent(accounting: Accounting) -> None:
    loss = account(R1, AGENT, num_steps=500)
    accountant = ACCOUNTANTS[accounting]
    epsilons = loss.epsilon(1e-5, accounting=accounting)
    assert epsilons.tolist() == [accountant.epsilon_from(float(mu), 1e-5) for mu in loss.mu]
    assert loss.worst_epsilon(1e-5, accounting=accounting) == epsilons.max()
    assert loss.delta(3.0).tolist() == [gaussian.delta_from(float(mu), 3.0) for mu in loss.mu]


def test_pure_zero_sum_noise_has_no_finite_epsilon_by_any_accountant() -> None:
    loss = account(np.eye(4) - 0.25, AGENT, num_steps=10)
    for accounting in ACCOUNTANTS:
        assert np.isinf(loss.epsilon(1e-5, accounting=accounting)).all()
    assert (loss.delta(100.0) == 1).all()


def test_an_agent_whose_data_is_unused_has_zero_epsilon() -> None:
    loss = account_precision([0.0, 1.0], AGENT, num_steps=10)
    assert loss.epsilon(1e-5)[0] == 0 == loss.delta(0.0)[0]


def test_eq_13b_warns_once_for_the_worst_agent() -> None:
    loss = account(np.diag([50.0, 5.0, 500.0]), AGENT, num_steps=5000)
    with pytest.warns(CornWarning, match=r"epsilon=42\.\d+, delta=1e-05 is beyond") as caught:
        loss.epsilon(1e-5, accounting="paper")
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: account(R1, AGENT, num_steps=0),
            "num_steps must be an integer of at least 1, found 0",
        ),
        (lambda: account_precision([1.0, -2.0], AGENT, num_steps=1), "non-negative, found -2"),
        (lambda: account_precision([math.nan], AGENT, num_steps=1), "non-negative, found nan"),
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


def test_noise_scaled_to_the_cap_keeps_the_promise() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    scaled = R1 * precision_diagonal(R1).max() / budget.precision_cap
    loss = account(scaled * (1 + 1e-13), budget.query, num_steps=5000)
    assert 10 * (1 - 1e-9) <= loss.worst_epsilon(1e-5) <= 10
    less = account(scaled * (1 - 1e-7), budget.query, num_steps=5000)
    assert less.worst_epsilon(1e-5) > 10
