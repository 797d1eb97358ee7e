"""κ is the disagreement that agents' own updates accumulate, over a trusted server's noise."""

import math

import numpy as np
import pytest

from corn.checks import FloatArray
from corn.covariance import EAVESDROPPER, Corn, Horizon, default_objective, design
from corn.covariance.objective import disagreement_ratio
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Gossip, Network, load_network

PAPER_GRAPH = "er:n=20,p=0.2,seed=1"
BUDGET = PrivacyBudget(1.0, 1e-5, num_steps=120, clip=1.0)
NETWORKS = {
    "plain": load_network("er:n=8,p=0.4,seed=1", mixing="gossip"),
    "chebyshev": load_network("ring:9", gossip=Gossip(2, "chebyshev"), mixing="gossip"),
}


def measure_disagreement(
    network: Network, factor: FloatArray, momentum: float, step_size: float
) -> float:
    """Return the standard deviation of disagreement in a simulation of noise alone.

    Each round of a step is applied by itself, and every coordinate is a run of its own.
    """
    rng, W, n = np.random.default_rng(0), network.mixing_matrix, network.num_agents
    x, m = np.zeros((n, 40_000)), np.zeros((n, 40_000))
    squares = []
    for step in range(80):
        v = factor @ rng.standard_normal((factor.shape[1], x.shape[1]))
        m = momentum * m + (1 - momentum) * v
        x = x - step_size * m
        change = np.zeros_like(x)
        for repeat, gain in network.schedule:
            change = repeat * change + gain * (W @ x - x)
            x = x + change
        if step >= 60:
            squares.append(np.square(x - x.mean(axis=0)).mean())
    return math.sqrt(float(np.mean(squares)))


@pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))
@pytest.mark.parametrize(("momentum", "step_size"), [(0.0, 1.0), (0.7, 0.1)])
def test_it_is_the_disagreement_of_a_simulation(
    network: Network, momentum: float, step_size: float
) -> None:
    n, T, b = network.num_agents, 50, 4.0
    factor = np.random.default_rng(1).standard_normal((n, n + 2))
    found = disagreement_ratio(
        network, factor @ factor.T, precision_cap=b, momentum=momentum, num_steps=T
    )
    # The server adds N(0, 1/(n² b)) to the average in each of T steps of the same size.
    server = step_size * math.sqrt(T) / (n * math.sqrt(b))
    simulated = measure_disagreement(network, factor, momentum, step_size) / server
    assert found == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(
    ("gossip", "momentum", "ratio"),
    [("plain:1", 0.0, 1.92), ("plain:1", 0.95, 1.07), ("chebyshev:3", 0.9, 0.36)],
)
def test_it_has_the_values_that_were_measured_with_accuracies(
    gossip: str, momentum: float, ratio: float
) -> None:
    """Those of docs/results/gossip.md: er:n=20,p=0.2,seed=1, 120 steps, an eavesdropper."""
    network = load_network(PAPER_GRAPH, gossip=Gossip.parse(gossip), mixing="gossip")
    objective = default_objective(120, momentum=momentum)
    made = design(network, BUDGET, objective=objective, threat=EAVESDROPPER)
    assert made.disagreement_ratio == pytest.approx(ratio, abs=0.005)


def test_it_does_not_depend_on_the_noise_level() -> None:
    network = load_network("grid:3x3", mixing="gossip")
    loose = PrivacyBudget(8.0, 1e-5, num_steps=120, clip=0.1)
    found = [design(network, budget, threat=EAVESDROPPER) for budget in (BUDGET, loose)]
    assert found[0].disagreement_ratio == pytest.approx(found[1].disagreement_ratio, rel=1e-6)


def test_exact_sums_and_a_trusted_server_have_none() -> None:
    for mechanism in ("corn", "ldp"):
        made = design(load_network("ring:6", mixing="sum"), BUDGET, mechanism=mechanism)
        assert made.disagreement_ratio == 0
    periodic = load_network(np.array([[0.0, 1.0], [1.0, 0.0]]), mixing="gossip")
    assert design(periodic, BUDGET, mechanism="central").disagreement_ratio == 0
    assert design(periodic, BUDGET, mechanism="ldp").disagreement_ratio == math.inf


def test_it_is_unknown_without_a_number_of_steps() -> None:
    network = load_network("ring:6", mixing="gossip")
    assert design(network, 1.0, objective=Horizon(10)).disagreement_ratio is None
    assert design(network.mixing_matrix, BUDGET).disagreement_ratio is None


def test_a_plan_has_that_of_its_shares() -> None:
    network = load_network("ring:6", mixing="gossip")
    made = design(network, BUDGET)
    # Without the default's cost for fewer seeds, it is the same noise.
    plan = make_plan(network, BUDGET, mechanism=Corn())
    assert plan.disagreement_ratio == pytest.approx(made.disagreement_ratio, rel=1e-3)
    assert make_plan(load_network("ring:6", mixing="sum"), BUDGET).disagreement_ratio == 0
