"""Samplings side by side: each keeps the promise, with more or less noise."""

from dataclasses import replace

import pytest

from corn.privacy import PrivacyBudget, account_precision, compare_samplings
from corn.privacy.accounting import SAMPLINGS, with_sampling

BUDGET = PrivacyBudget(
    2, 1e-5, num_steps=60, clip=1, unit="sample", batch_size=10, samples_per_agent=(100, 100, 45)
)


def test_each_sampling_keeps_the_same_promise() -> None:
    ratios = compare_samplings(BUDGET)
    assert list(ratios) == ["poisson", "passes", "every-step"]
    variances = {}
    for name in SAMPLINGS:
        own = with_sampling(BUDGET, name)
        assert own is not None
        caps = own.precision_caps(3)
        variances[name] = (1 / caps).sum()
        for cap, promise in zip(caps, own.promises, strict=True):
            loss = account_precision([cap], promise.query, num_steps=60)
            assert 1.99 < loss.epsilon(1e-5)[0] <= 2 * (1 + 1e-12)
    least = min(variances.values())
    assert ratios == pytest.approx({name: value / least for name, value in variances.items()})


def test_passes_count_the_steps_that_can_use_a_sample() -> None:
    """Passes of 10 batches count 6 of the 60 steps."""
    ratios = compare_samplings(replace(BUDGET, samples_per_agent=100))
    assert ratios["every-step"] / ratios["passes"] == pytest.approx(10)


def test_a_rate_implies_the_samples_of_passes() -> None:
    by_rate = replace(BUDGET, samples_per_agent=None, sampling_rate=0.1)
    by_samples = replace(BUDGET, samples_per_agent=100)
    assert compare_samplings(by_rate) == pytest.approx(compare_samplings(by_samples))


def test_samplings_without_their_numbers_are_left_out() -> None:
    worst = replace(BUDGET, sampling="every-step", samples_per_agent=None)
    assert compare_samplings(worst) == {"every-step": 1.0}
    agent = PrivacyBudget(2, 1e-5, num_steps=60, clip=1)
    assert compare_samplings(agent) == {"every-step": 1.0}
    # At so large a δ no noise is needed under Poisson sampling, and there is nothing to compare.
    loose = replace(worst, delta=0.999, samples_per_agent=100)
    assert list(compare_samplings(loose)) == ["passes", "every-step"]
