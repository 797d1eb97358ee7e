"""Low-rank updates over coalitions: derivatives, oracles, certificates, and interruption."""

from itertools import combinations

import networkx as nx
import numpy as np
import pytest

from corn.checks import FloatArray
from corn.covariance import (
    Corn,
    Decomposition,
    Design,
    DesignProblem,
    FirstOrder,
    Horizon,
    LowRank,
    ThreatModel,
    design,
    is_private,
)
from corn.covariance.certificate import certify
from corn.covariance.coalitions import Assembly, list_coalitions
from corn.covariance.low_rank import (
    PairUpdates,
    affordable_evaluations,
)
from corn.errors import InvalidArgumentError
from corn.topology import load_network, mixing_matrix
from tests.covariance.coalition_check import worst_precision

GRAPH = nx.gnp_random_graph(30, 0.15, seed=3)


def priors(num_agents: int, max_colluders: int) -> FloatArray:
    coalitions = list(combinations(range(num_agents), max_colluders))
    log_prior = np.zeros((len(coalitions), num_agents))
    for row, coalition in enumerate(coalitions):
        log_prior[row, list(coalition)] = -np.inf
    return log_prior


@pytest.mark.parametrize("colluders", [0, 1, 2, 3])
def test_updates_match_inverses_and_differences(colluders: int) -> None:
    n, p, rng = 7, 10.0, np.random.default_rng(0)
    graph = nx.gnp_random_graph(n, 0.6, seed=1)
    pairs = np.array(sorted(graph.edges))
    updates = PairUpdates(pairs, num_agents=n, max_colluders=colluders)
    theta, factors = rng.uniform(0.5, 2, n), rng.normal(size=(len(pairs), 2))
    log_prior = priors(n, colluders)

    def smooth(theta: FloatArray, factors: FloatArray) -> float:
        found = updates.press(theta, factors, log_prior, p)
        assert found is not None
        return found.smooth

    split = Decomposition(theta, tuple(map(tuple, pairs.tolist())), tuple(factors[:, :, None]))
    x = np.array(
        [
            np.linalg.inv(split.hidden_from(coalition)).diagonal()
            for coalition in combinations(range(n), colluders)
        ]
    )
    pressure = updates.press(theta, factors, log_prior, p)
    assert pressure is not None
    weights = np.exp(log_prior) * x**p
    assert pressure.smooth == pytest.approx(np.log(weights.sum()) / p)
    assert pressure.mean == pytest.approx((weights * x).sum() / weights.sum())
    step = 1e-6
    for i in range(n):
        e = step * np.eye(n)[i]
        slope = (smooth(theta + e, factors) - smooth(theta - e, factors)) / (2 * step)
        assert -pressure.private[i] == pytest.approx(slope, abs=1e-7)
    gradient = -2 * np.einsum("eij,ej->ei", pressure.blocks[0], factors)
    for k, end in np.ndindex(factors.shape):
        e = np.zeros_like(factors)
        e[k, end] = step
        slope = (smooth(theta, factors + e) - smooth(theta, factors - e)) / (2 * step)
        assert gradient[k, end] == pytest.approx(slope, abs=1e-7)


# Tr(A R) for b = 1 on ER n=30 p=.15, h=200 and one insider, by a solver of the same problem.
@pytest.mark.parametrize(
    ("seeds", "oracle"), [("edges", 75.7), pytest.param("pairs", 59.6, marks=pytest.mark.slow)]
)
def test_the_value_is_close_to_the_optimum(seeds: str, oracle: float) -> None:
    threat = ThreatModel(1, seeds)
    A = Horizon(200).matrix(mixing_matrix(GRAPH))
    problem = DesignProblem(A, np.ones(30), threat=threat)
    groups = threat.seed_groups(GRAPH)
    solution = LowRank().solve_split(problem, groups)
    assert oracle * 0.998 <= solution.value <= 1.03 * oracle
    assert solution.lower_bound <= oracle * 1.002
    assert worst_precision(solution.decomposition, 1) <= 1
    assert solution.value == pytest.approx(problem.value(solution.decomposition.covariance))
    # The multipliers prove the bound by other code, one inverse per coalition.
    coalitions = list_coalitions(groups, num_agents=30, max_colluders=1)
    assert solution.multipliers is not None
    proved = certify(
        A,
        Assembly(groups, coalitions, 30),
        solution.decomposition,
        solution.multipliers,
        common=False,
    )
    assert proved > 0


def test_both_solvers_agree_with_caps_of_each_agents_own() -> None:
    caps = np.where(np.arange(10) % 2, 4.0, 1.0)
    values = [
        design(
            load_network(nx.path_graph(10), mixing="gossip"),
            caps,
            objective=Horizon(50),
            threat=ThreatModel(1, "pairs"),
            mechanism=Corn(solver=solver),
        )
        for solver in (FirstOrder(), LowRank(1e-3, 3000))
    ]
    assert values[1].value == pytest.approx(values[0].value, rel=5e-3)
    assert is_private(values[1].covariance, caps)
    assert max(v.lower_bound for v in values) <= min(v.value for v in values)


def test_two_insiders() -> None:
    graph = load_network(nx.wheel_graph(7), mixing="gossip")
    made = [
        design(
            graph,
            1.0,
            objective=Horizon(100),
            threat=ThreatModel(2, "pairs"),
            mechanism=Corn(solver=solver),
        )
        for solver in (FirstOrder(), LowRank(1e-3, 3000))
    ]
    assert made[1].value == pytest.approx(made[0].value, rel=5e-3)
    assert worst_precision(made[1].decomposition, 2) <= 1


def test_large_networks_are_designed_by_updates_on_sparse_seeds() -> None:
    result = design(load_network("ring:60", mixing="gossip"), 1.0, objective=Horizon(50))
    assert (result.solver, result.threat.seeds) == ("low-rank", "sparse:8")
    assert max(result.decomposition.count_streams()) <= 2 + 8 + 1
    assert worst_precision(result.decomposition, 1) <= 1


def test_a_short_search_starts_near_the_optimum() -> None:
    def solve(max_evaluations: int) -> Design:
        solver = LowRank(max_evaluations=max_evaluations)
        return design(
            load_network("torus:5x5", mixing="gossip"),
            1.0,
            objective=Horizon(200),
            mechanism=Corn(solver),
        )

    short, full = solve(40), solve(500)
    assert worst_precision(short.decomposition, 1) <= 1
    assert full.value <= short.value <= 1.15 * full.value


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

    monkeypatch.setattr(PairUpdates, "press", fail)
    with pytest.raises(InvalidArgumentError, match="223,446 coalitions of 2"):
        design(
            load_network("ring:669", mixing="gossip"),
            1.0,
            objective=Horizon(5),
            threat=ThreatModel(2),
        )


@pytest.mark.parametrize("threat", [ThreatModel(1, "pairs", "common"), ThreatModel(1, "balls:1")])
def test_other_seeds_are_refused(threat: ThreatModel) -> None:
    with pytest.raises(InvalidArgumentError):
        design(
            load_network("ring:6", mixing="gossip"),
            1.0,
            objective=Horizon(5),
            threat=threat,
            mechanism=Corn(LowRank()),
        )
