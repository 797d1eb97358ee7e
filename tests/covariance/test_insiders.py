"""Designs against insiders: status, noise limits, dropped seeds, and the paper's special cases."""

import networkx as nx
import numpy as np
import pytest

from corn.covariance import DEFAULT_THREAT, Corn, Horizon, ThreatModel
from corn.topology import mixing_matrix
from tests.covariance.coalition_check import worst_precision
from tests.covariance.networks import paper_design
from tests.oracles.sdp import Sdp

W = mixing_matrix(nx.petersen_graph())


def test_a_design_against_an_insider_is_certified_and_keeps_its_split() -> None:
    threat = ThreatModel(1, "pairs")
    result = paper_design(W, 0.5, objective=Horizon(50), threat=threat)
    assert result.status == "optimal"
    assert (result.solver, result.threat, result.num_coalitions) == ("first-order", threat, 10)
    assert result.gap <= 1e-3
    np.testing.assert_allclose(result.covariance, result.decomposition.covariance)
    assert worst_precision(result.decomposition, 1) <= 0.5 * (1 + 1e-9)
    exact = paper_design(W, 0.5, Sdp(), objective=Horizon(50), threat=threat)
    assert exact.value == pytest.approx(result.value, rel=2e-3)


def test_no_insiders_and_one_seed_is_the_papers_problem() -> None:
    one_seed = paper_design(W, threat=ThreatModel(0, "global"))
    assert one_seed.value == pytest.approx(2.025, rel=1e-6)
    given = paper_design(W, threat=ThreatModel(0, (tuple(range(10)),)))
    assert given.value == pytest.approx(one_seed.value)
    covering = paper_design(W, threat=ThreatModel(0, "balls:2"))
    assert covering.value == pytest.approx(one_seed.value)


def test_overlapping_seeds_without_insiders_lie_between_one_seed_and_ldp() -> None:
    one_seed, edges, ldp = (
        paper_design(W, objective=Horizon(50), threat=ThreatModel(0, seeds)).value
        for seeds in ("global", "edges", "groups:10")
    )
    assert one_seed <= edges * (1 + 1e-6) < ldp


def test_singular_objectives_are_noise_limited_and_bounded() -> None:
    """On a complete graph one step hides any noise that sums to zero: noise must be limited."""
    complete = np.full((6, 6), 1 / 6)
    result = paper_design(complete, 1.0, Corn(max_noise_std=8.0), threat=DEFAULT_THREAT)
    assert result.noise_std.max() <= 8.0 * (1 + 1e-6)
    assert result.status == "loose bound"
    assert result.lower_bound >= 1 / 6 * (1 - 1e-6)
    # Against one insider five agents hide behind each other: 1/5 of LDP's variance each.
    assert result.value == pytest.approx(6 / 5 / 6, rel=0.1)
    assert worst_precision(result.decomposition, 1) <= 1 + 1e-9


def test_streams_that_died_out_are_not_drawn() -> None:
    # On this ring no optimum needs seeds of agents three or four steps apart.
    W = mixing_matrix(nx.cycle_graph(8))
    result = paper_design(W, objective=Horizon(1000), threat=DEFAULT_THREAT)
    assert result.decomposition.count_streams() == (5,) * 8
    assert result.gap <= 1e-3
    assert worst_precision(result.decomposition, 1) <= 1 + 1e-9


def test_common_private_noise_holds_for_disjoint_groups_too() -> None:
    matrix = mixing_matrix(nx.path_graph(4))
    threat = ThreatModel(0, ((0, 1),), "common")
    result = paper_design(matrix, objective=Horizon(50), threat=threat)
    exact = paper_design(matrix, 1.0, Sdp(), objective=Horizon(50), threat=threat)
    assert result.value == pytest.approx(exact.value, rel=1e-3)
    assert np.ptp(result.decomposition.private_variance) == 0


def test_a_loose_bound_has_its_own_status() -> None:
    complete = np.full((6, 6), 1 / 6)
    result = paper_design(complete, threat=DEFAULT_THREAT)
    assert result.status == "loose bound"
