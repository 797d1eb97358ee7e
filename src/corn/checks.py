"""Checks of arguments and matrices: each raises an error with the name, the rule and the value.

Every check returns the value that it accepted, so that a check can stand in an assignment. NaN is
refused by all of them. ``advice`` is a sentence on what to try instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from corn.errors import InvalidArgumentError

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
_Choice = TypeVar("_Choice", bound=str)


def require(condition: bool, name: str, rule: str, found: object, *, advice: str = "") -> None:
    """Raise unless ``condition`` holds: "``name`` must be ``rule``, found ``found``: ``advice``".

    >>> require(False, "clip", "positive", -1, advice="try 0.1")
    Traceback (most recent call last):
    ...
    corn.errors.InvalidArgumentError: clip must be positive, found -1: try 0.1
    """
    if not condition:
        hint = f": {advice}" if advice else ""
        raise InvalidArgumentError(f"{name} must be {rule}, found {found}{hint}")


def require_positive(name: str, value: float, *, advice: str = "") -> float:
    """Return ``value`` if it is a finite number above zero."""
    is_valid = is_number(value) and 0 < value < math.inf
    require(is_valid, name, "positive and finite", value, advice=advice)
    return value


def require_in_range(
    name: str, value: float, least: float, most: float = math.inf, *, advice: str = ""
) -> float:
    """Return ``value`` if ``least`` ≤ ``value`` ≤ ``most``."""
    is_valid = is_number(value) and least <= value <= most
    bounds = f"at least {least:g}" if math.isinf(most) else f"in [{least:g}, {most:g}]"
    require(is_valid, name, bounds, value, advice=advice)
    return value


def require_fraction(name: str, value: float) -> float:
    """Return ``value`` if 0 ≤ ``value`` < 1."""
    require(is_number(value) and 0 <= value < 1, name, "in [0, 1)", value)
    return value


def require_count(
    name: str, value: object, *, least: int = 1, most: int | None = None, advice: str = ""
) -> int:
    """Return ``value`` as an ``int`` if it is a whole number from ``least`` to ``most``."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(value) if isinstance(value, Integral) else least
    found = number if is_whole else repr(value)
    rule = f"an integer of at least {least}"
    require(is_whole and number >= least, name, rule, found, advice=advice)
    if most is not None:
        require(number <= most, name, f"at most {most:,}", found, advice=advice)
    return number


def require_choice(
    name: str, value: _Choice, choices: Iterable[_Choice], *, advice: str = ""
) -> _Choice:
    """Return ``value`` if it is one of ``choices``."""
    listed = tuple(choices)
    is_valid = isinstance(value, str) and value in listed
    require(is_valid, name, f"one of {', '.join(listed)}", repr(value), advice=advice)
    return value


def require_length(name: str, found: int, expected: int, *, per: str) -> int:
    """Return ``found`` if there is one item for each of the ``expected`` things called ``per``."""
    require(found == expected, name, f"{expected}, one for each {per}", found)
    return found


def is_number(value: object) -> bool:
    """Return whether a value is a real number, which a truth value is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_square_matrix(value: ArrayLike, *, name: str) -> FloatArray:
    """Return ``value`` as a new finite float64 matrix (n, n) with n ≥ 1, or raise."""
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} must be a matrix of numbers: {error}") from error
    is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] and matrix.size > 0
    found = f"shape {matrix.shape}"
    require(is_square, name, "a square matrix with at least one row", found)
    for i, j in np.argwhere(~np.isfinite(matrix)):
        raise InvalidArgumentError(f"{name} must be finite, found {matrix[i, j]} at ({i}, {j})")
    return matrix


def as_symmetric_matrix(value: ArrayLike, *, name: str) -> FloatArray:
    """Return ``value`` as an exactly symmetric matrix if it is one up to rounding."""
    matrix = as_square_matrix(value, name=name)
    asymmetry = float(np.abs(matrix - matrix.T).max())
    is_symmetric = asymmetry <= 1e-9 * float(np.abs(matrix).max())
    found = f"mirrored entries that differ by {asymmetry:.3g}"
    require(is_symmetric, name, "symmetric", found)
    return (matrix + matrix.T) / 2
