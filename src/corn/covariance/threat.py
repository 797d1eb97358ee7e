"""Who the noise must hold against: how many insiders may collude, and who shares which seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias, get_args

import networkx as nx
import numpy as np

from corn.covariance.groups import SeedGroups, find_communities, split_agents
from corn.errors import InvalidArgumentError
from corn.parsing import MAX_DIGITS
from corn.topology.graphs import Graph

PrivateNoise: TypeAlias = Literal["per-agent", "common"]


@dataclass(frozen=True)
class ThreatModel:
    """Up to ``max_colluders`` honest-but-curious agents pool what they know (the paper, §IV-D).

    They see every message, know their own data and noise, and the seed of every group that one of
    them belongs to. With ``max_colluders=0`` the adversary is an eavesdropper outside.

    Attributes:
        max_colluders: q, the size of the largest coalition.
        seeds: who shares a seed: ``global`` (all, one seed), ``edges`` (each link), ``pairs``
            (every two agents), ``balls:r`` (each agent and those within r hops), ``groups:m``
            (m disjoint groups, as equal as can be), ``communities:s`` (disjoint groups of well
            linked agents, at most s each), ``leave-one-out`` (all but one, for each), or the groups
            themselves.
        private_noise: ``per-agent`` lets each agent have its own variance θ_i of noise that nobody
            else knows; ``common`` is the paper's form, one θ for all.

    >>> ThreatModel(1, "groups:2").seed_groups(nx.path_graph(5))
    ((0, 1, 2), (3, 4))
    """

    max_colluders: int = 0
    seeds: str | SeedGroups = "global"
    private_noise: PrivateNoise = "per-agent"

    def __post_init__(self) -> None:
        if type(self.max_colluders) is not int or self.max_colluders < 0:
            raise InvalidArgumentError(
                f"max_colluders must be a whole number ≥ 0, found {self.max_colluders!r}"
            )
        if self.private_noise not in get_args(PrivateNoise):
            raise InvalidArgumentError(
                f"private_noise must be 'per-agent' or 'common', found {self.private_noise!r}"
            )
        if isinstance(self.seeds, str):
            _parse_seeds(self.seeds)
        else:
            object.__setattr__(self, "seeds", _checked_groups(self.seeds))

    def seed_groups(self, graph: Graph) -> SeedGroups:
        """The groups that share a seed on this graph; links count in either direction.

        A group of one is private noise, so it is listed only where that is common to all.
        """
        n = len(graph)
        if self.max_colluders > max(n - 1, 0):
            raise InvalidArgumentError(
                f"max_colluders must leave somebody honest: at most {n - 1} of {n} agents, found "
                f"{self.max_colluders}"
            )
        if isinstance(self.seeds, str):
            kind, number = _parse_seeds(self.seeds)
            groups = _sorted_groups(kind.build(nx.Graph(graph), number))
        else:
            groups = self.seeds
        stray = [group for group in groups if group and (group[0] < 0 or group[-1] >= n)]
        if stray:
            raise InvalidArgumentError(f"seeds must be of agents 0 … {n - 1}, found {stray[0]}")
        least = 1 if self.private_noise == "common" else 2
        return tuple(group for group in groups if len(group) >= least)

    def describe(self) -> str:
        """The adversary in words, to stand next to every ε."""
        if self.max_colluders == 0:
            return "an eavesdropper who sees every message but knows no seed"
        return (
            f"an eavesdropper together with {self.describe_colluders()}, who know every seed "
            "they share"
        )

    def describe_colluders(self) -> str:
        """How many insiders, in words."""
        if self.max_colluders == 0:
            return "no insider"
        return "one insider" if self.max_colluders == 1 else f"{self.max_colluders} insiders"

    def describe_seeds(self) -> str:
        """Who shares seeds, in words."""
        if not isinstance(self.seeds, str):
            return f"{len(self.seeds)} given groups"
        kind, _, number = self.seeds.partition(":")
        return _SEEDS[kind].words.format(number)


@dataclass(frozen=True)
class _SeedKind:
    """A way to share seeds: how to build its groups, and how to say it."""

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
        if argument.isdecimal() and len(argument) <= MAX_DIGITS and int(argument) > 0:
            return _SEEDS[kind], int(argument)
    accepted = ", ".join(f"{k}:NUMBER" if k in _WITH_NUMBER else k for k in _SEEDS)
    raise InvalidArgumentError(
        f"seeds must be one of {accepted}, or a list of sets, found {text!r}"
    )


def _checked_groups(groups: object) -> SeedGroups:
    """Groups that a caller gave: non-empty sets of agents' numbers, or say what is wrong."""
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, list | tuple | set | frozenset) and group for group in groups
    ):
        raise InvalidArgumentError(
            f"seeds must be sets of agents, none of them empty, found {groups!r:.60}"
        )
    for agent in (agent for group in groups for agent in group):
        if isinstance(agent, bool) or not isinstance(agent, int | np.integer):
            raise InvalidArgumentError(f"seeds must be of agents' numbers, found {agent!r:.60}")
    return _sorted_groups([map(int, group) for group in groups])


def _sorted_groups(groups: Iterable[Iterable[int]]) -> SeedGroups:
    """Members in order, each group once: equal groups are one seed more, but no more freedom."""
    return tuple(dict.fromkeys(tuple(sorted(set(group))) for group in groups))


EAVESDROPPER = ThreatModel()
"""An outsider who sees every message and knows no seed: the paper's main setting."""

DEFAULT_THREAT = ThreatModel(1, "pairs")
"""One curious insider, and a seed for every pair: the threat unless another one is given.

An agent that takes part in training is itself an insider, so a design against outsiders alone
would protect nobody from a curious neighbour. Pairs of seeds cost little of the gain.
"""
