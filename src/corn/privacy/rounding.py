"""Which way floating point errs: every result here is moved to the side that promises less."""

from __future__ import annotations

import math
from collections.abc import Callable

from corn.errors import InvalidArgumentError

_MARGIN = 2.0**-48
"""16 units in the last place: more than what a square, a square root and a few products lose."""


def round_down(value: float) -> float:
    """Return ``value`` lowered by 16 units in the last place: more than later rounding adds."""
    return value * (1 - _MARGIN)


def bisect(accepts: Callable[[float], bool], *, accepted: float, rejected: float) -> float:
    """Return an accepted number with a rejected one right beside it in floating point.

    What is returned has itself been tested, unless it is ``accepted``: for that the caller vouches.
    So the search ends on the accepted side by construction, not by tolerance.
    """
    middle = accepted + (rejected - accepted) / 2
    while middle not in (accepted, rejected):
        if accepts(middle):
            accepted = middle
        else:
            rejected = middle
        middle = accepted + (rejected - accepted) / 2
    return accepted


def require_in_range(name: str, value: float, least: float, most: float) -> None:
    """Raise unless ``least ≤ value ≤ most``; NaN is in no range."""
    if not least <= value <= most:
        bounds = f"at least {least:g}" if math.isinf(most) else f"in [{least:g}, {most:g}]"
        raise InvalidArgumentError(f"{name} must be {bounds}, found {value}")
