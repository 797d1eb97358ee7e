"""Masks and private noise for exact sums: optimal, and checked by independent computations."""

import math
from dataclasses import replace
from itertools import combinations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn import PrivacyBudget, design, load_network, make_plan
from corn.covariance import Decomposition, ThreatModel, coalitions
from corn.covariance.coalitions import (
    bound_second_eigenvalue,
    check_connectivity,
    has_connectivity,
    worst_precisions,
)
from corn.covariance.decomposition import hidden_precision, masked_precision
from corn.covariance.design import design_masks, least_variance
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.plan import verify_plan

BUDGET = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=100, clip=0.1)


def pairs_of(graph: nx.Graph) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((min(e), max(e)) for e in graph.edges))


def every_pair(n: int) -> tuple[tuple[int, int], ...]:
    return tuple(combinations(range(n), 2))


@pytest.mark.parametrize("n", [2, 8, 20, 50])
@pytest.mark.parametrize("q", [0, 1, 2])
def test_masks_reach_the_least_noise_of_any_seeds(n: int, q: int) -> None:
    if q >= n:
        pytest.skip("nobody is left to protect")
    caps = np.full(n, 3.0)
    noise = design_masks(caps, every_pair(n), q)
    assert noise.total_variance == pytest.approx(least_variance(n, 3.0, q), rel=1e-11)
    assert (worst_precisions(noise, q) <= caps).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(3, 7), data=st.data())
def test_masks_are_the_limit_of_strong_pairwise_noise(
    seed: int, n: int, data: st.DataObject
) -> None:
    graph = nx.gnp_random_graph(n, 0.5, seed=seed)
    coalition = data.draw(st.lists(st.integers(0, n - 1), max_size=n - 1, unique=True))
    theta = np.random.default_rng(seed).uniform(0.5, 2.0, n)
    pairs = pairs_of(graph)
    strong = tuple(1e3 * np.array([[1.0], [-1.0]]) for _ in pairs)
    gaussian = Decomposition(theta, pairs, strong)
    masked = Decomposition(theta, pairs, is_masked=True)
    honest, limit = hidden_precision(masked, coalition)
    same, found = hidden_precision(gaussian, coalition)
    assert honest == same
    np.testing.assert_allclose(limit, found, rtol=1e-4)


