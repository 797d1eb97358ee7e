"""Large networks: sparse mixing and noise, compared with dense products."""

import numpy as np
import pytest
import torch

from corn.covariance import Decomposition, Horizon, design
from corn.covariance.objective import default_objective
from corn.covariance.threat import EAVESDROPPER
from corn.learn import step
from corn.learn.mechanism import make_mechanisms
from corn.learn.metrics import choose_measured
from corn.learn.perturbation import JointNoise, make_root
from corn.learn.step import Mixer
from corn.privacy import PrivacyBudget
from corn.topology import Gossip, load_network


@pytest.mark.parametrize("gossip", ["1", "3", "chebyshev:1", "chebyshev:4"])
def test_sparse_rounds_equal_the_dense_power(gossip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_network("torus:4x5", gossip=Gossip.parse(gossip), mixing="gossip")
    models = torch.randn(2, 20, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = models.clone()
    dense = Mixer(network, dtype=torch.float64).mix(models)
    monkeypatch.setattr(step, "_SPARSE_COST", 0)
    sparse = Mixer(network, dtype=torch.float64).mix(models)
    torch.testing.assert_close(sparse, dense, atol=1e-12, rtol=0)
    expected = network.step_matrix @ before[1].numpy()
    np.testing.assert_allclose(sparse[1].numpy(), expected, atol=1e-12)
    assert torch.equal(models, before)


def pairs_on_a_ring(n: int) -> Decomposition:
    made = design(
        load_network(f"ring:{n}", mixing="gossip"),
        1.0,
        mechanism="decor",
        objective=Horizon(20),
        threat=EAVESDROPPER,
    )
    return made.decomposition


def test_every_root_is_a_root_of_its_covariance() -> None:
    """F Fᵀ = R, read off by applying F to unit vectors."""
    cases: list[tuple[Decomposition, int]] = [
        (Decomposition(np.array([1.0, 4.0, 9.0])), 3),
        (pairs_on_a_ring(5), 5),  # dense
        (pairs_on_a_ring(240), 480),  # sparse
    ]
    for noise, num_normals in cases:
        F = make_root(noise) @ np.eye(num_normals)
        np.testing.assert_allclose(F @ F.T, noise.covariance, atol=1e-9)


def test_structured_noise_has_its_covariances_and_is_new_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("corn.learn.perturbation._MOST_DENSE", 0)
    noises = [pairs_on_a_ring(12), Decomposition(np.arange(1.0, 13.0))]
    source = JointNoise(noises, seeds=(3,), num_parameters=20_000, dtype=torch.float64)
    drawn = source.draw(0)
    assert drawn.shape == (1, 12, 2, 20_000)
    for number, noise in enumerate(noises):
        v, R = drawn[0, :, number].numpy(), noise.covariance
        np.testing.assert_allclose(v @ v.T / 20_000, R, atol=0.05 * R.diagonal().max())
    again = source.draw(1)
    assert abs(float((again * drawn).mean())) < 0.05 * float(drawn.square().mean())


@pytest.mark.parametrize("graph", ["torus:48x50", "er:n=2100,p=0.005,seed=1"])
def test_exact_sums_of_many_agents_have_the_noise_of_few(graph: str) -> None:
    network = load_network(graph, mixing="sum")
    n, budget = network.num_agents, PrivacyBudget(5, 1e-5, num_steps=50, clip=0.1)
    objective = default_objective(50, mixing="sum")
    mechanisms = make_mechanisms(["corn", "ldp"], network, budget, objective=objective)
    ratios = [mechanism.central_ratio for mechanism in mechanisms]
    assert ratios == pytest.approx([n / (n - 1), n], rel=1e-6)
    assert mechanisms[0].disagreement_ratio == 0
    for mechanism in mechanisms:
        assert mechanism.threat.max_colluders == 1
        spent = mechanism.epsilon_spent(50)
        assert spent is not None
        assert 4.99 < spent.max() <= 5 * (1 + 1e-9)
    # No design forms a matrix of n × n.
    assert "mixing_matrix" not in vars(network)


def test_measured_agents_are_spread_over_all() -> None:
    assert choose_measured(1000) == list(range(1000))
    chosen = choose_measured(2500)
    assert len(set(chosen)) == 200
    assert (chosen[0], chosen[-1]) == (0, 2487)
