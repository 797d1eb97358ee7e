"""Mixing weights: doubly stochastic matrices whose support is the graph.

Agent i replaces its model by Σ_j w_ij x_j, so w_ij > 0 needs a link from j to i (or i = j).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from corn.arrays import FloatArray, as_square_matrix
from corn.errors import InvalidArgumentError
from corn.topology.balancing import balance
from corn.topology.fastest import fastest_mixing_weights
from corn.topology.graphs import Graph

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

STOCHASTIC_TOLERANCE = 1e-8
"""How far the sums of rows and columns of a mixing matrix may be from one."""

MAX_AGENTS = 20_000
"""The largest network held as dense matrices, of 3.2 GB each."""


def metropolis_weights(graph: Graph) -> FloatArray:
    """w_ij = 1/(1 + max(d_i, d_j)) on links: symmetric and doubly stochastic on any graph.

    The paper prints w_ij = 1/(d_i + 1), which is doubly stochastic only where all degrees agree.
    """
    links, degrees = _undirected_links(graph, "metropolis")
    return _fill_diagonal(links / (1 + np.maximum.outer(degrees, degrees)))


def lazy_metropolis_weights(graph: Graph) -> FloatArray:
    """w_ij = 1/(2 max(d_i, d_j)): every agent keeps at least half, so no eigenvalue is negative."""
    links, degrees = _undirected_links(graph, "lazy")
    return _fill_diagonal(links / (2 * np.maximum(np.maximum.outer(degrees, degrees), 1)))


def max_degree_weights(graph: Graph) -> FloatArray:
    """w_ij = 1/(1 + max degree): one weight for every link."""
    links, degrees = _undirected_links(graph, "max-degree")
    return _fill_diagonal(links / (1 + degrees.max()))


def uniform_weights(graph: Graph) -> FloatArray:
    """w_ij = 1/(1 + d) for the agent itself and all it hears from; needs equal degrees d."""
    heard = _hears(graph)
    degrees = np.concatenate([heard.sum(axis=0), heard.sum(axis=1)])
    if degrees.min() != degrees.max():
        raise InvalidArgumentError(
            "uniform weights need a graph whose agents all have the same number of links, found "
            f"{degrees.min():.0f} to {degrees.max():.0f}: try metropolis, or sinkhorn if directed"
        )
    return (heard + np.eye(len(heard))) / (1 + float(degrees[0]))


def sinkhorn_weights(graph: Graph) -> FloatArray:
    """Scale rows and columns of (links + self-links) until both sum to one; digraphs welcome.

    Edge weights, where the graph has any, are what is scaled. With self-links such a scaling exists
    exactly if every link lies on a cycle, which a strongly connected digraph guarantees.
    """
    heard = nx.to_numpy_array(graph, nodelist=range(len(graph)), weight="weight", dtype=float).T
    return balance(heard + np.eye(len(heard)))


WEIGHTS: dict[str, Callable[[Graph], FloatArray]] = {
    "metropolis": metropolis_weights,
    "max-degree": max_degree_weights,
    "lazy": lazy_metropolis_weights,
    "uniform": uniform_weights,
    "sinkhorn": sinkhorn_weights,
    "fastest": lambda graph: fastest_mixing_weights(_undirected_links(graph, "fastest")[0]),
}
"""The name of each rule that turns a graph into a mixing matrix."""


def mixing_matrix(graph: Graph, weights: str | None = None) -> FloatArray:
    """The mixing matrix of a graph by a rule of :data:`WEIGHTS`.

    Without a rule: Metropolis weights, or Sinkhorn's where links are directed.

    >>> mixing_matrix(nx.path_graph(3)).round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    rule = weights or ("sinkhorn" if graph.is_directed() else "metropolis")
    if len(graph) > MAX_AGENTS:
        raise InvalidArgumentError(
            f"a dense mixing matrix is for at most {MAX_AGENTS} agents, found {len(graph)} "
            f"({8e-9 * len(graph) ** 2:,.0f} GB): design communities of bounded size instead"
        )
    if rule not in WEIGHTS:
        raise InvalidArgumentError(f"weights must be one of {', '.join(WEIGHTS)}, found {rule!r}")
    return WEIGHTS[rule](graph)


def check_mixing_matrix(
    matrix: ArrayLike, *, graph: Graph | None = None, tolerance: float = STOCHASTIC_TOLERANCE
) -> FloatArray:
    """Return ``matrix`` as a float64 copy if agents can mix with it, or say what is wrong.

    It must be square, finite, without negative weights, with rows and columns that sum to one
    within ``tolerance``, and, if ``graph`` is given, zero wherever there is no link.
    """
    W = as_square_matrix(matrix, name="mixing_matrix")
    if (W < 0).any():
        i, j = np.argwhere(W < 0)[0]
        raise InvalidArgumentError(
            f"mixing weights must not be negative, found w[{i},{j}] = {W[i, j]:g}"
        )
    for axis, what in ((1, "row"), (0, "column")):
        sums = W.sum(axis=axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > tolerance:
            raise InvalidArgumentError(
                f"a mixing matrix must be doubly stochastic, found {what} {worst} that sums to "
                f"{sums[worst]:.9g} (allowed: 1 ± {tolerance:g})"
            )
    if graph is not None:
        _check_support(W, graph)
    return W


def graph_of(matrix: FloatArray) -> Graph:
    """The links a mixing matrix uses: j → i where w_ij ≠ 0, undirected if that is mutual."""
    used = matrix != 0
    np.fill_diagonal(used, False)
    symmetric = bool((used == used.T).all())
    return nx.from_numpy_array(
        used.T.astype(int), create_using=nx.Graph if symmetric else nx.DiGraph, edge_attr=None
    )


def _undirected_links(graph: Graph, rule: str) -> tuple[FloatArray, FloatArray]:
    if graph.is_directed():
        raise InvalidArgumentError(
            f"{rule} weights need undirected links, found a directed graph: try sinkhorn"
        )
    links = _hears(graph)
    return links, links.sum(axis=1)


def _hears(graph: Graph) -> FloatArray:
    """(n, n) of 0 and 1: whether agent i hears from agent j."""
    heard: FloatArray = nx.to_numpy_array(
        graph, nodelist=range(len(graph)), weight=None, dtype=float
    )
    return heard.T.copy()


def _fill_diagonal(W: FloatArray) -> FloatArray:
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return W


def _check_support(W: FloatArray, graph: Graph) -> None:
    if len(graph) != len(W):
        raise InvalidArgumentError(
            f"mixing_matrix is for {len(W)} agents, but the graph has {len(graph)}"
        )
    stray = np.argwhere((W != 0) & (_hears(graph) + np.eye(len(W)) == 0))
    if len(stray):
        i, j = stray[0]
        raise InvalidArgumentError(
            f"mixing weights must be zero where there is no link, found w[{i},{j}] = {W[i, j]:g} "
            f"and no link from {j} to {i}"
        )
