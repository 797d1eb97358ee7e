"""The entry point: oracles, feasibility of every mechanism, defaults, invariances, misuse."""

import math
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance import (
    DEFAULT_THREAT,
    EAVESDROPPER,
    MECHANISMS,
    ONE_STEP,
    Corn,
    Decor,
    Design,
    FiniteRun,
    Horizon,
    Ldp,
    Mechanism,
    MechanismName,
    ThreatModel,
    ZeroSum,
    default_objective,
    design,
)
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.privacy import PrivacyBudget
from corn.topology import Gossip, Network, load_network
from tests.covariance.networks import (
    EDGE_CASES,
    NETWORKS,
    PROPERTY,
    is_private,
    metropolis,
    paper_design,
    random_network,
)
from tests.oracles.eavesdropper import ORACLES, Oracle

PRIVATE: tuple[MechanismName, ...] = ("corn", "decor", "ldp", "zero-sum")
BUDGET = PrivacyBudget(epsilon=3, delta=1e-5, num_steps=100, clip=1.0)


def assert_private(result: Design) -> None:
    """Check the cap, to the last bit, with inverses that share no code with the package."""
    inverse_factor = np.linalg.inv(np.linalg.cholesky(result.covariance))
    assert (np.square(inverse_factor).sum(axis=0) <= result.precision_caps).all()
    assert (np.linalg.inv(result.covariance).diagonal() <= result.precision_caps).all()
    assert is_private(result.covariance, result.precision_caps)


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES.keys())
def test_values_match_the_oracles(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    W, objective = metropolis(oracle.graph), Horizon(oracle.horizon)
    # The printed oracles are rounded, so that the usual tolerance alone would use up the 1e-6.
    with monkeypatch.context() as patch:
        patch.setattr("corn.covariance.dual.TOLERANCE", 1e-8)
        corn = paper_design(W, 1.0, objective=objective)
    assert corn.status == "optimal"
    assert corn.value == pytest.approx(oracle.corn, rel=1e-6)
    ldp = paper_design(W, 1.0, "ldp", objective=objective)
    assert ldp.value == pytest.approx(oracle.ldp, rel=1e-6)
    decor = paper_design(W, 1.0, "decor", objective=objective)
    assert decor.value == pytest.approx(oracle.decor, rel=1e-6)
    assert decor.lower_bound == pytest.approx(oracle.corn, rel=2e-6)


@pytest.mark.parametrize("mechanism", PRIVATE)
@pytest.mark.parametrize("horizon", [1, 500])
@pytest.mark.parametrize("W", EDGE_CASES.values(), ids=EDGE_CASES.keys())
def test_every_mechanism_is_private_on_every_network(
    W: FloatArray, horizon: float, mechanism: MechanismName
) -> None:
    result = paper_design(W, 0.3, mechanism, objective=Horizon(horizon))
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
    corn = paper_design(W, objective=objective)
    assert corn.gap >= 0
    for mechanism in PRIVATE[1:]:
        other = paper_design(W, 1.0, mechanism, objective=objective)
        assert corn.lower_bound <= other.value * (1 + 1e-9)
        assert corn.value <= other.value * (1 + corn.gap) * (1 + 1e-9)
        assert other.lower_bound == pytest.approx(corn.lower_bound, rel=1e-9)


@PROPERTY
@given(NETWORKS, st.floats(1e-6, 1e6), st.sampled_from(PRIVATE))
def test_the_cap_only_sets_the_scale(W: FloatArray, cap: float, mechanism: MechanismName) -> None:
    one = paper_design(W, 1.0, mechanism)
    scaled = paper_design(W, cap, mechanism)
    assert scaled.value * scaled.strictest_cap == pytest.approx(one.value, rel=1e-8)
    assert scaled.lower_bound * scaled.strictest_cap == pytest.approx(one.lower_bound, rel=1e-8)
    np.testing.assert_allclose(scaled.noise_std * math.sqrt(cap), one.noise_std, rtol=1e-6)


@PROPERTY
@given(NETWORKS, st.randoms(use_true_random=False))
def test_renumbering_the_agents_renumbers_the_noise(W: FloatArray, random: object) -> None:
    order = np.arange(len(W))
    random.shuffle(order)  # type: ignore[attr-defined]
    plain = paper_design(W, objective=Horizon(10))
    renumbered = paper_design(W[np.ix_(order, order)], objective=Horizon(10))
    assert renumbered.value == pytest.approx(plain.value, rel=2e-6)
    assert renumbered.lower_bound == pytest.approx(plain.lower_bound, rel=2e-6)


def test_the_defaults_are_one_insider_with_pair_seeds_and_a_fifth_of_the_run() -> None:
    network = load_network("ring:6", mixing="gossip")
    result = design(network, BUDGET)
    assert (result.threat, result.mechanism, result.solver) == (
        DEFAULT_THREAT.resolve(network.graph),
        "corn",
        "split",
    )
    assert (result.precision_caps == BUDGET.precision_cap).all()
    spelled_out = design(
        network.mixing_matrix,
        BUDGET.precision_cap,
        mechanism=Corn(),
        objective=default_objective(BUDGET.num_steps),
        threat=ThreatModel(1, "pairs"),
    )
    assert spelled_out.value == result.value


def test_a_spec_and_a_graph_stand_for_exact_sums() -> None:
    expected = design(load_network("ring:6", mixing="sum"), BUDGET)
    assert expected.central_ratio == pytest.approx(6 / 5)
    for source in ("ring:6", nx.cycle_graph(6)):
        result = design(source, BUDGET)
        assert (result.value, result.solver) == (expected.value, "formula")
    # A matrix of mixing weights is for gossip.
    assert design(load_network("ring:6").mixing_matrix, BUDGET).solver != "formula"


def test_options_of_solvers_are_refused_for_exact_sums() -> None:
    with pytest.raises(InvalidArgumentError, match="Corn\\(\\) without options"):
        design("ring:6", BUDGET, mechanism=Corn(max_noise_std=100))


def test_a_single_agent_has_no_insiders_by_default() -> None:
    result = design(np.ones((1, 1)), BUDGET)
    assert result.threat == EAVESDROPPER
    assert result.noise_std[0] == pytest.approx(BUDGET.independent_noise_std)


def test_seeds_follow_the_links_of_the_network_even_where_weights_are_zero() -> None:
    unused_middle = np.kron(np.eye(2), np.full((2, 2), 0.5))
    threat = ThreatModel(0, "edges")
    linked = design(Network(nx.path_graph(4), unused_middle), BUDGET, threat=threat)
    assert linked.decomposition.seed_groups == ((0, 1), (1, 2), (2, 3))
    given = design(unused_middle, BUDGET, threat=threat)
    assert given.decomposition.seed_groups == ((0, 1), (2, 3))


@pytest.mark.parametrize("mechanism", ["decor", "zero-sum"])
def test_mechanisms_for_an_eavesdropper_name_their_threat_and_refuse_insiders(
    mechanism: MechanismName,
) -> None:
    network = load_network("ring:6", mixing="gossip")
    assert design(network, BUDGET, mechanism=mechanism).threat == EAVESDROPPER
    for threat in (DEFAULT_THREAT, ThreatModel(2, "global"), ThreatModel(0, "edges")):
        with pytest.raises(InvalidArgumentError):
            design(network, BUDGET, mechanism=mechanism, threat=threat)


def test_ldp_holds_against_any_number_of_insiders() -> None:
    network = load_network("ring:6", mixing="gossip")
    assert design(network, BUDGET, mechanism="ldp").threat.max_colluders == 1
    for colluders in range(6):
        result = design(network, BUDGET, mechanism=Ldp(), threat=ThreatModel(colluders, "pairs"))
        assert result.threat.max_colluders == colluders
        np.testing.assert_allclose(result.noise_std, BUDGET.independent_noise_std)
    with pytest.raises(InvalidArgumentError, match="max_colluders"):
        design(network, BUDGET, mechanism=Ldp(), threat=ThreatModel(6))


def test_references_hold_against_nobody() -> None:
    W = metropolis(nx.cycle_graph(6))
    central = paper_design(W, 2.0, "central")
    assert central.central_ratio == pytest.approx(1)
    assert central.value == pytest.approx(1 / (6 * 2.0))
    assert not is_private(central.covariance, 2.0)
    none = paper_design(W, 2.0, "none")
    assert none.value == 0
    for result in (central, none):
        assert (result.status, result.gap) == ("reference", 0.0)
        assert result.adversary.startswith("nobody")


def test_the_complete_graph_costs_what_central_noise_costs() -> None:
    W = EDGE_CASES["complete"]
    limited = paper_design(W)
    assert limited.status == "noise limited"
    assert limited.noise_std.max() == pytest.approx(32, rel=1e-6)
    assert limited.gap == pytest.approx(1 / 1024, rel=0.1)
    free = paper_design(W, 1.0, Corn(max_noise_std=math.inf))
    assert free.status == "optimal"
    assert free.value == pytest.approx(1 / 20, rel=1e-6)
    assert free.central_ratio == pytest.approx(1, rel=1e-6)


def test_parts_of_a_network_without_a_link_between_them_are_designed_apart() -> None:
    first, second = metropolis(nx.path_graph(4)), metropolis(nx.star_graph(5))
    together = np.block([[first, np.zeros((4, 6))], [np.zeros((6, 4)), second]])
    joint = paper_design(together)
    apart = [paper_design(first), paper_design(second)]
    assert joint.value == pytest.approx(sum(part.value for part in apart), rel=2e-6)
    assert np.abs(joint.covariance[:4, 4:]).max() < 1e-9


def test_an_objective_may_be_a_record_its_matrix_or_a_function_of_the_mixing_matrix() -> None:
    network = load_network("path:5", mixing="gossip", gossip=Gossip(2))
    run = FiniteRun([0.3, 0.2, 0.1])
    values = [
        design(network, 1.0, objective=objective, threat=EAVESDROPPER).value
        for objective in (run, run.matrix(network.step_matrix), run.matrix)
    ]
    assert values == pytest.approx([values[0]] * 3, rel=1e-9)
    assert values[0] != pytest.approx(design(network, 1.0, objective=ONE_STEP).value, rel=0.1)


def test_exact_sums_have_the_same_noise_for_every_objective() -> None:
    network = load_network("path:5", mixing="sum")
    A = np.diag([1.0, 2, 3, 4, 5])
    default, given, function = (
        design(network, BUDGET, objective=objective) for objective in (None, A, lambda W: 3 * W)
    )
    for made in (given, function):
        np.testing.assert_array_equal(made.covariance, default.covariance)
        assert made.gap == pytest.approx(default.gap, rel=1e-12)
    W = network.step_matrix
    assert given.value == pytest.approx(np.sum(W.T @ A @ W * given.covariance), rel=1e-9)
    assert function.value == pytest.approx(3 * np.sum(W * function.covariance), rel=1e-9)


def test_agents_whose_noise_nobody_receives_get_ldp_noise() -> None:
    A = np.zeros((5, 5))
    A[:3, :3] = np.eye(3) + 1
    result = paper_design(np.eye(5), 4.0, objective=A)
    assert result.status == "optimal"
    np.testing.assert_allclose(result.noise_std[3:], 0.5, rtol=1e-9)
    assert_private(result)


def test_running_out_of_iterations_is_not_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corn.covariance.dual.MAX_ITERATIONS", 2)
    result = paper_design(metropolis(nx.path_graph(30)))
    assert result.status == "iteration limit"
    assert result.iterations == 2
    assert result.gap > 1e-6
    assert_private(result)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-9])
