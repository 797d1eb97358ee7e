"""Views: what an attacker does not know, by a computation independent of the library's."""

import math

import numpy as np
import pytest

from corn.audit import View, find_smallest_break
from corn.audit.views import (
    StreamWeights,
    invert_hidden,
    largest_compared,
    list_worst_views,
    read_view,
)
from corn.covariance import Decomposition, SeedGroups
from corn.covariance.decomposition import hidden_precision
from corn.errors import InvalidArgumentError
from corn.plan.verify import verify_plan
from corn.topology import Mixing
from tests.audit.plans import agent_plan


@pytest.mark.parametrize("coalition", [(), (1,), (1, 4), (0, 1, 3)])
@pytest.mark.parametrize(
    ("seeds", "mixing"),
    [
        ("pairs", "gossip"),
        ("global", "gossip"),
        ("edges", "gossip"),
        ("edges", "sum"),
        ("pairs", "sum"),
        (((0, 1, 2), (2, 3, 4)), "sum"),
    ],
)
def test_precisions_agree_with_those_that_verify_plans(
    coalition: tuple[int, ...], seeds: str | SeedGroups, mixing: Mixing
) -> None:
    colluders = 1 if mixing == "gossip" and seeds != "global" else 0
    shares = agent_plan(colluders, seeds, mixing=mixing).decomposition
    found = StreamWeights.of(shares).precision(View(coalition))
    honest, expected = hidden_precision(shares, coalition)
    assert np.allclose(found[list(honest)], expected)
    assert (found[list(coalition)] == 0).all()


def test_the_worst_view_is_that_of_verification() -> None:
    plan = agent_plan()
    precision = StreamWeights.of(plan.decomposition).precision
    for guarantee, view in zip(verify_plan(plan).guarantees, list_worst_views(plan), strict=True):
        assert math.isclose(precision(view)[guarantee.agent], guarantee.precision, rel_tol=1e-9)


def test_a_leaked_key_hides_less() -> None:
    streams = StreamWeights.of(agent_plan().decomposition)
    by_plan = streams.held_by((2,))
    leaked = next(owner for owner in streams.owners if owner not in by_plan)
    assert streams.hidden({*by_plan, leaked}).trace() < streams.hidden(by_plan).trace()


def test_an_agent_without_hidden_noise_is_exposed() -> None:
    """The two agents' noise cancels in their sum, which shows that of both."""
    pair = np.array([[1.0], [-1.0]])
    shares = Decomposition(np.array([0.0, 0.0, 1.0]), ((0, 1),), (pair,))
    assert StreamWeights.of(shares).precision(View()).tolist() == [math.inf, math.inf, 1.0]
    inverse = invert_hidden(np.diag([2.0, 0.0]))
    assert inverse[0, 0] == 0.5
    assert math.isinf(inverse[1, 1])


@pytest.mark.parametrize(
    ("colluders", "seeds", "size"), [(0, "global", 1), (1, "pairs", 2), (2, "pairs", 3)]
)
def test_the_smallest_break_is_one_insider_more_than_planned(
    colluders: int, seeds: str, size: int
) -> None:
    plan = agent_plan(colluders, seeds, graph="complete:6")
    found = find_smallest_break(plan)
    assert found is not None
    view, victim = found
    assert len(view.coalition) == size
    precision = StreamWeights.of(plan.decomposition).precision(view)
    assert precision[victim] > 1.1 * plan.precision_caps[victim]


def test_independent_noise_is_broken_by_nobody() -> None:
    assert find_smallest_break(agent_plan(0, mechanism="ldp")) is None


def test_in_large_networks_fewer_coalitions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest_compared(agent_plan()) == 4
    assert largest_compared(agent_plan(0, mechanism="ldp")) == 0
    # An eigendecomposition for each of ten pairs of insiders, but not for more.
    monkeypatch.setattr("corn.audit.views._MOST_WORK", 5.0**3 * 9)
    assert largest_compared(agent_plan()) == 1
    assert find_smallest_break(agent_plan()) is None


@pytest.mark.parametrize(
    "text", ["worst", "nobody", "my coalition:1", "coalition:", "coalition:1,", "coalition:x"]
)
def test_other_views_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="view must be"):
        read_view(text, [str(agent) for agent in range(5)])


def test_views_of_other_agents_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="agents 0 … 4"):
        View((7,)).honest(5)
    with pytest.raises(InvalidArgumentError, match="leaves no victim"):
        View((0, 1)).honest(2)
