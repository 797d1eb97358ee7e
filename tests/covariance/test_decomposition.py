"""Splits into private noise and seed groups, and the privacy they leave against coalitions."""

import networkx as nx
import numpy as np
import pytest

from corn.covariance import Decomposition, Horizon, ThreatModel, design, expose
from corn.errors import InvalidArgumentError
from corn.privacy import ClippedQuery, PrivacyBudget
from corn.topology import load_network

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
        ([1.0, 1.0], ((0, 1),), (), "factors must be 1, one for each seed group, found 0"),
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


BUDGET = PrivacyBudget(epsilon=3, delta=1e-5, num_steps=100, clip=1.0)
W = load_network(nx.wheel_graph(7)).mixing_matrix


def shares(threat: ThreatModel) -> Decomposition:
    return design(W, BUDGET, objective=Horizon(20), threat=threat).decomposition


def epsilons(decomposition: Decomposition, coalition: list[int]) -> dict[int, float]:
    exposure = expose(decomposition, coalition, BUDGET.query, num_steps=BUDGET.num_steps)
    return exposure.epsilon(BUDGET.promise.delta)


@pytest.mark.parametrize("coalition", [[], [0], [3], [0, 3], [2, 5]])
def test_the_budget_holds_up_to_the_coalitions_designed_for(coalition: list[int]) -> None:
    found = epsilons(shares(ThreatModel(2, "pairs")), coalition)
    assert set(found) == set(range(7)) - set(coalition)
    assert max(found.values()) <= 3 * (1 + 1e-9)


def test_one_insider_more_than_designed_for_exceeds_the_budget() -> None:
    found = epsilons(shares(ThreatModel(1, "pairs")), [0, 3])
    assert max(found.values()) > 3.2


def test_one_seed_for_all_leaves_only_private_noise_against_an_insider() -> None:
    parts = shares(ThreatModel(0, "global"))
    assert max(epsilons(parts, []).values()) <= 3 * (1 + 1e-9)
    assert min(epsilons(parts, [4]).values()) > 5
    shared_only = Decomposition(np.zeros(7), parts.seed_groups, parts.factors)
    assert set(epsilons(shared_only, [4]).values()) == {np.inf}


def test_a_coalition_of_all_agents_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        epsilons(shares(ThreatModel(0, "global")), list(range(7)))


@pytest.mark.parametrize("agent", [2, -1])
def test_unknown_insiders_are_refused_without_seeds_too(agent: int) -> None:
    with pytest.raises(InvalidArgumentError):
        expose(Decomposition(np.ones(2)), [agent], ClippedQuery(1.0), num_steps=1)


def test_agents_are_exposed_by_name() -> None:
    names = ["Oslo", "Rome", "Kyiv", "Bern", "Riga", "Graz", "Linz"]
    noise = shares(ThreatModel(2, "pairs"))
    named = expose(noise, ["Rome", "5"], BUDGET.query, num_steps=100, names=names).epsilon(1e-5)
    numbered = expose(noise, [1, 5], BUDGET.query, num_steps=100).epsilon(1e-5)
    assert named == {names[int(agent)]: epsilon for agent, epsilon in numbered.items()}
    wrong: list[tuple[list[int | str], list[str]]] = [
        (["Roma"], names),
        ([1], names[:3]),
        ([1, "Rome"], names),
    ]
    for coalition, known in wrong:
        with pytest.raises(InvalidArgumentError):
            expose(noise, coalition, BUDGET.query, num_steps=100, names=known)
