"""Mixing weights are doubly stochastic, supported on the graph, and mix if it is connected."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InfeasibleError, InvalidArgumentError
from corn.topology import (
    GENERATORS,
    WEIGHTS,
    Graph,
    GraphSpec,
    balance,
    check_mixing_matrix,
    graph_of,
    load_network,
    spectrum,
)

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


@st.composite
def strong_digraphs(draw: st.DrawFn) -> Graph:
    """Draw a directed cycle through all agents with random further links."""
    n = draw(st.integers(2, 8))
    graph = nx.cycle_graph(n, create_using=nx.DiGraph)
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    graph.add_edges_from((i, j) for i, j in draw(st.lists(pairs, max_size=12)) if i != j)
    return graph


def assert_mixes_on(graph: Graph, W: np.ndarray) -> None:
    for axis in (0, 1):
        np.testing.assert_allclose(W.sum(axis=axis), 1, atol=1e-12)
    assert set(graph_of(W).to_directed().edges) == set(graph.to_directed().edges)
    assert spectrum(W).second_eigenvalue < 1


@pytest.mark.parametrize("text", EXAMPLES)
def test_default_weights_on_every_generator(text: str) -> None:
    graph = GraphSpec.parse(text).build()
    assert_mixes_on(graph, load_network(graph).mixing_matrix)


@given(graph=connected_graphs(), rule=st.sampled_from(["metropolis", "lazy"]))
def test_degree_rules_on_random_graphs(graph: Graph, rule: str) -> None:
    W = load_network(graph, weights=rule).mixing_matrix
    assert_mixes_on(graph, W)
    np.testing.assert_array_equal(W, W.T)


@given(graph=strong_digraphs())
def test_sinkhorn_on_random_digraphs(graph: Graph) -> None:
    assert_mixes_on(graph, load_network(graph).mixing_matrix)


def test_weights_by_hand_on_a_path() -> None:
    third = 1 / 3
    np.testing.assert_allclose(
        load_network(nx.path_graph(3)).mixing_matrix,
        [[2 * third, third, 0], [third, third, third], [0, third, 2 * third]],
    )
    np.testing.assert_allclose(
        load_network(nx.path_graph(3), weights="lazy").mixing_matrix[0], [0.75, 0.25, 0]
    )


def test_the_papers_printed_weights_are_not_doubly_stochastic() -> None:
    links = nx.to_numpy_array(nx.star_graph(3))
    printed = (links + np.eye(4)) / (links.sum(axis=1, keepdims=True) + 1)
    with pytest.raises(InvalidArgumentError, match="doubly stochastic, found column 0"):
        check_mixing_matrix(printed)


@pytest.mark.parametrize("rule", ["metropolis", "lazy"])
def test_symmetric_rules_refuse_directed_graphs(rule: str) -> None:
    with pytest.raises(InvalidArgumentError):
        load_network(GENERATORS["directed-ring"](4), weights=rule)


def test_errors_for_an_unknown_rule_list_all() -> None:
    with pytest.raises(InvalidArgumentError, match=", ".join(WEIGHTS)):
        load_network(nx.path_graph(3), weights="best")


@given(
    n=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0, 6),
)
def test_balance_scales_rows_and_columns_only(n: int, seed: int, spread: float) -> None:
    positive = np.exp(spread * np.random.default_rng(seed).standard_normal((n, n)))
    P = balance(positive)
    np.testing.assert_allclose(P.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(P.sum(axis=1), 1, atol=1e-12)
    # diag(r) A diag(c) leaves all cross ratios a_ij a_kl / (a_il a_kj) as they were.
    ratio = np.log(P) - np.log(positive)
    np.testing.assert_allclose(ratio - ratio[:1] - ratio[:, :1] + ratio[0, 0], 0, atol=1e-9)


def test_balance_is_fast_where_sinkhorn_is_slow() -> None:
    path = nx.to_numpy_array(nx.path_graph(200)) + np.eye(200)
    np.testing.assert_allclose(balance(path).sum(axis=0), 1, atol=1e-12)


def test_balance_refuses_matrices_without_total_support() -> None:
    one_way = GENERATORS["path"](3).to_directed()
    one_way.remove_edge(1, 0)
    with pytest.raises(InfeasibleError):
        load_network(one_way)
    with pytest.raises(InfeasibleError):
        balance(np.array([[1.0, 1.0], [0.0, 0.0]]))
    with pytest.raises(InvalidArgumentError):
        balance(np.array([[1.0, -1.0], [0.0, 1.0]]))


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
        check_mixing_matrix(matrix)


def test_a_given_matrix_is_copied() -> None:
    given = np.full((2, 2), 0.5)
    assert check_mixing_matrix(given) is not given
    with pytest.raises(InvalidArgumentError):
        check_mixing_matrix(given + 1e-6)
