"""Gradients recovered from neighbours' messages, and images from gradients."""

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.audit import View
from corn.checks import FloatArray
from corn.errors import InvalidArgumentError
from corn.learn.datasets import load_dataset
from corn.learn.mechanism import Mechanism
from corn.topology import load_network
from tests.audit.plans import agent_plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "reconstruct_images.py"
ATTACK: dict[str, Any] = runpy.run_path(str(EXAMPLE))
choose_images, reconstruct_images = ATTACK["choose_images"], ATTACK["reconstruct_images"]
find_recoverable, list_observed = ATTACK["find_recoverable"], ATTACK["list_observed"]
make_knowledge, predict_noise = ATTACK["make_knowledge"], ATTACK["predict_noise"]
STEPS = 12
RANK_TOLERANCE = 1e-10


def recover_gradients(knowledge: FloatArray, observations: FloatArray) -> FloatArray:
    """Return all agents' gradients, shape (n, d), by least squares: exact where recoverable.

    ``observations`` are (Wᵗ x₀ − m_t)/η of the observed agents, shape (steps · observed, d), in the
    order of the knowledge matrix.
    """
    solved = np.linalg.lstsq(knowledge, observations, rcond=RANK_TOLERANCE)[0]
    return np.asarray(solved, np.float64)


def sum_message_noise(
    mixing_matrix: FloatArray, covariance: FloatArray, observed: Sequence[int], num_steps: int
) -> FloatArray:
    """Return the covariance of the noise in all observations, in the order of the knowledge.

    Noise of step s has been mixed t − s times in the message of step t. Each step has new noise of
    this covariance, shape (n, n).
    """
    powers = [np.eye(len(mixing_matrix))]
    for _ in range(num_steps - 1):
        powers.append(powers[-1] @ mixing_matrix)
    # With a little more noise, because Cholesky fails where noise cancels exactly.
    root = np.linalg.cholesky(covariance + 1e-12 * np.trace(covariance) * np.eye(len(covariance)))
    size, n = len(observed), len(mixing_matrix)
    parts = np.zeros((num_steps * size, num_steps * n))
    for t in range(num_steps):
        for s in range(t + 1):
            # Block (t, s) maps the normals of step s to observation t; later noise has no part in
            # it.
            block = powers[t - s][list(observed)] @ root
            parts[t * size : (t + 1) * size, s * n : (s + 1) * n] = block
    total: FloatArray = parts @ parts.T
    return total


