"""Mistakes found in published code of this field; each test would fail if one were made here."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.privacy import (
    ACCOUNTANTS,
    ClippedQuery,
    PrivacyBudget,
    account,
    account_precision,
    gaussian,
)


def clipped(gradient: np.ndarray, norm: float) -> np.ndarray:
    return gradient * min(1.0, norm / float(np.linalg.norm(gradient)))


def test_per_sample_clipping_does_not_give_agent_level_privacy() -> None:
    # 128 samples, each clipped to C: the agent's whole data moves the sum by 2C·128, the average by
    # 2C. Noise for one sample's share, 2C/128, hides one sample, and no agent.
    generator = np.random.default_rng(0)
    samples = generator.normal(size=(128, 10)) + 5
    moved = 2 * float(np.linalg.norm(np.mean([clipped(g, 0.1) for g in samples], axis=0)))
    sample = PrivacyBudget(
        10, 1e-5, 1000, 0.1, unit="sample", batch_size=128, sampling="every-step"
    )
    agent = PrivacyBudget(10, 1e-5, 1000, 0.1)
    assert sample.query.sensitivity < moved <= agent.query.sensitivity
    assert agent.independent_noise_std == pytest.approx(128 * sample.independent_noise_std)
    noise = np.eye(3) * sample.independent_noise_std**2
    spent = {
        own: account(noise, own.query, num_steps=1000).epsilon(1e-5) for own in (sample, agent)
    }
    assert (spent[sample] <= 10).all()
    assert (spent[agent] > 10).all()
    with pytest.raises(InvalidArgumentError, match="batch_size must be None for unit='agent'"):
        PrivacyBudget(10, 1e-5, 1000, 0.1, batch_size=128)
    assert "one sample" in sample.describe()
    assert "one agent's whole data set" in agent.describe()


def test_reused_noise_protects_no_agent() -> None:
    # Two steps with the same draw have the joint covariance 11ᵀ ⊗ R: the messages' difference is
    # noise-free. Fresh draws have I ⊗ R.
    R = np.array([[2.0, -0.5], [-0.5, 1.0]])
    one_release = ClippedQuery(0.1)
    reused = account(np.kron(np.ones((2, 2)), R), one_release, num_steps=1)
    fresh = account(np.kron(np.eye(2), R), one_release, num_steps=1)
    assert np.isinf(reused.epsilon(1e-5)).all()
    assert (fresh.epsilon(1e-5) < math.inf).all()


@pytest.mark.parametrize("accounting", list(ACCOUNTANTS))
def test_every_step_adds_to_the_loss(accounting: str) -> None:
    R = np.eye(2) * 1e4
    epsilons = [
        account(R, ClippedQuery(0.1), num_steps=steps).worst_epsilon(1e-5, accounting=accounting)  # type: ignore[arg-type]
        for steps in (1, 100, 10_000)
    ]
    # μ grows by 10 each time, and ε at least as fast.
    assert epsilons[1] >= 10 * epsilons[0] * (1 - 1e-9)
    assert epsilons[2] >= 10 * epsilons[1] * (1 - 1e-9)
    caps = [PrivacyBudget(3, 1e-5, steps, 0.1).precision_cap for steps in (1, 100)]
    assert caps[0] == pytest.approx(100 * caps[1])


@given(
    epsilon=st.floats(-3, 3).map(lambda exponent: 10**exponent),
    delta=st.floats(-14, -0.5).map(lambda exponent: 10**exponent),
    steps=st.integers(1, 10**7),
    clip=st.floats(-6, 6).map(lambda exponent: 10**exponent),
)
@settings(max_examples=200)
def test_no_search_returns_an_epsilon_above_its_target(
    epsilon: float, delta: float, steps: int, clip: float
) -> None:
    budget = PrivacyBudget(epsilon, delta, steps, clip)
    loss = account_precision([budget.precision_cap], budget.query, num_steps=steps)
    assert loss.worst_epsilon(delta) <= epsilon
    assert gaussian.delta_from(float(loss.mu[0]), epsilon) <= delta


def test_pair_noise_scaled_by_mixing_weights_is_accounted_as_scaled() -> None:
    # A ring of 6: private noise θ² and pair noise τ² on each link, which the code then multiplies
    # by the mixing weight 1/3 before adding it. The covariance really added has τ²/9.
    n, weight, private, pair = 6, 1 / 3, 4.0, 400.0
    incidence = np.zeros((n, n))
    for i in range(n):
        incidence[i, i], incidence[(i + 1) % n, i] = 1.0, -1.0
    laplacian = incidence @ incidence.T
    claimed = private * np.eye(n) + pair * laplacian
    added = private * np.eye(n) + pair * weight**2 * laplacian
    generator = np.random.default_rng(1)
    draws = math.sqrt(private) * generator.normal(size=(40_000, n)) + weight * math.sqrt(pair) * (
        generator.normal(size=(40_000, n)) @ incidence.T
    )
    query = ClippedQuery(0.1)
    measured = account(np.cov(draws.T), query, num_steps=1000).worst_epsilon(1e-5)
    assert account(added, query, num_steps=1000).worst_epsilon(1e-5) == pytest.approx(
        measured, rel=0.03
    )
    assert account(claimed, query, num_steps=1000).worst_epsilon(1e-5) < 0.9 * measured


def test_precision_depends_on_correlations_not_only_on_variances() -> None:
    # Large variances alone prove nothing: privacy is in R⁻¹, not in R.
    n = 5
    R = 1e6 * (np.eye(n) - 1 / n) + 1e-3 * np.eye(n)
    loss = account(R, ClippedQuery(0.1), num_steps=1)
    naive = account(np.diag(np.diag(R)), ClippedQuery(0.1), num_steps=1)
    assert naive.worst_epsilon(1e-5) < 0.01
    assert loss.worst_epsilon(1e-5) > 5


def test_accounting_imports_without_torch_and_the_extra() -> None:
    code = (
        "import sys; import corn.privacy as p; p.PrivacyBudget(1, 1e-5, 10, 0.1).precision_cap; "
        "sys.exit('torch' in sys.modules or 'dp_accounting' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
