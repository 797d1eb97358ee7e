"""The first-order method: oracles, certificates, and every coalition checked by brute force."""

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.covariance import (
    DEFAULT_THREAT,
    DesignProblem,
    FirstOrder,
    Horizon,
    SeedGroups,
    ThreatModel,
    design,
)
from corn.covariance.certificate import SplitSolution
from corn.errors import CornWarning
from corn.topology import Graph, load_network, mixing_matrix
from tests.covariance.coalition_check import exact_worst_precision, worst_precision
from tests.oracles.sdp import SplitSdp

GRAPHS = {"cycle 6": nx.cycle_graph(6), "wheel 7": nx.wheel_graph(7)}
# Tr(A R) for b = 1, h = 100, Metropolis weights, one θ for all: cvxpy with Clarabel.
ORACLES = [
    ("cycle 6", "edges", (25.92436, 35.90059, 101.7121)),
    ("cycle 6", "pairs", (25.87164, 32.57254, 40.53124)),
    ("wheel 7", "edges", (21.21284, 26.20415, 35.83250)),
    ("wheel 7", "pairs", (21.13655, 25.97210, 31.52884)),
]
CASES = [(g, s, q, v) for g, s, values in ORACLES for q, v in enumerate(values)]


def horizon(graph: Graph, length: float) -> FloatArray:
    return Horizon(length).matrix(mixing_matrix(graph))


def solve(
    graph: Graph,
    threat: ThreatModel,
    solver: FirstOrder | SplitSdp = FirstOrder(),  # noqa: B008 - frozen
    length: float = 100,
) -> SplitSolution:
    problem = DesignProblem(horizon(graph, length), np.ones(len(graph)), threat=threat)
    return solver.solve_split(problem, threat.seed_groups(graph))


