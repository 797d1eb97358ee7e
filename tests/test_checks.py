"""Checks of arguments accept their whole domain and name the argument that they refuse."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

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

LONG = 10**5000
LIMITED = partial(require_count, most=10)
UPWARDS = partial(require_in_range, least=0)
BETWEEN = partial(require_in_range, least=1, most=2)
TOO_LONG = "found an integer of more than 20 digits"


@pytest.mark.parametrize(
    ("check", "values", "message"),
    [
        (require_positive, [0, -1, math.inf, math.nan, "1", True, None], "positive and finite"),
        (require_positive, [np.float16(math.inf), np.float32(math.inf)], "positive and finite"),
        (BETWEEN, [0.5, 2.5, math.nan, "1"], r"in \[1, 2\]"),
        (UPWARDS, [-1], "at least 0"),
        (require_fraction, [1.0, -0.1, math.nan], r"in \[0, 1\)"),
        (LIMITED, [0, -3, 2.0, True, "2", None], "an integer of at least 1, found"),
        (LIMITED, [11], "at most 10, found 11"),
        # Python does not print integers of more than 4300 digits.
        (LIMITED, [LONG], f"at most 10, {TOO_LONG}"),
        (require_count, [-LONG], TOO_LONG),
        (require_positive, [LONG, -LONG], TOO_LONG),
        (BETWEEN, [LONG], TOO_LONG),
        (require_fraction, [LONG], TOO_LONG),
    ],
)
def test_other_values_are_refused(
    check: Callable[..., Any], values: list[Any], message: str
) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError, match=f"size must be .*{message}"):
            check("size", value)


def test_valid_values_are_returned() -> None:
    for kind in (np.float16, np.float32, np.float64, float):
        assert require_positive("clip", kind(0.5)) == 0.5  # type: ignore[arg-type]
    assert require_positive("clip", 3) == 3
    assert UPWARDS("ridge", 1e9) == 1e9
    assert require_fraction("share", 0.0) == 0.0
    assert type(LIMITED("steps", np.int64(10))) is int
    assert require_choice("unit", "agent", ("agent", "sample")) == "agent"
    assert require_length("datasets", 4, 4, per="agent") == 4
