"""Disjoint seed groups: the problem separates, and more seeds never help."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.covariance import (
    GivenObjective,
    Horizon,
    ThreatModel,
    design,
    find_communities,
    is_private,
    split_agents,
)
from corn.errors import InvalidArgumentError
from tests.covariance.networks import PROPERTY, random_network

W = random_network(12, 0.4, seed=2)


def test_one_group_is_the_whole_problem_and_singletons_are_ldp() -> None:
    everyone = design(W, 1.0, threat=ThreatModel(seeds="groups:1"))
    assert everyone.value == pytest.approx(design(W, 1.0).value, rel=1e-12)
    alone = design(W, 1.0, threat=ThreatModel(seeds="groups:12"))
    assert alone.value == pytest.approx(design(W, 1.0, mechanism="ldp").value, rel=1e-9)


def test_merging_groups_never_costs() -> None:
    values = [
        design(W, 1.0, threat=ThreatModel(seeds=f"groups:{k}"), objective=Horizon(50)).value
        for k in (1, 2, 4, 12)
    ]
    assert values == sorted(values)


def test_groups_in_any_order_land_on_their_agents() -> None:
    threat = ThreatModel(seeds=((7, 1, 5, 11), (0, 2, 10), (3, 4, 6, 8, 9)))
    result = design(W, 0.5, threat=threat, objective=Horizon(20))
    groups = result.decomposition.seed_groups
    assert groups == ((1, 5, 7, 11), (0, 2, 10), (3, 4, 6, 8, 9))
    A = Horizon(20).matrix(W)
    assert result.value == pytest.approx(np.sum(A * result.covariance), rel=1e-9)
    assert is_private(result.covariance, 0.5)
    np.testing.assert_allclose(result.factor @ result.factor.T, result.covariance, atol=1e-12)
    np.testing.assert_allclose(result.decomposition.covariance, result.covariance, atol=1e-12)
    for group in groups:
        inside = np.ix_(np.array(group), np.array(group))
        block = design(np.eye(len(group)), 0.5, objective=GivenObjective(A[inside]))
        np.testing.assert_allclose(result.covariance[inside], block.covariance, rtol=1e-6)
        others = np.setdiff1d(np.arange(12), group)
        assert not result.covariance[np.ix_(np.array(group), others)].any()


def test_workers_give_the_same_design() -> None:
    one = design(W, 1.0, threat=ThreatModel(seeds="groups:3"))
    two = design(W, 1.0, threat=ThreatModel(seeds="groups:3"), num_workers=2)
    np.testing.assert_allclose(two.covariance, one.covariance, rtol=1e-12)


def test_the_worst_block_sets_the_status() -> None:
    assert (
        design(W, 1.0, threat=ThreatModel(seeds="groups:2"), max_iterations=1).status
        == "iteration limit"
    )


def test_groups_nobody_sees_get_ldp_noise() -> None:
    A = np.diag([1.0, 2.0, 0.0, 0.0])
    result = design(
        np.eye(4), 4.0, objective=GivenObjective(A), threat=ThreatModel(seeds="groups:2")
    )
    np.testing.assert_allclose(result.noise_std, 0.5)
    assert result.value == pytest.approx(0.75)


def test_agents_in_no_group_draw_alone() -> None:
    result = design(W, 1.0, threat=ThreatModel(seeds=((0, 1, 2),)))
    np.testing.assert_allclose(result.noise_std[3:], 1.0)
    assert not result.covariance[0, 3:].any()


@PROPERTY
@given(st.integers(1, 40), st.data())
def test_splits_are_even(num_agents: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_agents))
    groups = split_agents(num_agents, count)
    assert [agent for group in groups for agent in group] == list(range(num_agents))
    assert len(groups) == count
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@pytest.mark.parametrize("max_size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "graph", [nx.karate_club_graph(), nx.complete_graph(9), nx.empty_graph(4), nx.path_graph(20)]
)
def test_communities_are_bounded_and_cover_everyone(graph: nx.Graph, max_size: int) -> None:
    groups = find_communities(graph, max_size=max_size)
    assert sorted(agent for group in groups for agent in group) == list(range(len(graph)))
    assert max(map(len, groups)) <= max_size


def test_communities_follow_the_cliques() -> None:
    cliques = nx.ring_of_cliques(4, 6)
    groups = find_communities(cliques, max_size=6)
    assert groups == tuple(tuple(range(6 * k, 6 * k + 6)) for k in range(4))
    with pytest.raises(InvalidArgumentError, match="max_size"):
        find_communities(cliques, max_size=0)
