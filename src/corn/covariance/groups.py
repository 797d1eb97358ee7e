"""Groups of agents that share a seed: split evenly, or along the communities of the graph."""

from __future__ import annotations

from typing import TypeAlias

import networkx as nx
import numpy as np

from corn.errors import InvalidArgumentError
from corn.topology.graphs import Graph

SeedGroups: TypeAlias = tuple[tuple[int, ...], ...]
"""Sets of agents that share a seed, each in increasing order."""


def split_agents(num_agents: int, num_groups: int) -> SeedGroups:
    """Split agents 0 … n−1 into runs of neighbouring numbers whose sizes differ by at most one.

    >>> split_agents(5, 2)
    ((0, 1, 2), (3, 4))
    """
    if not 1 <= num_groups <= num_agents:
        raise InvalidArgumentError(
            f"the number of seed groups must be in [1, {num_agents}], found {num_groups}"
        )
    parts = np.array_split(np.arange(num_agents), num_groups)
    return tuple(tuple(part.tolist()) for part in parts)


def find_communities(graph: Graph, *, max_size: int, seed: int = 0) -> SeedGroups:
    """Group agents that are well connected with each other, at most ``max_size`` together.

    Louvain's method on the links, weights and directions ignored; a community that is too large is
    searched again on its own, and cut along a breadth-first order where that finds no parts.
    """
    if max_size < 1:
        raise InvalidArgumentError(f"max_size must be at least 1, found {max_size}")
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
    first = min(graph)
    order = [first, *(child for _, child in nx.bfs_edges(graph, first))]
    return [set(order[i : i + max_size]) for i in range(0, len(order), max_size)]
