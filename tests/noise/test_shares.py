"""Shares have the designed covariance, and an agent draws from its own streams only."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise import (
    NoiseSource,
    Owner,
    SecureSource,
    SimulationSource,
    StreamAddress,
    Terms,
    choose_factors,
    draw_all_shares,
    draw_share,
    owners,
    simulated_keys,
)
from corn.noise.stream import NormalArray

NONCE = bytes(32)


def make_decomposition() -> Decomposition:
    """Return five agents: a group of three, two pairs, a group of all, and private noise."""
    rng = np.random.default_rng(3)
    groups = ((0, 1, 2), (0, 3), (2, 3), (0, 1, 2, 3, 4))
    factors = tuple(rng.standard_normal((len(group), 3)) for group in groups)
    return choose_factors(Decomposition(np.array([0.5, 0.0, 1.0, 2.0, 0.3]), groups, factors))


SPLIT = make_decomposition()
SECURE = SecureSource(simulated_keys(SPLIT, seed=1))


class RecordingSource(NoiseSource):
    """A source that records the owners of the streams that were drawn."""

    def __init__(self, source: NoiseSource) -> None:
        self.source = source
        self.addresses: set[StreamAddress] = set()

    def fill_sum(self, out: NormalArray, terms: Terms) -> None:
        self.addresses.update(address for _, address in terms)
        self.source.fill_sum(out, terms)


def assert_covariance(shares: Any, expected: Any) -> None:
    """Compare with a tolerance in standard errors, √((R_ii R_jj + R_ij²)/N)."""
    found = shares @ shares.T / shares.shape[1]
    scale = np.diag(expected)
    error = np.sqrt((np.outer(scale, scale) + expected**2) / shares.shape[1])
    assert (np.abs(found - expected) <= 4.5 * error + 1e-12).all()


@pytest.mark.parametrize("source", [SECURE, SimulationSource(1)], ids=lambda s: type(s).__name__)
def test_shares_have_the_designed_covariance(source: NoiseSource) -> None:
    shares = draw_all_shares(SPLIT, source=source, nonce=NONCE, step=1, stop=400_000)
    assert_covariance(shares, SPLIT.covariance)


@pytest.mark.parametrize("coalition", [(), (4,), (1,), (3,), (0, 2)])
def test_noise_that_a_coalition_cannot_reproduce_has_the_stated_covariance(
    coalition: tuple[int, ...],
) -> None:
    # The coalition draws every stream whose key one of its members has, and subtracts.
    at: dict[str, Any] = {"nonce": NONCE, "step": 2, "stop": 400_000}
    shares = draw_all_shares(SPLIT, source=SECURE, **at)
    known_groups = [k for k, group in enumerate(SPLIT.seed_groups) if set(group) & set(coalition)]
    known = Decomposition(
        np.zeros(5),
        SPLIT.seed_groups,
        tuple(F * (k in known_groups) for k, F in enumerate(SPLIT.factors)),
    )
    keys = simulated_keys(SPLIT, seed=1)
    held = {owner: keys[owner] for owner in owners(SPLIT, coalition)}
    unknown = shares - draw_all_shares(known, source=SecureSource(held), **at)
    honest = [agent for agent in range(5) if agent not in coalition]
    hidden = SPLIT.hidden_from(coalition)[np.ix_(honest, honest)]
    assert_covariance(unknown[honest], hidden)


@pytest.mark.parametrize("source", [SECURE, SimulationSource(1)], ids=lambda s: type(s).__name__)
def test_all_shares_equal_each_agents_own_draw_in_every_bit(source: NoiseSource) -> None:
    at: dict[str, Any] = {"source": source, "nonce": NONCE, "step": 3}
    together = draw_all_shares(SPLIT, stop=150_000, **at)
    assert together.dtype == np.float64
    for agent in range(5):
        alone = draw_share(SPLIT, agent, stop=150_000, **at)
        np.testing.assert_array_equal(together[agent], alone)
        fewer = draw_share(SPLIT, agent, stop=70_100, **at)
        np.testing.assert_array_equal(fewer, alone[:70_100])


def test_an_agent_with_only_its_own_keys_draws_the_same() -> None:
    keys = simulated_keys(SPLIT, seed=1)
    at: dict[str, Any] = {"nonce": NONCE, "step": 4, "stop": 100}
    together = draw_all_shares(SPLIT, source=SECURE, **at)
    for agent in range(5):
        own = SecureSource({owner: keys[owner] for owner in owners(SPLIT, [agent])})
        np.testing.assert_array_equal(draw_share(SPLIT, agent, source=own, **at), together[agent])


def test_an_agent_draws_only_its_own_streams() -> None:
    for agent in range(5):
        source = RecordingSource(SECURE)
        draw_share(SPLIT, agent, source=source, nonce=NONCE, step=5, stop=10)
        assert all(agent in address.owner.members for address in source.addresses)
        assert {address.step for address in source.addresses} == {5}
        assert len(source.addresses) == SPLIT.count_streams()[agent]


def test_opposite_shares_of_a_pair_cancel_exactly() -> None:
    pair = Decomposition(np.zeros(2), ((0, 1),), (np.array([[0.3], [-0.3]]),))
    keys = simulated_keys(pair, seed=0)
    shares = draw_all_shares(pair, source=SecureSource(keys), nonce=NONCE, step=0, stop=1000)
    assert (shares.sum(axis=0) == 0).all()
    assert np.std(shares[0]) == pytest.approx(0.3, rel=0.1)


def test_steps_and_runs_are_independent_and_can_be_drawn_again() -> None:
    at: dict[str, Any] = {"source": SECURE, "stop": 100_000}
    first = draw_share(SPLIT, 0, nonce=NONCE, step=0, **at)
    later = draw_share(SPLIT, 0, nonce=NONCE, step=1, **at)
    other_run = draw_share(SPLIT, 0, nonce=b"\x01" * 32, step=0, **at)
    for other in (later, other_run):
        assert abs(np.corrcoef(first, other)[0, 1]) < 4.5 / np.sqrt(100_000)
    np.testing.assert_array_equal(first, draw_share(SPLIT, 0, nonce=NONCE, step=0, **at))


def test_zero_noise_needs_no_keys() -> None:
    silent = Decomposition(np.zeros(2))
    at: dict[str, Any] = {"source": SecureSource({}), "nonce": NONCE, "step": 0, "stop": 3}
    assert owners(silent, [0, 1]) == ()
    assert draw_share(silent, 1, **at).tolist() == [0, 0, 0]


def test_empty_ranges_are_drawn_and_bad_agents_refused() -> None:
    at: dict[str, Any] = {"source": SECURE, "nonce": NONCE, "step": 0}
    assert draw_all_shares(SPLIT, stop=0, **at).shape == (5, 0)
    with pytest.raises(InvalidArgumentError, match=r"agent must be in \[0, 4\], found 5"):
        draw_share(SPLIT, 5, stop=1, **at)


def test_memory_does_not_grow_with_streams_or_steps() -> None:
    size = 1_000_000
    at: dict[str, Any] = {"source": SECURE, "nonce": NONCE, "stop": size}
    draw_share(SPLIT, 0, step=0, **at)
    tracemalloc.start()
    for step in range(3):
        draw_share(SPLIT, 0, step=step, **at)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The result, before the one of the last step is let go, and little else.
    assert peak < 8 * size * 1.5


def test_simulated_keys_are_one_for_each_owner() -> None:
    keys = simulated_keys(SPLIT, seed=1)
    assert set(keys) == set(owners(SPLIT, range(5)))
    assert Owner((1,)) not in keys
    assert len({key.reveal() for key in keys.values()}) == len(keys)
    assert all(keys[o] != simulated_keys(SPLIT, seed=2)[o] for o in keys)
