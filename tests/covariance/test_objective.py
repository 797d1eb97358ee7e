"""Objectives against the sums that define them."""

import networkx as nx
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance import EAVESDROPPER, ONE_STEP, FiniteRun, GivenObjective, Horizon, design
from corn.covariance.objective import energy_of_average
from corn.errors import InvalidArgumentError
from corn.topology import load_network
from tests.covariance.networks import NETWORKS, PROPERTY, metropolis


def add_up(W: FloatArray, weights: FloatArray) -> FloatArray:
    """Σ_k weights[k−1] (Wᵏ)ᵀ Wᵏ, term by term."""
    A, power = np.zeros_like(W), np.eye(len(W))
    for weight in weights:
        power = power @ W
        A += weight * power.T @ power
    return A


def average_of_parts(W: FloatArray) -> FloatArray:
    """The limit of the powers of (I + W)/2, in which every connected part agrees."""
    return np.linalg.matrix_power((np.eye(len(W)) + W) / 2, 2**20)


def discounts(length: float) -> FloatArray:
    return np.asarray((1 - 1 / length) ** np.arange(1000.0 if length > 1 else 1.0))


@PROPERTY
@given(NETWORKS, st.floats(1, 30))
def test_a_horizon_is_the_discounted_sum(W: FloatArray, length: float) -> None:
    expected = add_up(W, discounts(length))
    found = Horizon(length).matrix(W)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


@PROPERTY
@given(NETWORKS, st.floats(1, 30), st.floats(0.01, 1), st.integers(1, 3))
def test_the_weight_scales_disagreement_and_not_the_average(
    W: FloatArray, length: float, gamma: float, rounds: int
) -> None:
    V = np.linalg.matrix_power(W, rounds)
    P = average_of_parts(V)
    expected = length * P + gamma * add_up(V - P, discounts(length))
    found = Horizon(length, gamma).matrix(V)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-8 * np.abs(expected).max())


def test_parts_that_exchange_nothing_have_averages_of_their_own() -> None:
    W = scipy.linalg.block_diag(metropolis(nx.path_graph(4)), metropolis(nx.star_graph(4)))
    A = Horizon(20, 0.1).matrix(W)
    np.testing.assert_allclose(A[:4, :4], Horizon(20, 0.1).matrix(W[:4, :4]), atol=1e-10)
    np.testing.assert_allclose(A[4:, 4:], Horizon(20, 0.1).matrix(W[4:, 4:]), atol=1e-10)
    assert not A[:4, 4:].any()


def test_a_slow_network_is_still_one_network() -> None:
    """An eigenvalue close to 1 is disagreement, if a link is there that removes it in the end."""
    weak = 1e-9
    W = np.array([[1 - weak, weak], [weak, 1 - weak]])
    A = Horizon(100, 0.1).matrix(W)
    disagreement = np.array([1, -1]) / np.sqrt(2)
    assert disagreement @ A @ disagreement == pytest.approx(10, rel=1e-4)
    assert np.ones(2) @ A @ np.ones(2) / 2 == pytest.approx(100)


def test_the_weight_needs_rows_and_columns_that_sum_to_one() -> None:
    W = 0.9 * np.eye(3)
    assert Horizon(10).matrix(W) == pytest.approx(add_up(W, discounts(10)))
    with pytest.raises(InvalidArgumentError, match="rows sum to 1"):
        Horizon(10, 0.1).matrix(W)


@PROPERTY
@given(NETWORKS, st.lists(st.floats(0.001, 3), min_size=1, max_size=6))
def test_a_finite_run_mixes_the_noise_of_each_step_until_the_end(
    W: FloatArray, steps: list[float]
) -> None:
    expected = add_up(W, np.square(steps[::-1]))
    found = FiniteRun(steps).matrix(W)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("length", [1.0, 7.0, 1e5])
def test_every_objective_is_symmetric_and_semidefinite(length: float) -> None:
    A = Horizon(length).matrix(metropolis(nx.path_graph(9)))
    np.testing.assert_array_equal(A, A.T)
    assert np.linalg.eigvalsh(A)[0] >= -1e-12 * np.abs(A).max()


def test_the_callers_matrix_is_copied_not_kept() -> None:
    given_matrix = np.eye(3)
    objective = GivenObjective(given_matrix)
    given_matrix[0, 0] = 5
    returned = objective.matrix(np.eye(3))
    returned[1, 1] = 7
    np.testing.assert_array_equal(objective.matrix(np.eye(3)), np.eye(3))


