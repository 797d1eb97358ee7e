"""Step sizes chosen on validation loss, for each method by itself, and the scores they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from corn.errors import InfeasibleError, InvalidArgumentError
from corn.learn.method import Method, Trial
from corn.learn.metrics import COLUMNS, PARTS, Row, is_missing
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result
from corn.learn.schedule import Schedule, ScheduleName, make_schedule
from corn.learn.settings import SweepSettings
from corn.learn.sweep import run_sweep
from corn.learn.tasks import Quadratic
from corn.topology import Network

STEP_SIZES = (1e-1, 5e-2, 1e-2, 5e-3, 1e-3)
"""The paper's grid."""

GridEnd: TypeAlias = Literal["smallest", "largest"]

_SCORES = ("loss", "accuracy", "loss_of_average", "accuracy_of_average")
_SCORE_COLUMNS = (*(f"{part}_{score}" for part in PARTS for score in _SCORES), "consensus_distance")


@dataclass(frozen=True, eq=False)
class Tuning:
    """The best step size of each method that has one, and the sweep that it was chosen from.

    Choosing by the validation loss of several runs on one data set costs privacy that no ε here
    counts. Like the paper, CorN reports the ε of each run alone. Tune on public data where that
    matters.
    """

    schedules: dict[str, Schedule]
    result: Result

    def score(self, column: str) -> dict[str, float]:
        """Return a column's last value at the best step size, averaged over seeds, by method."""
        return self._at_best(self.result.average(column))

    def interval(self, column: str) -> dict[str, float]:
        """Return half the width of the 95 % interval of ``score``, by method (``Result``)."""
        return self._at_best(self.result.interval(column))

    def _at_best(self, values: dict[tuple[str, str], float]) -> dict[str, float]:
        return {name: values[name, own.describe()] for name, own in self.schedules.items()}


def make_grid(
    methods: Sequence[Method],
    *,
    step_sizes: Sequence[float] = STEP_SIZES,
    schedule: ScheduleName = "constant",
) -> list[Trial]:
    """Return a trial for every method with every step size."""
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
    """Run all methods with all step sizes together; keep the best of each on validation loss.

    ``options`` are those of :func:`corn.learn.sweep.run_sweep`.
    """
    problem.require_samples("validation_loss")
    trials = make_grid(methods, step_sizes=step_sizes, schedule=schedule)
    return read_tuning(run_sweep(problem, network, trials, settings=settings, **options))


def read_tuning(result: Result, column: str = "validation_loss") -> Tuning:
    """Return the best step size of each method in a sweep, by the last value of a column.

    A method whose every run broke down has none.

    Raises:
        InfeasibleError: every run of every method broke down.
        InvalidArgumentError: the column was not measured.
    """
    # A run that broke down counts as an infinite loss, so it is never the best.
    best = result.best_step_sizes(column)
    if not best and not result.stopped:
        raise InvalidArgumentError(f"column must be one that was measured, found {column!r}")
    if not best:
        raise InfeasibleError("every run broke down: try smaller step sizes or a smaller clip")
    schedules = {
        trial.method.name: trial.schedule
        for trial in result.trials
        if best.get(trial.method.name) == trial.schedule.describe()
    }
    return Tuning(schedules, result)


def find_ends(tuning: Tuning) -> dict[str, GridEnd]:
    """Return the methods whose best step size is an end of their grid, and which end it is.

    A grid of one step size has no ends.
    """
    tried: dict[str, list[float]] = {}
    for trial in tuning.result.trials:
        tried.setdefault(trial.method.name, []).append(trial.schedule.initial)
    ends: dict[str, GridEnd] = {}
    for name, schedule in tuning.schedules.items():
        # By the first step size: schedules of a grid differ in nothing else.
        if len(tried[name]) > 1 and schedule.initial == min(tried[name]):
            ends[name] = "smallest"
        elif len(tried[name]) > 1 and schedule.initial == max(tried[name]):
            ends[name] = "largest"
    return ends


def summarize_methods(problem: TrainingProblem, tuning: Tuning) -> dict[str, dict[str, object]]:
    """Return the scores of each method at its best step size, averaged over seeds, and its ε.

    Scores that were not measured are left out, and all scores of a method whose every run broke
    down (its step size is None). For the quadratic task the optimality gap is added.
    """
    methods = dict.fromkeys(trial.method for trial in tuning.result.trials)
    return {method.name: _summarize(method, problem, tuning) for method in methods}


def select_measured(problem: TrainingProblem, rows: Sequence[Row]) -> list[Row]:
    """Return rows without unmeasured columns, the quadratic's loss as its optimality gap."""
    columns = [name for name in COLUMNS if not all(is_missing(row[name]) for row in rows)]
    chosen: list[Row] = [{name: row[name] for name in columns} for row in rows]
    # The quadratic's minimum is 1434, next to which the differences between losses are invisible.
    if isinstance(problem.task, Quadratic):
        for row in chosen:
            row["optimality_gap"] = float(row.pop("train_loss")) - problem.task.minimum
    return chosen


def _summarize(method: Method, problem: TrainingProblem, tuning: Tuning) -> dict[str, object]:
    schedule = tuning.schedules.get(method.name)
    prefix = "simulated_" if tuning.result.is_simulated else ""
    # For the steps that were run, which are fewer than planned after an interruption.
    spent = method.epsilon_spent(tuning.result.num_steps)
    return {
        "step_size": None if schedule is None else schedule.describe(),
        **({} if schedule is None else _scores(method.name, problem, tuning)),
        "intervals": {} if schedule is None else _intervals(method.name, problem, tuning),
        "num_step_sizes": sum(trial.method is method for trial in tuning.result.trials),
        f"{prefix}epsilon": None if spent is None else float(spent.max()),
        f"{prefix}epsilon_of_each_agent": spent,
        "unit": None if method.budget is None else method.budget.unit,
        "central_ratio": method.central_ratio,
        "weighted_central_ratio": method.weighted_central_ratio,
        "disagreement_ratio": method.disagreement_ratio,
        "against": method.against,
    }


def _scores(name: str, problem: TrainingProblem, tuning: Tuning) -> dict[str, float]:
    scores = {column: tuning.score(column)[name] for column in _SCORE_COLUMNS}
    if isinstance(problem.task, Quadratic):
        scores["optimality_gap"] = scores["train_loss"] - problem.task.minimum
    return {column: value for column, value in scores.items() if not math.isnan(value)}


def _intervals(name: str, problem: TrainingProblem, tuning: Tuning) -> dict[str, float]:
    """Return half the width of the 95 % interval of each score; none for a single run."""
    widths = {column: tuning.interval(column)[name] for column in _SCORE_COLUMNS}
    if isinstance(problem.task, Quadratic):
        # The minimum is a constant, so that the gap varies as much as the loss.
        widths["optimality_gap"] = widths["train_loss"]
    return {column: width for column, width in widths.items() if not math.isnan(width)}
