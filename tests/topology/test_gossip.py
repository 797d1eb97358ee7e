"""Gossip: texts, polynomials of the mixing matrix, and what they leave of disagreement."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.topology import ONE_ROUND, Gossip, Graph, choose_cooldown, load_network
from corn.topology.mixing import apply_rounds

from .test_mixing import connected_graphs

GRAPHS = [nx.path_graph(8), nx.complete_graph(5), nx.karate_club_graph()]


def test_plain_rounds_are_a_matrix_power() -> None:
    W = load_network(nx.path_graph(5)).mixing_matrix
    np.testing.assert_allclose(Gossip(3).matrix(W), W @ W @ W, atol=1e-15)


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("graph", GRAPHS)
def test_chebyshev_rounds_are_the_chebyshev_polynomial(graph: Graph, rounds: int) -> None:
    W = load_network(graph).mixing_matrix
    values, vectors = np.linalg.eigh(W)
    low, high = values[0], values[-2]
    if high - low < 1e-12:
        expected = np.full_like(W, 1 / len(W))
    else:
        chebyshev = np.polynomial.chebyshev.Chebyshev.basis(rounds)
        scaled, top = ((2 * x - low - high) / (high - low) for x in (values, 1.0))
        expected = vectors @ np.diag(chebyshev(scaled) / chebyshev(top)) @ vectors.T
    np.testing.assert_allclose(Gossip(rounds, "chebyshev").matrix(W), expected, atol=1e-9)


@settings(max_examples=40)
@given(connected_graphs(), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_recurrence_equals_the_matrix_and_keeps_the_average(
    graph: Graph, rounds: int, seed: int
) -> None:
    W, gossip = load_network(graph).mixing_matrix, Gossip(rounds, "chebyshev")
    models = np.random.default_rng(seed).standard_normal((len(W), 3))
    previous = current = models
    for momentum, gain in gossip.schedule(W):
        following = current + momentum * (current - previous) + gain * (W @ current - current)
        previous, current = current, following
    np.testing.assert_allclose(current, gossip.matrix(W) @ models, atol=1e-11)
    np.testing.assert_allclose(current.mean(axis=0), models.mean(axis=0), atol=1e-11)


@settings(max_examples=60)
@given(connected_graphs(), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_schedule_never_amplifies_on_fewer_links(graph: Graph, rounds: int, seed: int) -> None:
    """Agents keep schedule and weights when a loss removes links."""
    W, rng = load_network(graph).mixing_matrix, np.random.default_rng(seed)
    survivors = np.unique(np.append(np.flatnonzero(rng.random(len(W)) < 0.7), 0))
    kept = np.triu(rng.random(W.shape) < 0.8, 1)
    left = np.where(kept | kept.T, W, 0)[np.ix_(survivors, survivors)]
    left += np.diag(1 - left.sum(axis=1))
    step = apply_rounds(Gossip(rounds, "chebyshev").schedule(W), left)
    assert np.linalg.norm(step, 2) <= 1 + 1e-9


def test_chebyshev_rounds_agree_even_with_periodic_weights() -> None:
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_allclose(Gossip(1, "chebyshev").matrix(swap), np.full((2, 2), 0.5))


@pytest.mark.parametrize(
    ("text", "gossip"),
    [
        ("1", ONE_ROUND),
        ("3", Gossip(3)),
        ("plain:2", Gossip(2)),
        ("chebyshev:3", Gossip(3, "chebyshev")),
        ("chebyshev:1", Gossip(1, "chebyshev")),
    ],
)
def test_texts_are_read_and_written(text: str, gossip: Gossip) -> None:
    assert Gossip.parse(text) == gossip
    assert Gossip.parse(str(gossip)) == gossip


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "two", "fast:2", "chebyshev", "plain:", "9" * 5000]
)
def test_bad_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"rounds"):
        Gossip.parse(text)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="rounds must be an integer of at least 1"):
        Gossip(0)
    with pytest.raises(InvalidArgumentError, match="kind"):
        Gossip(2, "fast")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        Gossip(2, "chebyshev").matrix(np.eye(2))


def test_a_network_has_the_matrix_of_a_step() -> None:
    network = load_network("path:6", gossip=Gossip(3, "chebyshev"), mixing="gossip")
    W = load_network("path:6", mixing="gossip").mixing_matrix
    np.testing.assert_array_equal(network.mixing_matrix, W)
    np.testing.assert_array_equal(network.step_matrix, Gossip(3, "chebyshev").matrix(W))
    assert not network.step_matrix.flags.writeable
    np.testing.assert_array_equal(load_network("path:6", mixing="gossip").step_matrix, W)


@pytest.mark.parametrize("gossip", ["1", "plain:3", "chebyshev:3"])
def test_the_default_cool_down_leaves_a_hundredth_of_disagreement(gossip: str) -> None:
    network = load_network("er:n=20,p=0.2,seed=1", gossip=Gossip.parse(gossip), mixing="gossip")
    steps, deflated = choose_cooldown(network, 1000), network.step_matrix - 1 / 20
    left = [np.linalg.norm(np.linalg.matrix_power(deflated, k), 2) for k in (steps - 1, steps)]
    assert left[1] <= 0.01 < left[0]
    assert choose_cooldown(network, 3) == 3


def test_agents_that_never_agree_do_not_cool_down() -> None:
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert choose_cooldown(load_network(swap, mixing="gossip"), 100) == 0
    assert choose_cooldown(load_network("complete:1", mixing="gossip"), 100) == 0
