"""The threat that noise must hold against: how many insiders may collude, and who shares a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias, get_args

import networkx as nx
import numpy as np

from corn.checks import require, require_choice, require_count
from corn.errors import InvalidArgumentError
from corn.parsing import MAX_DIGITS
from corn.topology.graphs import Graph

PrivateNoise: TypeAlias = Literal["per-agent", "common"]
SeedGroups: TypeAlias = tuple[tuple[int, ...], ...]
"""Sets of agents that share a seed, each in increasing order."""


@dataclass(frozen=True)
class ThreatModel:
    """Up to ``max_colluders`` honest-but-curious agents pool what they know (the paper, §IV-D).

    They see every message, know their own data and noise, and the seed of every group that one of
    them belongs to. With ``max_colluders=0`` the adversary is an eavesdropper outside.

    Attributes:
        max_colluders: q, the size of the largest coalition.
        seeds: the sets of agents that share a seed: ``global`` (all, one seed), ``edges`` (each
            link), ``pairs`` (every two agents), ``balls:r`` (each agent and those within r hops),
            ``groups:m`` (m disjoint groups, as equal as can be), ``communities:s`` (disjoint groups
            of well linked agents, at most s each), ``leave-one-out`` (all but one, for each), or
            the groups themselves. ``auto`` becomes ``pairs`` where insiders may collude, who could
            subtract all noise of a global seed, and ``global`` against an eavesdropper.
        private_noise: ``per-agent`` lets each agent have its own variance θ_i of noise that nobody
            else knows; ``common`` is the paper's form, one θ for all.

    >>> ThreatModel(1, "groups:2").seed_groups(nx.path_graph(5))
    ((0, 1, 2), (3, 4))
    """

    max_colluders: int = 0
    seeds: str | SeedGroups = "auto"
    private_noise: PrivateNoise = "per-agent"

    def __post_init__(self) -> None:
        count = require_count("max_colluders", self.max_colluders, least=0)
        object.__setattr__(self, "max_colluders", count)
        require_choice("private_noise", self.private_noise, get_args(PrivateNoise))
        if not isinstance(self.seeds, str):
            object.__setattr__(self, "seeds", _check_groups(self.seeds))
        elif self.seeds == "auto":
            object.__setattr__(self, "seeds", "pairs" if self.max_colluders else "global")
        else:
            _parse_seeds(self.seeds)

    def seed_groups(self, graph: Graph) -> SeedGroups:
        """Return the groups that share a seed on this graph; links count in either direction.

        A group of one is private noise, so it is listed only where that is common to all.
        """
        n = len(graph)
        require(
            self.max_colluders < n,
            "max_colluders",
            f"at most {n - 1} of {n} agents",
            self.max_colluders,
            advice="at least one agent must be honest",
        )
        if isinstance(self.seeds, str):
            kind, number = _parse_seeds(self.seeds)
            # Both ends of a link know its seed, whichever way messages go.
            groups = _sort_groups(kind.build(nx.Graph(graph), number))
        else:
            groups = self.seeds
        stray = [group for group in groups if group and (group[0] < 0 or group[-1] >= n)]
        require(not stray, "seeds", f"groups of agents 0 … {n - 1}", stray[:1])
        least = 1 if self.private_noise == "common" else 2
        return tuple(group for group in groups if len(group) >= least)

    def describe(self) -> str:
        """Return the adversary in words, to stand next to every ε."""
        if self.max_colluders == 0:
            return "an eavesdropper who sees every message but knows no seed"
        return (
            f"an eavesdropper together with {self.describe_colluders()}, who know every seed "
            "they share"
        )

    def describe_colluders(self) -> str:
        """Return the number of insiders in words."""
        if self.max_colluders == 0:
            return "no insider"
        return "one insider" if self.max_colluders == 1 else f"{self.max_colluders} insiders"

    def describe_seeds(self) -> str:
        """Return the arrangement of seeds in words."""
        if not isinstance(self.seeds, str):
            return f"{len(self.seeds)} given groups"
        kind, _, number = self.seeds.partition(":")
        return _SEEDS[kind].words.format(number)


def split_agents(num_agents: int, num_groups: int) -> SeedGroups:
    """Split agents 0 … n−1 into runs of neighbouring numbers whose sizes differ by at most one.

    >>> split_agents(5, 2)
    ((0, 1, 2), (3, 4))
    """
    require_count("the number of seed groups", num_groups, most=num_agents)
    parts = np.array_split(np.arange(num_agents), num_groups)
    return tuple(tuple(part.tolist()) for part in parts)


def find_communities(graph: Graph, *, max_size: int, seed: int = 0) -> SeedGroups:
    """Group agents that are well connected with each other, at most ``max_size`` together.

    Louvain's method on the links, weights and directions ignored; a community that is too large is
    searched again on its own, and cut along a breadth-first order where that finds no parts.
    """
    require_count("max_size", max_size)
    # Without weights, which Louvain's method would use.
    links: Graph = nx.Graph()
    links.add_nodes_from(graph)
    links.add_edges_from(graph.edges)
    waiting, groups = [set(links)], []
    while waiting:
        members = waiting.pop()
        if len(members) <= max_size:
            groups.append(tuple(sorted(members)))
        else:
            waiting.extend(_split_once(links.subgraph(members), max_size, seed))
    return tuple(sorted(groups))


def _split_once(graph: Graph, max_size: int, seed: int) -> list[set[int]]:
    communities = [set(c) for c in nx.community.louvain_communities(graph, seed=seed)]
    if len(communities) > 1:
        return communities
    # Neighbours are close in a breadth-first order, so that slices of it are well linked.
    first = min(graph)
    order = [first, *(child for _, child in nx.bfs_edges(graph, first))]
    return [set(order[i : i + max_size]) for i in range(0, len(order), max_size)]


@dataclass(frozen=True)
class _SeedKind:
    """A rule that shares seeds, and its words."""

    build: Callable[[Graph, int], Iterable[Iterable[int]]]
    words: str


def _balls(graph: Graph, radius: int) -> Iterable[Iterable[int]]:
    return [nx.single_source_shortest_path_length(graph, i, cutoff=radius) for i in graph]


_SEEDS: dict[str, _SeedKind] = {
    "global": _SeedKind(lambda graph, _: [graph.nodes], "one seed for all"),
    "edges": _SeedKind(lambda graph, _: graph.edges, "a seed for each link"),
    "pairs": _SeedKind(lambda graph, _: combinations(sorted(graph), 2), "a seed for each pair"),
    "leave-one-out": _SeedKind(
        lambda graph, _: [set(graph) - {agent} for agent in graph], "a seed for all but one, each"
    ),
    "balls": _SeedKind(_balls, "a seed for each neighbourhood of radius {}"),
    "groups": _SeedKind(
        lambda graph, number: split_agents(len(graph), number), "{} disjoint groups"
    ),
    "communities": _SeedKind(
        lambda graph, size: find_communities(graph, max_size=size),
        "disjoint communities of up to {}",
    ),
}
_WITH_NUMBER = ("balls", "groups", "communities")


def _parse_seeds(text: str) -> tuple[_SeedKind, int]:
    kind, colon, argument = text.partition(":")
    if kind in _SEEDS and bool(colon) == (kind in _WITH_NUMBER):
        if not colon:
            return _SEEDS[kind], 0
        # The length is checked before int(), whose time is quadratic in the number of digits.
        if argument.isdecimal() and len(argument) <= MAX_DIGITS and int(argument) > 0:
            return _SEEDS[kind], int(argument)
    accepted = ", ".join(f"{k}:NUMBER" if k in _WITH_NUMBER else k for k in _SEEDS)
    raise InvalidArgumentError(
        f"seeds must be one of auto, {accepted}, or a list of sets, found {text!r}"
    )


def _check_groups(groups: object) -> SeedGroups:
    """Return a caller's groups in order, or raise unless they are non-empty sets of numbers."""
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, list | tuple | set | frozenset) and group for group in groups
    ):
        raise InvalidArgumentError(
            f"seeds must be sets of agents, none of them empty, found {groups!r:.60}"
        )
    for agent in (agent for group in groups for agent in group):
        is_number = isinstance(agent, int | np.integer) and not isinstance(agent, bool)
        require(is_number, "seeds", "sets of agents' numbers", f"{agent!r:.60}")
    return _sort_groups([map(int, group) for group in groups])


def _sort_groups(groups: Iterable[Iterable[int]]) -> SeedGroups:
    """Return each group once, members in order: an equal group adds a seed but no freedom."""
    return tuple(dict.fromkeys(tuple(sorted(set(group))) for group in groups))


EAVESDROPPER = ThreatModel()
"""An outsider who sees every message and knows no seed: the paper's main setting."""

DEFAULT_THREAT = ThreatModel(1, "pairs")
"""One curious insider, and a seed for every pair: the threat unless another one is given.

An agent that takes part in training is itself an insider, so a design against outsiders alone
would protect nobody from a curious neighbour. Pairs of seeds cost little of the gain.
"""
