"""The semidefinite programs as oracles of the other solvers, in both formulations."""

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance import Corn, Horizon
from tests.covariance.networks import (
    NETWORKS,
    PROPERTY,
    is_private,
    metropolis,
    paper_design,
    random_network,
)
from tests.oracles.sdp import Formulation, Sdp

# Posing a program takes cvxpy far longer than a design takes the dual.
FEW = settings(PROPERTY, max_examples=12)


@FEW
@given(NETWORKS, st.sampled_from([1, 20]))
def test_bound_sdp_and_value_are_in_order(W: FloatArray, horizon: float) -> None:
    dual = paper_design(W, objective=Horizon(horizon))
    sdp = paper_design(W, 1.0, Sdp(), objective=Horizon(horizon))
    assert is_private(sdp.covariance, 1.0)
    assert dual.lower_bound <= sdp.value * (1 + 1e-9)
    assert sdp.lower_bound <= dual.value * (1 + 1e-9)
    # Under the same noise limit the program is exact, and the dual's remedy within a little of it.
    assert sdp.value <= dual.value * (1 + 1e-3)
    assert dual.value <= sdp.value * (1.001 + dual.gap)


@pytest.mark.parametrize("formulation", ["single", "paper"])
@pytest.mark.parametrize("W", [metropolis(nx.path_graph(7)), random_network(7, 0.5, 9)])
def test_both_formulations_find_the_dual_optimum(W: FloatArray, formulation: Formulation) -> None:
    objective = Horizon(10)
    sdp = paper_design(W, 3.0, Sdp(formulation, tolerance=1e-5), objective=objective)
    dual = paper_design(W, 3.0, objective=objective)
    assert sdp.value == pytest.approx(dual.value, rel=2e-5)
    assert sdp.lower_bound == pytest.approx(dual.lower_bound, rel=2e-5)
    assert is_private(sdp.covariance, 3.0)
    if np.linalg.cond(W) < 100:  # elsewhere the optimum is not unique
        np.testing.assert_allclose(sdp.covariance, dual.covariance, atol=2e-3)


@pytest.mark.parametrize("limit", [1.1, 2.0])
def test_a_tight_noise_limit_costs_the_dual_little_more_than_the_exact_program(
    limit: float,
) -> None:
    W = random_network(9, 0.5, 4)
    dual = paper_design(W, 1.0, Corn(max_noise_std=limit), objective=Horizon(100))
    sdp = paper_design(W, 1.0, Sdp(max_noise_std=limit), objective=Horizon(100))
    assert sdp.noise_std.max() <= limit * (1 + 1e-9)
    assert sdp.status == dual.status == "noise limited"
    assert sdp.value <= dual.value * (1 + 1e-5)
    assert dual.value <= 1.05 * sdp.value


def test_an_unbounded_optimum_is_approached() -> None:
    complete = np.full((5, 5), 0.2)
    sdp = paper_design(complete, 1.0, Sdp(max_noise_std=100.0))
    dual = paper_design(complete, 1.0, Corn(max_noise_std=100.0))
    assert sdp.value == pytest.approx(dual.value, rel=1e-4)
    assert math.isclose(sdp.lower_bound, 0.2, rel_tol=1e-6)
