"""Promises of single agents: budgets of tuples, mappings and files, and every refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.privacy import PrivacyBudget, account_promises
from corn.privacy.floats import FloatLoss, account_floats, find_promise, set_aside

BASE: dict[str, Any] = {"num_steps": 1000, "clip": 0.1}
SAMPLE: dict[str, Any] = {**BASE, "unit": "sample", "batch_size": 10}
NAMES = ["north", "south", "east"]
SIZES = (200, 200, 200, 400)


@given(epsilons=st.lists(st.floats(0.01, 30), min_size=1, max_size=6), data=st.data())
def test_each_agent_gets_the_cap_of_its_own_budget(
    epsilons: list[float], data: st.DataObject
) -> None:
    n = len(epsilons)
    deltas = data.draw(st.lists(st.floats(1e-9, 1e-2), min_size=n, max_size=n))
    samples = data.draw(st.lists(st.integers(1, 10**4), min_size=n, max_size=n))
    budget = PrivacyBudget(
        tuple(epsilons),
        tuple(deltas),
        sampling="passes",
        samples_per_agent=tuple(samples),
        **SAMPLE,
    )
    caps = budget.precision_caps(n)
    for agent in range(n):
        own = PrivacyBudget(
            epsilons[agent],
            deltas[agent],
            sampling="passes",
            samples_per_agent=samples[agent],
            **SAMPLE,
        )
        assert budget.of_agent(agent) == own
        assert caps[agent] == own.precision_cap
    # Every agent at its cap spends what it was promised, and never more.
    spent = account_promises(caps, budget, num_steps=1000)
    assert (spent <= epsilons).all()
    np.testing.assert_allclose(spent, epsilons, rtol=1e-8)
    assert budget.is_uniform == (len(set(budget.promises)) == 1)


def test_poisson_caps_rise_with_epsilon_delta_and_samples() -> None:
    promises: dict[str, Any] = {"epsilon": (1.0, 2.0, 1.0, 1.0), "delta": (1e-5, 1e-5, 1e-4, 1e-5)}
    budget = PrivacyBudget(**promises, **{**SAMPLE, "num_steps": 100}, samples_per_agent=SIZES)
    caps = budget.precision_caps(4)
    assert (caps[1:] > caps[0]).all()
    spent = account_promises(caps, budget, num_steps=100)
    promised = budget.epsilons(4)
    assert (spent <= promised).all()
    assert (spent >= promised * (1 - 3e-4)).all()


def test_equal_promises_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from corn.privacy import subsampling

    calls = []

    def calibrate(epsilon: float, *_: Any, **__: Any) -> float:
        calls.append(epsilon)
        return epsilon

    monkeypatch.setattr(subsampling, "calibrate_precision", calibrate)
    budget = PrivacyBudget((1, 8, 1, 8), 1e-5, sampling_rate=0.1, **SAMPLE)
    assert budget.precision_caps(4).tolist() == [1, 8, 1, 8]
    assert budget.precision_caps(4).tolist() == [1, 8, 1, 8]
    assert sorted(calls) == [1, 8]


def test_agents_of_equal_sampling_are_uniform() -> None:
    """Passes over 105 and 109 samples have 10 batches each, so nothing differs."""
    budget = PrivacyBudget(1, 1e-5, sampling="passes", samples_per_agent=(105, 109), **SAMPLE)
    assert budget.is_uniform
    assert budget.num_agents == 2
    assert budget.precision_cap == budget.precision_caps(2)[1]
    assert not dataclasses.replace(budget, samples_per_agent=(105, 110)).is_uniform


@pytest.mark.parametrize("name", ["promise", "query", "precision_cap", "mu"])
def test_different_promises_have_no_single_one(name: str) -> None:
    budget = PrivacyBudget((1, 8), 1e-5, **BASE)
    with pytest.raises(InvalidArgumentError, match=r"one promise .* of_agent\(i\)"):
        getattr(budget, name)


def test_a_budget_of_other_agents_is_refused() -> None:
    budget = PrivacyBudget((1, 8), 1e-5, **BASE)
    with pytest.raises(InvalidArgumentError):
        budget.precision_caps(3)
    with pytest.raises(InvalidArgumentError):
        budget.of_agent(2)
    with pytest.raises(InvalidArgumentError):
        account_promises([1.0], budget, num_steps=1)


def test_each_agent_sets_its_own_reserve_aside() -> None:
    budget = PrivacyBudget((0.5, 8), (1e-6, 1e-5), **BASE)
    ideal = set_aside(budget)
    for agent in range(2):
        assert ideal.of_agent(agent) == set_aside(budget.of_agent(agent))
    caps = ideal.precision_caps(2)
    spent = account_floats(caps, budget, num_steps=1000)
    np.testing.assert_allclose(spent, [0.5, 8], rtol=1e-8)
    # The lenient agent's noise does not keep the strict agent's promise.
    assert account_floats(caps[::-1], budget, num_steps=1000)[0] == np.inf
    assert find_promise(caps[1], budget.of_agent(0), num_steps=1000).promise.epsilon > 7


def test_the_strictest_promise_limits_the_model() -> None:
    loss = FloatLoss(log_ratio=1e-9, failure=1e-40)
    budget = PrivacyBudget((0.5, 8), 1e-5, **BASE)
    alone = [loss.max_values(budget.of_agent(agent)) for agent in range(2)]
    assert loss.max_values(budget) == min(alone) < max(alone)
