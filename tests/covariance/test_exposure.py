"""What any coalition learns from any design, by an independent count."""

import networkx as nx
import numpy as np
import pytest

from corn.covariance import Decomposition, Horizon, ThreatModel, design, expose
from corn.errors import InvalidArgumentError
from corn.privacy import PrivacyBudget
from corn.topology import mixing_matrix

BUDGET = PrivacyBudget(epsilon=3, delta=1e-5, num_steps=100, clip=1.0)
W = mixing_matrix(nx.wheel_graph(7))


def shares(threat: ThreatModel) -> Decomposition:
    result = design(W, BUDGET.precision_cap, objective=Horizon(20), threat=threat)
    return result.decomposition


def epsilons(decomposition: Decomposition, coalition: list[int]) -> dict[int, float]:
    exposure = expose(decomposition, coalition, BUDGET.query, num_steps=BUDGET.num_steps)
    return exposure.epsilon(BUDGET.delta)


@pytest.mark.parametrize("coalition", [[], [0], [3], [0, 3], [2, 5]])
def test_the_budget_holds_up_to_the_coalitions_designed_for(coalition: list[int]) -> None:
    found = epsilons(shares(ThreatModel(2, "pairs")), coalition)
    assert set(found) == set(range(7)) - set(coalition)
    assert max(found.values()) <= 3 * (1 + 1e-9)


def test_one_insider_too_many_breaks_it() -> None:
    found = epsilons(shares(ThreatModel(1, "pairs")), [0, 3])
    assert max(found.values()) > 3.2


def test_one_seed_for_all_leaves_only_private_noise_against_an_insider() -> None:
    parts = shares(ThreatModel(0, "global"))
    assert max(epsilons(parts, []).values()) <= 3 * (1 + 1e-9)
    assert min(epsilons(parts, [4]).values()) > 5
    shared_only = Decomposition(np.zeros(7), parts.seed_groups, parts.factors)
    assert set(epsilons(shared_only, [4]).values()) == {np.inf}


def test_somebody_must_be_honest() -> None:
    with pytest.raises(InvalidArgumentError, match="nobody to protect"):
        epsilons(shares(ThreatModel(0, "global")), list(range(7)))
