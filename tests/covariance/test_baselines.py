"""DECOR and zero-sum noise: the best ratio of local noise, and the Laplacian."""

import networkx as nx
import numpy as np
import pytest

from corn.covariance.baselines import graph_laplacian
from corn.topology.mixing import graph_of
from tests.covariance.networks import directed, metropolis, paper_design


def test_the_ratio_of_zero_sum_noise_is_the_best() -> None:
    """The oracle scales I + r (I − 11ᵀ/n) to the cap for many ratios r."""
    W = metropolis(nx.cycle_graph(8))
    centred, values = np.eye(8) - 1 / 8, []
    for ratio in np.exp(np.linspace(-10, 6, 400)):
        R = np.eye(8) + ratio * centred
        R *= np.linalg.inv(R)[0, 0]
        values.append(float((W.T @ W * R).sum()))
    found = paper_design(W, 1.0, "zero-sum").value
    assert found <= min(values) * (1 + 1e-9)
    assert found == pytest.approx(min(values), rel=1e-3)


def test_decor_on_a_directed_graph_shares_noise_both_ways() -> None:
    W = directed(7, seed=5)
    links = ((W != 0) | (W.T != 0)) & ~np.eye(7, dtype=bool)
    expected = nx.laplacian_matrix(nx.from_numpy_array(links)).toarray()
    np.testing.assert_array_equal(graph_laplacian(graph_of(W)), expected)
    # R = c (I + r L): all covariances on links are the same multiple of L's.
    R = paper_design(W, 1.0, "decor").covariance
    assert np.ptp(R[expected == -1]) < 1e-12
    assert np.abs(R[(expected == 0)]).max() < 1e-12
