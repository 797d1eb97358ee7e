"""Samplings side by side: each keeps the promise, and the noise of one does not suffice others."""

import math
from dataclasses import replace

import numpy as np
import pytest

from corn.privacy import PrivacyBudget, account_precision, compare_samplings

BUDGET = PrivacyBudget(
    2, 1e-5, num_steps=60, clip=1, unit="sample", batch_size=10, samples_per_agent=(100, 100, 45)
)


def test_each_sampling_keeps_the_same_promise() -> None:
    costs = compare_samplings(BUDGET)
    assert [cost.sampling for cost in costs] == ["poisson", "passes", "every-step"]
    for cost in costs:
        for std, promise in zip(cost.noise_std, cost.budget.promises, strict=True):
            loss = account_precision([std**-2], promise.query, num_steps=60)
            assert 1.99 < loss.epsilon(1e-5)[0] <= 2 * (1 + 1e-12)
    ratios = [cost.variance_ratio for cost in costs]
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    # Passes of 10 and 4 batches count 6 and 15 of the 60 steps.
    passes, worst = costs[1], costs[2]
    assert (worst.noise_std / passes.noise_std) ** 2 == pytest.approx([10, 10, 4])
    assert passes.mu is not None
    assert passes.mu == pytest.approx(np.full(3, worst.mu[0]))  # type: ignore[index]
    assert costs[0].mu is None


def test_less_noise_than_a_sampling_needs_breaks_its_promise() -> None:
    poisson, passes, worst = compare_samplings(BUDGET)
    assert (poisson.epsilon_at_least <= 2).all()
    assert (passes.epsilon_at_least > 2).all()
    assert (worst.epsilon_at_least > passes.epsilon_at_least).all()


def test_a_rate_implies_the_samples_of_passes() -> None:
    by_rate = replace(BUDGET, samples_per_agent=None, sampling_rate=0.1)
    by_samples = replace(BUDGET, samples_per_agent=100)
    for one, other in zip(compare_samplings(by_rate), compare_samplings(by_samples), strict=True):
        assert one.sampling == other.sampling
        assert one.noise_std == pytest.approx(other.noise_std)


def test_samplings_without_their_numbers_are_left_out() -> None:
    worst = replace(BUDGET, sampling="every-step", samples_per_agent=None)
    assert [cost.sampling for cost in compare_samplings(worst)] == ["every-step"]
    agent = PrivacyBudget(2, 1e-5, num_steps=60, clip=1)
    [only] = compare_samplings(agent)
    assert only.noise_std[0] == pytest.approx(1 / math.sqrt(agent.precision_cap))
    # At so large a δ no noise is needed under Poisson sampling, and there is nothing to compare.
    loose = replace(worst, delta=0.999, samples_per_agent=100)
    assert [cost.sampling for cost in compare_samplings(loose)] == ["passes", "every-step"]
