"""Totals over several plans against closed forms, dp_accounting and each plan's own promise."""

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from corn.errors import InvalidArgumentError
from corn.privacy import PrivacyBudget, gaussian
from corn.privacy.composition import Expense, PlanTerms, TotalLoss, common_unit, compose_expenses
from corn.privacy.floats import bound_reserve, set_aside

DELTA = 1e-5


def spend(epsilon: float = 1, *, colluders: int = 1, share: float = 1, **changes: Any) -> Expense:
    """Return the expense of a plan at its cap, of which a share of the steps was released."""
    budget = PrivacyBudget(epsilon, DELTA, **({"num_steps": 200, "clip": 0.1} | changes))
    precision = set_aside(budget).precision_cap
    return Expense(PlanTerms(budget, colluders), precision, round(share * budget.num_steps))


def spend_poisson(epsilon: float = 1, *, adjacency: str = "replace", **changes: Any) -> Expense:
    options: dict[str, Any] = {"unit": "sample", "batch_size": 32, "sampling_rate": 0.05}
    return spend(epsilon, adjacency=adjacency, **(options | changes))


def mu_of(expense: Expense) -> float:
    query = expense.query
    uses = query.participations(expense.num_releases)
    return query.sensitivity * math.sqrt(uses * expense.precision)


@given(st.lists(st.floats(0.05, 8), min_size=1, max_size=5), st.sampled_from([1e-5, 1e-4, 1e-3]))
def test_gaussian_plans_add_in_squares(epsilons: list[float], delta: float) -> None:
    expenses = [spend(epsilon) for epsilon in epsilons]
    exact = gaussian.epsilon_from(math.hypot(*map(mu_of, expenses)), delta)
    total = compose_expenses(expenses, delta)
    # Never below the ideal releases, and above them by floats alone: the reserve of ε and of δ.
    reserve = sum(2 * bound_reserve(expense.terms.budget)[0] for expense in expenses)
    loosest = gaussian.epsilon_from(math.hypot(*map(mu_of, expenses)), 0.5 * delta)
    assert exact + reserve <= total.epsilon <= loosest + reserve + 1e-9
    assert (total.unit, total.relation, total.max_colluders) == ("agent", "replace-one", 1)


def test_phases_with_other_clipping_noise_and_steps_add_in_squares() -> None:
    phases = [spend(2), spend(1, clip=0.5, num_steps=30), spend(3, clip=0.02, share=0.5)]
    exact = gaussian.epsilon_from(math.hypot(*map(mu_of, phases)), DELTA)
    assert exact < compose_expenses(phases, DELTA).epsilon < 1.01 * exact


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1, 4, 10, 30])
@pytest.mark.parametrize("spend_one", [spend, spend_poisson])
def test_one_plan_costs_what_it_promises(spend_one: Any, epsilon: float) -> None:
    total = compose_expenses([spend_one(epsilon)], DELTA)
    assert 0.995 * epsilon < total.epsilon <= epsilon * (1 + 1e-9)
    half = compose_expenses([spend_one(epsilon, share=0.5)], DELTA)
    assert half.epsilon < total.epsilon


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
def test_mixed_plans_agree_with_dp_accounting(adjacency: str) -> None:
    poisson = [
        spend_poisson(0.8, adjacency=adjacency),
        spend_poisson(2, adjacency=adjacency, sampling_rate=0.2, num_steps=50),
    ]
    fixed = spend(1, unit="sample", batch_size=16, sampling="every-step", adjacency=adjacency)
    relation = NeighboringRelation.REPLACE_ONE
    if adjacency == "add-remove":
        relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    oracle = pld.from_gaussian_mechanism(1 / mu_of(fixed), value_discretization_interval=1e-4)
    for own in poisson:
        step = pld.from_gaussian_mechanism(
            1 / (own.query.contribution * math.sqrt(own.precision)),
            sampling_prob=own.query.sampling_rate,
            neighboring_relation=relation,
            value_discretization_interval=1e-4,
        )
        oracle = oracle.compose(step.self_compose(own.num_releases))
    exact = oracle.get_epsilon_for_delta(DELTA)
    total = compose_expenses([*poisson, fixed], DELTA)
    assert exact * (1 - 1e-3) <= total.epsilon <= exact * 1.01
    assert total.unit == "sample"


def test_the_order_of_plans_does_not_matter_and_each_adds() -> None:
    expenses = [spend(0.5), spend_poisson(1), spend(2, adjacency="add-remove", colluders=0)]
    totals = [compose_expenses(expenses[:count], DELTA).epsilon for count in (1, 2, 3)]
    assert totals == sorted(totals)
    backwards = compose_expenses(expenses[::-1], DELTA)
    assert backwards.epsilon == pytest.approx(totals[-1], rel=1e-6)
    assert backwards.max_colluders == 0


