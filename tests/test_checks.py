"""Checks of arguments accept their whole domain and name the argument that they refuse."""

import math

import numpy as np
import pytest

from corn.checks import (
    require_count,
    require_fraction,
    require_in_range,
    require_positive,
)
from corn.errors import InvalidArgumentError


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "1", True, None])
def test_positive_refuses_everything_else(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="clip must be positive and finite"):
        require_positive("clip", value)  # type: ignore[arg-type]


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


def test_count_refuses_numbers_above_the_limit() -> None:
    with pytest.raises(InvalidArgumentError, match="steps must be at most 10, found 11"):
        require_count("steps", 11, most=10)


def test_count_returns_an_int() -> None:
    assert type(require_count("steps", np.int64(10), most=10)) is int
