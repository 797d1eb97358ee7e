"""Inverses and scaling: singular covariances are refused, results are on the private side."""

from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corn.covariance.dual import limit_noise
from corn.covariance.problem import invert_covariance, scale_covariance, scale_to_cap
from corn.errors import InfeasibleError
from tests.covariance.networks import PROPERTY

LAPLACIAN = nx.laplacian_matrix(nx.karate_club_graph(), weight=None).toarray().astype(float)


@pytest.mark.parametrize(
    "singular", [LAPLACIAN, np.eye(4) - 1 / 4, np.ones((3, 3)), np.zeros((2, 2))]
)
def test_a_singular_covariance_is_refused(singular: np.ndarray) -> None:
    with pytest.raises(InfeasibleError, match="singular"):
        invert_covariance(singular)


@PROPERTY
@given(st.integers(1, 12), st.integers(0, 1000), st.floats(1e-8, 1e8), st.floats(1e-8, 1e8))
@example(1, 334, 81637367.0, 99999999.0)
def test_scaling_ends_just_below_the_cap(n: int, seed: int, unit: float, cap: float) -> None:
    square = np.random.default_rng(seed).standard_normal((n, n))
    R = scale_covariance(unit * (square @ square.T + 0.1 * np.eye(n)), np.full(n, cap))
    for diagonal in (invert_covariance(R).diagonal(), np.linalg.inv(R).diagonal()):
        assert cap * (1 - 1e-9) <= diagonal.max() <= cap


@PROPERTY
@given(st.floats(1e-8, 1e8), st.floats(1e-8, 1e8))
@example(83654186.60766019, 99999999.0)
def test_one_agent_has_enough_noise_in_exact_arithmetic(variance: float, cap: float) -> None:
    R = scale_covariance(np.array([[variance]]), np.array([cap]))
    assert 1 / Fraction(float(R[0, 0])) <= Fraction(cap)


def test_scaling_lands_on_the_private_side_whatever_the_rounding() -> None:
    rng = np.random.default_rng(0)

    def rounded(scale: float) -> float:
        return 1.5 / scale * (1 + 1e-13 * rng.random())

    for _ in range(50):
        scale = scale_to_cap(rounded)
        assert 1.5 / scale <= 1 + 1e-15
    with pytest.raises(InfeasibleError, match="ill-conditioned"):
        scale_to_cap(lambda _: 1.5)


@pytest.mark.parametrize("limit", [1.0, 3.0, 100.0])
def test_limited_noise_keeps_the_diagonal_of_the_precision(limit: float) -> None:
    precision = np.full((5, 5), 1.0)  # singular: without a limit the noise would be infinite
    R, limited = limit_noise(precision, np.full(5, limit))
    assert limited
    assert R.diagonal().max() <= limit * (1 + 1e-12)
    np.testing.assert_allclose(np.linalg.inv(R).diagonal(), 1, rtol=1e-9)
    assert not limit_noise(np.eye(3), np.ones(3))[1]
