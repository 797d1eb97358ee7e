"""Choose step sizes on validation loss, for each method by itself, as the paper does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corn.errors import InfeasibleError, InvalidArgumentError
from corn.learn.method import Method, Trial
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result
from corn.learn.schedule import Schedule, ScheduleName, make_schedule
from corn.learn.settings import SweepSettings
from corn.learn.sweep import run_sweep
from corn.topology import Network

STEP_SIZES = (1e-1, 5e-2, 1e-2, 5e-3, 1e-3)
"""The paper's grid."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """The best step size of each method that has one, and the sweep it was read off.

    Looking at the validation loss of several runs on one data set costs privacy that no ε here
    counts; like the paper, CorN reports each run's own ε. Tune on public data where that matters.
    """

    schedules: dict[str, Schedule]
    result: Result

    def score(self, column: str) -> dict[str, float]:
        """A column at the end, averaged over seeds, of each method at its best step size."""
        averages = self.result.average(column)
        return {
            name: averages[name, schedule.describe()] for name, schedule in self.schedules.items()
        }


def make_grid(
    methods: Sequence[Method],
    *,
    step_sizes: Sequence[float] = STEP_SIZES,
    schedule: ScheduleName = "constant",
) -> list[Trial]:
    """Every method with every step size."""
    schedules = [make_schedule(step_size, schedule) for step_size in step_sizes]
    return [Trial(method, own) for method in methods for own in schedules]


def tune(
    problem: TrainingProblem,
    network: Network,
    methods: Sequence[Method],
    *,
    settings: SweepSettings,
    step_sizes: Sequence[float] = STEP_SIZES,
    schedule: ScheduleName = "constant",
    **options: Any,
) -> Tuning:
    """Run all methods with all step sizes together; keep each one's best on validation.

    ``options`` are those of :func:`corn.learn.sweep.run_sweep`.
    """
    if "validation" not in problem.parts:
        raise InvalidArgumentError(
            "tuning needs validation samples, found none: give the problem a validation part"
        )
    trials = make_grid(methods, step_sizes=step_sizes, schedule=schedule)
    result = run_sweep(problem, network, trials, settings=settings, **options)
    return read_tuning(result)


def read_tuning(result: Result, column: str = "validation_loss") -> Tuning:
    """The best step size of each method in a sweep, by a column at the end.

    A method whose every run broke down has none; if that is so for all of them, it is an
    ``InfeasibleError``.
    """
    best = result.best_step_sizes(column)
    if not best:
        raise InfeasibleError("every run broke down: try smaller step sizes or a smaller clip")
    schedules = {
        trial.method.name: trial.schedule
        for trial in result.trials
        if best.get(trial.method.name) == trial.schedule.describe()
    }
    return Tuning(schedules, result)
