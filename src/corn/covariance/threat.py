"""The threat that noise must hold against: how many insiders may collude, and who shares a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from typing import Any, TypeAlias

import networkx as nx
import numpy as np

from corn.checks import require, require_count
from corn.errors import InvalidArgumentError
from corn.parsing import MAX_DIGITS
from corn.privacy.budget import describe_adversary, describe_insiders
from corn.topology.graphs import Graph
from corn.topology.mixing import Mixing

SeedGroups: TypeAlias = tuple[tuple[int, ...], ...]
"""Sets of agents that share a seed, each in increasing order."""

# The most agents for which ``auto`` gives every pair a seed: beyond, designs take minutes. For
# exact sums, the most for which partners are neighbours in one random cycle.
MOST_FOR_PAIRS = 40

# Partners beyond links for which ``auto`` gives seeds in larger networks, without and with hubs.
# Against one insider the noise energy is then within 10 % of that with all pairs. A hub knows most
# seeds of links, so that agents depend on their other partners.
SPARSE_PARTNERS = 8
PARTNERS_BESIDE_HUBS = 16

# The most insiders for whom each coalition of a small network can be checked.
_MOST_INSIDERS_LISTED = 3
# Random graphs of 16 partners stay connected without any 7 agents, at any size that was tried.
_MASK_PARTNERS = 16
# Agents up to which one cycle costs less noise of gossip than several, which have pairs in common.
_MOST_IN_ONE_CYCLE = 14
_HUB = 5  # times the mean number of links


@dataclass(frozen=True)
class ThreatModel:
    """Up to ``max_colluders`` honest-but-curious agents pool what they know (the paper, §IV-D).

    They see every message, know their own data and noise, and the seed of every group that one of
    them belongs to. With ``max_colluders=0`` the adversary is an eavesdropper outside.

    Attributes:
        max_colluders: q, the size of the largest coalition.
        seeds: the sets of agents that share a seed: ``global`` (all, one seed), ``edges`` (each
            link), ``pairs`` (every two agents), ``sparse:K`` (each link, and up to K more partners
            per agent), ``partners:K`` (up to K random partners per agent), ``groups:m`` (m disjoint
            groups, as equal as can be), or the groups themselves. ``auto`` is ``global`` against an
            eavesdropper. Where insiders may collude, who could subtract all noise of a global seed,
            it is ``pairs`` in a small network, and ``sparse:8`` in a large one or ``sparse:16`` if
            it has hubs. For exact sums it is ``edges`` against an eavesdropper, ``partners:K`` with
            K = 2q + 4 in a small network and ``partners:16`` in a large one: see ``resolve``.

    >>> ThreatModel(1, "groups:2").seed_groups(nx.path_graph(5))
    ((0, 1, 2), (3, 4))
    """

    max_colluders: int = 0
    seeds: str | SeedGroups = "auto"

    def __post_init__(self) -> None:
        count = require_count("max_colluders", self.max_colluders, least=0)
        object.__setattr__(self, "max_colluders", count)
        if not isinstance(self.seeds, str):
            object.__setattr__(self, "seeds", _check_groups(self.seeds))
        elif self.seeds == "auto" and self.max_colluders == 0:
            # Without insiders a seed for all costs nothing, and it allows every covariance.
            object.__setattr__(self, "seeds", "global")
        elif self.seeds != "auto":
            _parse_seeds(self.seeds)

    def resolve(self, graph: Graph, mixing: Mixing = "gossip") -> ThreatModel:
        """Return the threat with the seeds that ``auto`` stands for on this graph and mixing."""
        if mixing == "sum" and self == EAVESDROPPER:
            # Any seeds that join all agents are as good. Those of links need no message.
            return replace(self, seeds="edges")
        if self.seeds != "auto":
            return self
        is_small = len(graph) <= MOST_FOR_PAIRS
        if mixing == "sum" and is_small and self.max_colluders <= _MOST_INSIDERS_LISTED:
            # Without any 2q + 3 agents the others stay connected: more than twice the promise.
            return replace(self, seeds=f"partners:{2 * self.max_colluders + 4}")
        if is_small:
            return replace(self, seeds="pairs")
        if mixing == "sum":
            # λ₂ of a random graph is about K − 2√(K − 1), and must exceed q.
            needed = 2 * self.max_colluders + 8
            return replace(self, seeds=f"partners:{max(_MASK_PARTNERS, needed)}")
        most = max(degree for _, degree in graph.degree)
        has_hub = most > _HUB * 2 * graph.number_of_edges() / len(graph)
        number = PARTNERS_BESIDE_HUBS if has_hub else SPARSE_PARTNERS
        return replace(self, seeds=f"sparse:{number}")

    def seed_groups(self, graph: Graph, mixing: Mixing = "gossip") -> SeedGroups:
        """Return the groups that share a seed on this graph.

        A group of one is private noise, so it is not listed. ``partners`` of a small network are
        neighbours in one random cycle for exact sums, which need a connected graph of seeds, and in
        several cycles for gossip, in which noise of pairs far apart cancels better.
        """
        self.check(len(graph))
        seeds = self.resolve(graph, mixing).seeds
        if isinstance(seeds, str):
            rule, number = _parse_seeds(seeds)
            most = MOST_FOR_PAIRS if mixing == "sum" else _MOST_IN_ONE_CYCLE
            seeds = _sort_groups(rule(graph, number, len(graph) <= most))
        return tuple(group for group in seeds if len(group) > 1)

    def check(self, num_agents: int) -> None:
        """Raise if there are more insiders, or seeds of other agents, than a network has agents."""
        n = num_agents
        q = self.max_colluders
        require(q < n, "max_colluders", f"at most {n - 1} of {n} agents", q)
        groups = () if isinstance(self.seeds, str) else self.seeds
        stray = [group for group in groups if group[0] < 0 or group[-1] >= n]
        require(not stray, "seeds", f"groups of agents 0 … {n - 1}", stray[:1])

    def describe(self) -> str:
        """Return the adversary in words, to stand next to every ε."""
        return describe_adversary(self.max_colluders)

    def describe_colluders(self) -> str:
        """Return the number of insiders in words."""
        return describe_insiders(self.max_colluders)


def choose_partners(graph: Graph, num_partners: int) -> list[tuple[int, int]]:
    """Return pairs that are not linked: up to ``num_partners`` for each agent, half of them close.

    Noise that is shared with close agents cancels after few mixing steps, and noise that is shared
    with any others survives an insider in the neighbourhood. The choice comes from SHA-256 of
    public numbers, so that everybody makes the same one with any version of any library. It need
    not be secret, because every coalition is checked whatever the pairs are.
    """
    n = len(graph)
    if num_partners >= n - 1:
        return [pair for pair in combinations(range(n), 2) if not graph.has_edge(*pair)]
    pairs = _choose_near(graph, num_partners // 2)
    pairs |= choose_random_pairs(n, num_partners - num_partners // 2)
    return sorted(pair for pair in pairs if not graph.has_edge(*pair))


def choose_random_pairs(
    num_agents: int, num_partners: int, *, in_one_cycle: bool = False
) -> set[tuple[int, int]]:
    """Return pairs of agents that are close in cycles through all agents in random orders.

    Each cycle gives two partners. ``in_one_cycle`` takes the nearest on both sides instead: without
    any ``num_partners`` − 1 agents the others stay connected if the number is even (Harary 1962).
    The orders come from SHA-256 of public numbers, as in ``choose_partners``.
    """
    n = num_agents
    pairs = set[tuple[int, int]]()
    if num_partners >= n - 1:
        return set(combinations(range(n), 2))
    for number in range((num_partners + 1) // 2):
        digests = [_digest(n, 0 if in_one_cycle else number, agent) for agent in range(n)]
        order = sorted(range(n), key=digests.__getitem__)
        # An order and its end close a cycle; with an odd number, one cycle is cut into pairs.
        hops = number + 1 if in_one_cycle else 1
        starts, ends = order, order[hops:] + order[:hops]
        if 2 * number + 1 == num_partners:
            starts, ends = order[: n // 2], order[n // 2 : n // 2 * 2]
        pairs |= {(min(i, j), max(i, j)) for i, j in zip(starts, ends, strict=True)}
    return pairs


def _choose_near(graph: Graph, num_partners: int) -> set[tuple[int, int]]:
    """Return pairs that are not linked, nearest first, up to ``num_partners`` for each agent."""
    candidates: set[tuple[int, int, int]] = set()
    for agent in graph:
        # A few times as many as needed, because a partner may have enough others.
        hops = islice(nx.bfs_edges(graph, agent), len(graph[agent]) + 4 * num_partners)
        distance = {agent: 0}
        for parent, child in hops:
            distance[child] = distance[parent] + 1
        candidates |= {
            (d, min(agent, other), max(agent, other)) for other, d in distance.items() if d > 1
        }
    # Greedy by distance; the digest breaks ties, as an order by number would favour low agents.
    room = dict.fromkeys(graph, num_partners)
    chosen = set()
    for _, i, j in sorted(candidates, key=lambda c: (c[0], _digest(*c))):
        if room[i] and room[j]:
            chosen.add((i, j))
            room[i], room[j] = room[i] - 1, room[j] - 1
    return chosen


def _digest(*numbers: int) -> bytes:
    return hashlib.sha256(f"corn partners {numbers}".encode()).digest()


def _split_agents(num_agents: int, num_groups: int) -> list[list[int]]:
    """Split agents 0 … n−1 into runs of neighbouring numbers whose sizes differ by at most one."""
    require_count("the number of seed groups", num_groups, most=num_agents)
    return [part.tolist() for part in np.array_split(np.arange(num_agents), num_groups)]


_SeedRule: TypeAlias = Callable[[Graph, int, bool], Iterable[Iterable[int]]]
_SEEDS: dict[str, _SeedRule] = {
    "global": lambda graph, *_: [graph.nodes],
    "edges": lambda graph, *_: graph.edges,
    "pairs": lambda graph, *_: combinations(sorted(graph), 2),
    "sparse": lambda graph, number, _: [*graph.edges, *choose_partners(graph, number)],
    "partners": lambda graph, number, in_one_cycle: sorted(
        choose_random_pairs(len(graph), number, in_one_cycle=in_one_cycle)
    ),
    "groups": lambda graph, number, _: _split_agents(len(graph), number),
}
_WITH_NUMBER = ("sparse", "partners", "groups")


def _parse_seeds(text: str) -> tuple[_SeedRule, int]:
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
    sets = (list, tuple, set, frozenset)
    given: Any = groups
    is_list = isinstance(given, list | tuple)
    is_sets = is_list and all(isinstance(group, sets) and group for group in given)
    require(is_sets, "seeds", "sets of agents, none of them empty", f"{groups!r:.60}")
    for agent in chain.from_iterable(given):
        is_number = isinstance(agent, int | np.integer) and not isinstance(agent, bool)
        require(is_number, "seeds", "sets of agents' numbers", f"{agent!r:.60}")
    return _sort_groups([map(int, group) for group in given])


def _sort_groups(groups: Iterable[Iterable[int]]) -> SeedGroups:
    """Return each group once, members in order: an equal group adds a seed but no freedom."""
    return tuple(dict.fromkeys(tuple(sorted(set(group))) for group in groups))


EAVESDROPPER = ThreatModel()
"""An outsider who sees every message and knows no seed: the paper's main setting."""

DEFAULT_THREAT = ThreatModel(1)
"""One curious insider, and seeds of pairs: the threat unless another one is given.

An agent that takes part in training is itself an insider, so a design against outsiders alone
would protect nobody from a curious neighbour. Seeds of pairs cost little of the gain.
"""
