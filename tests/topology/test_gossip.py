"""Gossip: texts, polynomials of the mixing matrix, and what they leave of disagreement."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.topology import (
    GENERATORS,
    ONE_ROUND,
    Gossip,
    Graph,
    choose_cooldown,
    load_network,
    mixing_matrix,
    spectrum,
)
from corn.topology.generators import karate

from .test_mixing import connected_graphs

GRAPHS = [nx.path_graph(8), nx.complete_graph(5), karate()]


def test_plain_rounds_are_a_matrix_power() -> None:
    W = mixing_matrix(nx.path_graph(5))
    np.testing.assert_allclose(Gossip(3).matrix(W), W @ W @ W, atol=1e-15)
    assert Gossip(3).coefficients(W) == (1, 1, 1)


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("graph", GRAPHS)
def test_chebyshev_rounds_are_the_chebyshev_polynomial(graph: Graph, rounds: int) -> None:
    W = mixing_matrix(graph)
    values, vectors = np.linalg.eigh(W)
    sigma = spectrum(W).second_singular_value
    if sigma == 0:
        expected = np.full_like(W, 1 / len(W))
    else:
        chebyshev = np.polynomial.chebyshev.Chebyshev.basis(rounds)
        expected = vectors @ np.diag(chebyshev(values / sigma) / chebyshev(1 / sigma)) @ vectors.T
    np.testing.assert_allclose(Gossip(rounds, "chebyshev").matrix(W), expected, atol=1e-9)


@settings(max_examples=40)
@given(connected_graphs(), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_the_recurrence_equals_the_matrix_and_keeps_the_average(
    graph: Graph, rounds: int, seed: int
) -> None:
    W, gossip = mixing_matrix(graph), Gossip(rounds, "chebyshev")
    models = np.random.default_rng(seed).standard_normal((len(W), 3))
    previous = current = models
    for alpha in gossip.coefficients(W):
        assert 1 <= alpha <= 2
        previous, current = current, alpha * (W @ current) + (1 - alpha) * previous
    np.testing.assert_allclose(current, gossip.matrix(W) @ models, atol=1e-12)
    np.testing.assert_allclose(current.mean(axis=0), models.mean(axis=0), atol=1e-12)


@settings(max_examples=40)
@given(connected_graphs(), st.integers(2, 6))
def test_chebyshev_rounds_leave_less_disagreement_than_plain_ones(
    graph: Graph, rounds: int
) -> None:
    W = mixing_matrix(graph)
    plain, fast = (
        np.linalg.norm(Gossip(rounds, kind).matrix(W) - 1 / len(W), 2)
        for kind in ("plain", "chebyshev")
    )
    sigma = np.linalg.norm(W - 1 / len(W), 2)
    # Strictly less wherever there is disagreement to remove, for the same messages.
    assert fast < plain if sigma > 1e-4 else fast <= plain + 1e-12


@settings(max_examples=40)
@given(connected_graphs(), connected_graphs(), st.integers(2, 6))
def test_coefficients_of_other_weights_never_amplify(
    graph: Graph, other: Graph, rounds: int
) -> None:
    """Agents keep their coefficients when a loss changes the weights."""
    W = mixing_matrix(other)
    previous = current = np.eye(len(W))
    for alpha in Gossip(rounds, "chebyshev").coefficients(mixing_matrix(graph)):
        previous, current = current, alpha * (W @ current) + (1 - alpha) * previous
    assert np.linalg.norm(current, 2) <= 1 + 1e-12


@pytest.mark.parametrize(
    ("text", "gossip"),
    [
        ("1", ONE_ROUND),
        ("3", Gossip(3)),
        ("plain:2", Gossip(2)),
        ("chebyshev:3", Gossip(3, "chebyshev")),
        ("chebyshev:1", ONE_ROUND),
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
    with pytest.raises(InvalidArgumentError, match="needs a symmetric mixing matrix"):
        Gossip(2, "chebyshev").matrix(mixing_matrix(GENERATORS["directed-ring"](4)))
    with pytest.raises(InvalidArgumentError, match="needs a W that mixes"):
        Gossip(2, "chebyshev").matrix(np.eye(2))
    with pytest.raises(InvalidArgumentError, match="needs a symmetric mixing matrix"):
        load_network("directed-ring:4", gossip=Gossip(2, "chebyshev"))


def test_a_network_has_the_matrix_of_a_step() -> None:
    network = load_network("path:6", gossip=Gossip(3, "chebyshev"))
    W = load_network("path:6").mixing_matrix
    np.testing.assert_array_equal(network.mixing_matrix, W)
    np.testing.assert_array_equal(network.step_matrix, Gossip(3, "chebyshev").matrix(W))
    assert not network.step_matrix.flags.writeable
    np.testing.assert_array_equal(load_network("path:6").step_matrix, W)


@pytest.mark.parametrize("gossip", ["1", "plain:3", "chebyshev:3"])
def test_the_default_cool_down_leaves_a_hundredth_of_disagreement(gossip: str) -> None:
    network = load_network("er:n=20,p=0.2,seed=1", gossip=Gossip.parse(gossip))
    steps, deflated = choose_cooldown(network, 1000), network.step_matrix - 1 / 20
    left = [np.linalg.norm(np.linalg.matrix_power(deflated, k), 2) for k in (steps - 1, steps)]
    assert left[1] <= 0.01 < left[0]
    assert choose_cooldown(network, 3) == 3


def test_agents_that_never_agree_do_not_cool_down() -> None:
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert choose_cooldown(load_network(swap), 100) == 0
    assert choose_cooldown(load_network("complete:1"), 100) == 0


def test_messages_count_rounds_and_the_cool_down() -> None:
    assert Gossip(3).count_messages(100) == 300
    assert Gossip(2, "chebyshev").count_messages(100, 7) == 214
