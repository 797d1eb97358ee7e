"""The front door: oracles, feasibility of every mechanism, invariances, edge cases."""

import math
from typing import Any, get_args

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.arrays import FloatArray
from corn.covariance import (
    MECHANISMS,
    Design,
    GivenObjective,
    Horizon,
    MechanismName,
    ThreatModel,
    design,
    invert_covariance,
    is_private,
)
from corn.covariance.baselines import support_laplacian
from corn.errors import InfeasibleError, InvalidArgumentError
from tests.covariance.networks import (
    EDGE_CASES,
    NETWORKS,
    PROPERTY,
    directed,
    metropolis,
    random_network,
)
from tests.oracles.eavesdropper import ORACLES, Oracle

PRIVATE: tuple[MechanismName, ...] = ("corn", "decor", "ldp", "zero-sum")


def assert_private(result: Design) -> None:
    """Check the cap, to the last bit, with inverses that share no code with the package."""
    inverse_factor = np.linalg.inv(np.linalg.cholesky(result.covariance))
    assert np.square(inverse_factor).sum(axis=0).max() <= result.precision_cap
    assert np.linalg.inv(result.covariance).diagonal().max() <= result.precision_cap
    assert is_private(result.covariance, result.precision_cap)
    assert result.precision is not None
    assert result.precision.diagonal().max() <= result.precision_cap
    rebuilt = result.factor @ result.factor.T
    np.testing.assert_allclose(rebuilt, result.covariance, atol=1e-12 * rebuilt.max())


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES.keys())
def test_values_match_the_oracles(oracle: Oracle) -> None:
    W, objective = metropolis(oracle.graph), Horizon(oracle.horizon)
    # The printed oracles are rounded, so that the default tolerance alone would use up the 1e-6.
    corn = design(W, 1.0, objective=objective, tolerance=1e-8)
    assert corn.status == "optimal"
    assert corn.value == pytest.approx(oracle.corn, rel=1e-6)
    assert design(W, 1.0, mechanism="ldp", objective=objective).value == pytest.approx(
        oracle.ldp, rel=1e-6
    )
    decor = design(W, 1.0, mechanism="decor", objective=objective)
    assert decor.value == pytest.approx(oracle.decor, rel=1e-6)
    assert decor.lower_bound == pytest.approx(oracle.corn, rel=2e-6)


@pytest.mark.parametrize("mechanism", PRIVATE)
@pytest.mark.parametrize("horizon", [1, 500])
@pytest.mark.parametrize("W", EDGE_CASES.values(), ids=EDGE_CASES.keys())
def test_every_mechanism_is_private_on_every_network(
    W: FloatArray, horizon: float, mechanism: MechanismName
) -> None:
    result = design(W, 0.3, mechanism=mechanism, objective=Horizon(horizon))
    assert_private(result)
    assert result.gap >= 0
    assert result.central_ratio >= 1 - 1e-9
    assert result.noise_std.max() <= 32 / math.sqrt(0.3) * (1 + 1e-9)
    if mechanism == "corn":
        assert result.status in ("optimal", "noise limited")
        assert result.gap <= (1e-6 if result.status == "optimal" else 1e-2)


@PROPERTY
@given(NETWORKS, st.floats(1, 100))
def test_corn_is_at_least_as_good_as_every_other_mechanism(W: FloatArray, horizon: float) -> None:
    objective = Horizon(horizon)
    corn = design(W, 1.0, objective=objective)
    assert corn.gap >= 0
    for mechanism in PRIVATE[1:]:
        other = design(W, 1.0, mechanism=mechanism, objective=objective)
        assert corn.lower_bound <= other.value * (1 + 1e-9)
        assert corn.value <= other.value * (1 + corn.gap) * (1 + 1e-9)
        assert other.lower_bound == pytest.approx(corn.lower_bound, rel=1e-9)


@PROPERTY
@given(NETWORKS, st.floats(1e-6, 1e6), st.sampled_from(PRIVATE))
def test_the_cap_only_sets_the_scale(W: FloatArray, cap: float, mechanism: MechanismName) -> None:
    one = design(W, 1.0, mechanism=mechanism)
    scaled = design(W, cap, mechanism=mechanism)
    assert scaled.normalized_value == pytest.approx(one.value, rel=1e-8)
    assert scaled.normalized_lower_bound == pytest.approx(one.lower_bound, rel=1e-8)
    np.testing.assert_allclose(scaled.noise_std * math.sqrt(cap), one.noise_std, rtol=1e-6)


