"""Step-size schedules η_t: constant, η₁/√t, cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, SupportsFloat, TypeAlias

from corn.checks import require, require_choice

ScheduleName: TypeAlias = Literal["constant", "inverse-sqrt", "cosine"]
# Here, because the module of optimizers imports torch, which takes seconds.
OptimizerName: TypeAlias = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class Schedule:
    """A step size for every step; a schedule of your own overrides ``at`` and ``text``.

    ``initial`` is η₁; ``text`` describes the schedule, with ``{:g}`` for η₁.
    """

    initial: float
    text: ClassVar[str] = "{:g}"

    def __post_init__(self) -> None:
        # A larger step size would overflow single precision.
        is_valid = 0 < self.initial <= 3e38
        require(is_valid, "the step size", "positive and at most 3e38", self.initial)

    def at(self, step: int, num_steps: int) -> float:  # noqa: ARG002
        """Return η_t at step t = 1 … ``num_steps``."""
        return self.initial

    def describe(self) -> str:
        """Return the schedule in a few characters."""
        return self.text.format(self.initial)


class Constant(Schedule):
    """η_t = η."""


class InverseSqrt(Schedule):
    """η_t = η₁/√t."""

    text = "{:g}/√t"

    def at(self, step: int, num_steps: int) -> float:  # noqa: ARG002
        """See ``Schedule``."""
        return self.initial / math.sqrt(step)


class Cosine(Schedule):
    """Half a cosine from η₁ down to 0, which it would reach one step after the last."""

    text = "cosine from {:g}"

    def at(self, step: int, num_steps: int) -> float:
        """See ``Schedule``."""
        return self.initial * (1 + math.cos(math.pi * (step - 1) / num_steps)) / 2


_SCHEDULES = {"constant": Constant, "inverse-sqrt": InverseSqrt, "cosine": Cosine}


def make_schedule(step_size: float | Schedule, name: ScheduleName = "constant") -> Schedule:
    """Return the schedule of this name with this first step size, or a schedule unchanged."""
    if isinstance(step_size, Schedule):
        return step_size
    is_number = isinstance(step_size, SupportsFloat)
    require(is_number, "the step size", "a number or a schedule", repr(step_size))
    return _SCHEDULES[require_choice("schedule", name, _SCHEDULES)](float(step_size))
