"""Layouts of graphs: where a picture shows each agent."""

from __future__ import annotations

import networkx as nx

from corn.topology import Graph


def place_agents(graph: Graph) -> dict[int, tuple[float, float]]:
    """Return coordinates: rings as circles, small graphs by distance, large ones by springs."""
    n = len(graph)
    if 3 <= n <= 60 and all(degree == 2 for _, degree in graph.degree):
        return dict(nx.circular_layout(graph))
    # Kamada–Kawai shows structure best, but needs all shortest paths: cubic in n.
    if n <= 120:
        return dict(nx.kamada_kawai_layout(graph.to_undirected()))
    # A fixed seed: the same network gets the same picture each time.
    return dict(nx.spring_layout(graph, seed=1, iterations=60))
