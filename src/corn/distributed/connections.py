"""Table of the connections between agents, for a firewall."""

from __future__ import annotations

from dataclasses import dataclass

from corn.topology import Network


@dataclass(frozen=True)
class AgentConnections:
    """The TCP connections of one agent to its neighbours.

    Attributes:
        agent: its number.
        accepts: agents that connect to its listening port.
        opens: agents to whose listening ports it connects.
    """

    agent: int
    accepts: tuple[int, ...]
    opens: tuple[int, ...]


def list_connections(network: Network) -> list[AgentConnections]:
    """Return the connections of every agent: the higher number connects to the lower one.

    A link is one connection, also where messages go one way only. In addition every agent connects
    to the store.

    >>> from corn.topology import load_network
    >>> list_connections(load_network("path:3"))[1]
    AgentConnections(agent=1, accepts=(2,), opens=(0,))
    """
    linked: dict[int, set[int]] = {agent: set() for agent in range(network.num_agents)}
    for one, other in network.graph.edges:
        if one != other:
            linked[one].add(other)
            linked[other].add(one)
    return [
        AgentConnections(
            agent,
            accepts=tuple(sorted(peer for peer in peers if peer > agent)),
            opens=tuple(sorted(peer for peer in peers if peer < agent)),
        )
        for agent, peers in linked.items()
    ]
