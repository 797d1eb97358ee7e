"""Measurements at chosen steps and of final models, their files, and the result of a sweep."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from corn.checks import FloatArray, IntArray, require, require_choice
from corn.errors import MissingExtraError
from corn.files import writing_whole
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.step import StepStatistics
from corn.learn.tasks import Task

Row: TypeAlias = dict[str, str | int | float]
Samples: TypeAlias = tuple[Tensor, Tensor]
PARTS = ("train", "validation", "test")

# All of so many agents are scored; scoring all of more would take longer than training them.
_MOST_MEASURED, _MEASURED_OF_MORE = 1000, 200
_NUM_EVALUATIONS = 20

COLUMNS = (
    "mechanism",
    "step_size",
    "seed",
    "step",
    *(
        f"{part}_{score}{of}"
        for part in PARTS
        for of in ("", "_of_average")
        for score in ("loss", "accuracy")
    ),
    "consensus_distance",
    "gradient_norm",
    "fraction_clipped",
    "noise_norm",
    "epsilon",
    "epsilon_least",
    "simulated_epsilon",
    "simulated_epsilon_least",
    "delta",
    "unit",
    "central_ratio",
)
"""The columns of a table of results.

``test_loss`` is the loss of each agent's own model, averaged over agents (200 of them, if there are
more than 1000); ``test_loss_of_average`` is that of the average of all models.
``consensus_distance`` is the root mean square distance of the agents' models from their average.
``epsilon`` is the ε spent so far by the least protected agent, ``epsilon_least`` by the best
protected; with noise from a public seed nobody is protected, and both have the prefix
``simulated_``. ``central_ratio`` is the noise variance that a step adds to the average of all
agents, as planned, over that of a trusted server with the same promise. A value that was not
measured is NaN.
"""

TRACED = (
    *("mechanism", "step_size", "seed", "step"),
    *("gradient_norm", "fraction_clipped", "noise_norm", "average_noise_norm"),
    *("consensus_distance", "disagreement_ratio"),
)
"""The columns of a trace, of which `run_sweep` makes one row for each run and step.

Norms and clipped fractions are means over agents, as in `COLUMNS`. ``average_noise_norm`` is the
norm of the average of all agents' noise, ``consensus_distance`` the disagreement after the step,
and ``disagreement_ratio`` κ of the design.
"""

PRIVATE_COLUMNS = (
    *(name for name in COLUMNS if name.startswith("train_")),
    "gradient_norm",
    "fraction_clipped",
    "noise_norm",
)
"""The columns that no noise protects: only the owner of the training data may see them.

The norm of the noise is one of them: messages show the sum of gradient and noise, and together with
the exact norm of the noise they would reveal more of the gradient than ε counts.
"""

SHARED_COLUMNS = tuple(name for name in COLUMNS if name not in PRIVATE_COLUMNS)
"""The other columns, which follow from public models, public data and the plan."""


def measure(
    task: Task,
    parameters: Tensor,
    trials: tuple[Trial, ...],
    *,
    seeds: tuple[int, ...],
    step: int,
    parts: Mapping[str, Samples],
    statistics: StepStatistics | None,
    is_simulated: bool = True,
) -> list[Row]:
    """Measure models of shape (seeds, agents, trials, parameters), seed by seed."""
    # A different column name, so that a simulated ε can never be mistaken for a promise.
    prefix = "simulated_" if is_simulated else ""
    scores = _score(task, parameters, parts)
    scores["consensus_distance"] = spread_of(parameters)
    if statistics is not None:
        scores |= vars(statistics)
    spent = {own: _privacy_spent(own, step, prefix) for own in {v.mechanism for v in trials}}
    rows = []
    for s, seed in enumerate(seeds):
        for v, trial in enumerate(trials):
            row: Row = dict.fromkeys(COLUMNS, math.nan)
            mechanism, step_size = name_of(trial)
            row |= {"mechanism": mechanism, "step_size": step_size, "seed": seed, "step": step}
            row |= {name: float(own[s, v]) for name, own in scores.items()}
            rows.append(row | spent[trial.mechanism])
    return rows


def _privacy_spent(mechanism: Mechanism, step: int, prefix: str) -> dict[str, Any]:
    spent = mechanism.epsilon_spent(step)
    if spent is None or mechanism.budget is None:
        return {"unit": ""}
    return {
        f"{prefix}epsilon": float(spent.max()),
        f"{prefix}epsilon_least": float(spent.min()),
        "delta": max(promise.delta for promise in mechanism.budget.promises),
        "unit": mechanism.budget.unit,
        "central_ratio": mechanism.central_ratio,
    }


def name_of(trial: Trial) -> tuple[str, str]:
    """Return the mechanism and the step size of a trial as tables write them."""
    return trial.mechanism.name, trial.schedule.describe()


def run_of(row: Row) -> tuple[str, str, int]:
    """Return the mechanism, the step size and the seed of the run that a row measures."""
    return str(row["mechanism"]), str(row["step_size"]), int(row["seed"])


def spread_of(parameters: Tensor) -> Tensor:
    """Return the root mean square distance of agents' models from their average, by run."""
    # Relative to the first model, so that equal models have a distance of exactly zero.
    shifts = parameters - parameters[:, :1]
    return (shifts - shifts.mean(dim=1, keepdim=True)).square().sum(dim=-1).mean(dim=1).sqrt()


