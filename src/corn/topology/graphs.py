"""The graphs of this package: agents 0 … n−1, no self-loops, every agent reachable."""

from __future__ import annotations

import sys
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias

import networkx as nx

from corn.errors import InfeasibleError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

Graph: TypeAlias = nx.Graph
"""Agents 0 … n−1 and links; an ``nx.DiGraph`` if links are directed (i → j: i sends to j)."""


def check_graph(graph: nx.Graph) -> Graph:
    """Return a copy of ``graph`` with agents 0 … n−1, or raise if agents cannot learn on it.

    Integer labels must be 0 … n−1 already. Other labels are numbered in the order of the graph and
    kept as the node attribute ``name``. Edge weights, if there are any, must be positive numbers.
    """
    if graph.number_of_nodes() == 0:
        raise InvalidArgumentError("the graph must have at least one agent, found none")
    loops = sorted(str(node) for node in nx.nodes_with_selfloops(graph))
    if loops:
        raise InvalidArgumentError(
            f"the graph must have no self-loops, found one at {_some(loops)}: the mixing weights "
            "decide what an agent keeps for itself"
        )
    for u, v, weight in graph.edges(data="weight"):
        if weight is not None:
            _check_edge_weight(u, v, weight)
    # Numbered first, so that the error below can name agents as the file does.
    numbered = _number_agents(graph)
    _require_connected(numbered)
    return numbered


def is_connected(graph: Graph) -> bool:
    """Return whether every agent can reach every other (strongly, if links are directed)."""
    connected = nx.is_strongly_connected if graph.is_directed() else nx.is_connected
    return bool(connected(graph))


def name_of(graph: Graph, agent: int) -> str:
    """Return the name that an agent has in the graph's file, or its number."""
    return str(graph.nodes[agent].get("name", agent))


def _number_agents(graph: nx.Graph) -> Graph:
    kind = nx.DiGraph if graph.is_directed() else nx.Graph
    # Files can describe multigraphs; parallel links count as one.
    simple = kind(graph) if graph.is_multigraph() else graph
    nodes = list(simple.nodes)
    numbered: Graph = nx.empty_graph(len(nodes), create_using=kind)
    # NumPy's integers too: numbers that are taken for names would be given out in another order.
    is_numbered = all(isinstance(node, Integral) for node in nodes)
    if is_numbered:
        # Gaps are refused, not closed: agent 7 of the file must be agent 7 of the run, its keys and
        # its data.
        missing = sorted(set(range(len(nodes))) - set(nodes))
        if missing:
            raise InvalidArgumentError(
                f"agents must be numbered 0 … {len(nodes) - 1}, found no "
                f"{_some(map(str, missing))}: number them from 0 without gaps, or use names"
            )
        place = {node: int(node) for node in nodes}
    else:
        place = {node: agent for agent, node in enumerate(nodes)}
    for node, attributes in simple.nodes(data=True):
        name = {} if is_numbered else {"name": str(node)}
        numbered.add_nodes_from([(place[node], {**attributes, **name})])
    numbered.add_edges_from((place[u], place[v], data) for u, v, data in simple.edges(data=True))
    return numbered


def _check_edge_weight(u: Hashable, v: Hashable, weight: object) -> None:
    # An int can exceed every float, and NaN fails the comparison.
    if not isinstance(weight, int | float) or not 0 < weight <= sys.float_info.max:
        raise InvalidArgumentError(
            f"edge weights must be positive numbers, found {weight!r} between {u} and {v}"
        )


def _require_connected(graph: Graph) -> None:
    if is_connected(graph):
        return
    directed = graph.is_directed()
    parts = nx.strongly_connected_components(graph) if directed else nx.connected_components(graph)
    # The smallest part is the most likely mistake: one agent without a link, rather than the rest.
    smallest = min((sorted(part) for part in parts), key=len)
    cut_off = _some(name_of(graph, agent) for agent in smallest)
    how = "strongly connected (everyone can reach everyone)" if directed else "connected"
    raise InfeasibleError(
        f"the graph must be {how}, found a part cut off from the rest: {cut_off}; "
        "add links, or train each part separately"
    )


def _some(items: Iterable[str], limit: int = 5) -> str:
    """Return the first few items, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
