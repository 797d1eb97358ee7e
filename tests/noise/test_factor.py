"""Factors reproduce their covariance, with as few nonzeros as its structure allows."""

from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise import choose_factors, factor_covariance


def assert_factor_of(F: FloatArray, R: FloatArray) -> None:
    scale = np.sqrt(np.diag(R))
    assert (np.abs(F @ F.T - R) <= 1e-12 * len(R) * np.outer(scale, scale)).all()


def laplacian(graph: Any) -> FloatArray:
    return np.asarray(nx.laplacian_matrix(graph).toarray(), dtype=np.float64)


@given(
    n=st.integers(1, 12),
    rank=st.integers(0, 12),
    spread=st.sampled_from([0.0, 3.0, 8.0]),
    density=st.sampled_from([0.3, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_factors_of_any_rank_scale_and_sparsity(
    n: int, rank: int, spread: float, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n, rank)) * (rng.random((n, rank)) < density)
    A *= 10.0 ** rng.uniform(-spread, spread, (n, 1))
    R = A @ A.T
    F = factor_covariance(R)
    assert_factor_of(F, R)
    assert F.shape[1] <= max(n, np.count_nonzero(np.triu(R)))


@pytest.mark.parametrize("condition", [1e6, 1e10, 1e14])
def test_nearly_singular_covariances(condition: float) -> None:
    rng = np.random.default_rng(0)
    Q, _ = np.linalg.qr(rng.standard_normal((30, 30)))
    R = Q @ np.diag(np.geomspace(1, 1 / condition, 30)) @ Q.T
    assert_factor_of(factor_covariance((R + R.T) / 2), (R + R.T) / 2)


def test_a_dense_covariance_has_a_triangular_factor() -> None:
    A = np.random.default_rng(0).standard_normal((20, 40))
    F = factor_covariance(A @ A.T)
    assert np.count_nonzero(F) == 20 * 21 // 2
    assert sorted(np.count_nonzero(F, axis=1)) == list(range(1, 21))


def test_rank_is_the_number_of_streams() -> None:
    A = np.random.default_rng(0).standard_normal((12, 3))
    assert factor_covariance(A @ A.T).shape == (12, 3)
    assert factor_covariance(np.zeros((4, 4))).shape == (4, 0)
    assert factor_covariance(np.eye(5) - 0.2).shape == (5, 4)


def test_trees_have_factors_without_fill() -> None:
    # Eliminating a star's centre first would fill the whole matrix.
    for graph in (nx.star_graph(20), nx.path_graph(21), nx.balanced_tree(2, 3)):
        for R in (laplacian(graph), laplacian(graph) + 0.5 * np.eye(len(graph))):
            F = factor_covariance(R)
            assert_factor_of(F, R)
            assert np.count_nonzero(F) <= 2 * graph.number_of_edges() + 1


def test_chosen_factors_keep_the_covariance() -> None:
    rng = np.random.default_rng(0)
    groups = ((0, 1, 2), (1, 3), (0, 1, 2, 3))
    factors = tuple(rng.standard_normal((len(group), 6)) for group in groups)
    given_factors = Decomposition(rng.random(4), groups, factors)
    chosen = choose_factors(given_factors)
    for coalition in ((), (3,), (0, 2)):
        np.testing.assert_allclose(
            chosen.hidden_from(coalition), given_factors.hidden_from(coalition), rtol=1e-12
        )
    assert sum(chosen.count_streams()) < sum(given_factors.count_streams())


def test_an_indefinite_matrix_has_no_factor() -> None:
    with pytest.raises(InvalidArgumentError, match="positive semidefinite"):
        factor_covariance(np.array([[1.0, 2.0], [2.0, 1.0]]))
