"""Printed numbers of a guarantee are on the private side, and settings are repeated exactly."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from corn.privacy import PrivacyBudget
from corn.privacy.rounding import (
    round_bound_down,
    round_up,
    round_up_range,
    write_exactly,
    write_range,
)

values = st.floats(1e-12, 1e12)
digits = st.integers(2, 8)


@given(value=values, digits=digits)
def test_rounding_ends_on_its_side_within_one_digit(value: float, digits: int) -> None:
    up, down = float(round_up(value, digits)), float(round_bound_down(value, digits))
    assert down <= value <= up
    # The subtraction of two floats that agree in eight digits is exact to 1e-7 only.
    assert up - down <= 10.0 ** (math.floor(math.log10(value)) - digits + 1) * (1 + 1e-7)


@given(value=values)
def test_settings_read_back_as_they_were(value: float) -> None:
    assert float(write_exactly(value)) == value


def test_ranges_follow_the_rules_of_single_numbers() -> None:
    assert round_up_range([0.1234561, 2.0000001]) == "0.123457 to 2.00001"
    assert write_range([0.1234567, 2.0000001]) == "0.1234567 to 2.0000001"
    assert write_range([0.5, 0.5]) == "0.5"


def test_a_promise_is_described_with_all_its_digits() -> None:
    budget = PrivacyBudget(1.2345678, 1.2345678e-5, num_steps=10, clip=0.12345678)
    for setting in ("ε = 1.2345678,", "δ = 1.2345678e-05", "clipped once to 0.12345678"):
        assert setting in budget.describe()
