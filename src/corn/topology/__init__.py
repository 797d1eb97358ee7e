"""Graphs, mixing weights, and the speed at which they mix."""

from corn.topology.generators import GENERATORS, GraphSpec, describe_kind
from corn.topology.graphs import Graph, check_graph, is_connected, name_of
from corn.topology.mixing import (
    WEIGHTS,
    balance,
    chebyshev_gossip,
    check_mixing_matrix,
    graph_of,
    metropolis_weights,
    mixing_matrix,
    repeat_gossip,
)
from corn.topology.network import Network, load_network
from corn.topology.spectrum import Spectrum, spectrum

__all__ = [
    "GENERATORS",
    "WEIGHTS",
    "Graph",
    "GraphSpec",
    "Network",
    "Spectrum",
    "balance",
    "chebyshev_gossip",
    "check_graph",
    "check_mixing_matrix",
    "describe_kind",
    "graph_of",
    "is_connected",
    "load_network",
    "metropolis_weights",
    "mixing_matrix",
    "name_of",
    "repeat_gossip",
    "spectrum",
]
