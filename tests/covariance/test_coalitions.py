"""Bounds for every coalition: never below the exact value, and too many are refused."""

from fractions import Fraction
from itertools import combinations

import networkx as nx
import numpy as np
import pytest

from corn.covariance import Decomposition
from corn.covariance import coalitions as bounds
from corn.covariance.coalitions import CoalitionUpdates, coalition_precisions, worst_precisions
from corn.covariance.decomposition import hidden_precision
from corn.errors import InvalidArgumentError
from tests.covariance.coalition_check import exact_worst_precision


def make_split(
    num_agents: int, *, private: float, seed: int = 0, degree: int = 4, with_group: bool = True
) -> Decomposition:
    """Return noise of random weights for pairs, and for one group of three with two streams."""
    rng = np.random.default_rng(seed)
    graph = nx.random_regular_graph(degree, num_agents, seed=seed)
    pairs = sorted((min(edge), max(edge)) for edge in graph.edges)
    theta = private * rng.uniform(1, 3, num_agents)
    factors = [np.array([[a], [-b]]) for a, b in rng.uniform(0.5, 1.5, (len(pairs), 2))]
    if not with_group:
        return Decomposition(theta, tuple(pairs), tuple(factors))
    return Decomposition(theta, (*pairs, (0, 2, 5)), (*factors, rng.uniform(-0.5, 0.5, (3, 2))))


@pytest.mark.parametrize("private", [1.0, 1e-2])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("coalition", [(), (3,), (3, 8)])
def test_a_bound_is_never_below_the_exact_value(
    private: float, degree: int, coalition: tuple[int, ...]
) -> None:
    split = make_split(12, private=private, degree=degree, with_group=False)
    updates = CoalitionUpdates.try_make(split)
    assert updates is not None
    bound = updates.bound(coalition)
    assert bound is not None
    for agent in (0, 4):
        exact = exact_entry(split, coalition, agent)
        assert Fraction(float(bound[agent])) >= exact
        assert float(bound[agent]) <= float(exact) * (1 + 1e-6)


def exact_entry(split: Decomposition, coalition: tuple[int, ...], agent: int) -> Fraction:
    """Return [(R^(I))⁻¹]_ii without rounding, by making it the largest of all."""
    kept = [k for k, group in enumerate(split.seed_groups) if not set(group) & set(coalition)]
    hidden = Decomposition(
        split.private_variance,
        tuple(split.seed_groups[k] for k in kept),
        tuple(split.factors[k] for k in kept),
    )
    weights = np.ones(split.num_agents)
    weights[agent] = 2.0**-40
    return exact_worst_precision(hidden.rescale(weights), 0) / Fraction(2) ** 80


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_both_ways_agree_in_a_larger_network(colluders: int) -> None:
    split = make_split(60, private=0.05)
    updates = CoalitionUpdates.try_make(split)
    assert updates is not None
    for coalition in list(combinations(range(60), colluders))[::97]:
        honest, expected = hidden_precision(split, coalition)
        bound = updates.bound(coalition)
        assert bound is not None
        np.testing.assert_allclose(bound[list(honest)], expected, rtol=1e-8)


def test_any_inverse_gives_a_bound_however_wrong_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound follows from the residual, not from trust in the inverse."""
    split = make_split(60, private=0.05)
    _, expected = hidden_precision(split, (3,))
    monkeypatch.setattr(bounds, "_LOOSE", np.inf)
    honest = np.delete(np.arange(60), 3)
    exact = CoalitionUpdates.try_make(split)
    assert exact is not None
    for error in (1e-9, 1e-6, 1e-3, -1e-3):
        wrong = CoalitionUpdates(split, exact._scale, exact._Y * (1 - error))
        bound = wrong.bound((3,))
        assert bound is not None
        assert (bound[honest] >= expected * (1 - 1e-9)).all()


def test_a_network_without_private_noise_is_checked_one_by_one() -> None:
    split = make_split(60, private=0.05)
    theta = split.private_variance.copy()
    theta[7] = 0
    exposed = Decomposition(theta, split.seed_groups, split.factors)
    assert CoalitionUpdates.try_make(exposed) is None
    worst = worst_precisions(exposed, 1)
    assert np.isfinite(worst).all()
    one = max(hidden_precision(exposed, (c,))[1].max() for c in range(60))
    assert worst.max() == one


def test_large_networks_use_updates_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(split: Decomposition, coalition: tuple[int, ...]) -> object:
        calls.append(coalition)
        return hidden_precision(split, coalition)

    monkeypatch.setattr(bounds, "hidden_precision", count)
    worst_precisions(make_split(60, private=0.05), 1)
    assert not calls
    worst_precisions(make_split(10, private=0.05), 1)
    assert len(calls) == 10


def test_too_many_coalitions_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="too many to check one by one"):
        next(coalition_precisions(Decomposition(np.ones(1000)), 2))
