"""Decimal numbers of a guarantee, rounded on the private side."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

import numpy as np


def round_up(value: float, digits: int = 6) -> str:
    """Return this many digits, rounded up: a printed ε must not be smaller than the true one.

    >>> round_up(9.9999991), round_up(1.2e-7), round_up(float("inf")), round_up(2.001, 3)
    ('10', '1.2e-07', 'inf', '2.01')
    """
    return _round(value, digits, ROUND_CEILING)


def round_bound_down(value: float, digits: int = 6) -> str:
    """Return this many digits, rounded down: a printed lower bound must hold too."""
    return _round(value, digits, ROUND_FLOOR)


def write_exactly(value: float) -> str:
    """Return the shortest usual text that reads back as this number: for commands to copy."""
    short = f"{value:g}"
    # A rounded ε would be another promise.
    return short if float(short) == value else repr(float(value))


def write_range(values: Any, write: Callable[[float], str] = write_exactly) -> str:
    """Return one number, by default as it is, or the least and the largest of several."""
    least, most = (write(float(bound)) for bound in (np.min(values), np.max(values)))
    # By their text, as values that differ in later digits would be shown as "1 to 1".
    return least if least == most else f"{least} to {most}"


def round_up_range(values: Any) -> str:
    """Return one ε, or the least and the largest of several, each rounded up."""
    return write_range(values, round_up)


def _round(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return str(value)
    # Decimal, as multiplying a float by a power of ten would round by itself.
    rounded = Context(prec=digits, rounding=rounding).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"
