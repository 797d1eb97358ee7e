"""Mixing weights are doubly stochastic, supported on the graph, and mix if it is connected."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.topology import Graph, GraphSpec, graph_of, load_network, spectrum

from .test_generators import EXAMPLES


@st.composite
def connected_graphs(draw: st.DrawFn) -> Graph:
    """Draw a random tree with random further links on 1 to 9 agents."""
    n = draw(st.integers(1, 9))
    graph = nx.empty_graph(n)
    graph.add_edges_from((i, draw(st.integers(0, i - 1))) for i in range(1, n))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    graph.add_edges_from((i, j) for i, j in draw(st.lists(pairs, max_size=10)) if i != j)
    return graph


def assert_mixes_on(graph: Graph, W: np.ndarray) -> None:
    np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(W, W.T)
    assert nx.utils.graphs_equal(graph_of(W), nx.Graph(graph.edges)) or len(W) == 1
    assert spectrum(W).second_eigenvalue < 1


@pytest.mark.parametrize("text", EXAMPLES)
def test_default_weights_on_every_generator(text: str) -> None:
    graph = GraphSpec.parse(text).build()
    assert_mixes_on(graph, load_network(graph).mixing_matrix)


@given(graph=connected_graphs())
def test_weights_on_random_graphs(graph: Graph) -> None:
    assert_mixes_on(graph, load_network(graph).mixing_matrix)


def test_weights_by_hand_on_a_path() -> None:
    third = 1 / 3
    np.testing.assert_allclose(
        load_network(nx.path_graph(3)).mixing_matrix,
        [[2 * third, third, 0], [third, third, third], [0, third, 2 * third]],
    )


def test_the_papers_printed_weights_are_not_doubly_stochastic() -> None:
    links = nx.to_numpy_array(nx.star_graph(3))
    printed = (links + np.eye(4)) / (links.sum(axis=1, keepdims=True) + 1)
    with pytest.raises(InvalidArgumentError, match="mixing_matrix must be symmetric"):
        load_network(printed)


def test_links_without_a_way_back_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the graph must be undirected"):
        load_network(nx.cycle_graph(4, create_using=nx.DiGraph))
    with pytest.raises(InvalidArgumentError, match="mixing_matrix must be symmetric"):
        load_network((np.eye(4) + np.roll(np.eye(4), 1, axis=1)) / 2)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0, 0.0]], r"square matrix with at least one row, found shape \(1, 2\)"),
        ([], "square"),
        ([[np.inf]], "must be finite"),
        ([["a"]], "matrix of numbers"),
        ([[0.9]], "row 0 that sums to 0.9"),
    ],
)
def test_given_mixing_matrices_are_checked(matrix: list[list[float]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_network(np.array(matrix))
