"""Secret coins and orders: exact and uniform, independent, and determined by the secrets alone."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from corn.checks import IntArray
from corn.noise import Secret, choices
from corn.noise.choices import COIN_BITS, SecretChoices

FIRST, SECOND = Secret(bytes(31) + b"\1"), Secret(bytes(31) + b"\2")
CHOICES = SecretChoices(coins=FIRST, orders=SECOND)


def test_coins_are_multiples_of_the_unit_and_uniform() -> None:
    coins = CHOICES.draw_coins(3, [100_000])
    whole = np.ldexp(coins, COIN_BITS)
    assert np.array_equal(whole, np.rint(whole))
    # Half of them are odd: no bit is lost on the way to float64.
    assert abs(np.mean(whole % 2) - 0.5) < 0.01
    assert stats.kstest(coins, "uniform").pvalue > 1e-3


def test_coins_of_two_steps_and_of_two_agents_are_independent() -> None:
    """A chi-square test of the four combinations of two coins, for steps and for agents."""
    size = 40_000
    first, second = (CHOICES.draw_coins(number, [size, size]) < 0.3 for number in (0, 1))
    pairs = [
        (first[:size], second[:size]),
        (first[:size], first[size:]),
        (first[: size - 1], first[1:size]),
    ]
    for one, other in pairs:
        table = np.histogram2d(one, other, bins=2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_coins_of_an_agent_do_not_depend_on_the_samples_of_others() -> None:
    coins = CHOICES.draw_coins(5, [7, 20])
    assert np.array_equal(coins[:7], CHOICES.draw_coins(5, [7, 3])[:7])
    assert np.array_equal(coins[7:], CHOICES.draw_coins(5, [9, 20])[9:])


@pytest.mark.parametrize("draw", [CHOICES.draw_order, CHOICES.draw_positions])
def test_all_orders_are_equally_likely(draw: Callable[..., IntArray]) -> None:
    found = Counter(tuple(draw(0, k, size=4).tolist()) for k in range(12_000))
    assert len(found) == 24
    assert stats.chisquare(list(found.values())).pvalue > 1e-3


def test_equal_words_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting them would favour the order in which they came."""
    draws = iter([[5, 3, 5], [9, 8, 7]])
    monkeypatch.setattr(
        choices, "_read_words", lambda *_, **__: np.array(next(draws), dtype=np.uint64)
    )
    assert CHOICES.draw_order(0, 0, size=3).tolist() == [2, 1, 0]


def test_coins_and_orders_need_their_own_secret() -> None:
    other_coins = SecretChoices(coins=SECOND, orders=SECOND)
    other_orders = SecretChoices(coins=FIRST, orders=FIRST)
    coins, order = CHOICES.draw_coins(0, [50]), CHOICES.draw_order(0, 0, size=50)
    assert not np.array_equal(coins, other_coins.draw_coins(0, [50]))
    assert np.array_equal(coins, other_orders.draw_coins(0, [50]))
    assert np.array_equal(order, other_coins.draw_order(0, 0, size=50))
    assert not np.array_equal(order, other_orders.draw_order(0, 0, size=50))
    positions = CHOICES.draw_positions(0, 0, size=50)
    assert not np.array_equal(positions, other_coins.draw_positions(0, 0, size=50))
    assert np.array_equal(positions, other_orders.draw_positions(0, 0, size=50))
    assert "hidden" in repr(CHOICES)


def test_every_address_has_a_stream_of_its_own() -> None:
    """The same secret for all kinds, so that only the address separates them."""
    same = SecretChoices(coins=FIRST, orders=FIRST)
    coins = [tuple(same.draw_coins(k, [9, 9])[9 * a :][:9]) for k in range(4) for a in range(2)]
    ranks = [tuple(np.argsort(np.array(own)).tolist()) for own in coins]
    orders = [tuple(same.draw_order(a, k, size=9).tolist()) for k in range(4) for a in range(2)]
    assert len(set(coins)) == 8
    places = [tuple(same.draw_positions(a, k, size=9).tolist()) for k in range(4) for a in range(2)]
    assert len({*ranks, *orders, *places}) == 24
