"""Split samples into training, validation and test parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from corn.arrays import IntArray
from corn.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Split:
    """Which samples each part has: three disjoint arrays of row numbers that cover all rows."""

    train: IntArray
    validation: IntArray
    test: IntArray


def split_samples(
    num_samples: int,
    *,
    seed: int,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.1,
) -> Split:
    """Draw the test part (the paper's 80/20), then hold a part of the rest out for tuning.

    ``validation_fraction`` is of what is left after the test part. The test part depends on the
    seed and ``test_fraction`` alone, so that runs with and without validation are compared on the
    same samples.

    >>> [len(part) for part in vars(split_samples(100, seed=0)).values()]
    [72, 8, 20]
    """
    _require_fraction("test_fraction", test_fraction)
    _require_fraction("validation_fraction", validation_fraction)
    num_test = round(num_samples * test_fraction)
    num_validation = round((num_samples - num_test) * validation_fraction)
    if num_samples - num_test - num_validation < 1:
        raise InvalidArgumentError(
            f"the split must leave at least one training sample, found {num_samples} samples, "
            f"{num_test} of them for testing and {num_validation} for validation"
        )
    order = np.random.default_rng(seed).permutation(num_samples)
    test, rest = order[:num_test], order[num_test:]
    return Split(rest[num_validation:], rest[:num_validation], test)


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise InvalidArgumentError(f"{name} must be in [0, 1), found {value}")
