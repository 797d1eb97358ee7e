"""Plans for survivors restore cancellation, and privacy never weakens."""

from typing import Any

import networkx as nx
import numpy as np
import pytest

from corn.covariance import ONE_STEP, GivenObjective, ThreatModel
from corn.covariance.coalitions import coalition_precisions
from corn.distributed.recovery import ActivePlan, budget_left, replan
from corn.plan import fingerprint, make_plan, verify_plan
from corn.privacy import PrivacyBudget, account_precision, gaussian, precision_diagonal
from corn.privacy.floats import set_aside
from corn.topology import load_network

from .harness import small_plan

PLAN = small_plan("er:n=7,p=0.5,seed=1", 200)


@pytest.mark.parametrize("lost", [(2,), (0, 5), (1, 3, 6)])
def test_losses_weaken_no_agents_privacy(lost: tuple[int, ...]) -> None:
    """By the accountant, the messages of survivors keep the budget against every coalition."""
    budget = PLAN.budget
    for coalition, honest, planned in coalition_precisions(PLAN.decomposition, 1):
        left = [agent for agent in honest if agent not in lost]
        hidden = PLAN.decomposition.hidden_from(coalition)[np.ix_(left, left)]
        precision = precision_diagonal(hidden)
        before = np.array([planned[honest.index(agent)] for agent in left])
        assert (precision <= before * (1 + 1e-9)).all()
        loss = account_precision(precision, budget.query, num_steps=budget.num_steps)
        assert loss.worst_epsilon(budget.promise.delta) <= budget.promise.epsilon * (1 + 1e-9)


def test_survivors_keep_their_block_of_a_given_objective() -> None:
    """Where it has no weight, and for exact sums, the objective becomes that of one step."""
    weights = np.diag([1.0, 2, 0, 0])
    network = load_network("complete:4", mixing="gossip")
    plan = make_plan(network, PLAN.budget, mechanism="ldp", objective=weights)
    left = replan(plan, (1, 2, 3), steps_left=5).objective
    assert isinstance(left, GivenObjective)
    np.testing.assert_array_equal(left.given, np.diag([2.0, 0, 0]))
    assert replan(plan, (2, 3), steps_left=5).objective == ONE_STEP
    summed = make_plan(load_network("complete:4", mixing="sum"), PLAN.budget, objective=weights)
    assert replan(summed, (2, 3), steps_left=5).objective == ONE_STEP


@pytest.mark.parametrize("steps_left", [1, 73, 199])
def test_a_new_plan_spends_what_was_left(steps_left: int) -> None:
    survivors = (0, 1, 3, 4, 5, 6)
    plan = replan(PLAN, survivors, steps_left=steps_left)
    assert verify_plan(plan).passed
    assert plan.budget.num_steps == steps_left
    assert (plan.precision_caps <= PLAN.precision_caps[list(survivors)]).all()
    steps_done = PLAN.budget.num_steps - steps_left
    worst = max(float(p.max()) for *_, p in coalition_precisions(plan.decomposition, 1))
    cap = PLAN.precision_caps.max()
    squared = PLAN.budget.query.sensitivity**2 * (steps_done * cap + steps_left * worst)
    spent = gaussian.epsilon_from(float(np.sqrt(squared)), PLAN.budget.promise.delta)
    assert spent <= PLAN.budget.promise.epsilon * (1 + 1e-9)


def test_every_survivor_makes_the_same_plan() -> None:
    survivors = (0, 1, 2, 4, 5)
    plans = [replan(PLAN, survivors, steps_left=100) for _ in range(2)]
    assert fingerprint(plans[0]) == fingerprint(plans[1])
    assert plans[0].num_agents == 5
    links = {(survivors[i], survivors[j]) for i, j in plans[0].network.graph.edges}
    assert links <= {tuple(sorted(edge)) for edge in PLAN.network.graph.edges}


def test_a_new_plan_restores_cancellation() -> None:
    """By the objective, on the surviving graph: the noise of before, and that of a new plan."""
    survivors = (0, 1, 2, 4, 5, 6)
    plan = replan(PLAN, survivors, steps_left=199)
    A = plan.objective.matrix(plan.network.step_matrix)
    before = PLAN.decomposition.covariance[np.ix_(survivors, survivors)]
    assert plan.certificate.value < 0.9 * float((A * before).sum())


def test_survivors_have_metropolis_weights_of_the_links_that_are_left() -> None:
    survivors = (0, 1, 3, 4, 5, 6)
    plan = replan(PLAN, survivors, steps_left=10)
    left = nx.Graph(PLAN.network.graph).subgraph(survivors)
    expected = load_network(
        nx.convert_node_labels_to_integers(left, ordering="sorted")
    ).mixing_matrix
    np.testing.assert_allclose(plan.network.mixing_matrix, expected)
    silent: Any = None
    weights = ActivePlan(plan, survivors, silent).weights_of(3)
    assert set(weights) == {0, 1, 4, 5, 6}
    assert weights[4] == expected[2, 3]


@pytest.mark.parametrize("accounting", ["gdp", "rdp"])
def test_the_budget_left_keeps_the_cap(accounting: str) -> None:
    budget = PrivacyBudget(5, 1e-5, num_steps=100, clip=0.1, accounting=accounting)  # type: ignore[arg-type]
    plan = make_plan(
        load_network("ring:4", mixing="gossip"), budget, mechanism="ldp", threat=ThreatModel()
    )
    for steps in (1, 50, 99):
        cap = set_aside(budget_left(plan, (0,), steps)).precision_cap
        assert plan.precision_caps[0] * (1 - 1e-6) < cap <= plan.precision_caps[0]