@PROPERTY
@given(NETWORKS, st.randoms(use_true_random=False))
def test_renumbering_the_agents_renumbers_the_noise(W: FloatArray, random: object) -> None:
    order = np.arange(len(W))
    random.shuffle(order)  # type: ignore[attr-defined]
    plain = design(W, 1.0, objective=Horizon(10))
    renumbered = design(W[np.ix_(order, order)], 1.0, objective=Horizon(10))
    assert renumbered.value == pytest.approx(plain.value, rel=2e-6)
    assert renumbered.lower_bound == pytest.approx(plain.lower_bound, rel=2e-6)


def test_the_complete_graph_costs_what_central_noise_costs() -> None:
    W = EDGE_CASES["complete"]
    limited = design(W, 1.0)
    assert limited.status == "noise limited"
    assert limited.noise_std.max() == pytest.approx(32, rel=1e-6)
    assert limited.gap == pytest.approx(1 / 1024, rel=0.1)
    free = design(W, 1.0, max_noise_std=math.inf)
    assert free.status == "optimal"
    assert free.value == pytest.approx(1 / 20, rel=1e-6)
    assert free.central_ratio == pytest.approx(1, rel=1e-6)


def test_blocks_that_never_meet_are_designed_apart() -> None:
    first, second = metropolis(nx.path_graph(4)), metropolis(nx.star_graph(5))
    together = np.block([[first, np.zeros((4, 6))], [np.zeros((6, 4)), second]])
    joint = design(together, 1.0)
    apart = [design(first, 1.0), design(second, 1.0)]
    assert joint.value == pytest.approx(sum(part.value for part in apart), rel=2e-6)
    assert np.abs(joint.covariance[:4, 4:]).max() < 1e-9


def test_agents_whose_noise_nobody_sees_get_ldp_noise() -> None:
    A = np.zeros((5, 5))
    A[:3, :3] = np.eye(3) + 1
    result = design(np.eye(5), 4.0, objective=GivenObjective(A))
    assert result.status == "optimal"
    np.testing.assert_allclose(result.noise_std[3:], 0.5, rtol=1e-9)
    assert_private(result)


def test_an_objective_that_is_zero_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="zero for every agent"):
        design(np.zeros((3, 3)), 1.0)


def test_running_out_of_iterations_is_not_success() -> None:
    result = design(metropolis(nx.path_graph(30)), 1.0, max_iterations=2)
    assert result.status == "iteration limit"
    assert result.iterations == 2
    assert result.gap > 1e-6
    assert_private(result)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-9])
def test_the_gap_is_within_the_tolerance(tolerance: float) -> None:
    result = design(random_network(25, 0.2, 4), 1.0, objective=Horizon(100), tolerance=tolerance)
    assert result.status == "optimal"
    assert result.gap <= tolerance


@pytest.mark.parametrize("limit", [1.0, 1.2, 2.0, 5.0])
@pytest.mark.parametrize("name", ["complete", "long path", "disconnected", "directed"])
def test_noise_limits_hold(name: str, limit: float) -> None:
    W = EDGE_CASES[name]
    for mechanism in PRIVATE:
        result = design(
            W, 4.0, mechanism=mechanism, objective=Horizon(100), max_noise_std=limit / 2
        )
        assert result.noise_std.max() <= limit / 2 * (1 + 1e-9)
        assert_private(result)
    assert design(W, 4.0, max_noise_std=limit / 2).status in ("optimal", "noise limited")


def test_a_looser_noise_limit_costs_less() -> None:
    W = random_network(15, 0.5, 1)
    values = [
        design(W, 1.0, objective=Horizon(200), max_noise_std=limit).value
        for limit in (1.0, 1.3, 2.0, 4.0, 8.0, math.inf)
    ]
    assert values == sorted(values, reverse=True)


def test_noise_below_ldp_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="max_noise_std must be at least"):
        design(np.eye(3), 4.0, max_noise_std=0.49)


def test_a_ridge_trades_value_for_noise() -> None:
    W = random_network(15, 0.4, 3)
    plain = design(W, 1.0, objective=Horizon(300))
    ridged = design(W, 1.0, objective=Horizon(300), ridge=1e-2)
    assert ridged.status == "noise limited"
    assert ridged.noise_std.max() < plain.noise_std.max()
    assert ridged.value > plain.value
    assert ridged.lower_bound == pytest.approx(plain.lower_bound, rel=1e-9)


