"""Runs that were compared all count, and held-out samples can stand for those of the agents."""

import math
from dataclasses import replace

import pytest
import torch

from corn.errors import InvalidArgumentError
from corn.learn import Constant, Trial, borrow_held_out, price_all, price_tuning, run_sweep
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
    [(mechanism, price)] = price_tuning(result).items()
    assert mechanism.budget is not None
    promise = mechanism.budget.promise
    # The sweep made 40 of the steps that the budget is for.
    made = SETTINGS.num_steps / mechanism.budget.num_steps
    mu = gaussian.mu_from(promise.epsilon, promise.delta) * math.sqrt(made)
    exact = gaussian.epsilon_from(math.sqrt(6) * mu, promise.delta)
    assert (mechanism.name, price.num_runs) == ("ldp", 6)
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
    total = price_all(result)
    assert total is not None
    assert total.num_runs == 4
    exact = gaussian.epsilon_from(math.sqrt(4) * mu, promise.delta)
    assert exact <= total.epsilon <= 1.05 * exact


def test_public_samples_keep_sizes_and_reveal_nothing() -> None:
    problem = replace(make_logistic(), public_parts=("validation",))
    public = borrow_held_out(problem, seed=3)
    assert public.data.sizes == problem.data.sizes
    inputs, _ = problem.parts["validation"]
    drawn, kept = public.data.inputs, public.parts["validation"][0]
    rows = {tuple(row.tolist()) for row in inputs}
    assert {tuple(row.tolist()) for row in drawn} <= rows
    assert not {tuple(row.tolist()) for row in drawn} & {tuple(row.tolist()) for row in kept}
    assert len(kept) == len(inputs) // 2
    # Other private samples of the same number give the same public ones.
    other = replace(problem, data=replace(problem.data, inputs=problem.data.inputs + 1))
    torch.testing.assert_close(borrow_held_out(other, seed=3).data.inputs, drawn)


def test_private_held_out_samples_are_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        borrow_held_out(make_logistic(), seed=0)


def test_runs_with_poisson_sampling_compose_as_one_long_run() -> None:
    budget = PrivacyBudget(
        1, 1e-5, num_steps=50, clip=1, unit="sample", batch_size=10, samples_per_agent=100
    )
    terms = PlanTerms(budget, max_colluders=0)
    runs = [Expense(terms, budget.precision_cap, 50)] * 4
    total = compose_expenses(runs, 1e-5).epsilon
    exact = account_precision([budget.precision_cap], budget.query, num_steps=200).epsilon(1e-5)[0]
    assert exact <= total <= 1.05 * exact


def test_the_price_of_a_trusted_servers_runs_names_those_who_see_its_models() -> None:
    """The promise of a trusted server does not hold against an eavesdropper."""
    mechanism = make_mechanism("central")
    trials = [Trial(mechanism, Constant(0.1))]
    settings = replace(SETTINGS, num_steps=2, seeds=(0,))
    result = run_sweep(make_logistic(), NETWORK, trials, settings=settings)
    assert price_tuning(result)[mechanism].against == mechanism.against
    assert "eavesdropper" not in mechanism.against
    assert price_all(result) is None
