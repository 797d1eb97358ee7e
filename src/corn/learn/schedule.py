"""Step-size schedules η_t: constant, η₁/√t, cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, SupportsFloat, TypeAlias, final

from corn.checks import require, require_choice

ScheduleName: TypeAlias = Literal["constant", "inverse-sqrt", "cosine"]


class Schedule(Protocol):
    """A step size for every step."""

    @property
    def initial(self) -> float:
        """η₁, which distinguishes schedules of one kind."""

    def at(self, step: int, num_steps: int) -> float:
        """Return η_t at step t = 1 … ``num_steps``."""

    def describe(self) -> str:
        """Return the schedule in a few characters."""


# A larger step size would overflow single precision.
_LARGEST = 3e38


@dataclass(frozen=True)
class _Decay:
    initial: float
    _text: ClassVar[str]

    def __post_init__(self) -> None:
        is_valid = 0 < self.initial <= _LARGEST
        rule = f"positive and at most {_LARGEST:g}"
        require(is_valid, "the step size", rule, self.initial, advice="try 0.01")

    def describe(self) -> str:
        """See ``Schedule``."""
        return self._text.format(self.initial)


@final
@dataclass(frozen=True)
class Constant(_Decay):
    """η_t = η."""

    _text = "{:g}"

    def at(self, step: int, num_steps: int) -> float:  # noqa: ARG002
        """See ``Schedule``."""
        return self.initial


@final
@dataclass(frozen=True)
class InverseSqrt(_Decay):
    """η_t = η₁/√t.

    >>> InverseSqrt(0.01).at(4, num_steps=10)
    0.005
    """

    _text = "{:g}/√t"

    def at(self, step: int, num_steps: int) -> float:  # noqa: ARG002
        """See ``Schedule``."""
        return self.initial / math.sqrt(step)


@final
@dataclass(frozen=True)
class Cosine(_Decay):
    """Half a cosine from η₁ down towards 0, which it would reach one step after the last.

    A step of size zero would spend privacy without any progress.
    """

    _text = "cosine from {:g}"

    def at(self, step: int, num_steps: int) -> float:
        """See ``Schedule``."""
        return self.initial * (1 + math.cos(math.pi * (step - 1) / num_steps)) / 2


def make_schedule(step_size: float | Schedule, name: ScheduleName = "constant") -> Schedule:
    """Return the schedule of this name with this first step size, or a schedule unchanged.

    >>> make_schedule(0.1, "inverse-sqrt")
    InverseSqrt(initial=0.1)
    """
    if not isinstance(step_size, SupportsFloat):
        is_schedule = hasattr(step_size, "at")
        require(is_schedule, "the step size", "a number or a schedule", repr(step_size))
        return step_size
    return _SCHEDULES[require_choice("schedule", name, _SCHEDULES)](float(step_size))


_SCHEDULES: dict[ScheduleName, type[Constant] | type[InverseSqrt] | type[Cosine]] = {
    "constant": Constant,
    "inverse-sqrt": InverseSqrt,
    "cosine": Cosine,
}
