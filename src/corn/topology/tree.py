"""A spanning tree of a network's links, along which a step's releases are summed and returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from corn.topology.graphs import Graph

_SEARCHES = 20


@dataclass(frozen=True)
class SpanningTree:
    """A tree on the links that reaches every agent.

    Attributes:
        root: the agent that has the whole sum first.
        parents: the next agent towards the root, for each agent by number; the root's is itself.
    """

    root: int
    parents: dict[int, int]

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The agents whose parent an agent is, in increasing order."""
        found: dict[int, list[int]] = {agent: [] for agent in self.parents}
        for agent, parent in sorted(self.parents.items()):
            if agent != self.root:
                found[parent].append(agent)
        return {agent: tuple(own) for agent, own in found.items()}

    @cached_property
    def depth(self) -> int:
        """The number of hops from the farthest agent to the root."""
        level, depth = [self.root], 0
        while True:
            level = [child for agent in level for child in self.children[agent]]
            if not level:
                return depth
            depth += 1

    def rename(self, names: Sequence[int]) -> SpanningTree:
        """Return the tree with ``names[k]`` in the place of agent k.

        >>> SpanningTree(0, {0: 0, 1: 0}).rename((4, 7))
        SpanningTree(root=4, parents={4: 4, 7: 4})
        """
        parents = {names[agent]: names[parent] for agent, parent in self.parents.items()}
        return SpanningTree(names[self.root], parents)

    @property
    def num_messages(self) -> int:
        """The number of messages per step: one up and one down each link of the tree."""
        return 2 * (len(self.parents) - 1)


def find_tree(graph: Graph) -> SpanningTree:
    """Return a tree of shortest paths to a central agent, the same for everybody.

    >>> tree = find_tree(nx.path_graph(5))
    >>> tree.root, tree.depth, tree.parents
    (2, 2, {0: 1, 1: 2, 2: 2, 3: 2, 4: 3})
    """
    root = _find_centre(graph)
    parents = {root: root}
    level = [root]
    while level:
        level = sorted({other for agent in level for other in graph[agent] if other not in parents})
        before = set(parents)
        for agent in level:
            # The parent with the lowest number: the order of a graph's links must not matter.
            parents[agent] = min(other for other in graph[agent] if other in before)
    return SpanningTree(root, dict(sorted(parents.items())))


def _find_centre(graph: Graph) -> int:
    """Return an agent from which the farthest one is as near as a few searches show.

    An exact centre takes a search from every agent. Here each search begins at the agent that is
    farthest from the best candidate so far, whose distance to all such agents is the least.
    """
    farthest: dict[int, int] = dict.fromkeys(graph, 0)
    candidate, best, fewest = min(graph), min(graph), len(graph)
    for _ in range(_SEARCHES):
        distances = nx.single_source_shortest_path_length(graph, candidate)
        most = max(distances.values())
        if most < fewest:
            best, fewest = candidate, most
        far = min(agent for agent, distance in distances.items() if distance == most)
        for agent, distance in nx.single_source_shortest_path_length(graph, far).items():
            farthest[agent] = max(farthest[agent], distance)
        candidate = min(graph, key=lambda agent: (farthest[agent], agent))
        # No agent can be better than its distance to those that were tried.
        if farthest[candidate] >= fewest:
            break
    return int(best)
