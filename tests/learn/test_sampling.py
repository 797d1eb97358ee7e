"""Rates and refusals: an agent samples at most as often as its budget counted."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.learn.sampling import (
    TooFewSamplesError,
    choose_rates,
    require_fitting_samples,
    round_rate_down,
    usual_width,
)
from corn.privacy import PrivacyBudget


def make_budget(**changes: Any) -> PrivacyBudget:
    common = {"epsilon": 1, "delta": 1e-5, "num_steps": 100, "clip": 1.0, "unit": "sample"}
    return PrivacyBudget(**{**common, "batch_size": 16, **changes})


@given(st.integers(1, 200), st.integers(1, 5000), st.integers(0, 5000))
def test_no_agent_exceeds_the_rate_that_was_counted(batch: int, least: int, more: int) -> None:
    (rate,) = choose_rates(
        make_budget(batch_size=batch, samples_per_agent=least).queries, [least + more]
    ) or (2.0,)
    counted = make_budget(batch_size=batch, samples_per_agent=least).query.sampling_rate
    assert counted is not None
    assert 0 < round_rate_down(rate) <= rate <= counted
    # The expected batch has at most B samples, by the float just above at most.
    assert Fraction(rate) * (least + more) <= batch * (1 + Fraction(1, 2**52))


def test_each_agent_has_batches_of_the_same_expected_size() -> None:
    queries = make_budget(samples_per_agent=160).queries
    assert choose_rates(queries, [160, 320, 1600]) == (0.1, 0.05, 0.01)


def test_rates_do_not_depend_on_a_private_number_of_samples() -> None:
    """Adding a sample must not change the rate of the others."""
    budget = make_budget(samples_per_agent=160, adjacency="add-remove")
    assert choose_rates(budget.queries, [160, 320, 1600]) == (0.1, 0.1, 0.1)


def test_an_agent_with_fewer_samples_than_a_batch_takes_all() -> None:
    assert choose_rates(make_budget(samples_per_agent=10).queries, [10]) == (1.0,)


def test_a_rate_of_the_budget_is_never_exceeded_by_small_agents() -> None:
    assert choose_rates(make_budget(sampling_rate=0.1).queries, [20, 1600]) == (0.1, 0.01)


def test_only_poisson_sampling_has_rates() -> None:
    for budget in (
        make_budget(sampling="passes", samples_per_agent=50),
        make_budget(sampling="every-step"),
        PrivacyBudget(1, 1e-5, num_steps=10, clip=1),
    ):
        assert choose_rates(budget.queries, [50, 60]) is None


@pytest.mark.parametrize(
    ("budget", "sizes", "refused"),
    [
        (make_budget(samples_per_agent=100), [100, 1500], None),
        (make_budget(samples_per_agent=100), [100, 99], 1),
        (make_budget(samples_per_agent=(100, 50)), [100, 50], None),
        (make_budget(samples_per_agent=(100, 50)), [99, 50], 0),
        (make_budget(samples_per_agent=100, sampling="passes"), [96, 100], None),
        (make_budget(samples_per_agent=100, sampling="passes"), [100, 95], 1),
        (make_budget(samples_per_agent=10, sampling="passes"), [3, 10], None),
        # The number of samples is private: a refusal would reveal that one is missing.
        (make_budget(samples_per_agent=100, adjacency="add-remove"), [100, 99], None),
        (make_budget(sampling="every-step"), [1, 2], None),
        (make_budget(sampling_rate=0.1), [5, 2500], None),
    ],
)
def test_agents_with_fewer_samples_than_counted_are_refused(
    budget: PrivacyBudget, sizes: list[int], refused: int | None
) -> None:
    if refused is None:
        require_fitting_samples(budget, sizes)
        return
    with pytest.raises(TooFewSamplesError, match=f"samples of agent {refused} must be at least"):
        require_fitting_samples(budget, sizes)


def test_more_samples_than_the_float_proof_covers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="found 2,561 of agent 1: raise the batch size"):
        require_fitting_samples(make_budget(sampling_rate=0.1), [2560, 2561])


def test_usual_widths_are_exceeded_once_in_a_billion_steps() -> None:
    """By the exact binomial tail in rational arithmetic."""
    size, rate = 40, Fraction(1, 8)
    width = usual_width(size, float(rate))
    tail, term = Fraction(0), (1 - rate) ** size
    for k in range(size + 1):
        if k > width:
            tail += term
        term = term * (size - k) / (k + 1) * rate / (1 - rate)
    assert tail <= Fraction(1, 10**9) < tail * 10**3
