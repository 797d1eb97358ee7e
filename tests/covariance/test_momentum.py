"""Objectives of runs with momentum are the energy of noise that passes through both averages."""

import networkx as nx
import numpy as np
import pytest

from corn.checks import FloatArray
from corn.covariance import EAVESDROPPER, FiniteRun, GivenObjective, Horizon, design
from corn.covariance.objective import momentum_gain
from corn.errors import InvalidArgumentError
from corn.topology import Network, load_network

NETWORKS = {
    "two-way": load_network("er:n=8,p=0.4,seed=1", mixing="gossip"),
    "one-way": load_network(nx.gnp_random_graph(7, 0.6, seed=3, directed=True), mixing="gossip"),
}


def replay_noise(W: FloatArray, length: float, momentum: float, num_steps: int) -> FloatArray:
    """Return Σ_k G_kᵀ G_k, where G_k is what k steps make of the noise of one release."""
    rho, n = np.sqrt(1 - 1 / length), len(W)
    x, m, total = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    for step in range(num_steps):
        m = momentum * m + (1 - momentum) * np.eye(n) * (step == 0)
        x = W @ (rho * x + m)
        total += x.T @ x
    return total


@pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("length", [1.0, 2.0, 30.0])
def test_the_objective_is_the_energy_of_replayed_noise(
    network: Network, momentum: float, length: float
) -> None:
    W = network.step_matrix
    expected = replay_noise(W, length, momentum, 1500)
    found = Horizon(length, momentum=momentum).matrix(W)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))
def test_the_weight_scales_disagreement_alone(network: Network) -> None:
    W, n = network.step_matrix, network.num_agents
    whole = Horizon(20, momentum=0.8).matrix(W)
    split = Horizon(20, 0.1, 0.8).matrix(W)
    P = np.full((n, n), 1 / n)
    np.testing.assert_allclose(P @ split @ P, P @ whole @ P, atol=1e-9)
    Q = np.eye(n) - P
    np.testing.assert_allclose(Q @ split @ Q, 0.1 * Q @ whole @ Q, atol=1e-9)


def test_momentum_passes_slow_noise_and_damps_fast_noise() -> None:
    gain = momentum_gain([-0.9, 0.0, 0.5, 0.9, 1.0], 0.9)
    assert (np.diff(gain) > 0).all()
    assert gain[-1] == pytest.approx(1)
    assert gain[2] < 0.15


def test_a_design_for_momentum_leaves_less_noise_in_the_average() -> None:
    network = load_network("er:n=20,p=0.2,seed=1", mixing="gossip")
    ratios = [
        design(
            network, 1.0, objective=Horizon(60, 0.1, momentum), threat=EAVESDROPPER
        ).central_ratio
        for momentum in (0.0, 0.9)
    ]
    assert ratios[1] < ratios[0] - 0.1


def test_momentum_is_checked_and_named() -> None:
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(InvalidArgumentError, match="momentum must be in"):
            Horizon(5, momentum=wrong)
    assert Horizon(5, 0.1, 0.9).describe().endswith("weighted by 0.1, momentum 0.9")
    assert FiniteRun([1.0]).momentum == GivenObjective(np.eye(2)).momentum == 0