def estimate_gradients(
    knowledge: FloatArray, noise_covariance: FloatArray, observations: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the generalised least squares estimate, shape (n, d), and its standard errors, (n,).

    Errors are per coordinate; ∞ for agents that the observations do not determine.
    """
    values, vectors = np.linalg.eigh(noise_covariance)
    scale = 1 / np.sqrt(np.maximum(values, RANK_TOLERANCE * values[-1]))
    # In whitened coordinates generalised least squares is ordinary least squares.
    whiten = scale[:, None] * vectors.T
    K, y = whiten @ knowledge, whiten @ observations
    left, singular, right = np.linalg.svd(K, full_matrices=False)
    kept = singular > RANK_TOLERANCE * singular[0]
    # The covariance of the estimate is V S⁻² Vᵀ, whose diagonal is the sum of squares below.
    inverse = right[kept].T / singular[kept]
    estimate: FloatArray = inverse @ (left[:, kept].T @ y)
    errors = np.sqrt((inverse**2).sum(axis=1))
    known = np.isin(np.arange(knowledge.shape[1]), find_recoverable(knowledge))
    return estimate, np.where(known, errors, np.inf)


def observe(
    W: FloatArray, gradients: FloatArray, observed: list[int], noise: FloatArray, step_size: float
) -> FloatArray:
    """Run Algorithm 1 with fixed gradients, and return what observers compute from messages.

    ``noise`` has shape (steps, n, d).
    """
    start = np.random.default_rng(1).standard_normal(gradients.shape)
    models, public, found = start, start, []
    for v in noise:
        message = models - step_size * (gradients + v)
        found.append((public - message)[observed] / step_size)
        models, public = W @ message, W @ public
    return np.concatenate(found)


@pytest.mark.parametrize("graph", ["er:n=10,p=0.3,seed=2", "ring:7", "grid:2x4"])
def test_without_noise_gradients_of_others_than_neighbours_are_exact(graph: str) -> None:
    W = load_network(graph, mixing="gossip").mixing_matrix
    gradients = np.random.default_rng(0).standard_normal((len(W), 3))
    observed = list_observed(W, [0])
    knowledge = make_knowledge(W, observed, STEPS)
    values = observe(W, gradients, observed, np.zeros((STEPS, len(W), 3)), 0.1)
    recovered = find_recoverable(knowledge)
    assert set(recovered) - set(observed), "some agents beyond the neighbours"
    found = recover_gradients(knowledge, values)
    assert np.allclose(found[recovered], gradients[recovered], atol=1e-5)


def test_agents_that_look_alike_cannot_be_told_apart() -> None:
    """The leaves of a star send the same to the rest of the network: only their sum is known."""
    W = load_network("star:6", mixing="gossip").mixing_matrix
    assert find_recoverable(make_knowledge(W, list_observed(W, [1]), 30)) == [0, 1]


def test_with_noise_least_squares_has_the_errors_that_it_states() -> None:
    W = load_network("ring:5", mixing="gossip").mixing_matrix
    n, trials, generator = len(W), 4000, np.random.default_rng(0)
    R = 0.5 * np.eye(n) + 0.2
    observed = list_observed(W, [0])
    knowledge = make_knowledge(W, observed, STEPS)
    covariance = sum_message_noise(W, R, observed, STEPS)
    root = np.linalg.cholesky(R)
    noise = root @ generator.standard_normal((STEPS, n, trials))
    gradients = np.tile(generator.standard_normal((n, 1)), trials)
    values = observe(W, gradients, observed, noise, 0.1)
    found, errors = estimate_gradients(knowledge, covariance, values)
    assert np.allclose(found.mean(axis=1), gradients[:, 0], atol=5 * errors.max() / trials**0.5)
    assert np.allclose(found.std(axis=1), errors, rtol=0.1)
    plain = recover_gradients(knowledge, values)
    assert (errors < plain.std(axis=1) * 1.01).all(), "no linear estimate is better"


def test_agents_that_are_not_determined_have_no_estimate() -> None:
    W = load_network("star:6", mixing="gossip").mixing_matrix
    observed = list_observed(W, [1])
    knowledge = make_knowledge(W, observed, 8)
    covariance = sum_message_noise(W, np.eye(len(W)), observed, 8)
    _, errors = estimate_gradients(knowledge, covariance, np.zeros((len(knowledge), 1)))
    assert np.isfinite(errors[:2]).all()
    assert np.isinf(errors[2:]).all()


def test_observers_outside_the_network_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="agents 0 … 4"):
        list_observed(load_network("ring:5", mixing="gossip").mixing_matrix, [9])


def reconstruct(method: Mechanism, view: View, graph: str = "ring:5") -> FloatArray:
    network = load_network(graph, mixing="gossip")
    data, prior = choose_images(load_dataset("digits"), network.num_agents, seed=0)
    victims = [agent for agent in range(network.num_agents) if agent not in view.coalition]
    found = reconstruct_images(
        method,
        network,
        data,
        num_classes=10,
        num_steps=40,
        view=view,
        victims=victims,
        prior=prior,
    )
    assert found.images.shape == (len(victims), 64)
    similarity: FloatArray = found.similarity
    return similarity


def test_images_are_exact_without_noise_and_hidden_by_it() -> None:
    plan = agent_plan()
    assert (reconstruct(Mechanism.non_private(*plan.budget.queries), View()) > 0.999).all()
    assert abs(reconstruct(Mechanism.from_plan(plan), View((0,))).mean()) < 0.5


def test_an_insider_that_the_noise_is_not_designed_for_sees_images() -> None:
    graph = "complete:30"
    method = Mechanism.from_plan(agent_plan(0, "global", graph=graph))
    assert reconstruct(method, View(), graph).mean() < 0.25
    assert reconstruct(method, View((0,)), graph).mean() > 0.4


@pytest.mark.parametrize(
    ("covariance", "stds"),
    [
        (np.diag([4.0, 0.0, 1.0]), [2, 0, 1]),
        # Noise of the first two agents cancels, so each tells that of the other.
        (np.array([[9.0, -9.0, 0.0], [-9.0, 9.0, 0.0], [0.0, 0.0, 4.0]]), [0, 0, 2]),
        (np.array([[2.0, 1.0], [1.0, 2.0]]), [1.5**0.5] * 2),
    ],
)
def test_noise_is_predicted_from_that_of_others(covariance: np.ndarray, stds: list[float]) -> None:
    weights, found = predict_noise(covariance)
    np.testing.assert_allclose(found, stds, atol=1e-12)
    np.testing.assert_allclose(np.diag(weights), 1)
    # The error of the prediction has this variance.
    np.testing.assert_allclose(
        np.diag(weights @ covariance @ weights.T), np.square(stds), atol=1e-9
    )
