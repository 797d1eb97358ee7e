"""Networks: graphs with symmetric mixing weights, their speed, and the rounds of a step.

Agent i replaces its model by Σ_j w_ij x_j, so w_ij > 0 needs a link between i and j (or i = j). As
W is symmetric and its rows sum to one, so do its columns, and mixing keeps the average. Rounds of
gossip only post-process messages that the adversary has already observed: they cost messages but no
privacy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, final, get_args

import networkx as nx
import numpy as np
import scipy.sparse

from corn.checks import (
    FloatArray,
    IntArray,
    as_square_matrix,
    require,
    require_choice,
    require_count,
)
from corn.errors import CornError, FileFormatError, InvalidArgumentError, list_some, make_printable
from corn.topology import files
from corn.topology.graphs import (
    Graph,
    GraphSpec,
    SpanningTree,
    check_graph,
    find_tree,
    look_up_agents,
    name_of,
)

SparseMatrix: TypeAlias = scipy.sparse.csr_array

STOCHASTIC_TOLERANCE = 1e-8
"""The largest distance from one of the sum of a row of a mixing matrix."""

MAX_AGENTS = 5000
"""The largest network that mixes by gossip: its weights are a dense matrix of 0.2 GB."""

UNMIXED = 0.01
"""The part of any disagreement that is left after the mixing time."""

_SYMMETRY_TOLERANCE = 1e-9  # relative


def sparse_mixing_matrix(graph: Graph) -> SparseMatrix:
    """Return Metropolis weights w_ij = 1/(1 + max(d_i, d_j)) on links, the rest on the diagonal.

    They are symmetric and doubly stochastic on any graph. The paper prints w_ij = 1/(d_i + 1),
    which is doubly stochastic only where all degrees agree.
    """
    links = adjacency(graph.edges, len(graph))
    degrees = links.sum(axis=1)
    rows, columns = _places(links)
    weights = 1 / (1 + np.maximum(degrees[rows], degrees[columns]))
    W = SparseMatrix((weights, links.indices, links.indptr), shape=links.shape)
    return SparseMatrix(W + scipy.sparse.diags_array(1 - W.sum(axis=1)))


def check_weights(W: SparseMatrix, *, graph: Graph | None = None) -> None:
    """Raise unless agents can mix with W, and where the graph has no link for a weight."""
    require(bool(np.isfinite(W.data).all()), "mixing weights", "finite", "NaN or infinity")
    rows, columns = _places(W)
    negative = [f"w[{rows[k]},{columns[k]}] = {W.data[k]:g}" for k in np.flatnonzero(W.data < 0)]
    require(not negative, "mixing weights", "at least 0", list_some(negative))
    sums = W.sum(axis=1)
    worst = int(np.abs(sums - 1).argmax())
    is_stochastic = abs(sums[worst] - 1) <= STOCHASTIC_TOLERANCE
    found = f"row {worst} that sums to {sums[worst]:.9g}"
    require(bool(is_stochastic), "a mixing matrix", "doubly stochastic", found)
    require_symmetric(W)
    if graph is None:
        return
    n = W.shape[0]
    require(len(graph) == n, "mixing_matrix", f"for the {len(graph)} agents of the graph", n)
    allowed = adjacency(graph.edges, n) + scipy.sparse.eye_array(n)
    stray = SparseMatrix(W - W.multiply(allowed))
    stray.eliminate_zeros()
    links = [f"w[{i},{j}] = {W[i, j]:g}" for i, j in zip(*_places(stray), strict=True)]
    require(not links, "mixing weights", "zero where there is no link", list_some(links))


def require_symmetric(matrix: FloatArray | SparseMatrix) -> None:
    """Raise unless W equals its transpose up to rounding."""
    asymmetry = float(abs(matrix - matrix.T).max())
    is_symmetric = asymmetry <= _SYMMETRY_TOLERANCE * float(abs(matrix).max())
    found = f"mirrored weights that differ by {asymmetry:.3g}"
    require(is_symmetric, "mixing_matrix", "symmetric", found)


def graph_of(matrix: FloatArray) -> Graph:
    """Return the links that a symmetric mixing matrix uses, where w_ij ≠ 0."""
    used = matrix != 0
    np.fill_diagonal(used, False)
    return nx.from_numpy_array(used.astype(int), edge_attr=None)


def adjacency(links: Iterable[Sequence[int]], num_agents: int) -> SparseMatrix:
    """Return an (n, n) matrix of 0 and 1: whether agents i and j are linked."""
    i, j = np.array(list(links), np.int64).reshape(-1, 2).T
    ends = np.concatenate([i, j]), np.concatenate([j, i])
    return SparseMatrix((np.ones(2 * len(i)), ends), shape=(num_agents, num_agents))


def _places(matrix: SparseMatrix) -> tuple[IntArray, IntArray]:
    """Return the row and the column of each stored entry."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return rows, np.asarray(matrix.indices)


