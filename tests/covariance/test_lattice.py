"""Designs of rings and tori by Fourier transform, compared with dense ones."""

from collections.abc import Callable

import numpy as np
import pytest

from corn.covariance import Decomposition, Horizon, MechanismName, ThreatModel, design
from corn.covariance.lattice import (
    LatticeNoise,
    LatticePairs,
    choose_hops,
    design_lattice,
    design_lattice_insider,
    design_lattice_pairs,
)
from corn.covariance.threat import EAVESDROPPER
from corn.topology import Gossip, load_network
from corn.topology.sparse import find_lattice
from tests.covariance.coalition_check import worst_precision


@pytest.mark.parametrize("gossip", ["1", "2", "chebyshev:2"])
@pytest.mark.parametrize("graph", ["torus:4x5", "torus:3x3", "ring:9"])
@pytest.mark.parametrize(
    ("mechanism", "solve"), [("corn", design_lattice), ("decor", design_lattice_pairs)]
)
def test_noise_of_a_lattice_equals_that_of_the_dense_design(
    graph: str, gossip: str, mechanism: MechanismName, solve: Callable[..., LatticeNoise]
) -> None:
    network = load_network(graph, gossip=Gossip.parse(gossip), mixing="gossip")
    objective = Horizon(20, 0.1)
    dense = design(network, 2.0, mechanism=mechanism, objective=objective, threat=EAVESDROPPER)
    row = find_lattice(network.sparse_matrix)
    assert row is not None
    fast = solve(row, 2.0, objective=objective, gossip=network.gossip)
    A = objective.matrix(network.step_matrix)
    assert np.sum(A * fast.covariance) == pytest.approx(dense.value, rel=1e-4)
    inverse = np.linalg.inv(fast.covariance).diagonal()
    np.testing.assert_allclose(fast.precision_diagonal, inverse, rtol=1e-8)
    assert inverse.max() <= 2.0 * (1 + 1e-9)
    assert fast.total_variance == pytest.approx(fast.covariance.sum())


def test_only_rings_and_tori_are_lattices() -> None:
    for graph, shape in (("torus:4x5", (4, 5)), ("torus:5x4", (5, 4)), ("ring:7", (7,))):
        row = find_lattice(load_network(graph, mixing="gossip").sparse_matrix)
        assert row is not None
        assert row.shape == shape
    for graph in ("path:7", "grid:4x5", "er:n=12,p=0.4,seed=1", "star:6"):
        assert find_lattice(load_network(graph, mixing="gossip").sparse_matrix) is None
    # A ring of other weights is one only if they are the same from every agent.
    W = load_network("ring:6", mixing="gossip").mixing_matrix.copy()
    W[0, 1] = W[1, 0] = 0.2
    W[0, 0] = W[1, 1] = 1 - 0.2 - 1 / 3
    assert find_lattice(load_network(W, mixing="gossip").sparse_matrix) is None


@pytest.mark.parametrize("graph", ["torus:4x5", "torus:6x6", "ring:9", "ring:30"])
def test_noise_of_pairs_holds_against_every_insider(graph: str) -> None:
    """The one insider that stands for all, by Fourier transform, against all of them one by one."""
    network = load_network(graph, mixing="gossip")
    row = find_lattice(network.sparse_matrix)
    assert row is not None
    hops = choose_hops(row, 8)
    rng = np.random.default_rng(1)
    which = np.array([number for number, both in enumerate(hops) for _ in both])
    variances = rng.uniform(0.5, 3.0, len(hops))[which]
    pairs = LatticePairs(row.shape, np.array([h for both in hops for h in both]), variances, 0.7)
    shared: dict[tuple[int, ...], float] = {}
    places = np.arange(row.size).reshape(row.shape)
    for hop, variance in zip(pairs.hops, variances, strict=True):
        partners = np.roll(places, -hop, axis=tuple(range(row.ndim)))
        ends = zip(places.ravel().tolist(), partners.ravel().tolist(), strict=True)
        shared |= {tuple(sorted(pair)): variance for pair in ends}
    factors = tuple(np.sqrt(t) * np.array([[1.0], [-1.0]]) for t in shared.values())
    split = Decomposition(np.full(row.size, 0.7), tuple(shared), factors)
    noise = LatticeNoise(pairs.eigenvalues)
    np.testing.assert_allclose(noise.covariance, split.covariance, atol=1e-12)
    assert pairs.hidden_precisions().max() == pytest.approx(worst_precision(split, 1), rel=1e-9)


@pytest.mark.parametrize("graph", ["torus:6x6", "ring:50", "torus:4x9", "complete:5"])
def test_noise_of_pairs_is_about_as_good_as_a_dense_design_against_one_insider(graph: str) -> None:
    network, objective = load_network(graph, mixing="gossip"), Horizon(100, 0.1)
    row = find_lattice(network.sparse_matrix)
    assert row is not None
    fast = design_lattice_insider(row, 2.0, objective=objective, gossip=network.gossip)
    dense = design(network, 2.0, objective=objective, threat=ThreatModel(1, "sparse:8"))
    optimum = design_lattice(row, 2.0, objective=objective, gossip=network.gossip)
    A = objective.matrix(network.step_matrix)
    assert fast.precision_diagonal.max() <= 2.0
    assert np.sum(A * optimum.covariance) <= np.sum(A * fast.covariance) <= 1.1 * dense.value