def test_the_gap_is_within_the_tolerance(tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corn.covariance.dual.TOLERANCE", tolerance)
    result = paper_design(random_network(25, 0.2, 4), objective=Horizon(100))
    assert result.status == "optimal"
    assert result.gap <= tolerance


@pytest.mark.parametrize("limit", [1.0, 1.2, 2.0, 5.0])
@pytest.mark.parametrize("name", ["complete", "long path", "disconnected"])
def test_noise_limits_hold(name: str, limit: float) -> None:
    W, std = EDGE_CASES[name], limit / 2
    limited: list[Mechanism] = [Corn(max_noise_std=std), Decor(max_noise_std=std)]
    for mechanism in [*limited, ZeroSum(max_noise_std=std)]:
        result = paper_design(W, 4.0, mechanism, objective=Horizon(100))
        assert result.noise_std.max() <= std * (1 + 1e-9)
        assert_private(result)
    one_step = paper_design(W, 4.0, Corn(max_noise_std=std))
    assert one_step.status in ("optimal", "noise limited")


def test_noise_below_ldp_is_infeasible() -> None:
    with pytest.raises(InfeasibleError):
        paper_design(np.eye(3), 4.0, Corn(max_noise_std=0.49))


def test_the_split_leaves_a_semidefinite_rest() -> None:
    result = paper_design(metropolis(nx.grid_2d_graph(3, 4)))
    (factor,) = result.decomposition.factors
    least = np.linalg.eigvalsh(result.covariance)[0]
    np.testing.assert_allclose(result.decomposition.private_variance, least, rtol=1e-9)
    np.testing.assert_allclose(
        factor @ factor.T, result.covariance - least * np.eye(12), atol=1e-12
    )
    ones = np.ones(12)
    assert result.average_noise_variance == pytest.approx(ones @ result.covariance @ ones / 144)


def test_arguments_are_left_alone() -> None:
    W = metropolis(nx.path_graph(6))
    before = W.copy()
    for mechanism in MECHANISMS:
        paper_design(W, 1.0, mechanism, objective=Horizon(10))
    np.testing.assert_array_equal(W, before)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: paper_design(np.eye(3), 1.0, "magic"), "mechanism"),  # type: ignore[arg-type]
        (lambda: paper_design(np.ones((2, 3))), "network"),
        (lambda: paper_design(np.zeros((3, 3))), "objective"),
        (lambda: paper_design(np.eye(3), objective=np.eye(4)), "objective must be of the shape"),
        (lambda: paper_design(np.eye(3), objective=-np.eye(3)), "positive semidefinite"),
        (lambda: paper_design(np.eye(3), objective=lambda W: W[0]), "objective must be a square"),
        (lambda: paper_design(np.eye(3), objective="horizon"), "objective must be a matrix"),
        (lambda: paper_design(np.eye(3), 0.0), "precision_cap"),
        (lambda: paper_design(np.eye(3), math.nan), "precision_cap"),
        (lambda: paper_design(np.eye(3), "1"), "precision_caps must be numbers"),
        (lambda: paper_design(np.eye(3), [True] * 3), "precision_caps must be numbers"),
        (
            lambda: design(load_network("ring:6", mixing="gossip"), 1.0),
            "objective must be given with a precision cap",
        ),
    ],
)
def test_misuse_is_named(make: Any, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        make()


GROUPED = random_network(12, 0.4, seed=2)


def test_merging_groups_never_costs() -> None:
    values = [
        paper_design(GROUPED, threat=ThreatModel(seeds=f"groups:{k}"), objective=Horizon(50)).value
        for k in (1, 2, 4, 12)
    ]
    assert values == sorted(values)


def test_groups_in_any_order_land_on_their_agents() -> None:
    threat = ThreatModel(seeds=((7, 1, 5, 11), (0, 2, 10), (3, 4, 6, 8, 9)))
    result = paper_design(GROUPED, 0.5, threat=threat, objective=Horizon(20))
    groups = result.decomposition.seed_groups
    assert groups == ((1, 5, 7, 11), (0, 2, 10), (3, 4, 6, 8, 9))
    A = Horizon(20).matrix(GROUPED)
    assert result.value == pytest.approx(np.sum(A * result.covariance), rel=1e-9)
    assert is_private(result.covariance, 0.5)
    np.testing.assert_allclose(result.decomposition.covariance, result.covariance, atol=1e-12)
    for group in groups:
        inside = np.ix_(np.array(group), np.array(group))
        block = paper_design(np.eye(len(group)), 0.5, objective=A[inside])
        np.testing.assert_allclose(result.covariance[inside], block.covariance, rtol=1e-6)
        others = np.setdiff1d(np.arange(12), group)
        assert not result.covariance[np.ix_(np.array(group), others)].any()


def test_the_worst_block_sets_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corn.covariance.dual.MAX_ITERATIONS", 1)
    result = paper_design(GROUPED, threat=ThreatModel(seeds="groups:2"))
    assert result.status == "iteration limit"


def test_agents_in_no_group_and_groups_that_nobody_receives_get_ldp_noise() -> None:
    result = paper_design(GROUPED, threat=ThreatModel(seeds=((0, 1, 2),)))
    np.testing.assert_allclose(result.noise_std[3:], 1.0)
    assert not result.covariance[0, 3:].any()
    A = np.diag([1.0, 2.0, 0.0, 0.0])
    result = paper_design(np.eye(4), 4.0, objective=A, threat=ThreatModel(seeds="groups:2"))
    np.testing.assert_allclose(result.noise_std, 0.5)
    assert result.value == pytest.approx(0.75)


@pytest.mark.parametrize(("gamma", "ratio"), [(1.0, 1.45), (0.1, 1.14)])
def test_less_weight_on_disagreement_comes_closer_to_a_trusted_server(
    gamma: float, ratio: float
) -> None:
    """The oracles of an independent solver, for Erdős–Rényi n = 20, p = 0.2, seed 1, h = 1000."""
    W = load_network("er:n=20,p=0.2,seed=1", mixing="gossip").mixing_matrix
    result = paper_design(W, objective=Horizon(1000, gamma))
    assert result.central_ratio == pytest.approx(ratio, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("gamma", "ratio"), [(1.0, 1.58), (0.1, 1.22)])
def test_one_insider_costs_little_of_that(gamma: float, ratio: float) -> None:
    W = load_network("er:n=20,p=0.2,seed=1", mixing="gossip").mixing_matrix
    result = paper_design(W, objective=Horizon(1000, gamma), threat=ThreatModel(1, "pairs"))
    assert result.central_ratio == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(("rounds", "ratio"), [(1, 1.26), (2, 1.15), (4, 1.08)])
def test_more_rounds_a_step_come_closer_still(rounds: int, ratio: float) -> None:
    network = load_network("er:n=20,p=0.2,seed=1", gossip=Gossip(rounds), mixing="gossip")
    result = design(network, 1.0, objective=Horizon(300, 0.1), threat=EAVESDROPPER)
    assert result.central_ratio == pytest.approx(ratio, abs=0.005)


def test_the_ratio_of_zero_sum_noise_is_the_best() -> None:
    """The oracle scales I + r (I − 11ᵀ/n) to the cap for many ratios r."""
    W = metropolis(nx.cycle_graph(8))
    centred, values = np.eye(8) - 1 / 8, []
    for ratio in np.exp(np.linspace(-10, 6, 400)):
        R = np.eye(8) + ratio * centred
        R *= np.linalg.inv(R)[0, 0]
        values.append(float((W.T @ W * R).sum()))
    found = paper_design(W, 1.0, "zero-sum").value
    assert found <= min(values) * (1 + 1e-9)
    assert found == pytest.approx(min(values), rel=1e-3)
