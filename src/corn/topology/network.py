"""Networks: a graph with mixing weights, loaded from a spec, a file, a graph or a matrix."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import networkx as nx
import numpy as np
import scipy.sparse

from corn.checks import FloatArray, as_square_matrix, require, require_choice
from corn.errors import CornError, FileFormatError, make_printable
from corn.topology.files import (
    EDGE_LIST_SUFFIXES,
    MATRIX_SUFFIXES,
    SUFFIXES,
    read_edge_list,
    read_matrix,
)
from corn.topology.graphs import (
    Graph,
    GraphSpec,
    SpanningTree,
    check_graph,
    find_tree,
    look_up_agents,
    name_of,
)
from corn.topology.mixing import (
    MAX_AGENTS,
    ONE_ROUND,
    Gossip,
    GossipRound,
    SparseMatrix,
    check_weights,
    graph_of,
    require_symmetric,
    sparse_mixing_matrix,
    spectrum,
)

Mixing: TypeAlias = Literal["sum", "gossip"]
"""How the releases of a step are combined: summed exactly over a tree, or mixed with neighbours."""

_MAX_REASON = 300


@dataclass(frozen=True)
class Network:
    """A connected graph of agents 0 … n−1 and a symmetric, doubly stochastic mixing matrix on it.

    Attributes:
        graph: the links.
        sparse_matrix: W of one round, shape (n, n), dense or sparse when given and sparse after;
            w_ij is the weight of agent j's model at i.
        source: the spec or file that it came from, for people to read.
        weights: ``"metropolis"``, or ``"given"`` with the network.
        gossip: the mixing rounds of one step, where agents mix by gossip.
        schedule: the mixing rounds of a step, in order.
        mixing: ``sum`` adds the releases of a step up over a spanning tree of the links, so that
            all agents hold one model; ``gossip``, the paper's, mixes models with neighbours.

    >>> network = load_network("grid:2x3")
    >>> network.num_agents, network.graph.number_of_edges(), network.weights
    (6, 7, 'metropolis')
    """

    graph: Graph
    sparse_matrix: SparseMatrix = field(repr=False)
    source: str = "given"
    weights: str = "given"
    gossip: Gossip = ONE_ROUND
    mixing: Mixing = "gossip"
    schedule: tuple[GossipRound, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        given = self.sparse_matrix
        if not scipy.sparse.issparse(given):
            given = SparseMatrix(as_square_matrix(given, name="mixing_matrix"))
        matrix = SparseMatrix(given, dtype=np.float64, copy=True)
        graph = check_graph(self.graph)
        check_weights(matrix, graph=graph)
        # Frozen, because plans and designs are certified for these very weights.
        matrix.data.setflags(write=False)
        object.__setattr__(self, "graph", nx.freeze(graph))
        object.__setattr__(self, "sparse_matrix", matrix)
        require_choice("mixing", self.mixing, get_args(Mixing))
        if self.mixing == "sum":
            require(self.gossip == ONE_ROUND, "gossip", "one round with mixing='sum'", self.gossip)
        else:
            n = self.num_agents
            rule = f"at most {MAX_AGENTS:,} for gossip"
            advice = "exact sums (mixing='sum') have no such limit"
            require(n <= MAX_AGENTS, "agents", rule, f"{n:,}", advice=advice)
        # Raises if these weights do not admit the rounds. Plain ones do not depend on them.
        is_plain = self.gossip.kind == "plain"
        schedule = self.gossip.schedule(np.eye(1) if is_plain else matrix.toarray())
        object.__setattr__(self, "schedule", schedule)

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return int(self.sparse_matrix.shape[0])

    @property
    def agent_names(self) -> list[str]:
        """The label of each agent in the graph that it came from, or its number."""
        return [name_of(self.graph, agent) for agent in range(self.num_agents)]

    @property
    def has_names(self) -> bool:
        """Whether any agent has a name besides its number."""
        return any(name is not None for _, name in self.graph.nodes(data="name"))

    def find_agent(self, given: str | int, *, argument: str = "agent") -> int:
        """Return the number of an agent by its name or its number; raise if there is none."""
        return look_up_agents(self.agent_names, [given], argument=argument)[0]

    @cached_property
    def mixing_matrix(self) -> FloatArray:
        """W as a dense matrix, shape (n, n), made when it is first asked for."""
        n = self.num_agents
        require(n <= MAX_AGENTS, "agents", f"at most {MAX_AGENTS} for a dense mixing matrix", n)
        matrix: FloatArray = self.sparse_matrix.toarray()
        matrix.setflags(write=False)
        return matrix

    @cached_property
    def step_matrix(self) -> FloatArray:
        """The polynomial of W that the rounds of one step apply, shape (n, n); 11ᵀ/n for sums."""
        if self.mixing == "sum":
            return np.broadcast_to(np.float64(1 / self.num_agents), (self.num_agents,) * 2)
        if self.gossip == ONE_ROUND:
            return self.mixing_matrix
        matrix = self.gossip.matrix(self.mixing_matrix)
        matrix.setflags(write=False)
        return matrix

    @cached_property
    def tree(self) -> SpanningTree:
        """The links along which exact sums travel."""
        return find_tree(self.graph)

    def describe_mixing(self, num_steps: int, cooldown_steps: int = 0) -> str:
        """Return the messages of a run in one line.

        >>> load_network("grid:4x5").describe_mixing(300)
        'exact sums over a tree of depth 4: 38 messages per step, 8 hops, 300 steps'
        >>> load_network("grid:4x5", gossip=Gossip(2)).describe_mixing(300, 10)
        '2 rounds per step, 300 steps and 10 that only mix: 620 messages per link, each way'
        """
        if self.mixing == "sum":
            return (
                f"exact sums over a tree of depth {self.tree.depth}: {self.tree.num_messages:,} "
                f"messages per step, {2 * self.tree.depth} hops, {num_steps:,} steps"
            )
        rounds = self.gossip.rounds
        kind = " Chebyshev" if self.gossip.kind == "chebyshev" else ""
        cooldown = f" and {cooldown_steps:,} that only mix" if cooldown_steps else ", no cool-down"
        messages = self.gossip.count_messages(num_steps, cooldown_steps)
        return (
            f"{rounds}{kind} round{'s' if rounds > 1 else ''} per step, {num_steps:,} steps"
            f"{cooldown}: {messages:,} messages per link, each way"
        )


def choose_cooldown(network: Network, num_steps: int) -> int:
    """Return the steps that only mix after a run of ``num_steps``, unless a number is given.

    One mixing time of the step matrix, after which 1 % of any disagreement is left, and at most as
    many steps as the run itself. Zero if the agents never agree, because weights are periodic.
    """
    if network.mixing == "sum":
        return 0  # all agents have one model already
    time = spectrum(network.step_matrix).mixing_time
    return 0 if math.isinf(time) else min(int(time), num_steps)


def load_network(
    source: str | Path | Graph | FloatArray,
    *,
    gossip: Gossip = ONE_ROUND,
    mixing: Mixing | None = None,
) -> Network:
    """Turn a spec, a file, a networkx graph or a mixing matrix into a checked network.

    The mixing matrix of a graph has Metropolis weights. ``gossip`` are the mixing rounds of a step
    (default: one). ``mixing`` is ``sum`` by default, and ``gossip`` where a mixing matrix or more
    rounds are given, which exact sums do not use.

    >>> load_network("ring:4").mixing, load_network(np.full((4, 4), 0.25)).mixing
    ('sum', 'gossip')
    >>> load_network("ring:4").mixing_matrix[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    graph, matrix, name = _load(source)
    weights = "metropolis" if matrix is None else "given"
    if mixing is None:
        mixing = "gossip" if matrix is not None or gossip != ONE_ROUND else "sum"
    matrix = sparse_mixing_matrix(graph) if matrix is None else matrix
    return Network(graph, matrix, name, weights, gossip, mixing)


def _load(source: str | Path | Graph | FloatArray) -> tuple[Graph, FloatArray | None, str]:
    """Return a graph, its mixing matrix if one is given, and where they came from."""
    if isinstance(source, np.ndarray):
        return *_read_weights(source), "given matrix"
    if isinstance(source, nx.Graph):
        return check_graph(source), None, "given graph"
    # A suffix decides before the parser of specs does, so that a misspelt file name is reported as
    # a missing file and not as an unknown graph.
    path = Path(source)
    # Not Path's own is_file, which raises for a spec that is too long to be the name of a file.
    if path.suffix not in SUFFIXES and not os.path.isfile(path):
        spec = GraphSpec.parse(str(source))
        return spec.build(), None, str(spec)
    try:
        if path.suffix not in MATRIX_SUFFIXES:
            return check_graph(read_edge_list(path)), None, str(source)
        edge_lists = " or ".join(EDGE_LIST_SUFFIXES)
        advice = f"an edge list belongs in a file that ends in {edge_lists}"
        matrix = read_matrix(path, advice=advice)
        # Zeros and ones with an empty diagonal are links; anything else must be a mixing matrix. A
        # permutation without fixed points, which is both, is read as links.
        if np.isin(matrix, (0, 1)).all() and not np.diag(matrix).any():
            require_symmetric(matrix)
            return check_graph(graph_of(matrix)), None, str(source)
        return *_read_weights(matrix), str(source)
    except FileFormatError:
        raise
    except CornError as error:
        raise type(error)(f"{path}: {make_printable(str(error), limit=_MAX_REASON)}") from error


def _read_weights(matrix: FloatArray) -> tuple[Graph, FloatArray]:
    W = as_square_matrix(matrix, name="mixing_matrix")
    check_weights(SparseMatrix(W))
    return check_graph(graph_of(W)), W
