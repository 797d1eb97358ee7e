"""Graphs, mixing weights, and how fast they mix."""

from corn.topology.balancing import balance
from corn.topology.generators import GENERATORS
from corn.topology.gossip import chebyshev_gossip, repeat_gossip
from corn.topology.graphs import Graph, check_graph, is_connected, name_of
from corn.topology.mixing import WEIGHTS, check_mixing_matrix, graph_of, mixing_matrix
from corn.topology.network import Network, load_network
from corn.topology.spec import GraphSpec
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
    "graph_of",
    "is_connected",
    "load_network",
    "mixing_matrix",
    "name_of",
    "repeat_gossip",
    "spectrum",
]
