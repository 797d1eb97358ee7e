"""The noise of the average model, over a trusted server's: oracles for weights and rounds."""

import pytest

from corn.covariance import EAVESDROPPER, Horizon, ThreatModel, design
from corn.topology import Gossip, load_network
from tests.covariance.networks import paper_design


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


def test_chebyshev_rounds_need_fewer_messages_on_a_random_graph() -> None:
    """Not on every graph: they reduce the slowest disagreement, plain rounds all of it."""
    ratios = {
        text: design(
            load_network("er:n=20,p=0.2,seed=1", gossip=Gossip.parse(text), mixing="gossip"),
            1.0,
            objective=Horizon(300, 0.1),
            threat=EAVESDROPPER,
        ).central_ratio
        for text in ("plain:3", "chebyshev:3", "plain:4")
    }
    assert ratios["chebyshev:3"] < ratios["plain:4"] < ratios["plain:3"]
