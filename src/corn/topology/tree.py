"""A spanning tree of a network's links, along which a step's releases are summed and returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from corn.topology.graphs import Graph


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

    The root is the middle of a longest shortest path, found by two breadth-first searches. In a
    graph that is a tree it is a centre.

    >>> tree = find_tree(nx.path_graph(5))
    >>> tree.root, tree.depth, tree.parents
    (2, 2, {0: 1, 1: 2, 2: 2, 3: 2, 4: 3})
    """
    first = min(graph)
    far = _find_farthest(graph, first)
    path = nx.shortest_path(_ordered(graph), far, _find_farthest(graph, far))
    root = path[len(path) // 2]
    parents = {root: root}
    level = [root]
    while level:
        # The parent with the lowest number: the order of a graph's links must not matter.
        level = sorted({other for agent in level for other in graph[agent] if other not in parents})
        before = set(parents)
        for agent in level:
            parents[agent] = min(other for other in graph[agent] if other in before)
    return SpanningTree(root, dict(sorted(parents.items())))


def _find_farthest(graph: Graph, source: int) -> int:
    distances = nx.single_source_shortest_path_length(graph, source)
    most = max(distances.values())
    return min(int(agent) for agent, distance in distances.items() if distance == most)


def _ordered(graph: Graph) -> Graph:
    """Return the graph with agents and links in order, on which searches depend."""
    ordered = nx.Graph()
    ordered.add_nodes_from(sorted(graph))
    ordered.add_edges_from(sorted(tuple(sorted(edge)) for edge in graph.edges))
    return ordered
