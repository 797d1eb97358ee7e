"""The split of noise into private parts and seed groups, and what insiders cannot subtract."""

import networkx as nx
import numpy as np
import pytest

from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError

PAIR = np.array([[1.0], [-1.0]])


def edge_shares(graph: nx.Graph) -> Decomposition:
    edges = tuple(tuple(sorted(edge)) for edge in graph.edges)
    return Decomposition(np.ones(len(graph)), edges, (PAIR,) * len(edges))


def test_equal_edge_seeds_are_decor() -> None:
    graph = nx.karate_club_graph()
    laplacian = nx.laplacian_matrix(graph, weight=None).toarray()
    np.testing.assert_allclose(edge_shares(graph).covariance, np.eye(34) + laplacian)


def test_a_coalition_removes_exactly_the_groups_it_touches() -> None:
    graph = nx.petersen_graph()
    hidden = edge_shares(graph).hidden_from([0, 7])
    graph.remove_nodes_from([0, 7])
    rest = sorted(graph)
    expected = np.eye(8) + nx.laplacian_matrix(graph, nodelist=rest).toarray()
    np.testing.assert_allclose(hidden[np.ix_(rest, rest)], expected)
    np.testing.assert_allclose(hidden[0], np.eye(10)[0])


def test_streams_are_counted_per_agent() -> None:
    triangular = np.array([[1.0, 0.0], [0.5, 2.0]])
    shares = Decomposition(np.array([1.0, 0.0, 3.0]), ((0, 1), (1, 2)), (triangular, PAIR))
    assert shares.count_streams() == (2, 3, 2)


@pytest.mark.parametrize(
    ("theta", "groups", "factors", "message"),
    [
        ([1.0, -1.0], (), (), "finite number ≥ 0 per agent"),
        ([1.0, np.nan], (), (), "finite number ≥ 0 per agent"),
        ([1.0, 1.0], ((0, 1),), (), "one per seed group, found 0 for 1"),
        ([1.0, 1.0], ((1, 0),), (PAIR,), "in increasing order"),
        ([1.0, 1.0], ((0, 0),), (PAIR,), "once"),
        ([1.0, 1.0], ((0, 2),), (PAIR,), "agents 0 … 1, found"),
        ([1.0, 1.0], ((0, 1),), (np.ones((3, 1)),), "a row per member"),
    ],
)
def test_impossible_splits_are_refused(
    theta: list[float],
    groups: tuple[tuple[int, ...], ...],
    factors: tuple[np.ndarray, ...],
    message: str,
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Decomposition(np.array(theta), groups, factors)


def test_coalitions_must_be_agents_and_records_cannot_change() -> None:
    shares = edge_shares(nx.path_graph(3))
    with pytest.raises(InvalidArgumentError, match="agents 0 … 2"):
        shares.hidden_from([3])
    with pytest.raises(ValueError, match="read-only"):
        shares.factors[0][0, 0] = 5
