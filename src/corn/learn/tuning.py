"""Mechanisms compared, each at its best step size: the search, the choice, and what it spends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from scipy.special import stdtrit

from corn.checks import require_choice
from corn.covariance import ThreatModel
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.metrics import COLUMNS, PARTS, Result, Row, is_missing, make_frame, name_of
from corn.learn.optimizers import read_learning_rate
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.schedule import Schedule, ScheduleName, make_schedule
from corn.learn.sweep import run_sweep
from corn.learn.tasks import Quadratic
from corn.plan.advice import bound_gradient_variance, expect_step_size
from corn.privacy.composition import Expense, PlanTerms, compose_expenses
from corn.topology import Network

GridEnd: TypeAlias = Literal["smallest", "largest"]

_SCORES = ("loss", "accuracy", "loss_of_average", "accuracy_of_average")
_SCORE_COLUMNS = (*(f"{part}_{score}" for part in PARTS for score in _SCORES), "consensus_distance")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Mechanisms at the same ε, each at its best step size.

    Choosing by the validation loss of several runs on one data set costs privacy that no ε here
    counts. Tune on public data where that matters. ``schedules`` has the best of each mechanism;
    one whose every run broke down has none. ``result`` has all runs.
    """

    problem: TrainingProblem = field(repr=False)
    schedules: dict[str, Schedule]
    result: Result

    @property
    def mechanisms(self) -> list[Mechanism]:
        """The mechanisms, each once."""
        return list(dict.fromkeys(trial.mechanism for trial in self.result.trials))

    @property
    def best_step_sizes(self) -> dict[str, str]:
        """The best step size of each mechanism, as tables write it."""
        return {name: schedule.describe() for name, schedule in self.schedules.items()}

    def score(self, column: str) -> dict[str, float]:
        """Return a column's last value at the best step size, averaged over seeds, by name."""
        return {name: _mean(own) for name, own in self._last_values(column).items()}

    def interval(self, column: str) -> dict[str, float]:
        """Return half the width of Student's 95 % interval over seeds of ``score``, by name."""
        return {name: half_width(own) for name, own in self._last_values(column).items()}

    @property
    def reference(self) -> str:
        """The mechanism that others are compared with: the plan's or CorN, or else the first."""
        names = list(self.schedules)
        return next((name for name in ("plan", "corn") if name in names), names[0])

    def differences(self, column: str, to: str | None = None) -> dict[str, tuple[float, float]]:
        """Return each mechanism's score minus that of a reference, and half its 95 % interval.

        In each seed both have the same batches, normals and first model, so that what they have in
        common cancels in the paired interval. ``to`` is by default `reference`.
        """
        values = self._last_values(column)
        target = require_choice("to", self.reference if to is None else to, tuple(values))
        found = {}
        for name in [name for name in values if name != target]:
            paired = np.subtract(values[name], values[target]).tolist()
            found[name] = _mean(paired), half_width(paired)
        return found

    def _last_values(self, column: str) -> dict[str, list[float]]:
        """Return the last value for each seed at the best step size, by name."""
        task = self.problem.task
        if column == "optimality_gap" and isinstance(task, Quadratic):
            losses = self._last_values("train_loss")
            return {name: [loss - task.minimum for loss in own] for name, own in losses.items()}
        values = self.result.last_values(column)
        return {name: values[name, own] for name, own in self.best_step_sizes.items()}

    @property
    def ends(self) -> dict[str, GridEnd]:
        """Mechanisms whose best step size is an end of those tried, if several were."""
        ends: dict[str, GridEnd] = {}
        for name, schedule in self.schedules.items():
            mine = [own.schedule for own in self.result.trials if own.mechanism.name == name]
            tried = sorted(own.initial for own in mine)
            if len(tried) > 1 and schedule.initial in (tried[0], tried[-1]):
                ends[name] = "smallest" if schedule.initial == tried[0] else "largest"
        return ends

    @cached_property
    def summary(self) -> dict[str, dict[str, object]]:
        """Scores, ε and adversary of each mechanism, by its name, without what was not measured.

        ``intervals`` are half widths; ``differences`` are pairs of a mean and a half width, with
        `reference`. For the quadratic task the optimality gap is added.
        """
        prefix = "simulated_" if self.result.is_simulated else ""
        facts: dict[str, dict[str, Any]] = {}
        for own in self.mechanisms:
            # For the steps that were run, which are fewer than planned after an interruption.
            spent = own.epsilon_spent(self.result.num_steps)
            facts[own.name] = {
                "intervals": {},
                "differences": {},
                "step_size": self.best_step_sizes.get(own.name),
                "num_step_sizes": sum(trial.mechanism is own for trial in self.result.trials),
                f"{prefix}epsilon": None if spent is None else float(spent.max()),
                f"{prefix}epsilon_of_each_agent": spent,
                "unit": None if own.budget is None else own.budget.unit,
                "central_ratio": own.central_ratio,
                "weighted_central_ratio": own.weighted_central_ratio,
                "disagreement_ratio": own.disagreement_ratio,
                "against": own.against,
            }
        gap = ["optimality_gap"] if isinstance(self.problem.task, Quadratic) else []
        for column in (*_SCORE_COLUMNS, *gap):
            intervals, differences = self.interval(column), self.differences(column)
            for name, mean in self.score(column).items():
                if not math.isnan(mean):
                    facts[name][column] = mean
                if not math.isnan(intervals[name]):
                    facts[name]["intervals"][column] = intervals[name]
                if name in differences and not math.isnan(differences[name][0]):
                    facts[name]["differences"][column] = differences[name]
        return facts

    @property
    def measured_rows(self) -> list[Row]:
        """Rows without unmeasured columns, the quadratic's loss as its optimality gap."""
        rows = self.result.rows
        columns = [name for name in COLUMNS if not all(is_missing(row[name]) for row in rows)]
        chosen: list[Row] = [{name: row[name] for name in columns} for row in rows]
        # Next to the quadratic's minimum, 1434, differences between losses are invisible.
        if isinstance(self.problem.task, Quadratic):
            for row in chosen:
                row["optimality_gap"] = float(row.pop("train_loss")) - self.problem.task.minimum
        return chosen

    def to_pandas(self) -> Any:
        """Return all measurements as a data frame; ``is_best`` marks best step sizes."""
        best = self.best_step_sizes.items()
        rows = self.result.rows
        return make_frame(
            [row | {"is_best": (row["mechanism"], row["step_size"]) in best} for row in rows]
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def half_width(values: Sequence[float]) -> float:
    """Return half the width of Student's 95 % interval of the mean, or NaN."""
    count = len(values)
    if count < 2 or not np.isfinite(values).all():
        return math.nan
    return float(stdtrit(count - 1, 0.975)) * math.sqrt(np.var(values, ddof=1) / count)


def tune(
    problem: TrainingProblem,
    network: Network,
    mechanisms: Sequence[Mechanism],
    *,
    settings: SweepSettings,
    step_sizes: Sequence[float] = (),
    schedule: ScheduleName = "constant",
    **options: Any,
) -> Comparison:
    """Run all mechanisms with all step sizes together, and keep the best of each.

    Without step sizes they are searched for. An interrupted round of a search is left out, unless
    it is the first. ``options`` are those of :func:`corn.learn.sweep.run_sweep`.
    """

    def run(trials: Sequence[Trial]) -> Result:
        return run_sweep(problem, network, trials, settings=settings, **options)

    if step_sizes:
        schedules = [make_schedule(step_size, schedule) for step_size in step_sizes]
        trials = [Trial(mechanism, own) for mechanism in mechanisms for own in schedules]
        return choose_best(problem, run(trials))
    if settings.optimizer is None:
        starts = {m: expect_place(m, problem, settings.num_steps, schedule) for m in mechanisms}
    else:
        # An optimizer may scale releases as it likes, so its own learning rate is the best guess.
        starts = dict.fromkeys(mechanisms, nearest_place(read_learning_rate(settings.optimizer)))
    return choose_best(problem, _search(run, starts, schedule, _column_to_tune(problem)))


def _column_to_tune(problem: TrainingProblem) -> str:
    # Without validation samples step sizes are chosen by the loss on the agents' own data.
    return "validation_loss" if "validation" in problem.parts else "train_loss"


def choose_best(problem: TrainingProblem, result: Result) -> Comparison:
    """Return each mechanism at its best step size, by the last validation loss."""
    values = result.last_values(_column_to_tune(problem))
    least: dict[str, float] = {}
    schedules: dict[str, Schedule] = {}
    for trial in result.trials:
        name = trial.mechanism.name
        loss = _mean(values[name_of(trial)])
        # A run that broke down has an infinite loss, which is less than none.
        if loss < least.get(name, math.inf):
            least[name] = loss
            schedules[name] = trial.schedule
    if not schedules:
        raise InfeasibleError("every run broke down: try smaller step sizes or a smaller clip")
    return Comparison(problem, schedules, result)


# Nearly equal factors of 2, 2.5 and 2, with names that are short in tables.
_MANTISSAS = (1, 2, 5)
# Two places are a factor of 4 to 5. A search ends a factor of about 2000 from its start at most.
_STRIDE, _FURTHEST = 2, 10
# An end whose loss is less than this better than the last one is not worth another run.
_LEAST_GAIN = 0.01
# The paper's largest step size. Without clipping there is nothing to tell the scale of gradients.
_UNCLIPPED_START = 0.1


def _search(
    run: Callable[[Sequence[Trial]], Result],
    starts: Mapping[Mechanism, int],
    schedule: ScheduleName,
    column: str,
) -> Result:
    """Return all runs of a search from the place of each mechanism, for the least of a column."""
    losses: dict[Mechanism, dict[int, float]] = {m: {} for m in starts}
    wanted = [
        (m, k) for m, start in starts.items() for k in (start - _STRIDE, start, start + _STRIDE)
    ]
    found: Result | None = None
    while found is None or wanted:
        trials = [Trial(m, make_schedule(step_size_at(k), schedule)) for m, k in wanted]
        new = run(trials)
        # Half a round would compare runs of different lengths.
        if new.status == "interrupted":
            return new if found is None else replace(found, status="interrupted")
        found = new if found is None else _join(found, new)
        values = new.last_values(column)
        for (m, k), trial in zip(wanted, trials, strict=True):
            losses[m][k] = _mean(values[name_of(trial)])
        wanted = [(m, k) for m in starts for k in propose_places(losses[m], start=starts[m])]
        # Mechanisms that clip samples decide how batches are drawn: one has to be in each round.
        if not any(m.queries for m, _ in wanted) and any(m.queries for m in starts):
            wanted = []
    return found


def _join(first: Result, second: Result) -> Result:
    """Return the result of one sweep with the trials of two, which ran the same seeds and steps."""
    # Runs are ordered by seed first, so the trials of both sweeps alternate.
    by_seed = [
        own.parameters.reshape(len(own.seeds), -1, *own.parameters.shape[1:])
        for own in (first, second)
    ]
    return replace(
        first,
        trials=first.trials + second.trials,
        parameters=torch.cat(by_seed, dim=1).flatten(0, 1),
        rows=tuple(sorted(first.rows + second.rows, key=lambda row: int(row["step"]))),
        stopped={**first.stopped, **second.stopped},
        private_notes=first.private_notes + second.private_notes,
    )


def propose_places(losses: Mapping[int, float], *, start: int) -> tuple[int, ...]:
    """Return the places to try next: beyond the best end, or beside an inner one; none at last."""
    tried = sorted(losses)
    best = min(tried, key=losses.__getitem__)
    is_first = best == tried[0]
    outward = best + (-_STRIDE if is_first else _STRIDE)
    gain = losses[tried[1] if is_first else tried[tried.index(best) - 1]] - losses[best]
    # If all runs broke down, the least step size counts as the best, and a smaller one is tried.
    is_worthwhile = math.isinf(losses[best]) or gain > _LEAST_GAIN * abs(losses[best])
    if best in (tried[0], tried[-1]) and is_worthwhile and abs(outward - start) <= _FURTHEST:
        return (outward,)
    return tuple(k for k in (best - 1, best + 1) if k not in losses and tried[0] < k < tried[-1])


def expect_place(
    mechanism: Mechanism, problem: TrainingProblem, num_steps: int, schedule: ScheduleName
) -> int:
    """Return the place of the step size that a mechanism's clip and noise suggest."""
    if math.isinf(mechanism.clip):
        return nearest_place(_UNCLIPPED_START)
    n = problem.data.num_agents
    # The average over agents has the noise 1ᵀv/n, whose variance is 1ᵀR1/n².
    variance = 0.0 if mechanism.noise is None else mechanism.noise.total_variance / n**2
    randomness = bound_gradient_variance(mechanism.clip, n, mechanism.queries[0].batch_size)
    randomness += problem.task.num_parameters * variance
    expected = expect_step_size(num_steps=num_steps, clip=mechanism.clip, randomness=randomness)
    # A schedule that falls begins as much higher as its average over the steps is lower.
    shape = make_schedule(1.0, schedule)
    mean = float(np.mean([shape.at(step + 1, num_steps) for step in range(num_steps)]))
    return nearest_place(expected / mean)


def step_size_at(place: int) -> float:
    """Return a member of the series of step sizes."""
    decade, digit = divmod(place, len(_MANTISSAS))
    # Read from text: a product with a rounded power of ten need not print as 0.2 or 0.05.
    return float(f"{_MANTISSAS[digit]}e{decade}")


def nearest_place(step_size: float) -> int:
    """Return the place of the member nearest to a step size."""
    # Three places per decade, so that places are nearly logarithms.
    return round(len(_MANTISSAS) * math.log10(step_size))


@dataclass(frozen=True)
class TuningPrice:
    """Price of all runs with noise together, floats included, for the agent that loses most."""

    num_runs: int
    epsilon: float
    delta: float
    epsilon_of_one: float
    protects: str
    against: str
    assumes: str = (
        "each run has secret noise and secret batches of its own, and step sizes are not chosen by "
        "losses on private data"
    )


def price_tuning(result: Result) -> TuningPrice | None:
    """Return the price of all runs that have noise and no trusted server; None if there are none.

    A choice between them by losses without noise, as `tune` makes it, has no price. A run that
    broke down counts: its models were released until it stopped.
    """
    if result.status == "interrupted":
        raise InvalidArgumentError("an interrupted result cannot be priced")
    every = [own.mechanism for own in result.trials for _ in result.seeds]
    budgets = {own: own.budget for own in every if own.budget is not None and not own.is_central}
    if not budgets:
        return None
    runs = [own for own in every if own in budgets]
    # Agents with the same promises differ in their noise only, and the least counts.
    alike: dict[tuple[object, ...], list[int]] = {}
    for agent in range(runs[0].precision.size):
        key = tuple(budget.of_agent(agent).promise for budget in budgets.values())
        alike.setdefault(key, []).append(agent)
    prices = []
    for agents in alike.values():
        expenses = {
            mechanism: Expense(
                PlanTerms(budget.of_agent(agents[0]), mechanism.threat.max_colluders),
                # A larger [R⁻¹]_ii means less privacy: the maximum bounds every agent of the class.
                float(mechanism.precision[agents].max()),
                result.num_steps,
            )
            for mechanism, budget in budgets.items()
        }
        own = budgets[runs[0]].of_agent(agents[0])
        total = compose_expenses([expenses[mechanism] for mechanism in runs], own.promise.delta)
        prices.append(
            TuningPrice(
                num_runs=len(runs),
                epsilon=total.epsilon,
                delta=total.delta,
                epsilon_of_one=own.promise.epsilon,
                protects=f"{own.query.protects} ({own.query.recipe})",
                against=ThreatModel(total.max_colluders or 0).describe(),
            )
        )
    return max(prices, key=lambda price: price.epsilon)
