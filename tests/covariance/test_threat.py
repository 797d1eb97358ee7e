"""Threat models name who shares a seed; coalitions are pruned without losing a constraint."""

from itertools import combinations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.covariance.coalitions import list_coalitions
from corn.covariance.groups import SeedGroups
from corn.covariance.threat import ThreatModel
from corn.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ("global", ((0, 1, 2, 3),)),
        ("edges", ((0, 1), (1, 2), (2, 3))),
        ("pairs", tuple(combinations(range(4), 2))),
        ("balls:1", ((0, 1), (0, 1, 2), (1, 2, 3), (2, 3))),
        ("balls:2", ((0, 1, 2), (0, 1, 2, 3), (1, 2, 3))),
        ("groups:2", ((0, 1), (2, 3))),
        ("groups:4", ()),
        ("leave-one-out", ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2))),
        (((2, 0), (1,), (0, 2)), ((0, 2),)),
    ],
)
def test_seed_groups_on_a_path(seeds: str | SeedGroups, expected: SeedGroups) -> None:
    assert ThreatModel(1, seeds).seed_groups(nx.path_graph(4)) == expected


def test_direction_of_links_does_not_matter() -> None:
    digraph = nx.cycle_graph(5, create_using=nx.DiGraph)
    both = ThreatModel(1, "edges").seed_groups(digraph)
    assert sorted(both) == sorted(ThreatModel(1, "edges").seed_groups(nx.cycle_graph(5)))
    assert len(ThreatModel(1, "balls:1").seed_groups(digraph)) == 5


@pytest.mark.parametrize(
    ("colluders", "seeds", "message"),
    [
        (-1, "pairs", "max_colluders must be a whole number ≥ 0"),
        (1.0, "pairs", "whole number"),
        (4, "pairs", "at most 3 of 4 agents, found 4"),
        (
            1,
            "everyone",
            "seeds must be one of global, edges, pairs, leave-one-out, balls:N",
        ),
        (1, "balls", "balls:NUMBER"),
        (1, "balls:0", "found 'balls:0'"),
        (1, "pairs:2", "found 'pairs:2'"),
        (1, "groups:9", r"must be in \[1, 4\], found 9"),
        (1, ((0, 7),), "agents 0 … 3"),
        (1, ((),), "none of them empty"),
        (1, ((True, 2),), "agents' numbers, found True"),
    ],
)
def test_bad_threats(colluders: int, seeds: str | SeedGroups, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ThreatModel(colluders, seeds).seed_groups(nx.path_graph(4))


def test_bad_private_noise() -> None:
    with pytest.raises(InvalidArgumentError, match="'per-agent' or 'common'"):
        ThreatModel(1, "pairs", "none")  # type: ignore[arg-type]


def test_the_adversary_is_said_in_words() -> None:
    assert "knows no seed" in ThreatModel().describe()
    assert "one insider" in ThreatModel(1, "pairs").describe()
    assert "3 insiders" in ThreatModel(3, "pairs").describe()


GROUPS = st.lists(
    st.sets(st.integers(0, 5), min_size=2, max_size=4).map(lambda s: tuple(sorted(s))),
    min_size=1,
    max_size=6,
    unique=True,
)


@given(groups=GROUPS, colluders=st.integers(0, 5))
def test_pruning_keeps_every_constraint(groups: list[tuple[int, ...]], colluders: int) -> None:
    kept = list_coalitions(tuple(groups), num_agents=6, max_colluders=colluders)
    table = {
        tuple(unknown): set(np.flatnonzero(protected))
        for unknown, protected in zip(kept.unknown, kept.protected, strict=True)
    }
    expected: dict[tuple[bool, ...], set[int]] = {}
    for coalition in combinations(range(6), colluders):
        unknown = tuple(set(coalition).isdisjoint(group) for group in groups)
        expected.setdefault(unknown, set()).update(set(range(6)) - set(coalition))
    assert table == expected
    assert len(kept) <= kept.num_before_pruning


def test_disjoint_groups_need_one_constraint_set_each() -> None:
    groups = ThreatModel(1, "groups:3").seed_groups(nx.path_graph(12))
    kept = list_coalitions(groups, num_agents=12, max_colluders=1)
    assert (len(kept), kept.num_before_pruning) == (3, 12)
    assert kept.protected.all()


def test_too_many_coalitions_are_counted_and_refused() -> None:
    pairs = tuple(combinations(range(60), 2))
    with pytest.raises(InvalidArgumentError, match="5,461,512 coalitions of 5 among 60 agents"):
        list_coalitions(pairs, num_agents=60, max_colluders=5)
