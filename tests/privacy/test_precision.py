"""diag(R⁻¹): never understated, infinite for exposed agents, refused for other matrices."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.errors import InvalidArgumentError
from corn.privacy import precision_diagonal


def exact_diagonal(matrix: Any) -> list[Fraction]:
    """Return diag(R⁻¹) in rational arithmetic, by Gauss and Jordan without a rounding error."""
    n = len(matrix)
    rows = [
        [Fraction(entry) for entry in row] + [Fraction(int(i == j)) for j in range(n)]
        for i, row in enumerate(matrix)
    ]
    for k in range(n):
        pivot = rows[k][k]
        rows[k] = [entry / pivot for entry in rows[k]]
        for i in range(n):
            if i != k:
                factor = rows[i][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [rows[i][n + i] for i in range(n)]


def random_covariance(n: int, seed: int, *, condition: float) -> FloatArray:
    generator = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(generator.normal(size=(n, n)))
    R = (basis * np.geomspace(1, 1 / condition, n)) @ basis.T
    scales = 10.0 ** generator.uniform(-3, 3, n)
    covariance: FloatArray = (R + R.T) / 2 * scales * scales[:, None]
    return covariance


@given(n=st.integers(1, 7), seed=st.integers(0, 10**6), exponent=st.floats(0, 10))
@settings(max_examples=60)
def test_never_below_the_exact_inverse_and_close_to_it(n: int, seed: int, exponent: float) -> None:
    R = random_covariance(n, seed, condition=10**exponent)
    R = (R + R.T) / 2
    computed = precision_diagonal(R)
    correlation = R / np.sqrt(np.outer(np.diag(R), np.diag(R)))
    slack = 1e-14 * n * np.linalg.cond(correlation)
    for found, exact in zip(computed, exact_diagonal(R), strict=True):
        assert Fraction(float(found)) >= exact
        assert found <= float(exact) * (1 + slack)


def test_independent_noise_of_very_different_sizes() -> None:
    variances = np.array([1e-12, 1.0, 1e12])
    np.testing.assert_allclose(precision_diagonal(np.diag(variances)), 1 / variances, rtol=1e-13)


@pytest.mark.parametrize("n", [2, 3, 5, 20, 100])
@pytest.mark.parametrize("scale", [1e-9, 1 / 3, 1e9])
def test_pure_zero_sum_noise_exposes_every_agent(n: int, scale: float) -> None:
    zero_sum = scale * (np.eye(n) - np.ones((n, n)) / n)
    assert np.isinf(precision_diagonal(zero_sum)).all()


@pytest.mark.parametrize("seed", range(10))
def test_a_singular_graph_laplacian_exposes_every_agent(seed: int) -> None:
    # Pair noise alone, whatever the variance of each pair: its sum over all agents is zero.
    generator = np.random.default_rng(seed)
    incidence = np.zeros((12, 30))
    for edge in range(30):
        i, j = (edge, edge + 1) if edge < 11 else generator.choice(12, 2, replace=False)
        incidence[i, edge], incidence[j, edge] = generator.uniform(0.1, 10) * np.array([1, -1])
    assert np.isinf(precision_diagonal(incidence @ incidence.T)).all()


def test_agents_with_noise_of_their_own_are_hidden_beside_exposed_ones() -> None:
    # Agents 0 and 1 add the same noise, so that their difference is naked.
    R = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    assert precision_diagonal(R).tolist() == pytest.approx([np.inf, np.inf, 0.5])


def test_no_bound_is_too_small_beside_an_exposed_agent() -> None:
    """A tiny eigenvalue that rounding hides may be that of a direction with a tiny part."""
    shared = np.array([[1e4, 3e-10], [-1e4, 0.0], [0.0, 1.01]])
    own = np.diag([1e-26, 1e-26, 1e-12])
    # Of real numbers: in floats the private noise of agents 0 and 1 is lost in their sums.
    streams = np.vectorize(Fraction)(shared)
    exact = exact_diagonal(streams @ streams.T + np.vectorize(Fraction)(own))
    found = precision_diagonal(shared @ shared.T + own, num_terms=3)
    assert exact[2] > 10**6
    assert all(bound >= value for bound, value in zip(found, exact, strict=True))


def test_an_agent_without_noise_is_exposed() -> None:
    assert precision_diagonal(np.diag([0.0, 4.0])).tolist() == pytest.approx([np.inf, 0.25])
    assert np.isinf(precision_diagonal(np.zeros((3, 3)))).all()


def test_agents_that_drop_out_do_not_weaken_the_others() -> None:
    R = random_covariance(8, 3, condition=1e3)
    assert (precision_diagonal(R[:5, :5]) <= precision_diagonal(R)[:5] * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        ([[1.0, 0.0]], r"covariance must be a square matrix .* found shape \(1, 2\)"),
        ([[1.0, 0.5], [0.0, 1.0]], "covariance must be symmetric"),
        ([[1.0, np.nan], [np.nan, 1.0]], r"covariance must be finite, found nan at \(0, 1\)"),
        ([[np.inf]], r"covariance must be finite, found inf at \(0, 0\)"),
        ([[1.0, 2.0], [2.0, 1.0]], "must be positive semidefinite, .* eigenvalue -1"),
        ([[1.0, 0.0], [0.0, -1.0]], "without negative variances, found -1"),
        ([[0.0, 1.0], [1.0, 4.0]], "must be positive semidefinite"),
    ],
)
def test_matrices_that_are_no_covariance_are_refused(
    covariance: list[list[float]], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        precision_diagonal(covariance)
