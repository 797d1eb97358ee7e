"""All runs on private data count."""

import math
from dataclasses import replace

import pytest
import torch

from corn.errors import InvalidArgumentError
from corn.learn import Constant, Trial, price_tuning, run_sweep
from corn.learn.tuning import choose_best
from corn.privacy import PrivacyBudget, account_precision, gaussian
from corn.privacy.composition import Expense, PlanTerms, compose_expenses

from .problems import NETWORK, make_mechanism
from .sweeps import SETTINGS, make_logistic


def test_runs_add_up_in_squares() -> None:
    """Six runs of a Gaussian mechanism have √6 times its μ, and a little for floating point."""
    trials = [Trial(make_mechanism("ldp"), Constant(size)) for size in (0.1, 0.2, 0.3)]
    trials.append(Trial(make_mechanism("none"), Constant(0.1)))
    shared = [replace(trial, mechanism=trials[0].mechanism) for trial in trials[:3]] + trials[3:]
    result = run_sweep(make_logistic(), NETWORK, shared, settings=SETTINGS)
    price = price_tuning(result)
    mechanism = shared[0].mechanism
    assert price is not None
    assert mechanism.budget is not None
    promise = mechanism.budget.promise
    # The sweep made 40 of the steps that the budget is for.
    made = SETTINGS.num_steps / mechanism.budget.num_steps
    mu = gaussian.mu_from(promise.epsilon, promise.delta) * math.sqrt(made)
    exact = gaussian.epsilon_from(math.sqrt(6) * mu, promise.delta)
    # The runs without noise are not among them.
    assert price.num_runs == 6
    assert price.epsilon_of_one == promise.epsilon
    assert exact <= price.epsilon <= 1.05 * exact
    assert "clipped" in price.protects
    assert "noise and secret batches of its own" in price.assumes
    # The last round of an interrupted search is not in its result, but it used the data.
    with pytest.raises(InvalidArgumentError):
        price_tuning(replace(result, status="interrupted"))
    # One seed, and one more run of another mechanism with the same noise.
    other = Trial(replace(mechanism, name="another"), Constant(0.1))
    result = replace(result, trials=(*result.trials, other), seeds=(0,))
    total = price_tuning(result)
    assert total is not None
    assert total.num_runs == 4
    exact = gaussian.epsilon_from(math.sqrt(4) * mu, promise.delta)
    assert exact <= total.epsilon <= 1.05 * exact


def test_one_validation_sample_decides_which_run_is_the_best() -> None:
    """No release depends on it, so the price of all releases is not the price of the choice."""
    problem = make_logistic()
    mechanism = make_mechanism("ldp")
    trials = [Trial(mechanism, Constant(size)) for size in (0.01, 1.0)]
    inputs, targets = problem.parts["validation"]
    found = {}
    for label in (0, 1):
        parts = {"validation": (30 * inputs[:1], torch.full_like(targets[:1], label))}
        own = replace(problem, parts=parts)
        result = run_sweep(own, NETWORK, trials, settings=SETTINGS)
        found[label] = choose_best(own, result).schedules[mechanism.name], result.parameters
        price = price_tuning(result)
        assert price is not None
        assert "not chosen by losses on private data" in price.assumes
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0] != found[1][0]


def test_runs_with_poisson_sampling_compose_as_one_long_run() -> None:
    budget = PrivacyBudget(
        1, 1e-5, num_steps=50, clip=1, unit="sample", batch_size=10, samples_per_agent=100
    )
    terms = PlanTerms(budget, max_colluders=0)
    runs = [Expense(terms, budget.precision_cap, 50)] * 4
    total = compose_expenses(runs, 1e-5).epsilon
    exact = account_precision([budget.precision_cap], budget.query, num_steps=200).epsilon(1e-5)[0]
    assert exact <= total <= 1.05 * exact


def test_a_trusted_servers_runs_have_another_adversary_and_no_price() -> None:
    trials = [Trial(make_mechanism("central"), Constant(0.1))]
    settings = replace(SETTINGS, num_steps=2, seeds=(0,))
    assert price_tuning(run_sweep(make_logistic(), NETWORK, trials, settings=settings)) is None
