"""Objectives against the sums that define them."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.arrays import FloatArray
from corn.covariance import ONE_STEP, FiniteRun, GivenObjective, Horizon
from corn.errors import InvalidArgumentError
from tests.covariance.networks import NETWORKS, PROPERTY, directed, metropolis

ROUNDS = st.integers(1, 3), st.integers(0, 3)


def add_up(W: FloatArray, weights: FloatArray, gossip: int, cooldown: int) -> FloatArray:
    """Σ_k weights[k−1] (W^{rk+K})ᵀ W^{rk+K}, term by term."""
    A = np.zeros_like(W)
    for k, weight in enumerate(weights, start=1):
        power = np.linalg.matrix_power(W, gossip * k + cooldown)
        A += weight * power.T @ power
    return A


@PROPERTY
@given(NETWORKS, st.floats(1, 30), *ROUNDS)
def test_a_horizon_is_the_discounted_sum(
    W: FloatArray, length: float, gossip: int, cooldown: int
) -> None:
    weights = np.power(1 - 1 / length, np.arange(1000.0 if length > 1 else 1.0))
    expected = add_up(W, weights, gossip, cooldown)
    found = Horizon(length, gossip_rounds=gossip, cooldown_rounds=cooldown).matrix(W)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


@PROPERTY
@given(NETWORKS, st.lists(st.floats(0.001, 3), min_size=1, max_size=6), *ROUNDS)
def test_a_finite_run_mixes_the_noise_of_each_step_until_the_end(
    W: FloatArray, steps: list[float], gossip: int, cooldown: int
) -> None:
    expected = add_up(W, np.square(steps[::-1]), gossip, cooldown)
    found = FiniteRun(steps, gossip_rounds=gossip, cooldown_rounds=cooldown).matrix(W)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * np.abs(expected).max())


def test_length_one_is_the_papers_objective() -> None:
    W = directed(6, seed=2)
    np.testing.assert_allclose(ONE_STEP.matrix(W), W.T @ W, rtol=1e-15)


@pytest.mark.parametrize("length", [1.0, 7.0, 1e5])
def test_every_objective_is_symmetric_and_semidefinite(length: float) -> None:
    for W in (metropolis(nx.path_graph(9)), directed(9, seed=0)):
        A = Horizon(length).matrix(W)
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
        ([[1.0, 0.0], [0.0, -1.0]], "semidefinite"),
        ([[1.0, 2.0], [0.0, 1.0]], "symmetric"),
        (np.zeros((2, 2)), "not zero"),
        (1e307 * np.eye(2), "without entries beyond"),
    ],
)
def test_a_given_matrix_must_be_semidefinite(given_matrix: FloatArray, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        GivenObjective(given_matrix)


def test_sizes_must_agree() -> None:
    with pytest.raises(InvalidArgumentError, match="shape"):
        GivenObjective(np.eye(3)).matrix(np.eye(4))


@pytest.mark.parametrize("W", [1.2 * np.eye(3), 1.2 * directed(5, seed=3)])
def test_a_matrix_that_amplifies_is_refused(W: FloatArray) -> None:
    with pytest.raises(InvalidArgumentError, match="amplifies"):
        Horizon(100).matrix(W)


def test_parameters_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="length"):
        Horizon(0.5)
    with pytest.raises(InvalidArgumentError, match="length"):
        Horizon(float("inf"))
    with pytest.raises(InvalidArgumentError, match=r"in \[1, 1e\+09\], found 1000"):
        Horizon(1e12)
    with pytest.raises(InvalidArgumentError, match=r"step_sizes must be .* to 1e"):
        FiniteRun([1e160])
    with pytest.raises(InvalidArgumentError, match="gossip_rounds"):
        Horizon(gossip_rounds=0)
    with pytest.raises(InvalidArgumentError, match="cooldown_rounds"):
        FiniteRun([1.0], cooldown_rounds=-1)
    with pytest.raises(InvalidArgumentError, match="step_sizes"):
        FiniteRun([])
    with pytest.raises(InvalidArgumentError, match="not all of them zero"):
        FiniteRun([0.0])


def test_descriptions_name_the_objective() -> None:
    assert ONE_STEP.describe() == "one step"
    assert Horizon(50, 2, 3).describe() == (
        "horizon of 50 steps, 2 gossip rounds a step, 3 rounds at the end"
    )
    assert FiniteRun([0.1, 0.2]).describe() == "end of a run of 2 steps"
    assert GivenObjective(np.eye(2)).describe() == "given matrix of shape (2, 2)"
