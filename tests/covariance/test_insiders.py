"""Designs against insiders: oracles, certificates, and every coalition checked by brute force."""

from itertools import combinations, pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corn.arrays import FloatArray
from corn.covariance import Horizon, design
from corn.covariance.decomposition import Decomposition
from corn.covariance.groups import SeedGroups
from corn.covariance.insiders import InsiderSolution, solve_insiders
from corn.covariance.insiders_sdp import solve_insiders_sdp
from corn.covariance.threat import ThreatModel
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
    A = horizon(graph, length)
    # Noise that a singular A hides is unlimited; design() adds a ridge before it comes here.
    eigenvalues = np.linalg.eigvalsh(A)
    assume(eigenvalues[0] > 1e-6 * eigenvalues[-1])
    return A, tuple(groups), draw(st.integers(0, n - 1)), cap


@settings(max_examples=25)
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


def test_pair_seeds_draw_at_most_one_stream_per_pair_and_one_private() -> None:
    solution = solve(nx.cycle_graph(6), "pairs", 1)
    assert solution.decomposition.count_streams() == (5,) * 6  # opposite agents' seeds died out
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


W = mixing_matrix(nx.petersen_graph())


def test_the_front_door_certifies_and_keeps_the_shares() -> None:
    threat = ThreatModel(1, "pairs")
    result = design(W, 0.5, objective=Horizon(50), threat=threat)
    assert result.status == "optimal"
    assert (result.solver, result.threat, result.num_coalitions) == ("first-order", threat, 10)
    assert result.gap <= 1e-3
    np.testing.assert_allclose(result.covariance, result.decomposition.covariance)
    assert worst_precision(result.decomposition, 1) <= 0.5 * (1 + 1e-9)
    exact = design(W, 0.5, objective=Horizon(50), threat=threat, solver="sdp")
    assert exact.value == pytest.approx(result.value, rel=2e-3)


def test_no_insiders_and_one_seed_is_the_papers_problem() -> None:
    one_seed = design(W, 1.0, threat=ThreatModel(0, "global"))
    assert one_seed.value == pytest.approx(2.025, rel=1e-6)
    given = design(W, 1.0, threat=ThreatModel(0, (tuple(range(10)),)))
    assert given.value == pytest.approx(one_seed.value)
    covering = design(W, 1.0, threat=ThreatModel(0, "balls:2"))
    assert covering.value == pytest.approx(one_seed.value)


def test_overlapping_seeds_without_insiders_lie_between_one_seed_and_ldp() -> None:
    one_seed, edges, ldp = (
        design(W, 1.0, objective=Horizon(50), threat=ThreatModel(0, seeds)).value
        for seeds in ("global", "edges", "groups:10")
    )
    assert one_seed <= edges * (1 + 1e-6) < ldp


def test_singular_objectives_are_noise_limited_and_bounded() -> None:
    """On a complete graph one step hides any noise that sums to zero: noise must be limited."""
    complete = np.full((6, 6), 1 / 6)
    result = design(complete, 1.0, threat=ThreatModel(1, "pairs"), max_noise_std=8.0)
    assert result.noise_std.max() <= 8.0 * (1 + 1e-6)
    assert result.status == "loose bound"
    assert result.lower_bound >= 1 / 6 * (1 - 1e-6)
    # Against one insider five agents hide behind each other: 1/5 of LDP's variance each.
    assert result.value == pytest.approx(6 / 5 / 6, rel=0.1)
    assert worst_precision(result.decomposition, 1) <= 1 + 1e-9


def test_streams_that_died_out_are_not_drawn() -> None:
    # On this ring no optimum needs seeds of agents three or four steps apart.
    W = mixing_matrix(nx.cycle_graph(8))
    result = design(W, 1.0, objective=Horizon(1000), threat=ThreatModel(1, "pairs"))
    assert result.decomposition.count_streams() == (5,) * 8
    assert result.gap <= 1e-3
    assert worst_precision(result.decomposition, 1) <= 1 + 1e-9


def test_dropping_weak_seeds_is_reported_and_stays_private() -> None:
    graph = nx.karate_club_graph().subgraph(range(12))
    matrix = mixing_matrix(nx.convert_node_labels_to_integers(graph))
    arguments = {"objective": Horizon(100), "threat": ThreatModel(1, "pairs"), "tolerance": 1e-2}
    full = design(matrix, 1.0, **arguments)  # type: ignore[arg-type]
    lean = design(matrix, 1.0, drop_share=0.03, **arguments)  # type: ignore[arg-type]
    assert lean.num_dropped_groups > 0
    assert lean.value_before_dropping == pytest.approx(full.value, rel=2e-2)
    groups = len(lean.decomposition.seed_groups)
    assert groups == len(full.decomposition.seed_groups) - lean.num_dropped_groups
    assert lean.value < 1.2 * full.value
    assert worst_precision(lean.decomposition, 1) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "dual"}, "'auto' or 'sdp' against insiders"),
        ({"drop_share": 2.0}, r"drop_share must be in \[0, 1\]"),
        ({"mechanism": "decor"}, "'corn' only"),
    ],
)
def test_impossible_combinations(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        design(W, 1.0, threat=ThreatModel(1, "pairs"), **options)  # type: ignore[arg-type]


def test_baselines_do_not_pretend_to_hold_against_insiders() -> None:
    with pytest.raises(InvalidArgumentError, match="against an eavesdropper only"):
        design(W, 1.0, mechanism="decor", threat=ThreatModel(1))
    assert design(W, 1.0, mechanism="ldp", threat=ThreatModel(1)).value == pytest.approx(2.5)


def test_common_private_noise_holds_for_disjoint_groups_too() -> None:
    matrix = mixing_matrix(nx.path_graph(4))
    threat = ThreatModel(0, ((0, 1),), "common")
    result = design(matrix, 1.0, objective=Horizon(50), threat=threat)
    exact = design(matrix, 1.0, objective=Horizon(50), threat=threat, solver="sdp")
    assert result.value == pytest.approx(exact.value, rel=1e-3)
    assert np.ptp(result.decomposition.private_variance) == 0


def test_a_loose_bound_is_called_that() -> None:
    complete = np.full((6, 6), 1 / 6)
    result = design(complete, 1.0, threat=ThreatModel(1, "pairs"))
    assert result.status == "loose bound"


def test_dropping_needs_seeds_to_drop() -> None:
    with pytest.raises(InvalidArgumentError, match="drop_share applies where seed groups overlap"):
        design(W, 1.0, drop_share=0.1)
