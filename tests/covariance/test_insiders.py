"""Designs against insiders: oracles, certificates, and every coalition checked by brute force."""

from itertools import combinations, pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.arrays import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.covariance.insiders import InsiderSolution, solve_insiders
from corn.covariance.insiders_sdp import solve_insiders_sdp
from corn.covariance.objective import Horizon
from corn.covariance.threat import SeedGroups, ThreatModel
from corn.errors import InvalidArgumentError
from corn.topology import Graph, mixing_matrix

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


def worst_precision(decomposition: Decomposition, max_colluders: int) -> float:
    """The largest [(R^(I))⁻¹]_ii over all coalitions up to this size, one solve at a time."""
    n = decomposition.num_agents
    worst = 0.0
    for size in range(max_colluders + 1):
        for coalition in combinations(range(n), size):
            honest = [i for i in range(n) if i not in coalition]
            hidden = decomposition.hidden_from(coalition)[np.ix_(honest, honest)]
            worst = max(worst, float(np.diag(np.linalg.inv(hidden)).max()))
    return worst


@pytest.mark.parametrize(("name", "seeds", "colluders", "oracle"), CASES)
def test_oracles(name: str, seeds: str, colluders: int, oracle: float) -> None:
    groups = ThreatModel(colluders, seeds).seed_groups(GRAPHS[name])
    A = horizon(GRAPHS[name], 100)
    arguments = {"seed_groups": groups, "max_colluders": colluders, "common_private_noise": True}
    exact = solve_insiders_sdp(A, 1.0, **arguments)  # type: ignore[arg-type]
    assert exact.value == pytest.approx(oracle, rel=1e-5)
    first = solve_insiders(A, 1.0, tolerance=1e-4, **arguments)  # type: ignore[arg-type]
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
    return horizon(graph, length), tuple(groups), draw(st.integers(0, n - 1)), cap


@settings(deadline=None, max_examples=25)
@given(problem=problems(), common=st.booleans())
def test_bound_below_exact_below_found_and_all_feasible(
    problem: tuple[FloatArray, SeedGroups, int, float], common: bool
) -> None:
    A, groups, colluders, cap = problem
    arguments = {
        "seed_groups": groups,
        "max_colluders": colluders,
        "common_private_noise": common,
    }
    exact = solve_insiders_sdp(A, cap, **arguments)  # type: ignore[arg-type]
    found = solve_insiders(A, cap, max_evaluations=2000, **arguments)  # type: ignore[arg-type]
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


def solve(graph: Graph, seeds: str, colluders: int, **options: object) -> InsiderSolution:
    groups = ThreatModel(colluders, seeds).seed_groups(graph)
    return solve_insiders(
        horizon(graph, 100),
        1.0,
        seed_groups=groups,
        max_colluders=colluders,
        **options,  # type: ignore[arg-type]
    )


def test_more_colluders_never_cost_less() -> None:
    solutions = [solve(GRAPHS["wheel 7"], "pairs", q) for q in range(4)]
    for fewer, more in pairwise(solutions):
        assert more.value >= fewer.lower_bound


@pytest.mark.parametrize(
    ("seeds", "colluders"), [("pairs", 5), ("groups:6", 0), ("groups:2", 1), ("global", 1)]
)
def test_what_is_worthless_is_ldp(seeds: str, colluders: int) -> None:
    graph = GRAPHS["cycle 6"]
    solution = solve(graph, seeds, colluders)
    assert solution.value == pytest.approx(float(np.trace(horizon(graph, 100))), rel=1e-3)
    assert worst_precision(solution.decomposition, colluders) <= 1 + 1e-9


def test_private_noise_per_agent_repairs_edge_seeds() -> None:
    """A degree-1 agent has one seed, which its neighbour knows: only its own θ need be large."""
    graph = nx.star_graph(5)
    per_agent, common = (solve(graph, "edges", 1, common_private_noise=c) for c in (False, True))
    assert common.value == pytest.approx(float(np.trace(horizon(graph, 100))), rel=1e-3)
    assert per_agent.value <= common.value * (1 + 1e-9)
    lollipop = nx.lollipop_graph(5, 1)
    per_agent, common = (solve(lollipop, "edges", 1, common_private_noise=c) for c in (False, True))
    assert per_agent.value < 0.6 * common.value


def test_pair_seeds_draw_one_stream_per_pair_and_one_private() -> None:
    solution = solve(nx.cycle_graph(6), "pairs", 1)
    assert solution.decomposition.count_streams() == (6,) * 6
    assert all(factor.shape == (2, 1) for factor in solution.decomposition.factors)


def test_running_out_of_evaluations_is_not_success_but_still_private() -> None:
    solution = solve(GRAPHS["wheel 7"], "pairs", 1, tolerance=1e-9, max_evaluations=60)
    assert not solution.converged
    assert worst_precision(solution.decomposition, 1) <= 1 + 1e-12
    assert solution.value > solution.lower_bound


def test_too_much_memory_is_refused_with_the_numbers() -> None:
    n = 120
    groups = tuple(combinations(range(n), 2))
    with pytest.raises(InvalidArgumentError, match=r"7,140 coalitions with 7,140 seed groups need"):
        solve_insiders(np.eye(n), 1.0, seed_groups=groups, max_colluders=2)