@dataclass(frozen=True)
class Spectrum:
    """The rate at which disagreement between agents decays.

    ``second_eigenvalue`` is |λ₂| = ‖W − 11ᵀ/n‖₂, what a step leaves of disagreement at most;
    ``mixing_time`` the steps until at most ``UNMIXED`` of it is left, infinite if never.
    """

    second_eigenvalue: float
    mixing_time: float


def spectrum(mixing_matrix: FloatArray) -> Spectrum:
    """Return the spectrum of a symmetric mixing matrix.

    >>> spectrum(np.full((4, 4), 0.25)).mixing_time
    1
    """
    W = as_square_matrix(mixing_matrix, name="mixing_matrix")
    second = float(np.abs(np.linalg.eigvalsh(W - 1 / len(W))).max())
    # Exactly one or zero for what is so up to rounding: 1 means no mixing.
    if abs(second - round(second)) <= 8 * len(W) * np.finfo(float).eps:
        second = float(round(second))
    if second >= 1:
        return Spectrum(second, math.inf)
    if len(W) == 1:
        return Spectrum(second, 0)
    # ‖Wᵗ − 11ᵀ/n‖₂ is |λ₂|ᵗ. A norm that equals the limit up to rounding counts as reached.
    steps = math.log(UNMIXED * (1 + 1e-12)) / math.log(second) if second > 0 else 1
    return Spectrum(second, max(1, math.ceil(steps)))


GossipKind: TypeAlias = Literal["plain", "chebyshev"]

_MOST_ROUNDS = 1000


class GossipRound(NamedTuple):
    """One round: y ← y + momentum · (y − the y before) + gain · (W y − y)."""

    momentum: float
    gain: float


