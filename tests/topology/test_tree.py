"""Spanning trees of exact sums: shortest paths to a centre, the same for everybody."""

import random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn import load_network
from corn.topology.graphs import find_tree


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 25), p=st.floats(0.1, 1))
def test_every_agent_reaches_the_root_by_a_shortest_path(seed: int, n: int, p: float) -> None:
    graph = nx.gnp_random_graph(n, p, seed=seed)
    graph.add_edges_from(nx.path_graph(n).edges)  # connected
    tree = find_tree(graph)
    distance = nx.single_source_shortest_path_length(graph, tree.root)
    for agent, parent in tree.parents.items():
        if agent != tree.root:
            assert graph.has_edge(agent, parent)
            assert distance[agent] == distance[parent] + 1
    assert tree.depth == max(distance.values())
    # Twenty searches find a centre of graphs of this size, or nearly.
    assert tree.depth <= nx.radius(graph) + 1
    assert tree.num_messages == 2 * (n - 1)
    assert sorted(k for own in tree.children.values() for k in own) == sorted(
        set(graph) - {tree.root}
    )


def test_the_tree_does_not_depend_on_the_order_of_links() -> None:
    links = list(nx.gnp_random_graph(15, 0.4, seed=3).edges)
    first = find_tree(nx.Graph(links))
    random.Random(1).shuffle(links)
    assert find_tree(nx.Graph([(j, i) for i, j in links])) == first


@pytest.mark.parametrize(
    ("graph", "depth"),
    [("path:9", 4), ("star:10", 1), ("ring:10", 5), ("grid:4x5", 4), ("grid:9x9", 8)],
)
def test_the_root_is_central(graph: str, depth: int) -> None:
    network = load_network(graph, mixing="sum")
    assert network.tree.depth == depth
    assert f"depth {depth}" in network.describe_mixing(10)