def test_an_agents_promise_covers_a_sample_but_not_the_other_way_round() -> None:
    agent, sample = spend(1, adjacency="add-remove"), spend_poisson(1, adjacency="add-remove")
    assert common_unit([agent]) == "agent"
    assert common_unit([agent, sample]) == "sample"
    both = compose_expenses([agent, sample], DELTA)
    assert (both.unit, both.relation) == ("sample", "add-or-remove-one")
    # A sample that is added can turn the agent's gradient around: twice the shift of zero-out.
    alone = compose_expenses([agent], DELTA, unit="sample").epsilon
    assert alone >= gaussian.epsilon_from(2 * mu_of(agent), DELTA)
    assert both.epsilon > alone
    assert compose_expenses([agent, sample], DELTA, unit="agent").epsilon == math.inf


def test_mixed_adjacencies_are_counted_as_replacing() -> None:
    zero_out = spend(1, adjacency="add-remove")
    total = compose_expenses([zero_out, spend(1)], DELTA)
    mu = math.hypot(2 * mu_of(zero_out), mu_of(spend(1)))
    assert total.relation == "replace-one"
    assert (
        gaussian.epsilon_from(mu, DELTA) < total.epsilon < 1.01 * gaussian.epsilon_from(mu, DELTA)
    )
    poisson = compose_expenses(
        [spend_poisson(0.5), spend_poisson(1, adjacency="add-remove")], DELTA
    )
    assert poisson.relation == "replace-one"
    assert poisson.epsilon > compose_expenses([spend_poisson(0.5)], DELTA).epsilon


def test_passes_count_passes_begun() -> None:
    sampling: dict[str, Any] = {"sampling": "passes", "samples_per_agent": 200}
    full = spend(1, unit="sample", batch_size=10, **sampling)
    assert compose_expenses([full], DELTA).epsilon <= 1
    # 21 releases begin two passes of 20 batches, as 40 do.
    begun = [compose_expenses([Expense(full.terms, 1.0, n)], DELTA).epsilon for n in (20, 21, 40)]
    assert begun[0] < begun[1] == begun[2]


def test_nothing_released_is_nothing_spent() -> None:
    assert compose_expenses([], DELTA) == TotalLoss(0, DELTA, "agent")
    assert compose_expenses([spend(share=0)], DELTA).epsilon == 0
    exposed = Expense(spend().terms, math.inf, 1)
    assert compose_expenses([exposed], DELTA).epsilon == math.inf


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan])
def test_delta_must_be_a_fraction(delta: float) -> None:
    with pytest.raises(InvalidArgumentError, match="delta must be in"):
        compose_expenses([spend()], delta)


def test_floats_are_covered_plan_by_plan() -> None:
    """Perturb two Gaussian releases as far as the reserve allows, in the worst direction."""
    expenses, total_delta = [spend(0.5), spend(8)], DELTA
    total = compose_expenses(expenses, total_delta)
    # Discretise each pair of laws by its log-likelihood ratio, the best statistic there is.
    edges = np.linspace(-12, 12, 1201)
    p, q = np.ones(1), np.ones(1)
    for expense in expenses:
        mu, (ratio, failure) = mu_of(expense), bound_reserve(expense.terms.budget)
        one, two = np.diff(ndtr(edges - mu)), np.diff(ndtr(edges))
        # The computed law of the first data set has more mass where it is likely, and that of the
        # second lacks an event of probability δ′ that the first one makes as likely as possible.
        above = edges[:-1] > mu
        computed = one * np.where(above, math.exp(ratio), 1)
        lacking = two * np.where(above, math.exp(-ratio), 1) * (edges[:-1] <= -ndtri(failure))
        p, q = np.outer(p, computed).ravel(), np.outer(q, lacking).ravel()
    assert np.maximum(p - math.exp(total.epsilon) * q, 0).sum() <= total_delta


def test_totals_name_the_relation_that_every_plan_protects() -> None:
    """Nothing is proved for a sample that is missing where batches have a fixed size."""
    poisson = spend_poisson(adjacency="add-remove")
    passes = spend_poisson(
        adjacency="add-remove", sampling="passes", sampling_rate=None, samples_per_agent=640
    )
    agent = spend(adjacency="add-remove")
    for expenses, relation in (
        ([poisson], "add-or-remove-one"),
        ([poisson, passes], "zero-out"),
        ([agent], "zero-out"),
        ([poisson, spend_poisson()], "replace-one"),
    ):
        total = compose_expenses(expenses, DELTA)
        assert total.relation == relation
        if len(expenses) == 1:
            assert relation in expenses[0].query.recipe