@final
@dataclass(frozen=True)
class Gossip:
    """The mixing rounds of one step: ``rounds`` messages over each link, in each direction.

    Plain rounds replace y by W y and compute Wʳ. Chebyshev rounds compute the polynomial of degree
    r in W that preserves the average and leaves the least of the worst disagreement: with λ from
    ``a`` to ``b`` the eigenvalues of W other than that of the average, and
    t(λ) = (2λ − a − b)/(b − a), it is T_r(t(W))/T_r(t(1)). Its matrix may have negative entries.

    >>> Gossip.parse("chebyshev:3"), str(Gossip(2))
    (Gossip(rounds=3, kind='chebyshev'), 'plain:2')
    """

    rounds: int = 1
    kind: GossipKind = "plain"

    def __post_init__(self) -> None:
        require_count("rounds", self.rounds, most=_MOST_ROUNDS)
        require_choice("kind", self.kind, get_args(GossipKind))

    @classmethod
    def parse(cls, text: str) -> Gossip:
        """Return the gossip of a text such as ``3``, ``plain:3`` or ``chebyshev:3``."""
        kind, _, rounds = text.strip().rpartition(":")
        # Nine digits, because Python refuses to read integers of thousands of them.
        if kind not in ("", *get_args(GossipKind)) or not rounds.isdecimal() or len(rounds) > 9:
            raise InvalidArgumentError(
                "gossip must be a number of rounds, plain:ROUNDS or chebyshev:ROUNDS, found "
                f"{text[:40]!r}: try 2 or chebyshev:3"
            )
        return cls(int(rounds), "chebyshev" if kind == "chebyshev" else "plain")

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.kind}:{self.rounds}"

    def schedule(self, mixing_matrix: FloatArray) -> tuple[GossipRound, ...]:
        """Return the rounds of a step; Chebyshev rounds need a W that mixes."""
        if self.kind == "plain":
            return (GossipRound(0.0, 1.0),) * self.rounds
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        # Without the largest eigenvalue, which is 1 and belongs to the average; zero for one agent.
        disagreement = np.linalg.eigvalsh(W)[:-1] if len(W) > 1 else np.zeros(1)
        low, high = float(disagreement[0]), float(disagreement[-1])
        # One that is 1 up to rounding belongs to a part of the network that is cut off.
        mixes = bool(high <= 1 - 8 * len(W) * np.finfo(float).eps)
        rule = "one that mixes for Chebyshev gossip"
        require(mixes, "mixing_matrix", rule, f"a second eigenvalue of {high:g}")
        centre = (low + high) / 2
        # W' = (W − centre)/(1 − centre) has disagreement eigenvalues from −s to s. With
        # c_k = T_k(1/s), T's recurrence is y_{k+1} = α W' y_k + (1 − α) y_{k−1},
        # α = 2 c_k/(s c_{k+1}) from the second round on. Its half a replaces c_k, which overflows
        # for small s; the limit s = 0 exists.
        s = (high - low) / 2 / (1 - centre)
        found = [GossipRound(0.0, 1 / (1 - centre))]
        a = 1.0
        for _ in range(self.rounds - 1):
            a = 1 / (2 - s**2 * a)
            # α W' y + (1 − α) (the y before)
            #     = y + (α − 1)(y − the y before) + α (W y − y)/(1 − centre)
            found.append(GossipRound(2 * a - 1, 2 * a / (1 - centre)))
        return tuple(found)

    def matrix(self, mixing_matrix: FloatArray) -> FloatArray:
        """Return the polynomial of W that a step applies, shape (n, n)."""
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if self.kind == "plain":
            return np.asarray(np.linalg.matrix_power(W, self.rounds))
        return apply_rounds(self.schedule(W), W)

    def count_messages(self, num_steps: int, cooldown_steps: int = 0) -> int:
        """Return the messages of a run over each link, in each direction."""
        return self.rounds * (num_steps + cooldown_steps)


ONE_ROUND = Gossip()
"""One mixing round per step, as in the paper."""


def apply_rounds(schedule: Sequence[GossipRound], mixing_matrix: FloatArray) -> FloatArray:
    """Return the polynomial of W that rounds apply, shape (n, n)."""
    change = np.zeros_like(mixing_matrix)
    current = np.eye(len(mixing_matrix))
    for momentum, gain in schedule:
        change = momentum * change + gain * (mixing_matrix @ current - current)
        current = current + change
    return current


Mixing: TypeAlias = Literal["sum", "gossip"]
"""The combination of a step's releases: an exact sum over a tree, or mixing with neighbours."""

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
        """Return the messages of a run in one line."""
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
    rule = "a spec such as 'ring:4', a file, a graph of networkx or a mixing matrix"
    require(isinstance(source, str | os.PathLike), "network", rule, repr(source))
    # A suffix decides before the parser of specs does, so that a misspelt file name is reported as
    # a missing file and not as an unknown graph.
    path = Path(source)
    # Not Path's own is_file, which raises for a spec that is too long to be the name of a file.
    if path.suffix not in files.SUFFIXES and not os.path.isfile(path):
        spec = GraphSpec.parse(str(source))
        return spec.build(), None, str(spec)
    try:
        if path.suffix not in files.MATRIX_SUFFIXES:
            return check_graph(files.read_edge_list(path)), None, str(source)
        edge_lists = " or ".join(files.EDGE_LIST_SUFFIXES)
        advice = f"an edge list belongs in a file that ends in {edge_lists}"
        matrix = files.read_matrix(path, advice=advice)
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
