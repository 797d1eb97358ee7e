"""Who connects to whom: of the two ends of each link, one accepts and the other connects."""

from __future__ import annotations

from collections.abc import Sequence

from corn.errors import InfeasibleError
from corn.topology.graphs import Graph


def opens_link(agent: int, peer: int, accepts: Sequence[bool]) -> bool:
    """Return whether an agent connects to its neighbour, and not the neighbour to it.

    The end that accepts is connected to. If both do, the higher number connects to the lower one.

    Raises:
        InfeasibleError: neither end accepts connections.
    """
    if not (accepts[agent] or accepts[peer]):
        _refuse([(agent, peer)])
    return agent > peer if accepts[agent] and accepts[peer] else accepts[peer]


def list_connections(graph: Graph, accepts: Sequence[bool] | None = None) -> list[tuple[int, int]]:
    """Return a pair for each link: the agent that connects, and the one that accepts.

    A link is one connection, also where messages go one way only. By default all agents accept.

    Raises:
        InfeasibleError: some links have no end that accepts connections; all are listed.

    >>> from corn.topology import load_network
    >>> list_connections(load_network("star:4").graph, [False, True, True, True])
    [(0, 1), (0, 2), (0, 3)]
    """
    accepting = [True] * graph.number_of_nodes() if accepts is None else accepts
    links = sorted({(min(link), max(link)) for link in graph.edges})
    closed = [link for link in links if not any(accepting[end] for end in link)]
    if closed:
        _refuse(closed)
    return sorted((b, a) if opens_link(b, a, accepting) else (a, b) for a, b in links)


def _refuse(links: Sequence[tuple[int, int]]) -> None:
    named = ", ".join(f"{a}–{b}" for a, b in links)
    raise InfeasibleError(
        f"one end of each link must accept connections, found none at the links {named}: let one "
        "of the two agents accept in the roster, choose a graph without these links, or run under "
        "a server of Flower or NVIDIA FLARE, to which all agents connect outward"
    )
