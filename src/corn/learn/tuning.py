"""Mechanisms compared, each at its best step size: the search, the choice, and what it spends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from corn.checks import require_choice
from corn.covariance import ThreatModel
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.metrics import (
    COLUMNS,
    PARTS,
    Result,
    Row,
    half_width,
    is_missing,
    join_results,
    make_frame,
)
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
    counts. Like the paper, CorN reports the ε of each run alone. Tune on public data where that
    matters.

    Attributes:
        problem: the task and the data that was trained on.
        schedules: the best step size of each mechanism; one whose every run broke down has none.
        result: all runs: measurements and models.
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
        return {name: sum(own) / len(own) for name, own in self._last_values(column).items()}

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

        Both are at their best step sizes. In each seed both have the same batches, normals and
        first model, so that what they have in common cancels in the paired interval. ``to`` is the
        name of the reference, by default `reference`.
        """
        values = self._last_values(column)
        target = require_choice("to", self.reference if to is None else to, tuple(values))
        found = {}
        for name, own in values.items():
            pairs = zip(own, values[target], strict=True)
            differences = [mine - theirs for mine, theirs in pairs]
            found[name] = sum(differences) / len(differences), half_width(differences)
        del found[target]
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
        tried: dict[str, list[float]] = {}
        for trial in self.result.trials:
            # By the first step size: schedules of a grid differ in nothing else.
            tried.setdefault(trial.mechanism.name, []).append(trial.schedule.initial)
        ends: dict[str, GridEnd] = {}
        for name, schedule in self.schedules.items():
            if len(tried[name]) > 1 and schedule.initial == min(tried[name]):
                ends[name] = "smallest"
            elif len(tried[name]) > 1 and schedule.initial == max(tried[name]):
                ends[name] = "largest"
        return ends

    @cached_property
    def summary(self) -> dict[str, dict[str, object]]:
        """Scores, ε and adversary of each mechanism, by its name.

        Scores that were not measured are left out, and all scores of a mechanism whose every run
        broke down (its step size is None). For the quadratic task the optimality gap is added.
        ``intervals`` are half widths; ``differences`` are pairs of a mean and a half width, paired
        with `reference`.
        """
        gap = ["optimality_gap"] if isinstance(self.problem.task, Quadratic) else []
        facts: dict[str, dict[str, Any]] = {
            mechanism.name: {"intervals": {}, "differences": {}} for mechanism in self.mechanisms
        }
        for column in (*_SCORE_COLUMNS, *gap):
            # Those that were measured.
            for name, mean in self.score(column).items():
                if not math.isnan(mean):
                    facts[name][column] = mean
            for name, width in self.interval(column).items():
                if not math.isnan(width):
                    facts[name]["intervals"][column] = width
            for name, difference in self.differences(column).items():
                if not math.isnan(difference[0]):
                    facts[name]["differences"][column] = difference
        prefix = "simulated_" if self.result.is_simulated else ""
        for mechanism in self.mechanisms:
            schedule = self.schedules.get(mechanism.name)
            # For the steps that were run, which are fewer than planned after an interruption.
            spent = mechanism.epsilon_spent(self.result.num_steps)
            facts[mechanism.name] |= {
                "step_size": None if schedule is None else schedule.describe(),
                "num_step_sizes": sum(trial.mechanism is mechanism for trial in self.result.trials),
                f"{prefix}epsilon": None if spent is None else float(spent.max()),
                f"{prefix}epsilon_of_each_agent": spent,
                "unit": None if mechanism.budget is None else mechanism.budget.unit,
                "central_ratio": mechanism.central_ratio,
                "weighted_central_ratio": mechanism.weighted_central_ratio,
                "disagreement_ratio": mechanism.disagreement_ratio,
                "against": mechanism.against,
            }
        return facts

    @property
    def measured_rows(self) -> list[Row]:
        """Rows without unmeasured columns, the quadratic's loss as its optimality gap."""
        rows = self.result.rows
        columns = [name for name in COLUMNS if not all(is_missing(row[name]) for row in rows)]
        chosen: list[Row] = [{name: row[name] for name in columns} for row in rows]
        # The quadratic's minimum is 1434, next to which the differences between losses are
        # invisible.
        if isinstance(self.problem.task, Quadratic):
            for row in chosen:
                row["optimality_gap"] = float(row.pop("train_loss")) - self.problem.task.minimum
        return chosen

    def to_pandas(self) -> Any:
        """Return all measurements as one data frame: a row for each run and measured step.

        ``is_best`` marks the runs at their mechanism's best step size.
        """
        best = set(self.best_step_sizes.items())
        return make_frame(
            [
                {**row, "is_best": (row["mechanism"], row["step_size"]) in best}
                for row in self.result.rows
            ]
        )


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

    Without step sizes they are searched for. ``options`` are those of
    :func:`corn.learn.sweep.run_sweep`.
    """
    if not step_sizes:
        result = search_step_sizes(
            problem, network, mechanisms, settings=settings, schedule=schedule, **options
        )
    else:
        schedules = [make_schedule(step_size, schedule) for step_size in step_sizes]
        trials = [Trial(mechanism, own) for mechanism in mechanisms for own in schedules]
        result = run_sweep(problem, network, trials, settings=settings, **options)
    return choose_best(problem, result)


def _column_to_tune(problem: TrainingProblem) -> str:
    # Without validation samples step sizes are chosen by the loss on the agents' own data.
    return "validation_loss" if "validation" in problem.parts else "train_loss"


def choose_best(problem: TrainingProblem, result: Result) -> Comparison:
    """Return each mechanism at its best step size, by the last validation loss.

    Raises:
        InfeasibleError: every run of every mechanism broke down.
    """
    losses = result.average(_column_to_tune(problem))
    least: dict[str, float] = {}
    schedules: dict[str, Schedule] = {}
    for trial in result.trials:
        name = trial.mechanism.name
        loss = losses[name, trial.schedule.describe()]
        # A run that broke down has an infinite loss, which is less than none.
        if loss < least.get(name, math.inf):
            least[name] = loss
            schedules[name] = trial.schedule
    if not schedules:
        raise InfeasibleError("every run broke down: try smaller step sizes or a smaller clip")
    return Comparison(problem, schedules, result)


# Nearly equal factors of 2, 2.5 and 2, with names that are short in tables.
_MANTISSAS = (1, 2, 5)
# Two places are a factor of 4 to 5. A search ends 5 times as far from its start at most, which is a
# factor of about 2000.
_STRIDE = 2
_FURTHEST = 10
# An end whose loss is less than this better than the last one is not worth another run.
_LEAST_GAIN = 0.01
# The paper's largest step size. Without clipping there is nothing to tell the scale of gradients.
_UNCLIPPED_START = 0.1


def search_step_sizes(
    problem: TrainingProblem,
    network: Network,
    mechanisms: Sequence[Mechanism],
    *,
    settings: SweepSettings,
    schedule: ScheduleName = "constant",
    **options: Any,
) -> Result:
    """Run each mechanism with three step sizes, then with those that ``propose_places`` returns.

    An interrupted round is left out, unless it is the first. Mechanisms that do not clip are
    searched only as long as one that does is. ``options`` are those of
    :func:`corn.learn.sweep.run_sweep`.
    """
    if settings.optimizer is None:
        starts = {m: expect_place(m, problem, settings.num_steps, schedule) for m in mechanisms}
    else:
        # An optimizer may scale releases as it likes, so its own learning rate is the best guess.
        starts = dict.fromkeys(mechanisms, nearest_place(read_learning_rate(settings.optimizer)))
    wanted: dict[Mechanism, tuple[int, ...]] = {
        m: (place - _STRIDE, place, place + _STRIDE) for m, place in starts.items()
    }
    losses: dict[Mechanism, dict[int, float]] = {m: {} for m in mechanisms}
    found: Result | None = None
    while found is None or wanted:
        schedules = {
            (m, k): make_schedule(step_size_at(k), schedule)
            for m, places in wanted.items()
            for k in places
        }
        trials = [Trial(m, own) for (m, _), own in schedules.items()]
        new = run_sweep(problem, network, trials, settings=settings, **options)
        # Half a round would compare runs of different lengths.
        if new.status == "interrupted":
            return new if found is None else replace(found, status="interrupted")
        found = new if found is None else join_results(found, new)
        average = new.average(_column_to_tune(problem))
        for (m, k), own in schedules.items():
            losses[m][k] = average[m.name, own.describe()]
        proposed = {m: propose_places(losses[m], start=starts[m]) for m in mechanisms}
        wanted = {m: places for m, places in proposed.items() if places}
        # Mechanisms that clip samples decide how batches are drawn. A round without any would have
        # other batches than the rounds before.
        if not any(m.queries for m in wanted) and any(m.queries for m in mechanisms):
            wanted = {}
    return found


def propose_places(losses: Mapping[int, float], *, start: int) -> tuple[int, ...]:
    """Return the places to try next, given the losses so far; none if the search is over.

    Beyond an end that is the best so far there may be a better one, unless the end has gained less
    than one percent. An inner place is refined by its two neighbours.

    >>> propose_places({-2: 0.9, 0: 0.7, 2: 0.6}, start=0)
    (4,)
    >>> propose_places({-2: 0.9, 0: 0.7, 2: 0.6, 4: 0.8}, start=0)
    (1, 3)
    """
    tried = sorted(losses)
    best = min(tried, key=losses.__getitem__)
    if best == tried[0]:
        outward = best - _STRIDE
        inner = tried[1]
    else:
        outward = best + _STRIDE
        inner = tried[tried.index(best) - 1]
    gain = losses[inner] - losses[best]
    # If all runs broke down, the least step size counts as the best, and a smaller one is tried.
    is_worthwhile = math.isinf(losses[best]) or gain > _LEAST_GAIN * abs(losses[best])
    is_end = best in (tried[0], tried[-1])
    if is_end and is_worthwhile and abs(outward - start) <= _FURTHEST:
        return (outward,)
    between = (best - 1, best + 1)
    # Beyond the ends nothing is refined: an end that gained too little is the end of the search.
    return tuple(k for k in between if k not in losses and tried[0] < k < tried[-1])


def expect_place(
    mechanism: Mechanism, problem: TrainingProblem, num_steps: int, schedule: ScheduleName
) -> int:
    """Return the place of the step size that a mechanism's clip and noise suggest."""
    if math.isinf(mechanism.clip):
        return nearest_place(_UNCLIPPED_START)
    noise = mechanism.noise
    query = mechanism.query
    # The average over agents has the noise 1ᵀv/n, whose variance is 1ᵀR1/n².
    n = problem.data.num_agents
    variance = 0.0 if noise is None else noise.total_variance / n**2
    size = None if query is None else query.batch_size
    randomness = bound_gradient_variance(mechanism.clip, n, size)
    randomness += problem.task.num_parameters * variance
    expected = expect_step_size(num_steps=num_steps, clip=mechanism.clip, randomness=randomness)
    # A schedule that falls begins as much higher as its average over the steps is lower.
    shape = make_schedule(1.0, schedule)
    mean = float(np.mean([shape.at(step, num_steps) for step in range(1, num_steps + 1)]))
    return nearest_place(expected / mean)


