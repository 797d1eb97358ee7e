"""Weights agree at both ends of every link, whatever each end knows, and keep nobody negative."""

import networkx as nx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corn.distributed.weights import Standing, weigh_neighbours
from corn.topology import load_network
from corn.topology.mixing import metropolis_weights


@st.composite
def troubled_networks(draw: st.DrawFn) -> tuple[np.ndarray, nx.Graph, list[Standing]]:
    """A plan's weights, the links that are left, and what each survivor announces."""
    seed = draw(st.integers(0, 10_000))
    weights = draw(st.sampled_from(["metropolis", "lazy", "max-degree"]))
    network = load_network(f"er:n=8,p=0.5,seed={seed}", weights=weights)
    alive = draw(st.lists(st.booleans(), min_size=8, max_size=8))
    graph = nx.Graph(network.graph)
    for agent, is_alive in enumerate(alive):
        if not is_alive:
            graph.remove_edges_from(list(graph.edges(agent)))
    # Whoever lost a neighbour is aware; others may be, by hearsay.
    standings = []
    for agent in range(8):
        degree = graph.degree(agent)
        aware = degree < network.graph.degree(agent) or draw(st.booleans())
        standings.append(Standing(degree, aware))
    return np.array(network.mixing_matrix), graph, standings


@given(troubled_networks())
def test_weights_are_doubly_stochastic_while_news_spread(
    case: tuple[np.ndarray, nx.Graph, list[Standing]],
) -> None:
    W, graph, standings = case
    mixing = np.zeros_like(W)
    for i in range(len(W)):
        planned = {j: (W[i, j], W[j, i]) for j in range(len(W)) if j != i}
        others = {j: standings[j] for j in graph[i]}
        weights = weigh_neighbours(planned, standings[i], others)
        for j, weight in weights.items():
            mixing[i, j] = weight
        mixing[i, i] = 1 - sum(weights.values())
    np.testing.assert_allclose(mixing, mixing.T)
    assert (mixing >= -1e-12).all()
    np.testing.assert_allclose(mixing.sum(axis=1), 1)


def test_without_losses_the_plan_holds_and_afterwards_metropolis() -> None:
    network = load_network("er:n=8,p=0.5,seed=3", weights="lazy")
    W, graph = network.mixing_matrix, nx.Graph(network.graph)
    survivors = [agent for agent in graph if agent != 2]
    reduced = graph.subgraph(survivors)
    expected = metropolis_weights(nx.convert_node_labels_to_integers(reduced, ordering="sorted"))
    for place, i in enumerate(survivors):
        planned = {j: (W[i, j], W[j, i]) for j in range(8) if j != i}
        calm = weigh_neighbours(
            planned, Standing(graph.degree(i), False), {j: Standing(1, False) for j in graph[i]}
        )
        assert calm == {j: W[i, j] for j in graph[i]}
        aware = {j: Standing(reduced.degree(j), True) for j in reduced[i]}
        found = weigh_neighbours(planned, Standing(reduced.degree(i), True), aware)
        for j, weight in found.items():
            np.testing.assert_allclose(weight, expected[place, survivors.index(j)])
