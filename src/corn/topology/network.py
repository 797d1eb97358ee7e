"""Networks: a graph with mixing weights, loaded from a spec, a file, a graph or a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import networkx as nx
import numpy as np

from corn.arrays import FloatArray
from corn.errors import CornError, FileFormatError, make_printable
from corn.topology.files import (
    EDGE_LIST_SUFFIXES,
    MATRIX_SUFFIXES,
    SUFFIXES,
    read_graph,
    read_matrix,
)
from corn.topology.generators import GraphSpec
from corn.topology.gossip import ONE_ROUND, Gossip
from corn.topology.graphs import Graph, check_graph
from corn.topology.mixing import check_mixing_matrix, default_rule, graph_of, mixing_matrix
from corn.topology.spectrum import find_mixing_time

_DIRECTED = "directed:"
_MAX_REASON = 300


@dataclass(frozen=True)
class Network:
    """A connected graph of agents 0 … n−1 and a doubly stochastic mixing matrix on it.

    Attributes:
        graph: the links; an ``nx.DiGraph`` where they have a direction.
        mixing_matrix: W of one round, shape (n, n); w_ij is the weight of agent j's model at i.
        source: the spec or file that it came from, for people to read.
        weights: the rule of :data:`~corn.topology.mixing.WEIGHTS`, or ``"given"``.
        gossip: the mixing rounds of one step.
    """

    graph: Graph
    mixing_matrix: FloatArray = field(repr=False)
    source: str = "given"
    weights: str = "given"
    gossip: Gossip = ONE_ROUND

    def __post_init__(self) -> None:
        matrix = check_mixing_matrix(self.mixing_matrix, graph=self.graph)
        # Frozen, because plans and designs are certified for these very weights.
        matrix.setflags(write=False)
        object.__setattr__(self, "graph", nx.freeze(check_graph(self.graph)))
        object.__setattr__(self, "mixing_matrix", matrix)
        self.gossip.schedule(matrix)  # raises if these weights do not admit them

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.mixing_matrix)

    @cached_property
    def step_matrix(self) -> FloatArray:
        """The polynomial of W that the rounds of one step apply, shape (n, n)."""
        matrix = self.gossip.matrix(self.mixing_matrix)
        matrix.setflags(write=False)
        return matrix


def choose_cooldown(network: Network, num_steps: int) -> int:
    """Return the steps that only mix after a run of ``num_steps``, unless a number is given.

    One mixing time of the step matrix, after which 1 % of any disagreement is left, and at most as
    many steps as the run itself. Zero if the agents never agree, because weights are periodic.

    >>> choose_cooldown(load_network("ring:6"), 500), choose_cooldown(load_network("ring:6"), 5)
    (12, 5)
    """
    time = find_mixing_time(network.step_matrix)
    return 0 if math.isinf(time) else min(int(time), num_steps)


def load_network(
    source: str | Path | Graph | FloatArray,
    *,
    weights: str | None = None,
    gossip: Gossip = ONE_ROUND,
) -> Network:
    """Turn a spec, a file, a networkx graph or a mixing matrix into a checked network.

    ``weights`` names the rule for the mixing matrix (default: Metropolis, Sinkhorn if directed). If
    the source is a mixing matrix, the default is that matrix; a named rule keeps only its links.
    ``gossip`` are the mixing rounds of a step (default: one).

    >>> load_network("ring:4").mixing_matrix[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    network = _load(source, weights)
    return network if gossip == network.gossip else replace(network, gossip=gossip)


def _load(source: str | Path | Graph | FloatArray, weights: str | None) -> Network:
    if isinstance(source, np.ndarray):
        return _weigh(check_mixing_matrix(source), "given matrix", weights)
    if isinstance(source, nx.Graph):
        return _weigh(check_graph(source), "given graph", weights)
    # A suffix decides before the parser of specs does, so that a misspelt file name is reported as
    # a missing file and not as an unknown graph.
    text = str(source)
    path = Path(text.removeprefix(_DIRECTED))
    if path.suffix not in SUFFIXES and not path.is_file():
        spec = GraphSpec.parse(text)
        return _weigh(spec.build(), str(spec), weights)
    try:
        return _weigh(_read(path, directed=text.startswith(_DIRECTED)), text, weights)
    except FileFormatError:
        raise
    except CornError as error:
        raise type(error)(f"{path}: {make_printable(str(error), limit=_MAX_REASON)}") from error


def _weigh(what: Graph | FloatArray, source: str, weights: str | None) -> Network:
    if isinstance(what, np.ndarray):
        if weights is None:
            return Network(graph_of(what), what, source)
        what = graph_of(what)
    rule = weights or default_rule(what)
    return Network(what, mixing_matrix(what, rule), source, rule)


def _read(path: Path, *, directed: bool) -> Graph | FloatArray:
    if path.suffix not in MATRIX_SUFFIXES:
        return check_graph(read_graph(path, directed=directed))
    edge_lists = " or ".join(EDGE_LIST_SUFFIXES)
    matrix = read_matrix(path, advice=f"an edge list belongs in a file that ends in {edge_lists}")
    # Zeros and ones with an empty diagonal are links (row i sends to column j); anything else must
    # be a mixing matrix. A permutation without fixed points, which is both, is read as links.
    if np.isin(matrix, (0, 1)).all() and not np.diag(matrix).any():
        return check_graph(_graph_of_adjacency(matrix))
    return check_mixing_matrix(matrix)


def _graph_of_adjacency(matrix: FloatArray) -> Graph:
    symmetric = bool((matrix == matrix.T).all())
    return nx.from_numpy_array(
        matrix, create_using=nx.Graph if symmetric else nx.DiGraph, edge_attr=None
    )
