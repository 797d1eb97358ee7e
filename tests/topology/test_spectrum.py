"""Spectrum against eigenvalues known in closed form and brute-force powers."""

import math
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.topology import Graph, load_network, spectrum
from corn.topology.mixing import sparse_mixing_matrix

from .test_mixing import connected_graphs


def brute_force_mixing_time(W: np.ndarray) -> int:
    power, time = np.eye(len(W)), 0
    while np.linalg.norm(power - 1 / len(W), 2) > 0.01 * (1 + 1e-12):
        power, time = power @ W, time + 1
    return time


def test_ring_has_its_known_eigenvalues() -> None:
    n = 12
    measured = spectrum(load_network(f"ring:{n}").mixing_matrix)
    assert measured.second_eigenvalue == pytest.approx((1 + 2 * math.cos(2 * math.pi / n)) / 3)


def test_one_agent_mixes_in_zero_steps() -> None:
    measured = spectrum(np.eye(1))
    assert (measured.mixing_time, measured.second_eigenvalue) == (0, 0)


@settings(max_examples=40)
@given(graph=connected_graphs())
def test_mixing_time_equals_brute_force(graph: Graph) -> None:
    W = load_network(graph).mixing_matrix
    assert spectrum(W).mixing_time == brute_force_mixing_time(W)


@given(n=st.integers(2, 8), edges=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_mixes_iff_connected_with_self_weights(n: int, edges: set[tuple[int, int]]) -> None:
    graph = nx.empty_graph(n)
    graph.add_edges_from((i, j) for i, j in edges if i != j and max(i, j) < n)
    measured = spectrum(sparse_mixing_matrix(graph).toarray())
    assert (measured.second_eigenvalue < 1) == nx.is_connected(graph)
    assert math.isfinite(measured.mixing_time) == nx.is_connected(graph)


def test_periodic_weights_never_mix() -> None:
    assert spectrum(np.array([[0.0, 1.0], [1.0, 0.0]])).mixing_time == math.inf


def test_a_large_edge_list_is_for_exact_sums(tmp_path: Path) -> None:
    """It loads without a dense matrix, which gossip needs."""
    n, random = 20_500, np.random.default_rng(1)
    links = {(k, (k + 1) % n) for k in range(n)}
    links |= {(int(i), int(j)) for i, j in random.integers(n, size=(n, 2)) if i != j}
    file = tmp_path / "links.edges"
    file.write_text("".join(f"{i} {j}\n" for i, j in links))
    network = load_network(file)
    assert network.tree.num_messages == 2 * (n - 1)
    with pytest.raises(InvalidArgumentError, match="at most 5000 for a dense mixing matrix"):
        network.mixing_matrix  # noqa: B018
    with pytest.raises(InvalidArgumentError, match=r"at most 5,000 for gossip, found 20,500.*sums"):
        load_network(file, mixing="gossip")
