"""Coalitions: pruned without losing a constraint, and too many of them are refused."""

from itertools import combinations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.covariance.coalitions import Assembly, list_coalitions
from corn.covariance.threat import ThreatModel
from corn.errors import InvalidArgumentError

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
    assert len(kept) <= kept.merged.size


def test_disjoint_groups_need_one_constraint_set_each() -> None:
    groups = ThreatModel(1, "groups:3").seed_groups(nx.path_graph(12))
    kept = list_coalitions(groups, num_agents=12, max_colluders=1)
    assert (len(kept), kept.merged.size) == (3, 12)
    assert kept.protected.all()


def test_too_many_coalitions_are_counted_and_refused() -> None:
    pairs = tuple(combinations(range(60), 2))
    with pytest.raises(InvalidArgumentError, match="5,461,512 coalitions of 5 among 60 agents"):
        list_coalitions(pairs, num_agents=60, max_colluders=5)


def test_too_much_memory_is_refused_with_the_numbers() -> None:
    n = 120
    groups = tuple(combinations(range(n), 2))
    coalitions = list_coalitions(groups, num_agents=n, max_colluders=2)
    with pytest.raises(InvalidArgumentError, match=r"7,140 coalitions with 7,140 seed groups need"):
        Assembly(groups, coalitions, n)
