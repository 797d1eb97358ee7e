"""Losses never weaken anyone's privacy, and a new plan spends no more than was left."""

import networkx as nx
import numpy as np
import pytest

from corn.covariance import GivenObjective, ThreatModel
from corn.distributed.replanning import (
    budget_left,
    choose_roster,
    measure_loss,
    replan,
)
from corn.distributed.settings import RunSettings
from corn.errors import InvalidArgumentError
from corn.noise import Roster, generate_identity
from corn.plan import fingerprint, make_plan, verify_plan
from corn.plan.plan import coalition_precisions
from corn.privacy import PrivacyBudget, account_precision, gaussian, precision_diagonal
from corn.privacy.floats import set_aside
from corn.topology import load_network

from .harness import small_plan

PLAN = small_plan("er:n=7,p=0.5,seed=1", 200)


@pytest.mark.parametrize("lost", [(2,), (0, 5), (1, 3, 6)])
def test_losses_weaken_nobodys_privacy(lost: tuple[int, ...]) -> None:
    """By the accountant, for every coalition: what the survivors send keeps the budget."""
    budget = PLAN.budget
    for coalition, honest, planned in coalition_precisions(PLAN.decomposition, 1):
        left = [agent for agent in honest if agent not in lost]
        hidden = PLAN.decomposition.hidden_from(coalition)[np.ix_(left, left)]
        precision = precision_diagonal(hidden)
        before = np.array([planned[honest.index(agent)] for agent in left])
        assert (precision <= before * (1 + 1e-9)).all()
        loss = account_precision(precision, budget.query, num_steps=budget.num_steps)
        assert loss.worst_epsilon(budget.delta) <= budget.epsilon * (1 + 1e-9)


@pytest.mark.parametrize("steps_left", [1, 73, 199])
def test_a_new_plan_spends_what_was_left(steps_left: int) -> None:
    survivors = (0, 1, 3, 4, 5, 6)
    plan = replan(PLAN, survivors, steps_left=steps_left)
    assert verify_plan(plan).passed
    assert plan.budget.num_steps == steps_left
    assert plan.precision_cap <= PLAN.precision_cap
    steps_done = PLAN.budget.num_steps - steps_left
    worst = max(float(p.max()) for *_, p in coalition_precisions(plan.decomposition, 1))
    squared = PLAN.budget.sensitivity**2 * (steps_done * PLAN.precision_cap + steps_left * worst)
    spent = gaussian.epsilon_from(float(np.sqrt(squared)), PLAN.budget.delta)
    assert spent <= PLAN.budget.epsilon * (1 + 1e-9)


def test_every_survivor_makes_the_same_plan() -> None:
    survivors = (0, 1, 2, 4, 5)
    plans = [replan(PLAN, survivors, steps_left=100) for _ in range(2)]
    assert fingerprint(plans[0]) == fingerprint(plans[1])
    assert plans[0].num_agents == 5
    links = {(survivors[i], survivors[j]) for i, j in plans[0].network.graph.edges}
    assert links <= {tuple(sorted(edge)) for edge in PLAN.network.graph.edges}


def test_a_new_plan_gets_cancellation_back() -> None:
    survivors = (0, 1, 2, 4, 5, 6)
    loss = measure_loss(PLAN, survivors)
    plan = replan(PLAN, survivors, steps_left=199)
    assert loss.continued > loss.planned
    assert plan.certificate.value / 6 < loss.continued
    assert f"{loss.continued / loss.planned:.3g} ×" in loss.describe()


def test_the_loss_is_by_one_objective_where_the_given_one_is_of_all_agents() -> None:
    """Scaling the given matrix leaves the noise as it is, and so what its loss costs."""
    network, options = load_network("complete:4"), {"mechanism": "ldp", "threat": ThreatModel()}
    plans = [
        make_plan(network, PLAN.budget, objective=GivenObjective(c * np.eye(4)), **options)  # type: ignore[arg-type]
        for c in (1, 1000)
    ]
    losses = [measure_loss(plan, (0, 1, 2)) for plan in plans]
    assert losses[0].planned == pytest.approx(losses[1].planned)
    assert losses[0].continued == pytest.approx(losses[1].continued)
    assert losses[0].planned < losses[0].continued


@pytest.mark.parametrize("accounting", ["gdp", "rdp"])
def test_the_budget_left_keeps_the_cap(accounting: str) -> None:
    budget = PrivacyBudget(5, 1e-5, num_steps=100, clip=0.1, accounting=accounting)  # type: ignore[arg-type]
    plan = make_plan(load_network("ring:4"), budget, mechanism="ldp", threat=ThreatModel())
    for steps in (1, 50, 99):
        cap = set_aside(budget_left(plan, steps)).precision_cap
        assert plan.precision_cap * (1 - 1e-6) < cap <= plan.precision_cap


def test_the_roster_follows_the_survivors() -> None:
    roster = Roster(tuple(generate_identity().public_key for _ in range(4)))
    chosen = choose_roster(roster, (0, 2, 3))
    assert chosen.public_keys == tuple(roster.public_key(agent) for agent in (0, 2, 3))


def test_policies_that_cannot_be_kept_are_refused() -> None:
    shared = small_plan("ring:4", 10, threat=ThreatModel())
    with pytest.raises(InvalidArgumentError, match="needs seeds of pairs or links"):
        RunSettings(on_dropout="replan").check_plan(shared)
    RunSettings(on_dropout="continue").check_plan(shared)
    network = load_network(nx.cycle_graph(4, create_using=nx.DiGraph))
    one_way = make_plan(network, PrivacyBudget(10, 1e-5, num_steps=10, clip=0.1))
    with pytest.raises(InvalidArgumentError, match="must be 'stop' where links are one-way"):
        RunSettings().check_plan(one_way)
    RunSettings(on_dropout="stop").check_plan(one_way)
