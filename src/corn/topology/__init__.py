"""Graphs, mixing weights, and the speed at which they mix."""

from corn.topology.graphs import (
    GENERATORS,
    Graph,
    GraphSpec,
    check_graph,
    list_connections,
    name_of,
    opens_link,
)
from corn.topology.mixing import (
    ONE_ROUND,
    Gossip,
    Spectrum,
    check_mixing_matrix,
    graph_of,
    spectrum,
)
from corn.topology.network import (
    Mixing,
    Network,
    choose_cooldown,
    load_network,
)

__all__ = [
    "GENERATORS",
    "ONE_ROUND",
    "Gossip",
    "Graph",
    "GraphSpec",
    "Mixing",
    "Network",
    "Spectrum",
    "check_graph",
    "check_mixing_matrix",
    "choose_cooldown",
    "graph_of",
    "list_connections",
    "load_network",
    "name_of",
    "opens_link",
    "spectrum",
]
