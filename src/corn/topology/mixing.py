"""Mixing: symmetric weights on the links of a graph, their speed, and the rounds of a step.

Agent i replaces its model by Σ_j w_ij x_j, so w_ij > 0 needs a link between i and j (or i = j). As
W is symmetric and its rows sum to one, so do its columns, and mixing keeps the average. Rounds of
gossip only post-process messages that the adversary has already observed: they cost messages but no
privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final, get_args

import networkx as nx
import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike

from corn.checks import (
    FloatArray,
    IntArray,
    as_square_matrix,
    require,
    require_choice,
    require_count,
)
from corn.errors import InvalidArgumentError
from corn.topology.graphs import Graph

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

    >>> sparse_mixing_matrix(nx.path_graph(3)).toarray().round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    links = adjacency(graph.edges, len(graph))
    degrees = links.sum(axis=1)
    rows, columns = _places(links)
    weights = 1 / (1 + np.maximum(degrees[rows], degrees[columns]))
    W = SparseMatrix((weights, links.indices, links.indptr), shape=links.shape)
    return SparseMatrix(W + scipy.sparse.diags_array(1 - W.sum(axis=1)))


def check_mixing_matrix(matrix: ArrayLike) -> FloatArray:
    """Return ``matrix`` as a float64 copy if agents can mix with it, or raise.

    It must be square, finite, symmetric, without negative weights, with rows that sum to one.
    """
    W = as_square_matrix(matrix, name="mixing_matrix")
    check_sparse_weights(SparseMatrix(W))
    return W


def check_sparse_weights(W: SparseMatrix, *, graph: Graph | None = None) -> None:
    """Raise as `check_mixing_matrix` does, and for weights where the graph has no link."""
    if not np.isfinite(W.data).all():
        raise InvalidArgumentError("mixing weights must be finite, found NaN or infinity")
    if (W.data < 0).any():
        i, j = (places[W.data < 0][0] for places in _places(W))
        raise InvalidArgumentError(
            f"mixing weights must not be negative, found w[{i},{j}] = {W[i, j]:g}"
        )
    sums = W.sum(axis=1)
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > STOCHASTIC_TOLERANCE:
        raise InvalidArgumentError(
            f"a mixing matrix must be doubly stochastic, found row {worst} that sums to "
            f"{sums[worst]:.9g} (allowed: 1 ± {STOCHASTIC_TOLERANCE:g})"
        )
    require_symmetric(W)
    if graph is None:
        return
    n = W.shape[0]
    if len(graph) != n:
        raise InvalidArgumentError(
            f"mixing_matrix is for {n} agents, but the graph has {len(graph)}"
        )
    allowed = adjacency(graph.edges, n) + scipy.sparse.eye_array(n)
    stray = SparseMatrix(W - W.multiply(allowed))
    stray.eliminate_zeros()
    if stray.nnz:
        i, j = (places[0] for places in _places(stray))
        raise InvalidArgumentError(
            f"mixing weights must be zero where there is no link, found w[{i},{j}] = {W[i, j]:g} "
            "and no link between them"
        )


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
    """The quantities that determine how fast disagreement between agents decays.

    Attributes:
        second_eigenvalue: |λ₂| = ‖W − 11ᵀ/n‖₂, what mixing leaves of disagreement, at most.
        mixing_time: steps until at most ``UNMIXED`` of any disagreement is left; inf if never.
    """

    second_eigenvalue: float
    mixing_time: float

    @property
    def spectral_gap(self) -> float:
        """1 − |λ₂|; zero if the agents never agree."""
        return 1 - self.second_eigenvalue


def spectrum(mixing_matrix: FloatArray) -> Spectrum:
    """Return the spectrum of a symmetric mixing matrix.

    >>> complete = np.full((4, 4), 0.25)
    >>> spectrum(complete).mixing_time, spectrum(complete).spectral_gap
    (1, 1.0)
    """
    W = as_square_matrix(mixing_matrix, name="mixing_matrix")
    second = _clean(float(np.abs(np.linalg.eigvalsh(W - 1 / len(W))).max()), len(W))
    if second >= 1:
        return Spectrum(second, math.inf)
    if len(W) == 1:
        return Spectrum(second, 0)
    # ‖Wᵗ − 11ᵀ/n‖₂ is |λ₂|ᵗ. A norm that equals the limit up to rounding counts as reached.
    steps = math.log(UNMIXED * (1 + 1e-12)) / math.log(second) if second > 0 else 1
    return Spectrum(second, max(1, math.ceil(steps)))


def _clean(value: float, n: int) -> float:
    """Return exactly one or zero for values that are so up to rounding: 1 means no mixing."""
    tolerance = 8 * n * np.finfo(float).eps
    nearest = float(round(value))
    return nearest if abs(value - nearest) <= tolerance else value


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
        eigenvalues = np.asarray(np.linalg.eigvalsh(W), dtype=np.float64)
        # Without the largest, which is 1 and belongs to the average.
        return accelerate(eigenvalues[:-1], self.rounds)

    def matrix(self, mixing_matrix: FloatArray) -> FloatArray:
        """Return the polynomial of W that a step applies, shape (n, n)."""
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if self.kind == "plain":
            return np.asarray(np.linalg.matrix_power(W, self.rounds))
        return apply_rounds(self.schedule(W), W)

    def count_messages(self, num_steps: int, cooldown_steps: int = 0) -> int:
        """Return the messages of a run over each link, in each direction."""
        return self.rounds * (num_steps + cooldown_steps)

    def describe(self, num_steps: int, cooldown_steps: int) -> str:
        """Return the rounds and messages of a run in one line.

        >>> Gossip(2).describe(300, 10)
        '2 rounds per step, 300 steps and 10 that only mix: 620 messages per link, each way'
        """
        kind = " Chebyshev" if self.kind == "chebyshev" else ""
        rounds = f"{self.rounds}{kind} round{'s' if self.rounds > 1 else ''} per step"
        cooldown = f" and {cooldown_steps:,} that only mix" if cooldown_steps else ", no cool-down"
        messages = self.count_messages(num_steps, cooldown_steps)
        return f"{rounds}, {num_steps:,} steps{cooldown}: {messages:,} messages per link, each way"


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


def accelerate(eigenvalues: FloatArray, rounds: int) -> tuple[GossipRound, ...]:
    """Return Chebyshev rounds for a W with these eigenvalues besides the 1 of the average.

    >>> accelerate(np.array([0.5, 0.5]), 1)
    (GossipRound(momentum=0.0, gain=2.0),)
    """
    low, high = float(eigenvalues.min(initial=1.0)), float(eigenvalues.max(initial=-1.0))
    if not len(eigenvalues):
        low = high = 0.0  # a single agent
    # An eigenvalue that is 1 up to rounding belongs to a part of the network that is cut off.
    if high > 1 - 8 * (1 + len(eigenvalues)) * np.finfo(float).eps:
        raise InvalidArgumentError(
            f"Chebyshev gossip needs a W that mixes, found a second eigenvalue of {high:g}"
        )
    centre = (low + high) / 2
    # W' = (W − centre)/(1 − centre) has disagreement eigenvalues from −s to s. With c_k = T_k(1/s),
    # T's recurrence is y_{k+1} = α W' y_k + (1 − α) y_{k−1}, α = 2 c_k/(s c_{k+1}) from the second
    # round on. Its half a replaces c_k, which overflows for small s; the limit s = 0 exists.
    s = (high - low) / 2 / (1 - centre)
    found = [GossipRound(0.0, 1 / (1 - centre))]
    a = 1.0
    for _ in range(rounds - 1):
        a = 1 / (2 - s**2 * a)
        # α W' y + (1 − α) (the y before) = y + (α − 1)(y − the y before) + α (W y − y)/(1 − centre)
        found.append(GossipRound(2 * a - 1, 2 * a / (1 - centre)))
    return tuple(found)