@pytest.mark.parametrize(("name", "seeds", "colluders", "oracle"), CASES)
def test_both_solvers_match_the_oracles(
    name: str, seeds: str, colluders: int, oracle: float
) -> None:
    threat = ThreatModel(colluders, seeds, "common")
    exact = solve(GRAPHS[name], threat, SplitSdp())
    assert exact.value == pytest.approx(oracle, rel=1e-5)
    first = solve(GRAPHS[name], threat, FirstOrder(tolerance=1e-4))
    assert first.converged
    assert first.value == pytest.approx(oracle, rel=1.01e-4)
    assert first.lower_bound <= oracle * (1 + 1e-6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[FloatArray, SeedGroups, int, float]:
    n = draw(st.integers(3, 5))
    graph = nx.path_graph(n)
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    graph.add_edges_from((i, j) for i, j in draw(st.lists(pairs, max_size=5)) if i != j)
    sets = st.sets(st.integers(0, n - 1), min_size=2)
    groups = draw(st.lists(sets.map(lambda s: tuple(sorted(s))), max_size=5, unique=True))
    cap = draw(st.sampled_from([0.02, 1.0, 50.0]))
    length = draw(st.sampled_from([2, 30]))
    A = horizon(graph, length)
    # Noise that a singular A hides is unlimited; design() adds a ridge before it comes here.
    eigenvalues = np.linalg.eigvalsh(A)
    assume(eigenvalues[0] > 1e-6 * eigenvalues[-1])
    return A, tuple(groups), draw(st.integers(0, n - 1)), cap


@settings(max_examples=25)
@given(problem=problems(), common=st.booleans())
def test_bound_optimum_and_value_are_in_order_and_every_split_is_feasible(
    problem: tuple[FloatArray, SeedGroups, int, float], common: bool
) -> None:
    A, groups, colluders, cap = problem
    threat = ThreatModel(colluders, groups, "common" if common else "per-agent")
    posed = DesignProblem(A, np.full(len(A), cap), threat=threat)
    exact = SplitSdp().solve_split(posed, groups)
    found = FirstOrder(max_evaluations=2000).solve_split(posed, groups)
    for solution in (exact, found):
        assert worst_precision(solution.decomposition, colluders) <= cap * (1 + 1e-9)
        assert solution.value == pytest.approx(
            float(np.trace(A @ solution.decomposition.covariance)), rel=1e-9
        )
        assert solution.lower_bound <= solution.value
    assert found.lower_bound <= exact.value * (1 + 1e-9)
    assert exact.lower_bound <= found.value * (1 + 1e-9)
    assert found.value <= np.trace(A) / cap * (1 + 1e-12)
    if found.converged:
        assert exact.value >= found.value / (1 + 1.01e-3)


@pytest.mark.parametrize("seeds", ["pairs", "leave-one-out"])
def test_the_cap_holds_in_exact_arithmetic(seeds: str) -> None:
    cap, threat = 0.02, ThreatModel(1, seeds)
    found = design(
        load_network("ring:6", mixing="gossip"), cap, objective=Horizon(1000), threat=threat
    )
    assert 0.999 * cap < exact_worst_precision(found.decomposition, 1) <= cap


def test_more_colluders_never_cost_less() -> None:
    solutions = [solve(GRAPHS["wheel 7"], ThreatModel(q, "pairs")) for q in range(4)]
    for fewer, more in pairwise(solutions):
        assert more.value >= fewer.lower_bound


@pytest.mark.parametrize(
    ("seeds", "colluders"), [("pairs", 5), ("groups:6", 0), ("groups:2", 1), ("global", 1)]
)
def test_seeds_that_insiders_know_leave_ldp(seeds: str, colluders: int) -> None:
    graph = GRAPHS["cycle 6"]
    solution = solve(graph, ThreatModel(colluders, seeds))
    assert solution.value == pytest.approx(float(np.trace(horizon(graph, 100))), rel=1e-3)
    assert worst_precision(solution.decomposition, colluders) <= 1 + 1e-9


def test_private_noise_per_agent_repairs_edge_seeds() -> None:
    """A degree-1 agent has one seed, which its neighbour knows: only its own θ need be large."""
    graph, threats = nx.star_graph(5), (ThreatModel(1, "edges"), ThreatModel(1, "edges", "common"))
    per_agent, common = (solve(graph, threat) for threat in threats)
    assert common.value == pytest.approx(float(np.trace(horizon(graph, 100))), rel=1e-3)
    assert per_agent.value <= common.value * (1 + 1e-9)
    lollipop = nx.lollipop_graph(5, 1)
    per_agent, common = (solve(lollipop, threat) for threat in threats)
    assert per_agent.value < 0.6 * common.value


def test_pair_seeds_draw_at_most_one_stream_per_pair_and_one_private() -> None:
    solution = solve(nx.cycle_graph(6), DEFAULT_THREAT)
    assert solution.decomposition.count_streams() == (5,) * 6  # opposite agents' seeds died out
    assert all(factor.shape == (2, 1) for factor in solution.decomposition.factors)


def test_running_out_of_evaluations_is_not_success_but_still_private() -> None:
    solution = solve(GRAPHS["wheel 7"], DEFAULT_THREAT, FirstOrder(1e-9, max_evaluations=60))
    assert not solution.converged
    assert worst_precision(solution.decomposition, 1) <= 1 + 1e-12
    assert solution.value > solution.lower_bound


COMMON = {
    "ladder 2x5": nx.ladder_graph(5),
    "ladder 2x3": nx.ladder_graph(3),
    "prism": nx.circular_ladder_graph(3),
    "barbell": nx.barbell_graph(3, 0),
    "lollipop": nx.lollipop_graph(4, 2),
    "path 6": nx.path_graph(6),
}


@pytest.mark.parametrize("graph", COMMON.values(), ids=COMMON.keys())
def test_common_private_noise_converges_to_the_exact_optimum(graph: Graph) -> None:
    """Groups of two symmetric agents start rank-deficient, and must gain the missing stream."""
    threat = ThreatModel(1, "edges", "common")
    found, exact = (
        solve(graph, threat, solver, length=50) for solver in (FirstOrder(), SplitSdp())
    )
    assert found.converged
    assert found.evaluations < 2000
    assert found.value == pytest.approx(exact.value, rel=1.1e-3)
    assert found.lower_bound <= exact.value * (1 + 1e-9)
    assert worst_precision(found.decomposition, 1) <= 1 + 1e-9
    if len(graph) == 10:
        assert exact.value == pytest.approx(22.3123, rel=1e-5)


def test_a_design_that_takes_minutes_is_announced() -> None:
    with pytest.warns(CornWarning, match="75 coalitions of insiders among 75 agents takes about 1"):
        solve(nx.cycle_graph(75), ThreatModel(1, "edges"), FirstOrder(0.5, max_evaluations=1))


def test_large_groups_converge_although_the_objective_is_ill_conditioned() -> None:
    graph = nx.gnp_random_graph(9, 0.5, seed=4)
    found = solve(graph, ThreatModel(1, "leave-one-out"), FirstOrder(), length=1000)
    assert found.converged
    assert found.evaluations < 2000