def _score(task: Task, parameters: Tensor, parts: Mapping[str, Samples]) -> dict[str, Tensor]:
    """Return losses and accuracies, each of shape (seeds, trials)."""
    # Of all agents, before those to be scored are selected.
    average = parameters.mean(dim=1)
    parameters = parameters[:, choose_measured(parameters.shape[1])].contiguous()
    scores = {}
    for name, (inputs, targets) in parts.items():
        for of, models in (("", parameters), ("_of_average", average.unsqueeze(1))):
            # All models of all runs in one call, which shares one product with the samples.
            found = task.evaluate(models.reshape(-1, models.shape[-1]), inputs, targets)
            shape = models.shape[:-1]
            scores[f"{name}_loss{of}"] = found.loss.view(shape).mean(dim=1)
            if found.accuracy is not None:
                scores[f"{name}_accuracy{of}"] = found.accuracy.view(shape).mean(dim=1)
    return scores


@dataclass(frozen=True)
class Quality:
    """Scores of predicted probabilities; NaN where one is not defined.

    ``auc`` is that of the second of two classes, or the mean over classes of each against all
    others. ``recall`` has one number for each class. ``calibration_error`` is the expected one
    (ECE), in 15 bins of equal width. ``brier`` is the mean squared error of the probability of the
    second of two classes, or the sum of that over classes.
    """

    accuracy: float
    auc: float
    recall: tuple[float, ...]
    calibration_error: float
    brier: float
    num_samples: int


_NUM_BINS = 15


def measure_quality(probabilities: FloatArray, targets: IntArray) -> Quality:
    """Return the scores of probabilities, shape (samples, classes), for the right classes."""
    from sklearn.metrics import roc_auc_score

    num_samples, num_classes = probabilities.shape
    confidence = probabilities.max(axis=1)
    hits = probabilities.argmax(axis=1) == targets
    is_class = targets[:, None] == np.arange(num_classes)
    areas = [
        roc_auc_score(own, scores) if own.any() and not own.all() else math.nan
        for own, scores in zip(is_class.T, probabilities.T, strict=True)
    ]
    errors = np.square(probabilities - is_class)
    # Bins (k/15, (k+1)/15], and each weighted by its samples: sums instead of means.
    bins = np.clip(np.ceil(confidence * _NUM_BINS) - 1, 0, _NUM_BINS - 1).astype(np.int64)
    gaps = np.bincount(bins, hits - confidence, minlength=_NUM_BINS)
    return Quality(
        accuracy=float(hits.mean()),
        auc=float(areas[1] if num_classes == 2 else np.mean(areas)),
        recall=tuple(float(hits[own].mean()) if own.any() else math.nan for own in is_class.T),
        calibration_error=float(np.abs(gaps).sum() / num_samples),
        brier=float((errors[:, 1] if num_classes == 2 else errors.sum(axis=1)).mean()),
        num_samples=num_samples,
    )


