"""Weights of survivors stay symmetric, and privacy never weakens."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.covariance import ThreatModel
from corn.covariance.coalitions import coalition_precisions
from corn.distributed.recovery import (
    LinkState,
    budget_left,
    measure_loss,
    replan,
    weigh_neighbours,
)
from corn.plan import fingerprint, make_plan, verify_plan
from corn.privacy import PrivacyBudget, account_precision, gaussian, precision_diagonal
from corn.privacy.floats import set_aside
from corn.topology import load_network
from corn.topology.mixing import metropolis_weights

from .harness import small_plan

PLAN = small_plan("er:n=7,p=0.5,seed=1", 200)


@st.composite
def troubled_networks(draw: st.DrawFn) -> tuple[np.ndarray, nx.Graph, list[LinkState]]:
    """Draw a plan's weights, the links that are left, and each survivor's announcement."""
    seed = draw(st.integers(0, 10_000))
    weights = draw(st.sampled_from(["metropolis", "lazy", "max-degree"]))
    network = load_network(f"er:n=8,p=0.5,seed={seed}", weights=weights)
    alive = draw(st.lists(st.booleans(), min_size=8, max_size=8))
    graph = nx.Graph(network.graph)
    for agent, is_alive in enumerate(alive):
        if not is_alive:
            graph.remove_edges_from(list(graph.edges(agent)))
    # Whoever lost a neighbour is aware; others may be, by hearsay.
    states = []
    for agent in range(8):
        degree = graph.degree(agent)
        aware = degree < network.graph.degree(agent) or draw(st.booleans())
        states.append(LinkState(degree, aware))
    return np.array(network.mixing_matrix), graph, states


@given(troubled_networks())
def test_weights_are_doubly_stochastic_while_only_some_know_of_a_loss(
    case: tuple[np.ndarray, nx.Graph, list[LinkState]],
) -> None:
    W, graph, states = case
    mixing = np.zeros_like(W)
    for i in range(len(W)):
        planned = {j: (W[i, j], W[j, i]) for j in range(len(W)) if j != i}
        others = {j: states[j] for j in graph[i]}
        weights = weigh_neighbours(planned, states[i], others)
        for j, weight in weights.items():
            mixing[i, j] = weight
        mixing[i, i] = 1 - sum(weights.values())
    np.testing.assert_allclose(mixing, mixing.T)
    assert (mixing >= -1e-12).all()
    np.testing.assert_allclose(mixing.sum(axis=1), 1)


def test_weights_are_the_plans_without_losses_and_metropolis_after() -> None:
    network = load_network("er:n=8,p=0.5,seed=3", weights="lazy")
    W, graph = network.mixing_matrix, nx.Graph(network.graph)
    survivors = [agent for agent in graph if agent != 2]
    reduced = graph.subgraph(survivors)
    expected = metropolis_weights(nx.convert_node_labels_to_integers(reduced, ordering="sorted"))
    for place, i in enumerate(survivors):
        planned = {j: (W[i, j], W[j, i]) for j in range(8) if j != i}
        calm = weigh_neighbours(
            planned, LinkState(graph.degree(i), False), {j: LinkState(1, False) for j in graph[i]}
        )
        assert calm == {j: W[i, j] for j in graph[i]}
        aware = {j: LinkState(reduced.degree(j), True) for j in reduced[i]}
        found = weigh_neighbours(planned, LinkState(reduced.degree(i), True), aware)
        for j, weight in found.items():
            np.testing.assert_allclose(weight, expected[place, survivors.index(j)])


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
    squared = PLAN.budget.sensitivity**2 * (steps_done * cap + steps_left * worst)
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
    survivors = (0, 1, 2, 4, 5, 6)
    loss = measure_loss(PLAN, survivors)
    plan = replan(PLAN, survivors, steps_left=199)
    assert loss.continued > loss.planned
    assert plan.certificate.value / 6 < loss.continued
    assert f"{loss.continued / loss.planned:.3g} ×" in loss.describe()


@pytest.mark.parametrize("accounting", ["gdp", "rdp"])
def test_the_budget_left_keeps_the_cap(accounting: str) -> None:
    budget = PrivacyBudget(5, 1e-5, num_steps=100, clip=0.1, accounting=accounting)  # type: ignore[arg-type]
    plan = make_plan(
        load_network("ring:4", mixing="gossip"), budget, mechanism="ldp", threat=ThreatModel()
    )
    for steps in (1, 50, 99):
        cap = set_aside(budget_left(plan, (0,), steps)).precision_cap
        assert plan.precision_caps[0] * (1 - 1e-6) < cap <= plan.precision_caps[0]
