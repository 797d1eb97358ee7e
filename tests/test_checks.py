"""Checks of arguments accept their whole domain and name the argument that they refuse."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from corn.checks import (
    require_choice,
    require_count,
    require_fraction,
    require_in_range,
    require_length,
    require_positive,
)
from corn.errors import InvalidArgumentError


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "1", True, None])
def test_positive_refuses_everything_else(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="clip must be positive and finite"):
        require_positive("clip", value)  # type: ignore[arg-type]


def test_positive_accepts_numbers_of_any_type() -> None:
    assert require_positive("clip", np.float64(0.5)) == 0.5
    assert require_positive("clip", 3) == 3


@pytest.mark.parametrize("value", [0.5, 2.5, math.nan, "1"])
def test_range_refuses_values_outside(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"ratio must be in \[1, 2\]"):
        require_in_range("ratio", value, 1, 2)  # type: ignore[arg-type]


def test_range_without_an_upper_end() -> None:
    assert require_in_range("ridge", 1e9, 0) == 1e9
    with pytest.raises(InvalidArgumentError, match="ridge must be at least 0"):
        require_in_range("ridge", -1, 0)


@pytest.mark.parametrize("value", [1.0, -0.1, math.nan])
def test_fraction_excludes_one(value: float) -> None:
    assert require_fraction("share", 0.0) == 0.0
    with pytest.raises(InvalidArgumentError, match="share"):
        require_fraction("share", value)


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "2", None])
def test_count_refuses_everything_else(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="steps must be an integer of at least 1, found"):
        require_count("steps", value, most=10)


@pytest.mark.parametrize(
    ("value", "found"),
    [(11, "11"), (10**5000, "an integer of more than 20 digits")],
    ids=["11", "long"],
)
def test_count_refuses_numbers_above_the_limit(value: int, found: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"steps must be at most 10, found {found}"):
        require_count("steps", value, most=10)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_positive_numbers_of_numpy_are_finite(kind: type[np.floating]) -> None:
    assert require_positive("clip", kind(0.5)) == 0.5  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="positive and finite, found inf"):
        require_positive("clip", kind(math.inf))  # type: ignore[arg-type]


def test_count_returns_an_int() -> None:
    assert type(require_count("steps", np.int64(10), most=10)) is int


def test_choice_and_length_accept_valid_values() -> None:
    assert require_choice("unit", "agent", ("agent", "sample")) == "agent"
    assert require_length("datasets", 4, 4, per="agent") == 4


@pytest.mark.parametrize(
    "check",
    [
        lambda number: require_positive("size", number),
        lambda number: require_positive("size", -number),
        lambda number: require_in_range("size", number, 0, 1),
        lambda number: require_fraction("size", number),
        lambda number: require_count("size", -number),
    ],
)
def test_integers_too_long_to_print_are_refused(check: Callable[[int], object]) -> None:
    with pytest.raises(InvalidArgumentError, match="found an integer of more than 20 digits"):
        check(10**5000)