def choose_measured(num_agents: int) -> list[int]:
    """Return the agents whose own models are scored: all of 1000, some of more, evenly spaced."""
    count = num_agents if num_agents <= _MOST_MEASURED else _MEASURED_OF_MORE
    return [k * num_agents // count for k in range(count)]


def choose_evaluation_steps(evaluate_at: Sequence[int] | None, num_steps: int) -> frozenset[int]:
    """Return the steps to measure at: those given and the last, or 0, the last and 19 between."""
    if evaluate_at is None:
        shares = range(_NUM_EVALUATIONS + 1)
        return frozenset(round(num_steps * k / _NUM_EVALUATIONS) for k in shares)
    outside = [step for step in evaluate_at if not 0 <= step <= num_steps]
    require(not outside, "evaluate_at", f"steps from 0 to {num_steps}", outside)
    return frozenset({*evaluate_at, num_steps})


def write_table(
    rows: Sequence[Row],
    path: Path | str,
    *,
    columns: Sequence[str] = COLUMNS,
    is_private: bool = False,
) -> None:
    """Write these columns of rows to a CSV file, NaN as an empty field."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The file gets its name when it is complete: readers never see half a table.
    with (
        writing_whole(target, is_private=is_private) as partial,
        partial.open("w", newline="", encoding="utf-8") as stream,
    ):
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: "" if is_missing(row[name]) else row[name] for name in columns})


def is_missing(value: str | int | float) -> bool:
    """Return whether a value was not measured."""
    return isinstance(value, float) and math.isnan(value)


def make_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a ``pandas.DataFrame``; pandas is an extra."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError("a data frame", extra="pandas") from error
    return pd.DataFrame([dict(row) for row in rows])


SweepStatus: TypeAlias = Literal["complete", "interrupted"]

PUBLIC_SEEDS = (
    "the noise follows from public seeds, so these models protect nobody; the same run with secret "
    "keys would spend the simulated ε"
)


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of all runs of a sweep. An interrupted one is valid up to its last step.

    ``parameters`` are the final models, shape (runs, agents, parameters): run s·len(trials) + v is
    seed s with trial v; NaN for runs that broke down. ``rows`` are measurements, in order of steps.
    ``num_steps`` were completed, and ``cooldown_steps`` after them only mixed. ``stopped`` says why
    runs broke down, by (mechanism, step size, seed). ``simulation`` says why ε is simulated, and no
    promise; empty if it is one. ``private_notes`` depend on data without noise, for its owner.
    """

    trials: tuple[Trial, ...] = field(repr=False)
    seeds: tuple[int, ...]
    parameters: Tensor = field(repr=False)
    rows: tuple[Row, ...] = field(repr=False)
    num_steps: int
    status: SweepStatus
    stopped: Mapping[tuple[str, str, int], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    simulation: str = PUBLIC_SEEDS
    private_notes: tuple[str, ...] = ()
    cooldown_steps: int = 0

    @property
    def is_simulated(self) -> bool:
        """Whether ε is simulated, and no promise."""
        return bool(self.simulation)

    @property
    def privacy(self) -> str:
        """A sentence on the models' privacy: the promise and its adversary, or its absence."""
        against: dict[str, dict[str, list[str]]] = {}
        for own in dict.fromkeys(trial.mechanism for trial in self.trials):
            if own.budget is not None:
                adversaries = against.setdefault(own.budget.describe(), {})
                adversaries.setdefault(own.against, []).append(own.name)
        is_one = sum(map(len, against.values())) == 1
        promises = [
            f"{promise}, "
            + "; ".join(
                f"against {adversary}" + ("" if is_one else f" ({', '.join(names)})")
                for adversary, names in adversaries.items()
            )
            for promise, adversaries in against.items()
        ]
        if not promises:
            return "no noise: the models protect nobody"
        if self.is_simulated:
            return f"simulated: {self.simulation}; the promise would be {'; '.join(promises)}"
        return (
            f"the models keep {promises[0]}; losses and accuracies on training data are not "
            "covered by ε: keep them to yourself"
        )

    @property
    def average_parameters(self) -> Tensor:
        """The average of the agents' final models, shape (runs, parameters)."""
        return self.parameters.mean(dim=1)

    @property
    def last_rows(self) -> tuple[Row, ...]:
        """The last measurement of each run."""
        return tuple({run_of(row): row for row in self.rows}.values())

    def last_values(self, column: str) -> dict[tuple[str, str], list[float]]:
        """Return the last value of a column for each seed, by (mechanism, step size).

        Runs that broke down have infinity for a loss and NaN for any other column.
        """
        require_choice("column", column, COLUMNS)
        # Less is better for a loss alone; for other columns there is no worst value to put in.
        failed = math.inf if "loss" in column else math.nan
        found = {run_of(row): float(row[column]) for row in self.last_rows}
        found |= dict.fromkeys(self.stopped, failed)
        return {
            key: [found[*key, seed] for seed in self.seeds] for key in map(name_of, self.trials)
        }

    def to_pandas(self) -> Any:
        """Return the measurements as a ``pandas.DataFrame``, one row per run and measured step."""
        return make_frame(self.rows)