@pytest.mark.parametrize(
    ("given_matrix", "message"),
    [
        (np.diag([1.0, -1.0]), "semidefinite"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (np.zeros((2, 2)), "not zero"),
        (1e307 * np.eye(2), "without entries beyond"),
        (np.ones((2, 3)), "square"),
    ],
)
def test_a_given_matrix_must_be_semidefinite(given_matrix: FloatArray, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"objective must be .*{message}"):
        GivenObjective(given_matrix)


def test_eigenvalues_below_zero_by_rounding_are_set_to_zero() -> None:
    v = np.array([[3.0, -1.0, 1.0]])
    A = v.T @ v - 1e-14 * np.eye(3)
    found = np.linalg.eigvalsh(GivenObjective(A).matrix(np.eye(3)))
    assert np.linalg.eigvalsh(A)[0] < -9e-15
    assert found[0] > -4e-15


def test_sizes_must_agree() -> None:
    with pytest.raises(InvalidArgumentError, match="shape"):
        GivenObjective(np.eye(3)).matrix(np.eye(4))


@pytest.mark.parametrize(
    "objective", [Horizon(7, 0.1), FiniteRun([0.5, 2.0]), GivenObjective(np.diag([1.0, 2, 0, 4]))]
)
def test_exact_sums_weigh_the_average_alone(
    objective: Horizon | FiniteRun | GivenObjective,
) -> None:
    W = np.full((4, 4), 0.25)
    A = W.T @ objective.matrix(W) @ W
    np.testing.assert_allclose(A, energy_of_average(objective, 4) * W, rtol=1e-12)


def test_an_objective_without_weight_in_the_average_has_no_exact_sum() -> None:
    with pytest.raises(InvalidArgumentError):
        energy_of_average(GivenObjective(np.eye(4) - 0.25), 4)


def test_matrices_that_amplify_or_are_not_symmetric_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="amplifies"):
        Horizon(100).matrix(1.2 * np.eye(3))
    with pytest.raises(InvalidArgumentError, match="symmetric"):
        Horizon(100).matrix([[0.5, 0.5], [0.4, 0.6]])


def test_parameters_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="length"):
        Horizon(0.5)
    with pytest.raises(InvalidArgumentError, match="length"):
        Horizon(float("inf"))
    with pytest.raises(InvalidArgumentError):
        Horizon(1e12)
    for steps in ([1e160], [], [float("nan")], ["a"], 0.1):
        with pytest.raises(InvalidArgumentError):
            FiniteRun(steps)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        FiniteRun([0.0])
    for weight in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidArgumentError, match="disagreement_weight"):
            Horizon(10, weight)


def test_descriptions_name_the_objective() -> None:
    assert ONE_STEP.describe() == "one step"
    assert Horizon(50).describe() == "horizon of 50 steps"
    assert Horizon(50, 0.1).describe() == "horizon of 50 steps, disagreement weighted by 0.1"
    assert FiniteRun([0.1, 0.2]).describe() == "end of a run of 2 steps"
    assert GivenObjective(np.eye(2)).describe() == "given matrix of shape (2, 2)"


REPLAYED = load_network("er:n=8,p=0.4,seed=1", mixing="gossip")


def replay_noise(W: FloatArray, length: float, momentum: float, num_steps: int) -> FloatArray:
    """Return Σ_k G_kᵀ G_k, where G_k is what k steps make of the noise of one release."""
    rho, n = np.sqrt(1 - 1 / length), len(W)
    x, m, total = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    for step in range(num_steps):
        m = momentum * m + (1 - momentum) * np.eye(n) * (step == 0)
        x = W @ (rho * x + m)
        total += x.T @ x
    return total


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("length", [1.0, 2.0, 30.0])
def test_the_objective_is_the_energy_of_replayed_noise(momentum: float, length: float) -> None:
    W = REPLAYED.step_matrix
    expected = replay_noise(W, length, momentum, 1500)
    found = Horizon(length, momentum=momentum).matrix(W)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_the_weight_scales_disagreement_alone() -> None:
    W, n = REPLAYED.step_matrix, REPLAYED.num_agents
    whole = Horizon(20, momentum=0.8).matrix(W)
    split = Horizon(20, 0.1, 0.8).matrix(W)
    P = np.full((n, n), 1 / n)
    np.testing.assert_allclose(P @ split @ P, P @ whole @ P, atol=1e-9)
    Q = np.eye(n) - P
    np.testing.assert_allclose(Q @ split @ Q, 0.1 * Q @ whole @ Q, atol=1e-9)


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
