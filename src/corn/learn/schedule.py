"""Step sizes η_t: constant, η₁/√t, cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, final

from corn.errors import InvalidArgumentError

ScheduleName: TypeAlias = Literal["constant", "inverse-sqrt", "cosine"]


class Schedule(Protocol):
    """A step size for every step."""

    @property
    def initial(self) -> float:
        """η_1, by which schedules of one kind are told apart."""

    def at(self, step: int, num_steps: int) -> float:
        """η_t at step t = 1 … ``num_steps``."""

    def describe(self) -> str:
        """The schedule in a few characters."""


_LARGEST = 3e38
"""Beyond this a step overflows single precision."""


@dataclass(frozen=True)
class _Decay:
    initial: float

    def __post_init__(self) -> None:
        if not 0 < self.initial <= _LARGEST:
            raise InvalidArgumentError(
                f"the step size must be positive and at most {_LARGEST:g}, found {self.initial}: "
                "try 0.01"
            )


@final
@dataclass(frozen=True)
class Constant(_Decay):
    """η_t = η."""

    def at(self, step: int, num_steps: int) -> float:  # noqa: ARG002
        """See ``Schedule``."""
        return self.initial

    def describe(self) -> str:
        """See ``Schedule``."""
        return f"{self.initial:g}"


@final
@dataclass(frozen=True)
class InverseSqrt(_Decay):
    """η_t = η₁/√t.

    >>> InverseSqrt(0.01).at(4, num_steps=10)
    0.005
    """

    def at(self, step: int, num_steps: int) -> float:  # noqa: ARG002
        """See ``Schedule``."""
        return self.initial / math.sqrt(step)

    def describe(self) -> str:
        """See ``Schedule``."""
        return f"{self.initial:g}/√t"


@final
@dataclass(frozen=True)
class Cosine(_Decay):
    """From η₁ down towards ``final`` · η₁ along half a cosine.

    It would get there a step after the last: a step of size zero would spend privacy on nothing.
    """

    final: float = 0.0

    def at(self, step: int, num_steps: int) -> float:
        """See ``Schedule``."""
        progress = (step - 1) / num_steps
        share = self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
        return self.initial * share

    def describe(self) -> str:
        """See ``Schedule``."""
        return f"cosine from {self.initial:g}"


def make_schedule(step_size: float | Schedule, name: ScheduleName = "constant") -> Schedule:
    """A schedule from its first step size and its name; a schedule is returned as it is.

    >>> make_schedule(0.1, "inverse-sqrt")
    InverseSqrt(initial=0.1)
    """
    if not isinstance(step_size, int | float):
        return step_size
    if name not in _SCHEDULES:
        raise InvalidArgumentError(
            f"schedule must be one of {', '.join(_SCHEDULES)}, found {name!r}"
        )
    return _SCHEDULES[name](float(step_size))


_SCHEDULES: dict[str, type[Constant] | type[InverseSqrt] | type[Cosine]] = {
    "constant": Constant,
    "inverse-sqrt": InverseSqrt,
    "cosine": Cosine,
}
