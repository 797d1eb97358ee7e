"""Graphs, mixing weights, and the speed at which they mix."""

from corn.topology.graphs import Graph as Graph
from corn.topology.graphs import GraphSpec as GraphSpec
from corn.topology.graphs import check_graph as check_graph
from corn.topology.graphs import list_connections as list_connections
from corn.topology.graphs import name_of as name_of
from corn.topology.graphs import opens_link as opens_link
from corn.topology.mixing import ONE_ROUND as ONE_ROUND
from corn.topology.mixing import Gossip as Gossip
from corn.topology.mixing import Mixing as Mixing
from corn.topology.mixing import Network as Network
from corn.topology.mixing import Spectrum as Spectrum
from corn.topology.mixing import choose_cooldown as choose_cooldown
from corn.topology.mixing import graph_of as graph_of
from corn.topology.mixing import load_network as load_network
from corn.topology.mixing import spectrum as spectrum
