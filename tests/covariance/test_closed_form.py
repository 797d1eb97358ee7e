"""Networks whose agents are all alike: formula, dual and FFT agree."""

import math

import networkx as nx
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from corn.arrays import FloatArray
from corn.covariance import Horizon, design, design_circulant
from corn.errors import InfeasibleError, InvalidArgumentError
from tests.covariance.networks import PROPERTY, metropolis

ALIKE = {
    "ring": nx.cycle_graph(11),
    "torus": nx.grid_2d_graph(4, 5, periodic=True),
    "hypercube": nx.hypercube_graph(4),
    "circulant": nx.circulant_graph(13, [1, 3, 4]),
    "petersen": nx.petersen_graph(),
}


@pytest.mark.parametrize("horizon", [1, 200])
@pytest.mark.parametrize("graph", ALIKE.values(), ids=ALIKE.keys())
def test_the_closed_form_is_the_optimum(graph: nx.Graph, horizon: float) -> None:
    W, objective = metropolis(graph), Horizon(horizon)
    closed = design(W, 0.7, objective=objective, solver="closed-form", max_noise_std=math.inf)
    dual = design(W, 0.7, objective=objective, solver="dual", max_noise_std=math.inf)
    root = scipy.linalg.sqrtm(objective.matrix(W)).real
    n = len(W)
    assert closed.status == "optimal"
    assert closed.value == pytest.approx(np.trace(root) ** 2 / (n * 0.7), rel=1e-7)
    assert dual.value == pytest.approx(closed.value, rel=1e-9)
    if np.linalg.cond(root) < 1e6:
        expected = np.trace(root) / (n * 0.7) * np.linalg.inv(root)
        np.testing.assert_allclose(closed.covariance, expected, rtol=1e-6, atol=1e-8)


def test_agents_that_differ_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="all alike"):
        design(metropolis(nx.path_graph(5)), 1.0, solver="closed-form")


ROWS = st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda row: sum(row) > 0.1)


@PROPERTY
@given(ROWS, st.floats(1, 50), st.integers(1, 2), st.integers(0, 2))
def test_the_fft_agrees_with_the_dual_on_circulants(
    weights: list[float], length: float, gossip: int, cooldown: int
) -> None:
    row = np.array(weights) / sum(weights)
    W = scipy.linalg.circulant(row).T
    objective = Horizon(length, gossip_rounds=gossip, cooldown_rounds=cooldown)
    fast = design_circulant(row, 2.0, objective=objective)
    dense = design(W, 2.0, objective=objective)
    assert fast.lower_bound == pytest.approx(dense.lower_bound, rel=1e-5)
    assert fast.value == pytest.approx(dense.value, rel=1e-5)
    assert fast.central_ratio == pytest.approx(dense.central_ratio, rel=1e-4)
    assert fast.average_noise_variance == pytest.approx(dense.average_noise_variance, rel=1e-4)


def test_the_first_row_is_the_covariance() -> None:
    row = ring(12)
    fast = design_circulant(row, 1.0)
    dense = design(scipy.linalg.circulant(row).T, 1.0)
    np.testing.assert_allclose(scipy.linalg.circulant(fast.first_row), dense.covariance, atol=1e-9)
    np.testing.assert_allclose(fast.noise_std, dense.noise_std, rtol=1e-9)


def ring(n: int) -> FloatArray:
    row = np.zeros(n)
    row[[0, 1, -1]] = 1 / 3
    return row


@pytest.mark.parametrize("cap", [1.0, 0.3, 7.0])
def test_a_hundred_thousand_agents(cap: float) -> None:
    result = design_circulant(ring(100_000), cap, objective=Horizon(1000))
    assert (1 / result.eigenvalues).mean() <= cap
    assert 0 <= result.gap < 1e-9
    # From 20 to 100 000 agents the cost of an agent settles: the oracle for 20 is 118.3157 in all.
    assert result.value * cap / 100_000 < 118.3157 / 20


def test_circulant_noise_is_limited_too() -> None:
    complete = np.full(16, 1 / 16)
    limited = design_circulant(complete, 4.0, max_noise_std=2.0)
    assert limited.noise_std == pytest.approx(2.0, rel=1e-9)
    assert limited.gap > 0
    with pytest.raises(InfeasibleError, match="max_noise_std"):
        design_circulant(complete, 4.0, max_noise_std=0.1)


@pytest.mark.parametrize("row", [[], [[0.5, 0.5]], [np.nan, 1.0], [0.9, 0.9]])
def test_rows_are_checked(row: list[float]) -> None:
    with pytest.raises(InvalidArgumentError, match="first_row"):
        design_circulant(row, 1.0, objective=Horizon(100))
