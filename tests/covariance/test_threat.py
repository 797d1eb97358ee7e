"""Threat models: seed groups on a graph, defaults, words and splits."""

from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.covariance import Horizon, design
from corn.covariance.coalitions import require_few_coalitions
from corn.covariance.threat import (
    DEFAULT_THREAT,
    EAVESDROPPER,
    SeedGroups,
    ThreatModel,
    choose_partners,
)
from corn.errors import InvalidArgumentError
from corn.topology import Graph, Mixing, load_network
from tests.covariance.networks import PROPERTY


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ("global", ((0, 1, 2, 3),)),
        ("edges", ((0, 1), (1, 2), (2, 3))),
        ("pairs", tuple(combinations(range(4), 2))),
        ("groups:2", ((0, 1), (2, 3))),
        ("groups:4", ()),
        (((2, 0), (1,), (0, 2)), ((0, 2),)),
    ],
)
def test_seed_groups_on_a_path(seeds: str | SeedGroups, expected: SeedGroups) -> None:
    assert ThreatModel(1, seeds).seed_groups(nx.path_graph(4)) == expected


@pytest.mark.parametrize(
    ("colluders", "seeds", "message"),
    [
        (-1, "pairs", "max_colluders must be an integer of at least 0"),
        (1.0, "pairs", "max_colluders must be an integer"),
        (4, "pairs", "at most 3 of 4 agents, found 4"),
        (
            1,
            "everyone",
            "seeds must be one of auto, global, edges, pairs, sparse:NUMBER, partners:NUMBER",
        ),
        (1, "groups", "groups:NUMBER"),
        (1, "groups:0", "found 'groups:0'"),
        (1, "pairs:2", "found 'pairs:2'"),
        (1, "groups:9", "at most 4, found 9"),
        (1, ((0, 7),), "agents 0 … 3"),
        (1, ((),), "none of them empty"),
        (1, ((True, 2),), "agents' numbers, found True"),
    ],
)
def test_bad_threats(colluders: int, seeds: str | SeedGroups, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ThreatModel(colluders, seeds).seed_groups(nx.path_graph(4))


def test_seeds_are_pairs_with_insiders_and_global_without() -> None:
    assert ThreatModel().seeds == "global"
    assert ThreatModel() == ThreatModel(0, "auto") == EAVESDROPPER
    assert ThreatModel(1) == DEFAULT_THREAT
    assert ThreatModel(2).resolve(nx.path_graph(40)).seeds == "pairs"
    assert ThreatModel(2).resolve(nx.path_graph(41)).seeds == "sparse:8"
    assert ThreatModel(2).resolve(nx.wheel_graph(41)).seeds == "sparse:16"
    assert ThreatModel(2, "edges").resolve(nx.path_graph(41)).seeds == "edges"


@pytest.mark.parametrize("graph", [nx.star_graph(40), nx.cycle_graph(41)], ids=["star", "ring"])
def test_default_seeds_of_large_networks_cost_a_tenth_at_most(graph: Graph) -> None:
    values = [
        design(graph, 1.0, objective=Horizon(100, 0.1), threat=threat).value
        for threat in (ThreatModel(1), ThreatModel(1, "pairs"))
    ]
    assert values[0] <= 1.1 * values[1]


@pytest.mark.parametrize("number", [1, 2, 5, 8])
@pytest.mark.parametrize("graph", [nx.cycle_graph(31), nx.star_graph(30), nx.path_graph(30)])
def test_sparse_seeds_are_links_and_a_few_partners_of_each_agent(graph: Graph, number: int) -> None:
    groups = ThreatModel(1, f"sparse:{number}").seed_groups(graph)
    assert set(ThreatModel(1, "edges").seed_groups(graph)) <= set(groups)
    added = nx.Graph()
    added.add_nodes_from(graph)
    added.add_edges_from(choose_partners(graph, number))
    degrees = [degree for _, degree in added.degree]
    assert max(degrees) <= number
    assert sum(degrees) >= len(graph) * number * 0.5
    assert not any(graph.has_edge(*pair) for pair in added.edges)
    assert len(groups) == graph.number_of_edges() + added.number_of_edges()


def test_the_adversary_is_described_in_words() -> None:
    assert "knows no seed" in ThreatModel().describe()
    assert "one insider" in ThreatModel(1, "pairs").describe()
    assert "3 insiders" in ThreatModel(3, "pairs").describe()


@PROPERTY
@given(st.integers(1, 40), st.data())
def test_splits_are_even(num_agents: int, data: st.DataObject) -> None:
    # A group of one agent is private noise, and no group.
    count = data.draw(st.integers(1, max(1, num_agents // 2)))
    threat = ThreatModel(0, f"groups:{count}")
    groups = threat.seed_groups(nx.path_graph(num_agents))
    if num_agents > 1:
        assert [agent for group in groups for agent in group] == list(range(num_agents))
        assert len(groups) == count
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


@pytest.mark.parametrize(("agents", "power"), [(300, 88), (20_000, 6018)])
def test_coalitions_beyond_any_number_that_is_printed_are_refused(agents: int, power: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"more than 10\^{power} coalitions"):
        require_few_coalitions(agents, agents // 2)


def test_partners_are_close_in_one_cycle_for_sums_and_in_several_for_gossip() -> None:
    """One cycle proves the connectivity that masks need; several cancel more noise by gossip."""
    graph, threat = nx.gnp_random_graph(24, 0.2, seed=1), ThreatModel(1, "partners:4")
    mixings: tuple[Mixing, ...] = ("sum", "gossip")
    sums, gossip = (threat.seed_groups(graph, mixing) for mixing in mixings)
    assert nx.node_connectivity(nx.Graph(sums)) == 4
    values = [
        design(
            load_network(graph).mixing_matrix,
            1.0,
            objective=Horizon(100),
            threat=ThreatModel(1, own),
        ).value
        for own in (sums, gossip)
    ]
    assert values[1] < 0.95 * values[0]