def test_groups_of_several_agents_are_known_to_whoever_is_in_them() -> None:
    noise = Decomposition(np.ones(5), ((0, 1, 2), (2, 3, 4)), is_masked=True)
    np.testing.assert_allclose(masked_precision(noise, []), np.full(5, 0.2))
    # Agent 2 knows both seeds; agent 0 knows the first.
    np.testing.assert_allclose(masked_precision(noise, [2])[[0, 1, 3, 4]], 1.0)
    np.testing.assert_allclose(masked_precision(noise, [0])[[1, 2, 3, 4]], [1, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("graph", ["er:n=12,p=0.3,seed=1", "ring:9", "star:8"])
@pytest.mark.parametrize("q", [0, 1, 2])
def test_no_other_noise_has_a_smaller_sum(graph: str, q: int) -> None:
    network = load_network(graph, mixing="gossip")
    noise = design(network, BUDGET, threat=ThreatModel(q, "pairs")).decomposition
    cap = float(worst_precisions(noise, q).max())
    assert noise.total_variance >= least_variance(network.num_agents, cap, q) * (1 - 1e-9)


def test_seeds_that_insiders_can_cut_are_refused() -> None:
    caps = np.ones(6)
    assert design_masks(caps, pairs_of(nx.cycle_graph(6)), 1).num_agents == 6
    for graph, q in [(nx.cycle_graph(6), 2), (nx.path_graph(6), 1), (nx.star_graph(5), 1)]:
        with pytest.raises(InfeasibleError, match="seeds must join all agents"):
            design_masks(caps, pairs_of(graph), q)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(5, 9), q=st.integers(1, 3))
def test_connectivity_by_flows_agrees_with_removing_every_coalition(
    seed: int, n: int, q: int
) -> None:
    graph = nx.gnp_random_graph(n, 0.6, seed=seed)
    noise = Decomposition(np.ones(n), pairs_of(graph), is_masked=True)
    survives = all(
        nx.is_connected(graph.subgraph(set(graph) - set(some)))
        for size in range(q + 1)
        for some in combinations(graph, size)
    )
    assert check_connectivity(noise, q) == survives
    assert has_connectivity(noise, q) <= survives


@pytest.mark.parametrize(
    "graph",
    [
        nx.random_regular_graph(8, 300, seed=1),
        nx.cycle_graph(120),
        nx.complete_graph(60),
        nx.disjoint_union(nx.complete_graph(30), nx.complete_graph(30)),
    ],
    ids=["regular", "cycle", "complete", "two parts"],
)
def test_lanczos_bounds_the_second_eigenvalue_from_below(
    graph: nx.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalitions, "_MOST_DENSE", 10)
    true = np.linalg.eigvalsh(nx.laplacian_matrix(graph).toarray().astype(float))[1]
    for _ in range(5):
        bound = bound_second_eigenvalue(pairs_of(graph), len(graph))
        assert bound <= true + 1e-6
    # Of a graph that mixes well the bound is useful.
    if true > 1:
        assert bound > 0.7 * true


def test_a_large_network_is_designed_and_verified_by_its_connectivity() -> None:
    plan = make_plan(load_network("ring:60", mixing="sum"), BUDGET, threat=ThreatModel(3))
    assert plan.central_ratio == pytest.approx(60 / 57, rel=1e-9)
    assert verify_plan(plan).passed
    # Too few partners: three insiders may cut an agent off.
    weak = ThreatModel(3, "partners:3")
    with pytest.raises(InfeasibleError):
        make_plan(load_network("ring:60", mixing="sum"), BUDGET, threat=weak)


def test_verification_finds_noise_for_fewer_insiders() -> None:
    plan = make_plan(load_network("ring:6", mixing="sum"), BUDGET)
    assert verify_plan(plan).passed
    theta = plan.decomposition.private_variance * 5 / 6  # enough against an eavesdropper alone
    weak = replace(plan, decomposition=replace(plan.decomposition, private_variance=theta))
    problems = verify_plan(weak).problems
    assert any("instead of 10" in problem for problem in problems)
    cut = replace(plan.decomposition, seed_groups=plan.decomposition.seed_groups[4:], factors=())
    assert not verify_plan(replace(plan, decomposition=cut)).passed


def test_a_design_for_sums_states_its_optimum() -> None:
    noise = design(load_network("er:n=20,p=0.2,seed=1", mixing="sum"), BUDGET)
    assert noise.central_ratio == pytest.approx(20 / 19, rel=1e-11)
    assert noise.status == "optimal"
    assert noise.gap < 1e-11
    ldp = design(load_network("ring:5", mixing="sum"), BUDGET, mechanism="ldp")
    assert ldp.central_ratio == pytest.approx(5)


def test_eavesdroppers_need_the_seeds_of_links_only() -> None:
    plan = make_plan(load_network("ring:6", mixing="sum"), BUDGET, threat=ThreatModel(0))
    assert len(plan.decomposition.seed_groups) == 6
    assert plan.central_ratio == pytest.approx(1, rel=1e-9)


def test_the_strictest_promise_decides() -> None:
    budget = replace(BUDGET, epsilon=(1.0, 10.0, 10.0))
    plan = make_plan(load_network("ring:3", mixing="sum"), budget)
    assert plan.central_ratio == pytest.approx(3 / 2, rel=1e-9)
    found = verify_plan(plan)
    assert found.passed
    assert found.guarantees[1].epsilon < 2


def test_one_agent_draws_alone() -> None:
    noise = design_masks(np.array([4.0]), (), 0)
    assert noise.private_variance.tolist() == [pytest.approx(0.25)]


def test_masks_have_no_streams_of_normals() -> None:
    with pytest.raises(InvalidArgumentError):
        Decomposition(np.ones(2), ((0, 1),), (np.ones((2, 1)),), is_masked=True)


@pytest.mark.parametrize("n", [5, 9, 14, 20, 40])
@pytest.mark.parametrize("q", [1, 2, 3])
def test_default_seeds_cover_more_than_twice_the_insiders_of_the_promise(n: int, q: int) -> None:
    threat = ThreatModel(q).resolve(nx.cycle_graph(n), "sum")
    seeds = nx.Graph(threat.seed_groups(nx.cycle_graph(n), "sum"))
    # All pairs if there are no more partners; otherwise 2q + 4 of each agent, none of them twice.
    assert {degree for _, degree in seeds.degree} == {min(2 * q + 4, n - 1)}
    assert nx.node_connectivity(seeds) == min(2 * q + 4, n - 1)


def test_more_insiders_than_the_margin_covers_see_one_release() -> None:
    plan = make_plan(load_network("ring:12", mixing="sum"), BUDGET, threat=ThreatModel(1))
    noise, theta = plan.decomposition, float(plan.decomposition.private_variance[0])
    partners = sorted({a for pair in noise.seed_groups if 0 in pair for a in pair} - {0})
    assert masked_precision(noise, partners[:5])[0] == pytest.approx(1 / (7 * theta))
    assert masked_precision(noise, partners)[0] == pytest.approx(1 / theta)


def test_seeds_of_all_pairs_remain_a_choice() -> None:
    plan = make_plan(load_network("ring:12", mixing="sum"), BUDGET, threat=ThreatModel(1, "pairs"))
    assert plan.decomposition.seed_groups == every_pair(12)


@pytest.mark.slow
def test_ten_thousand_agents() -> None:
    network = load_network("ring:10000", mixing="sum")
    plan = make_plan(network, BUDGET, threat=ThreatModel(3))
    assert plan.central_ratio == pytest.approx(10_000 / 9_997, rel=1e-7)
    assert math.isfinite(plan.max_parameters)
