"""The dual: its bound, its curvature, its number of iterations, and the closed form."""

import math

import networkx as nx
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance import Corn, Horizon
from corn.covariance.dual import attained_value, dual_curvature, evaluate, solve_dual
from tests.covariance.networks import NETWORKS, PROPERTY, metropolis, paper_design, random_network


@PROPERTY
@given(NETWORKS, st.integers(0, 1000))
def test_any_multipliers_bound_any_private_covariance(W: FloatArray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = len(W)
    A = Horizon(5).matrix(W)
    bound = evaluate(A, rng.uniform(0.01, 1, n)).lower_bound
    square = rng.standard_normal((n, n))
    R = square @ square.T + 0.1 * np.eye(n)
    R *= np.linalg.inv(R).diagonal().max()
    assert bound <= np.sum(A * R) * (1 + 1e-9)


@PROPERTY
@given(NETWORKS, st.integers(0, 1000))
def test_the_precision_of_a_point_attains_its_value_or_better(W: FloatArray, seed: int) -> None:
    A = W.T @ W + 0.1 * np.eye(len(W))
    point = evaluate(A, np.random.default_rng(seed).uniform(0.1, 1, len(W)))
    Y = point.precision()
    np.testing.assert_array_equal(Y.diagonal(), 1)
    assert np.sum(A * np.linalg.inv(Y)) <= point.value * (1 + 1e-9)


def test_the_attained_value_is_second_order_in_the_distance_from_the_optimum() -> None:
    A = Horizon(10).matrix(metropolis(nx.path_graph(8)))
    optimum = solve_dual(A, tolerance=1e-12, max_iterations=50)
    direction = np.random.default_rng(1).standard_normal(8)
    scaled, attained = [], []
    for distance in (1e-2, 1e-3):
        point = evaluate(A, optimum.point.multipliers * np.exp(distance * direction))
        scaled.append(point.value / optimum.lower_bound - 1)
        attained.append(attained_value(A, point) / optimum.lower_bound - 1)
    assert scaled[0] / scaled[1] == pytest.approx(10, rel=0.1)
    assert attained[0] / attained[1] == pytest.approx(100, rel=0.1)


def test_a_singular_point_falls_back_on_its_scaled_value() -> None:
    point = evaluate(np.full((4, 4), 0.25), np.ones(4))
    assert attained_value(np.full((4, 4), 0.25), point) == point.value


@pytest.mark.parametrize("horizon", [1, 100])
def test_the_curvature_is_the_hessian_of_the_dual(horizon: float) -> None:
    A = Horizon(horizon).matrix(metropolis(nx.path_graph(7)))
    rng = np.random.default_rng(0)
    lam = evaluate(A, rng.uniform(0.5, 2, 7)).multipliers

    def gradient(multipliers: FloatArray) -> FloatArray:
        """Of Tr S, in λ: S_ii/(2 λ_i), undoing the scaling of the point."""
        point = evaluate(A, multipliers)
        scale = np.sqrt(multipliers[0] / point.multipliers[0])
        return np.asarray(point.diagonal * scale / (2 * multipliers))

    step = 1e-5
    hessian = np.array(
        [(gradient(lam + step * e) - gradient(lam - step * e)) / (2 * step) for e in np.eye(7)]
    )
    expected = -2 * lam[:, None] * lam * hessian
    point = evaluate(A, lam)
    upper = dual_curvature(point.vectors, point.roots)
    found = np.triu(upper) + np.triu(upper, 1).T
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05 * np.abs(expected).max())


HARD = {
    "path": metropolis(nx.path_graph(100)),
    "scale-free": metropolis(nx.barabasi_albert_graph(120, 2, seed=1)),
    "lollipop": metropolis(nx.lollipop_graph(20, 30)),
    "geometric": metropolis(nx.random_geometric_graph(120, 0.2, seed=3)),
    "random": random_network(100, 0.1, 1),
}


@pytest.mark.parametrize("horizon", [1, 30, 1000])
@pytest.mark.parametrize("W", HARD.values(), ids=HARD.keys())
def test_few_eigendecompositions_suffice(W: FloatArray, horizon: float) -> None:
    A = Horizon(horizon).matrix(W)
    solution = solve_dual(A, tolerance=1e-6, max_iterations=9)
    assert solution.converged
    assert solve_dual(A, tolerance=1e-3, max_iterations=6).converged


def test_a_warm_start_at_the_solution_is_done_at_once() -> None:
    A = Horizon(100).matrix(HARD["random"])
    first = solve_dual(A, tolerance=1e-6, max_iterations=50)
    again = solve_dual(A, tolerance=1e-6, max_iterations=50, start=first.point.multipliers)
    assert again.iterations == 1
    assert again.lower_bound == pytest.approx(first.lower_bound, rel=1e-6)


@PROPERTY
@given(st.floats(1e-12, 1e12))
def test_the_unit_of_the_objective_does_not_matter(unit: float) -> None:
    A = Horizon(50).matrix(metropolis(nx.star_graph(6)))
    plain = solve_dual(A, tolerance=1e-6, max_iterations=50)
    scaled = solve_dual(unit * A, tolerance=1e-6, max_iterations=50)
    assert scaled.lower_bound == pytest.approx(unit * plain.lower_bound, rel=1e-6)


ALIKE = {
    "ring": nx.cycle_graph(11),
    "torus": nx.grid_2d_graph(4, 5, periodic=True),
    "hypercube": nx.hypercube_graph(4),
    "circulant": nx.circulant_graph(13, [1, 3, 4]),
    "petersen": nx.petersen_graph(),
}


@pytest.mark.parametrize("horizon", [1, 200])
@pytest.mark.parametrize("graph", ALIKE.values(), ids=ALIKE.keys())
def test_the_closed_form_is_the_optimum(
    graph: nx.Graph, horizon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corn.covariance.dual.MAX_ITERATIONS", 1)
    W, objective = metropolis(graph), Horizon(horizon)
    dual = paper_design(W, 0.7, Corn(math.inf), objective=objective)
    root = scipy.linalg.sqrtm(objective.matrix(W)).real
    n = len(W)
    assert dual.status == "optimal"
    assert dual.value == pytest.approx(np.trace(root) ** 2 / (n * 0.7), rel=1e-7)
    if np.linalg.cond(root) < 1e6:
        expected = np.trace(root) / (n * 0.7) * np.linalg.inv(root)
        np.testing.assert_allclose(dual.covariance, expected, rtol=1e-6, atol=1e-8)
