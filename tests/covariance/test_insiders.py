"""Noise against insiders: oracles, derivatives, certificates, every coalition checked."""

from collections.abc import Callable
from itertools import combinations

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance import (
    DEFAULT_THREAT,
    Corn,
    Decomposition,
    Design,
    Horizon,
    SeedGroups,
    ThreatModel,
    design,
)
from corn.covariance.insiders import (
    Pressure,
    Streams,
    affordable_evaluations,
    certify,
    list_outside,
    press_by_inverses,
    press_by_updates,
)
from corn.errors import InvalidArgumentError
from corn.topology import Graph, load_network
from tests.covariance.coalition_check import exact_worst_precision, worst_precision
from tests.covariance.networks import is_private, metropolis, paper_design
from tests.oracles.sdp import solve_split

GRAPHS = {"cycle 6": nx.cycle_graph(6), "wheel 7": nx.wheel_graph(7)}
# Tr(A R) for b = 1, h = 100, Metropolis weights, one θ for all: cvxpy with Clarabel.
ORACLES = [
    ("cycle 6", "edges", (25.92436, 35.90059, 101.7121)),
    ("cycle 6", "pairs", (25.87164, 32.57254, 40.53124)),
    ("wheel 7", "edges", (21.21284, 26.20415, 35.83250)),
    ("wheel 7", "pairs", (21.13655, 25.97210, 31.52884)),
]
CASES = [(g, s, q, v) for g, s, values in ORACLES for q, v in enumerate(values)]


def horizon(graph: Graph, length: float = 100) -> FloatArray:
    return Horizon(length).matrix(load_network(graph).mixing_matrix)


def solve(graph: Graph, threat: ThreatModel, length: float = 100) -> Design:
    W = load_network(graph).mixing_matrix
    return paper_design(W, objective=Horizon(length), threat=threat)


