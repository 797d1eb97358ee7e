"""The semidefinite program as an oracle, its formulations, and custom constraints."""

import math
import sys
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.arrays import FloatArray
from corn.covariance import Horizon, SdpSettings, design, is_private
from corn.covariance.sdp import Backend, Formulation
from corn.errors import InfeasibleError, InvalidArgumentError, MissingExtraError
from tests.covariance.networks import NETWORKS, PROPERTY, directed, metropolis, random_network

# Posing a program takes cvxpy far longer than a design takes the dual.
FEW = settings(PROPERTY, max_examples=12)


@FEW
@given(NETWORKS, st.sampled_from([1, 20]))
def test_bound_sdp_and_value_are_in_order(W: FloatArray, horizon: float) -> None:
    dual = design(W, 1.0, objective=Horizon(horizon))
    sdp = design(W, 1.0, objective=Horizon(horizon), solver="sdp")
    assert is_private(sdp.covariance, 1.0)
    assert dual.lower_bound <= sdp.value * (1 + 1e-9)
    assert sdp.lower_bound <= dual.value * (1 + 1e-9)
    # Under the same noise limit the program is exact, and the dual's remedy within a little of it.
    assert sdp.value <= dual.value * (1 + 1e-3)
    assert dual.value <= sdp.value * (1.001 + dual.gap)


@pytest.mark.parametrize("backend", ["clarabel", "scs"])
@pytest.mark.parametrize("formulation", ["single", "paper"])
@pytest.mark.parametrize("W", [metropolis(nx.path_graph(7)), directed(7, seed=9)])
def test_both_formulations_find_the_dual_optimum(
    W: FloatArray, formulation: Formulation, backend: Backend
) -> None:
    chosen = SdpSettings(formulation, backend)
    objective = Horizon(10)
    sdp = design(W, 3.0, objective=objective, solver="sdp", sdp_settings=chosen, tolerance=1e-5)
    dual = design(W, 3.0, objective=objective)
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
    dual = design(W, 1.0, objective=Horizon(100), max_noise_std=limit)
    sdp = design(W, 1.0, objective=Horizon(100), max_noise_std=limit, solver="sdp")
    assert sdp.noise_std.max() <= limit * (1 + 1e-9)
    assert sdp.status == dual.status == "noise limited"
    assert sdp.value <= dual.value * (1 + 1e-5)
    assert dual.value <= 1.05 * sdp.value


def test_custom_constraints_join_the_program() -> None:
    def no_shared_noise(R: Any) -> list[Any]:
        return [R[0, 1] == 0, R[2, 2] >= 3 / 4]

    W = random_network(6, 0.6, 2)
    free = design(W, 4.0)
    held = design(W, 4.0, solver="sdp", sdp_settings=SdpSettings(constraints=no_shared_noise))
    assert held.status == "constrained"
    assert held.value > free.value
    assert held.covariance[0, 1] == pytest.approx(0, abs=1e-6)
    assert held.covariance[2, 2] >= 0.75 * (1 - 1e-5)
    assert is_private(held.covariance, 4.0)


def test_contradictory_constraints_are_infeasible() -> None:
    chosen = SdpSettings(constraints=lambda R: [R[0, 0] <= 0.5])
    with pytest.raises(InfeasibleError, match="no covariance satisfies"):
        design(np.eye(2), 1.0, solver="sdp", sdp_settings=chosen)


def test_a_backend_that_is_missing_is_named() -> None:
    import cvxpy

    if "MOSEK" in cvxpy.installed_solvers():
        pytest.skip("MOSEK is installed here")
    with pytest.raises(InvalidArgumentError, match="mosek"):
        design(np.eye(2), 1.0, solver="sdp", sdp_settings=SdpSettings(backend="mosek"))


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="formulation"):
        SdpSettings("double")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="backend"):
        SdpSettings(backend="magic")  # type: ignore[arg-type]


def test_without_cvxpy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[sdp\]"):
        design(np.eye(2), 1.0, solver="sdp")


def test_an_unbounded_optimum_is_approached() -> None:
    complete = np.full((5, 5), 0.2)
    sdp = design(complete, 1.0, solver="sdp", max_noise_std=100.0)
    assert sdp.value == pytest.approx(design(complete, 1.0, max_noise_std=100.0).value, rel=1e-4)
    assert math.isclose(sdp.lower_bound, 0.2, rel_tol=1e-6)