def test_the_split_leaves_a_semidefinite_rest() -> None:
    result = design(metropolis(nx.grid_2d_graph(3, 4)), 1.0)
    assert result.independent_variance == pytest.approx(np.linalg.eigvalsh(result.covariance)[0])
    assert np.linalg.eigvalsh(result.correlated_covariance)[0] >= -1e-12
    ones = np.ones(12)
    assert result.average_noise_variance == pytest.approx(ones @ result.covariance @ ones / 144)


def test_references_are_marked_as_such() -> None:
    W = metropolis(nx.cycle_graph(6))
    central = design(W, 2.0, mechanism="central")
    assert central.central_ratio == pytest.approx(1)
    assert central.value == pytest.approx(1 / (6 * 2.0))
    assert not is_private(central.covariance, 2.0)
    none = design(W, 2.0, mechanism="none")
    assert none.value == 0
    for result in (central, none):
        assert (result.status, result.gap, result.precision) == ("reference", 0.0, None)
        assert result.independent_variance == 0


@pytest.mark.parametrize("mechanism", ["zero-sum", "decor"])
def test_noise_that_cancels_exactly_has_no_guarantee(mechanism: MechanismName) -> None:
    with pytest.raises(InfeasibleError, match="no privacy guarantee"):
        design(metropolis(nx.cycle_graph(5)), 1.0, mechanism=mechanism, local_share=0)


def test_a_singular_covariance_is_refused() -> None:
    laplacian = support_laplacian(metropolis(nx.karate_club_graph()))
    for singular in (laplacian, np.eye(4) - 1 / 4, np.ones((3, 3)), np.zeros((2, 2))):
        with pytest.raises(InfeasibleError, match="singular"):
            invert_covariance(singular)
        assert not is_private(singular, 1e9)


def test_a_local_share_fixes_the_ratio() -> None:
    W = metropolis(nx.cycle_graph(8))
    alone = design(W, 1.0, mechanism="zero-sum", local_share=1)
    np.testing.assert_allclose(alone.covariance, np.eye(8), atol=1e-12)
    half = design(W, 1.0, mechanism="zero-sum", local_share=0.5)
    searched = design(W, 1.0, mechanism="zero-sum")
    assert searched.value <= half.value
    with pytest.raises(InvalidArgumentError, match="local_share"):
        design(W, 1.0, mechanism="decor", local_share=1.5)
    with pytest.raises(InfeasibleError, match="max_noise_std"):
        design(W, 1.0, mechanism="decor", local_share=1e-9)


def test_decor_on_a_directed_graph_shares_noise_both_ways() -> None:
    W = directed(7, seed=5)
    links = ((W != 0) | (W.T != 0)) & ~np.eye(7, dtype=bool)
    expected = nx.laplacian_matrix(nx.from_numpy_array(links)).toarray()
    np.testing.assert_array_equal(support_laplacian(W), expected)
    given_laplacian = design(W, 1.0, mechanism="decor", laplacian=expected)
    assert design(W, 1.0, mechanism="decor").value == pytest.approx(given_laplacian.value)
    with pytest.raises(InvalidArgumentError, match="laplacian"):
        design(W, 1.0, mechanism="decor", laplacian=np.eye(3))


def test_arguments_are_left_alone() -> None:
    W = metropolis(nx.path_graph(6))
    before = W.copy()
    for mechanism in MECHANISMS:
        design(W, 1.0, mechanism=mechanism, objective=Horizon(10))
    np.testing.assert_array_equal(W, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision_cap": 0.0}, "precision_cap"),
        ({"precision_cap": math.nan}, "precision_cap"),
        ({"mechanism": "magic"}, "mechanism"),
        ({"solver": "magic"}, "solver"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"ridge": -1.0}, "ridge"),
        ({"mechanism": "ldp", "solver": "dual"}, "'corn' only"),
        ({"mechanism": "ldp", "threat": ThreatModel(seeds="edges")}, "'corn' only"),
        ({"mixing_matrix": np.ones((2, 3))}, "mixing_matrix"),
    ],
)
def test_misuse_is_named(change: dict[str, object], message: str) -> None:
    arguments = {"mixing_matrix": np.eye(3), "precision_cap": 1.0} | change
    with pytest.raises(InvalidArgumentError, match=message):
        design(**arguments)  # type: ignore[arg-type]


def test_every_mechanism_is_listed() -> None:
    assert get_args(MechanismName) == MECHANISMS


@pytest.mark.parametrize("cap", [np.ones(5), "1", [1.0]])
def test_a_cap_that_is_no_number_is_named(cap: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="precision_cap must be one number"):
        design(np.full((5, 5), 0.2), cap)