@pytest.mark.parametrize(("name", "seeds", "colluders", "oracle"), CASES)
def test_one_theta_for_all_has_the_oracles_and_a_theta_for_each_the_optimum(
    name: str, seeds: str, colluders: int, oracle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program with one θ is that of the oracles; without that restriction it is CorN's."""
    graph, threat = GRAPHS[name], ThreatModel(colluders, seeds)
    common, exact = (
        solve_split(
            horizon(graph),
            threat.seed_groups(graph),
            np.ones(len(graph)),
            max_colluders=colluders,
            common=is_common,
        )
        for is_common in (True, False)
    )
    assert common == pytest.approx(oracle, rel=1e-5)
    monkeypatch.setattr("corn.covariance.insiders._TOLERANCE", 1e-4)
    found = solve(graph, threat)
    assert (found.status, found.solver) == ("optimal", "split")
    assert found.value == pytest.approx(exact, rel=1.1e-4)
    assert found.lower_bound <= exact * (1 + 1e-6)
    assert exact <= oracle * (1 + 1e-5)


def test_private_noise_per_agent_repairs_edge_seeds() -> None:
    """A degree-1 agent has one seed, which its neighbour knows: only its own θ need be large."""
    graph, threat = nx.lollipop_graph(5, 1), ThreatModel(1, "edges")
    A, groups = horizon(graph), threat.seed_groups(graph)
    common = solve_split(A, groups, np.ones(6), max_colluders=1, common=True)
    assert common == pytest.approx(float(np.trace(A)), rel=1e-3)  # LDP
    assert solve(graph, threat).value < 0.6 * common


@st.composite
def problems(draw: st.DrawFn) -> tuple[FloatArray, SeedGroups, int, float]:
    n = draw(st.integers(3, 5))
    graph = nx.path_graph(n)
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    graph.add_edges_from((i, j) for i, j in draw(st.lists(ends, max_size=5)) if i != j)
    sets = st.sets(st.integers(0, n - 1), min_size=2).map(lambda s: tuple(sorted(s)))
    groups = draw(st.lists(sets, max_size=5, unique=True))
    cap = draw(st.sampled_from([0.02, 1.0, 50.0]))
    A = horizon(graph, draw(st.sampled_from([2, 30])))
    # Noise that a singular A hides is limited, which the program does not know.
    eigenvalues = np.linalg.eigvalsh(A)
    assume(eigenvalues[0] > 1e-6 * eigenvalues[-1])
    return A, tuple(groups), draw(st.integers(0, n - 1)), cap


@settings(max_examples=25)
@given(problem=problems())
def test_bound_optimum_and_value_are_in_order_and_every_split_is_private(
    problem: tuple[FloatArray, SeedGroups, int, float],
) -> None:
    A, groups, colluders, cap = problem
    exact = solve_split(A, groups, np.full(len(A), cap), max_colluders=colluders)
    threat = ThreatModel(colluders, groups)
    found = paper_design(np.eye(len(A)), cap, objective=A, threat=threat)
    assert worst_precision(found.decomposition, colluders) <= cap * (1 + 1e-9)
    assert found.value == pytest.approx(float(np.trace(A @ found.covariance)), rel=1e-9)
    assert found.lower_bound <= min(found.value, exact * (1 + 1e-6))
    # Any private noise is at or above the optimum; with an ill-conditioned A the oracle is not.
    assert exact <= found.value * (1 + 1e-3)
    assert found.value <= np.trace(A) / cap * (1 + 1e-12)
    if found.status == "optimal":
        assert exact >= found.value / (1 + 1.01e-3)


def test_the_cap_holds_in_exact_arithmetic() -> None:
    network, cap = load_network("ring:6", mixing="gossip"), 0.02
    found = design(network, cap, objective=Horizon(1000), threat=ThreatModel(1, "pairs"))
    assert 0.999 * cap < exact_worst_precision(found.decomposition, 1) <= cap


@pytest.mark.parametrize(
    ("seeds", "colluders"), [("pairs", 5), ("groups:6", 0), ("groups:2", 1), ("global", 1)]
)
def test_seeds_that_insiders_know_leave_ldp(seeds: str, colluders: int) -> None:
    graph = GRAPHS["cycle 6"]
    found = solve(graph, ThreatModel(colluders, seeds))
    assert found.status == "optimal"
    assert found.value == pytest.approx(float(np.trace(horizon(graph))), rel=1e-9)
    assert found.gap < 1e-6
    assert worst_precision(found.decomposition, colluders) <= 1 + 1e-9


def test_streams_that_died_out_are_not_drawn() -> None:
    # On this ring no optimum needs seeds of agents three or four steps apart.
    found = solve(nx.cycle_graph(8), DEFAULT_THREAT, length=1000)
    assert found.decomposition.count_streams() == (5,) * 8
    assert found.gap <= 1e-3
    assert worst_precision(found.decomposition, 1) <= 1 + 1e-9


def test_running_out_of_evaluations_is_not_success_but_still_private(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("corn.covariance.insiders._TOLERANCE", 1e-9)
    monkeypatch.setattr("corn.covariance.insiders._EVALUATIONS_OF_INVERSES", 60)
    found = solve(GRAPHS["wheel 7"], DEFAULT_THREAT)
    assert found.status == "iteration limit"
    assert worst_precision(found.decomposition, 1) <= 1 + 1e-12
    assert found.value > found.lower_bound


def test_a_singular_objective_is_noise_limited_and_bounded() -> None:
    """On a complete graph one step hides any noise that sums to zero: noise must be limited."""
    complete = np.full((6, 6), 1 / 6)
    found = paper_design(complete, 1.0, Corn(max_noise_std=8.0), threat=DEFAULT_THREAT)
    assert found.noise_std.max() <= 8.0 * (1 + 1e-6)
    assert found.status == "loose bound"
    assert found.lower_bound >= 1 / 6 * (1 - 1e-6)
    # Against one insider five agents hide behind each other: 1/5 of LDP's variance each.
    assert found.value == pytest.approx(6 / 5 / 6, rel=0.1)
    assert worst_precision(found.decomposition, 1) <= 1 + 1e-9


GROUPS = {
    "all but one": [tuple(set(range(6)) - {agent}) for agent in range(6)],
    "neighbourhoods": [tuple(sorted({i, (i + 1) % 6, (i - 1) % 6})) for i in range(6)],
    "of several sizes": [(0, 1, 2, 3), (2, 3), (3, 4, 5), (0, 5), (1, 4)],
}


@pytest.mark.parametrize("colluders", [0, 1, 2])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_groups_of_any_size_may_overlap(groups: list[tuple[int, ...]], colluders: int) -> None:
    """Problem (16) as the paper states it, for sets of agents of any size."""
    graph, threat = nx.lollipop_graph(4, 2), ThreatModel(colluders, tuple(groups))
    exact = solve_split(
        horizon(graph), threat.seed_groups(graph), np.ones(6), max_colluders=colluders
    )
    found = solve(graph, threat)
    assert (found.status, found.solver) == ("optimal", "split")
    assert found.value == pytest.approx(exact, rel=1.1e-3)
    assert found.lower_bound <= exact * (1 + 1e-6)
    assert worst_precision(found.decomposition, colluders) <= 1 + 1e-9
    assert found.multipliers is not None
    proved = certify(
        horizon(graph),
        threat.seed_groups(graph),
        found.decomposition,
        found.multipliers,
        max_colluders=colluders,
    )
    assert proved <= exact * (1 + 1e-6)
    # Independent noise takes the place of a split that is no better, and has other inverses.
    if found.decomposition.seed_groups:
        assert proved >= 0.99 * exact


@pytest.mark.parametrize("colluders", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("press", "groups"),
    [
        (press_by_inverses, tuple(sorted(nx.gnp_random_graph(7, 0.6, seed=1).edges))),
        (press_by_updates, tuple(sorted(nx.gnp_random_graph(7, 0.6, seed=1).edges))),
        (press_by_inverses, ((0, 1, 2), (1, 6), (2, 3, 4, 5))),
    ],
)
def test_evaluations_match_inverses_and_differences(
    press: Callable[..., None], groups: SeedGroups, colluders: int
) -> None:
    n, p, rng = 7, 10.0, np.random.default_rng(0)
    streams = Streams.list_all(groups, n)
    outside = list_outside(n, colluders)
    theta = rng.uniform(0.5, 2, n)
    factors = np.where(streams.are_filled, rng.normal(size=streams.members.shape), 0.0)
    log_prior = np.where(outside, 0.0, -np.inf)

    def measure(theta: FloatArray, factors: FloatArray) -> Pressure:
        found = Pressure(streams, log_prior, p)
        press(found, theta, factors, outside)
        return found

    def smooth(theta: FloatArray, factors: FloatArray) -> float:
        return measure(theta, factors).smooth

    split = Decomposition(theta, groups, streams.split(factors))
    coalitions = list(combinations(range(n), colluders))
    x = np.array([np.linalg.inv(split.hidden_from(own)).diagonal() for own in coalitions])
    pressure = measure(theta, factors)
    weights = np.exp(log_prior) * x**p
    assert pressure.smooth == pytest.approx(np.log(weights.sum()) / p)
    assert pressure.mean == pytest.approx((weights * x).sum() / weights.sum())
    np.testing.assert_allclose(pressure.multipliers, weights / weights.sum() / x)
    step = 1e-6
    for i in range(n):
        e = step * np.eye(n)[i]
        slope = (smooth(theta + e, factors) - smooth(theta - e, factors)) / (2 * step)
        assert -pressure.private[i] == pytest.approx(slope, abs=1e-7)
    gradient = -2 * np.einsum("eij,ej->ei", pressure.blocks, factors)
    for k, end in np.argwhere(streams.are_filled):
        e = np.zeros_like(factors)
        e[k, end] = step
        slope = (smooth(theta, factors + e) - smooth(theta, factors - e)) / (2 * step)
        assert gradient[k, end] == pytest.approx(slope, abs=1e-7)


@given(st.integers(1, 6), st.integers(0, 5))
def test_coalitions_are_listed_in_lexicographic_order(num_agents: int, colluders: int) -> None:
    assume(colluders < num_agents)
    outside = list_outside(num_agents, colluders)
    expected = list(combinations(range(num_agents), colluders))
    assert [tuple(np.flatnonzero(~row)) for row in outside] == expected


# Tr(A R) for b = 1 on ER n=30 p=.15, h=200 and one insider, by a solver of the same problem.
@pytest.mark.parametrize(
    ("seeds", "oracle"), [("edges", 75.7), pytest.param("pairs", 59.6, marks=pytest.mark.slow)]
)
def test_updates_come_close_to_the_optimum(seeds: str, oracle: float) -> None:
    graph, threat = nx.gnp_random_graph(30, 0.15, seed=3), ThreatModel(1, seeds)
    found = solve(graph, threat, length=200)
    assert oracle * 0.998 <= found.value <= 1.03 * oracle
    assert found.lower_bound <= oracle * 1.002
    assert worst_precision(found.decomposition, 1) <= 1
    # The multipliers prove a bound by other code, one inverse per coalition.
    assert found.multipliers is not None
    proved = certify(
        horizon(graph, 200),
        threat.seed_groups(graph),
        found.decomposition,
        found.multipliers,
        max_colluders=1,
    )
    assert 0.9 * found.lower_bound < proved <= oracle * 1.002


@pytest.mark.parametrize("colluders", [1, 2])
def test_both_evaluations_agree_with_caps_of_each_agents_own(
    colluders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps, threat = np.where(np.arange(8) % 2, 4.0, 1.0), ThreatModel(colluders, "pairs")
    monkeypatch.setattr("corn.covariance.insiders._TOLERANCE_WITH_UPDATES", 1e-3)
    monkeypatch.setattr("corn.covariance.insiders.affordable_evaluations", lambda *_: 3000)
    W, found = metropolis(nx.path_graph(8)), []
    for least in (100, 2):
        monkeypatch.setattr("corn.covariance.insiders._LEAST_FOR_UPDATES", least)
        found.append(paper_design(W, caps, objective=Horizon(50), threat=threat))
    assert found[1].value == pytest.approx(found[0].value, rel=5e-3)
    assert is_private(found[1].covariance, caps)
    assert max(v.lower_bound for v in found) <= min(v.value for v in found)


def test_large_networks_are_designed_on_sparse_seeds() -> None:
    found = design(load_network("ring:60", mixing="gossip"), 1.0, objective=Horizon(50))
    assert (found.solver, found.threat.seeds) == ("split", "sparse:8")
    assert max(found.decomposition.count_streams()) <= 2 + 8 + 1
    assert worst_precision(found.decomposition, 1) <= 1


@pytest.mark.parametrize(
    ("num_agents", "insiders", "evaluations"),
    [(60, 1, 500), (1000, 1, 500), (2000, 1, 62), (20_000, 1, 40), (200, 2, 83), (600, 2, 20)],
)
def test_larger_networks_have_fewer_evaluations(
    num_agents: int, insiders: int, evaluations: int
) -> None:
    assert affordable_evaluations(num_agents, insiders) == evaluations


def test_coalitions_that_cannot_all_be_checked_are_refused_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the search began")

    monkeypatch.setattr("corn.covariance.insiders.press_by_updates", fail)
    network = load_network("ring:669", mixing="gossip")
    with pytest.raises(InvalidArgumentError, match="223,446 coalitions of 2"):
        design(network, 1.0, objective=Horizon(5), threat=ThreatModel(2))