def step_size_at(place: int) -> float:
    """Return a member of the series of step sizes.

    >>> [step_size_at(place) for place in (-3, -1, 0, 1, 5)]
    [0.1, 0.5, 1.0, 2.0, 50.0]
    """
    decade, digit = divmod(place, len(_MANTISSAS))
    # Read from text: a product with a rounded power of ten need not print as 0.2 or 0.05.
    return float(f"{_MANTISSAS[digit]}e{decade}")


def nearest_place(step_size: float) -> int:
    """Return the place of the member nearest to a step size.

    >>> nearest_place(0.5), nearest_place(1.1)
    (-1, 0)
    """
    # Three places per decade, so that places are nearly logarithms.
    return round(len(_MANTISSAS) * math.log10(step_size))


@dataclass(frozen=True)
class TuningPrice:
    """Price of all runs with noise together, for the agent that loses most.

    Attributes:
        num_runs: The number of runs.
        epsilon: ε of all runs together at ``delta``, floating point included.
        delta: δ of the budget.
        epsilon_of_one: ε that a single run promises that agent.
        protects: The unit, its clipping, sampling and adjacency, in words.
        against: The adversary against whom all runs hold, in words.
        assumes: The condition under which this is their price, in words.
    """

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

    It is that of their releases. A choice between them by losses without noise, as `tune` makes it,
    may depend on one sample of the validation data, and has no price.
    A server's runs have another adversary, which does not add up. A run that broke down counts:
    its models were released until it stopped. An interrupted search is refused: it has left out the
    runs of its last round.
    """
    if result.status == "interrupted":
        raise InvalidArgumentError("result must be complete to be priced, found an interrupted one")
    # Every step size and every seed is a run of its own on the same data.
    runs = [
        trial.mechanism
        for trial in result.trials
        for _ in result.seeds
        if trial.mechanism.budget is not None and not trial.mechanism.is_central
    ]
    budgets = {mechanism: mechanism.budget for mechanism in runs if mechanism.budget is not None}
    if not budgets:
        return None
    first, *_ = budgets
    # Agents with the same promises differ in their noise only, and the least counts.
    alike: dict[tuple[object, ...], list[int]] = {}
    for agent in range(first.precision.size):
        key = tuple(budget.of_agent(agent).promise for budget in budgets.values())
        alike.setdefault(key, []).append(agent)
    prices = []
    for agents in alike.values():
        # All agents of a class have the same promises, so the first stands for them.
        terms = {
            mechanism: PlanTerms(budget.of_agent(agents[0]), mechanism.threat.max_colluders)
            for mechanism, budget in budgets.items()
        }
        spent = [
            # A larger [R⁻¹]_ii means less privacy, so the maximum bounds every agent of the class.
            Expense(terms[mechanism], float(mechanism.precision[agents].max()), result.num_steps)
            for mechanism in runs
        ]
        own = terms[first].budget
        total = compose_expenses(spent, own.promise.delta)
        prices.append(
            TuningPrice(
                num_runs=len(spent),
                epsilon=total.epsilon,
                delta=total.delta,
                epsilon_of_one=own.promise.epsilon,
                protects=f"{own.query.protects} ({own.query.recipe})",
                # Together runs hold against no stronger adversary than the weakest of them.
                against=ThreatModel(total.max_colluders or 0).describe(),
            )
        )
    return max(prices, key=lambda price: price.epsilon)
