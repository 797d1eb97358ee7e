"""An audit of one training run: its bound against brute force, and on runs with known privacy."""

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom

from corn.audit.one_run import (
    OneRunReport,
    audit_training,
    bound_epsilon_by_guesses,
    guess_p_value,
)
from corn.errors import InvalidArgumentError
from corn.learn import Workload, make_schedule
from corn.learn.mechanism import Mechanism
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Mixing, load_network
from tests.audit.plans import agent_plan


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_without_delta_the_tail_is_that_of_randomised_response(epsilon: float) -> None:
    """All answers of randomised response are enumerated; guessing the answers is optimal."""
    chance, r = 1 / (1 + math.exp(-epsilon)), 6
    for v in range(r + 1):
        total = sum(
            math.prod(chance if right else 1 - chance for right in outcome)
            for outcome in product((0, 1), repeat=r)
            if sum(outcome) >= v
        )
        assert math.isclose(guess_p_value(9, r, v, epsilon=epsilon, delta=0.0), total)


@pytest.mark.parametrize("delta", [1e-3, 0.01, 0.05])
@pytest.mark.parametrize("right", [3, 5, 8])
def test_with_delta_the_bound_is_a_linear_program(right: int, delta: float) -> None:
    """The largest P[X + F ≥ v] over all F with E[F] ≤ 2mδ, independent of X."""
    m, r, epsilon = 10, 8, 0.8
    chance = 1 / (1 + math.exp(-epsilon))
    free = np.arange(m + 1)
    success = np.array([binom.sf(right - f - 1, r, chance) for f in free])
    solved = linprog(
        -success,
        A_ub=[free],
        b_ub=[2 * m * delta],
        A_eq=[np.ones(m + 1)],
        b_eq=[1.0],
    )
    found = guess_p_value(m, r, right, epsilon=epsilon, delta=delta)
    assert found >= -solved.fun - 1e-9
    # A single number of free guesses is optimal as long as it is rare.
    if 2 * m * delta < 0.2:
        assert math.isclose(found, min(-solved.fun, 1.0), rel_tol=1e-6)


def test_the_bound_is_the_largest_epsilon_that_is_refuted() -> None:
    found = bound_epsilon_by_guesses(1000, 500, 400, delta=1e-5, alpha=0.05)
    assert guess_p_value(1000, 500, 400, epsilon=found, delta=1e-5) < 0.05
    assert guess_p_value(1000, 500, 400, epsilon=found * 1.001, delta=1e-5) >= 0.05
    assert bound_epsilon_by_guesses(100, 50, 25, delta=1e-5, alpha=0.05) == 0.0
    assert bound_epsilon_by_guesses(10**6, 10**6, 10**6, delta=0.0, alpha=0.05) > 10


def test_the_bound_of_randomised_response_holds_at_its_level() -> None:
    generator, epsilon, m = np.random.default_rng(0), 1.0, 200
    chance = 1 / (1 + math.exp(-epsilon))
    counts = generator.binomial(m, chance, 1000)
    each = {
        right: bound_epsilon_by_guesses(m, m, right, delta=1e-6, alpha=0.05)
        for right in set(counts.tolist())
    }
    bounds = [each[right] for right in counts.tolist()]
    wrong = sum(bound > epsilon for bound in bounds)
    assert wrong <= binom.isf(1e-3, 1000, 0.05)
    assert np.median(bounds) > 0.5


@cache
def digits_plan(
    adjacency: str, epsilon: float | tuple[float, ...] = 1.0, mixing: Mixing = "gossip"
) -> Plan:
    budget = PrivacyBudget(
        epsilon,
        1e-5,
        num_steps=30,
        clip=1.0,
        unit="sample",
        adjacency=adjacency,  # type: ignore[arg-type]
        batch_size=64,
        samples_per_agent=300,
    )
    return make_plan(load_network("complete:4", mixing=mixing), budget)


def run(plan: Plan, *, method: Mechanism | None = None, num_canaries: int = 400) -> OneRunReport:
    return audit_training(
        plan,
        Workload("digits", partition="iid").build(4),
        schedule=make_schedule(0.2, "constant"),
        num_canaries=num_canaries,
        method=method,
    )


@pytest.mark.parametrize(
    ("adjacency", "mixing"), [("add-remove", "gossip"), ("replace", "gossip"), ("replace", "sum")]
)
def test_a_private_run_keeps_its_promise(adjacency: str, mixing: Mixing) -> None:
    report = run(digits_plan(adjacency, mixing=mixing))
    assert not report.violated
    assert report.epsilon < 1
    assert 0.45 < report.auc < 0.75


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_a_run_without_noise_is_found(mixing: Mixing) -> None:
    plan = digits_plan("add-remove", mixing=mixing)
    report = run(plan, method=Mechanism.non_private(*plan.budget.queries))
    assert report.auc > 0.75
    assert report.violated


def test_agents_may_have_different_promises() -> None:
    """An agent that is promised little must not count against the promise of another one."""
    # An odd number of canaries: they cannot be halved.
    report = run(digits_plan("add-remove", (0.1, 40.0, 40.0, 40.0)), num_canaries=399)
    assert report.epsilon > 0.1
    assert report.promised_epsilon == 40
    assert report.num_guesses < 399


def test_a_seed_repeats_the_audit() -> None:
    first, second = (run(digits_plan("add-remove")) for _ in range(2))
    assert (first.num_right, first.auc) == (second.num_right, second.auc)


def test_plans_for_agents_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a plan for samples"):
        run(agent_plan())
    with pytest.raises(InvalidArgumentError, match="canaries must be"):
        run(digits_plan("add-remove"), num_canaries=5)
