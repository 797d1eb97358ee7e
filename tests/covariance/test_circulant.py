"""Circulant networks: the FFT agrees with the dual, privacy holds, rows are checked."""

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance import Horizon, design_circulant
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.topology import Gossip
from tests.covariance.networks import PROPERTY, paper_design

WEIGHTS = st.sampled_from([0.0]) | st.floats(0.01, 1)
ROWS = st.lists(WEIGHTS, min_size=1, max_size=9).filter(lambda row: sum(row) > 0.1)


@PROPERTY
@given(
    ROWS,
    st.floats(1, 50),
    st.sampled_from([1.0, 0.1]),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.6]),
)
def test_the_fft_agrees_with_the_dual_on_circulants(
    weights: list[float], length: float, gamma: float, rounds: int, momentum: float
) -> None:
    row = np.array(weights) / sum(weights)
    W = scipy.linalg.circulant(row).T
    objective = Horizon(length, gamma, momentum)
    fast = design_circulant(row, 2.0, objective=objective, gossip=Gossip(rounds))
    dense = paper_design(Gossip(rounds).matrix(W), 2.0, objective=objective)
    assert fast.lower_bound == pytest.approx(dense.lower_bound, rel=1e-5)
    assert fast.value == pytest.approx(dense.value, rel=1e-5)
    assert fast.central_ratio == pytest.approx(dense.central_ratio, rel=1e-4)
    assert fast.average_noise_variance == pytest.approx(dense.average_noise_variance, rel=1e-4)


def test_chebyshev_rounds_agree_with_the_dual_too() -> None:
    gossip, objective = Gossip(3, "chebyshev"), Horizon(50, 0.1)
    fast = design_circulant(ring(12), 2.0, objective=objective, gossip=gossip)
    step = gossip.matrix(scipy.linalg.circulant(ring(12)).T)
    dense = paper_design(step, 2.0, objective=objective)
    assert fast.value == pytest.approx(dense.value, rel=1e-5)
    assert fast.central_ratio == pytest.approx(dense.central_ratio, rel=1e-4)
    with pytest.raises(InvalidArgumentError, match="first_row must be symmetric"):
        design_circulant([0.5, 0.5, 0.0], 1.0, objective=objective, gossip=gossip)


def test_the_first_row_is_the_covariance() -> None:
    row = ring(12)
    fast = design_circulant(row, 1.0)
    dense = paper_design(scipy.linalg.circulant(row).T)
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


@pytest.mark.parametrize("row", [[], [[0.9, 0.5]], [np.nan, 1.0], [0.9, 0.9]])
def test_rows_are_checked(row: list[float]) -> None:
    with pytest.raises(InvalidArgumentError, match="first_row"):
        design_circulant(row, 1.0, objective=Horizon(100))
