"""The result of a sweep: the models, the table of measurements, and the runs that broke down."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from scipy.special import stdtrit
from torch import Tensor

from corn.checks import require_choice
from corn.errors import FileFormatError, InvalidArgumentError, MissingExtraError
from corn.learn.method import Trial
from corn.learn.metrics import COLUMNS, Row

_TEXTS = ("mechanism", "step_size", "unit")


def make_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a ``pandas.DataFrame``; pandas is an extra."""
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingExtraError("a data frame", extra="pandas") from error
    return pandas.DataFrame([dict(row) for row in rows])


def load_results(path: Path | str) -> Any:
    """Return the measurements of a run as a ``pandas.DataFrame``.

    Args:
        path: a table (``.csv`` or ``.parquet``), or the folder of a run: of ``corn train --out``,
            of ``corn launch --out`` (the shared measurements; see :func:`load_agent_results`), or
            of the reproduction of the paper (every run).

    >>> load_results("out/run")["test_loss"].min()  # doctest: +SKIP
    0.3742
    """
    place = Path(path)
    if place.is_file():
        return _read_table(place)
    # Only ``shared`` of a launched run: private measurements must be asked for by name.
    for name in ("metrics.csv", "shared/metrics.csv", "runs.csv"):
        if (place / name).is_file():
            return _read_table(place / name)
    raise FileFormatError(
        f"{place}: must be a table or the folder of a run, with metrics.csv, found neither"
    )


def load_agent_results(path: Path | str) -> Any:
    """Return the measurements of every agent of ``corn launch --out``, in one data frame.

    Those in ``shared`` may be published. Give the folder ``private`` for those that may not.
    """
    place = Path(path)
    folders = (place / "shared" if (place / "shared").is_dir() else place).glob("agent-*")
    numbered = {folder.name.removeprefix("agent-"): folder / "metrics.csv" for folder in folders}
    # Others, such as a copy called agent-0-old, are no agent's.
    frames = {
        int(number): _read_table(table)
        for number, table in numbered.items()
        if number.isdecimal() and table.is_file()
    }
    if not frames:
        raise FileFormatError(f"{place}: must have folders agent-0, agent-1, …, found none")
    pandas: Any = importlib.import_module("pandas")
    return pandas.concat(
        [own.assign(agent=agent) for agent, own in sorted(frames.items())], ignore_index=True
    )


def _read_table(path: Path) -> Any:
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingExtraError("a data frame", extra="pandas") from error
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        # Step sizes may be formulas, such as 0.01/√t, so that they are text in every table.
        frame = pandas.read_csv(path, dtype=dict.fromkeys(_TEXTS, str))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: not a table: {error}") from error
    return frame.fillna(dict.fromkeys(set(_TEXTS) & set(frame.columns), ""))


SweepStatus: TypeAlias = Literal["complete", "interrupted"]
BreakdownCause: TypeAlias = Literal["gradients-not-finite", "loss-diverged"]

_CAUSES: dict[BreakdownCause, str] = {
    "gradients-not-finite": "its gradients are not finite",
    "loss-diverged": "its loss diverged",
}


PUBLIC_SEEDS = (
    "the noise follows from public seeds, so these models protect nobody; the same run with secret "
    "keys would spend the simulated ε"
)


@dataclass(frozen=True)
class Breakdown:
    """The step at which a run broke down, and the cause."""

    step: int
    cause: BreakdownCause

    def __str__(self) -> str:
        """Return a sentence for tables and warnings."""
        return f"stopped at step {self.step}: {_CAUSES[self.cause]}; try a smaller step size"


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of all runs of a sweep. An interrupted one is valid up to its last step.

    Attributes:
        trials: methods with step-size schedules.
        seeds: each trial was run once per seed.
        parameters: the final models, shape (runs, agents, parameters): run s·len(trials) + v is
            seed s with trial v. NaN for runs that broke down.
        rows: the measurements, in order of steps.
        num_steps: the number of completed steps.
        status: ``complete``, or ``interrupted`` by the user.
        stopped: runs that broke down, by (method, step size, seed).
        notes: facts that a reader must know, such as a data set that stands in for another.
        simulation: why ε is simulated, and no promise, in clauses; empty if it is one.
        private_notes: facts that depend on the data without noise, for its owner alone.
    """

    trials: tuple[Trial, ...]
    seeds: tuple[int, ...]
    parameters: Tensor = field(repr=False)
    rows: tuple[Row, ...] = field(repr=False)
    num_steps: int
    status: SweepStatus
    stopped: Mapping[tuple[str, str, int], Breakdown] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    simulation: str = PUBLIC_SEEDS
    private_notes: tuple[str, ...] = ()

    @property
    def is_simulated(self) -> bool:
        """Whether ε is simulated, and no promise."""
        return bool(self.simulation)

    @property
    def privacy(self) -> str:
        """A sentence on the models' privacy: the promise and its adversary, or its absence."""
        # Methods, not trials: a promise does not depend on the step size.
        promises = [
            f"{own.budget.describe()}, against {own.against}"
            for own in dict.fromkeys(trial.method for trial in self.trials)
            if own.budget is not None
        ]
        if not promises:
            return "no noise: the models protect nobody"
        if self.is_simulated:
            return f"simulated: {self.simulation}"
        return (
            f"the models keep {promises[0]}; losses and accuracies on training data are not "
            "covered by ε: keep them to yourself"
        )

    @property
    def average_parameters(self) -> Tensor:
        """The average of the agents' final models, shape (runs, parameters).

        After a cool-down the agents' own models nearly agree with it.
        """
        return self.parameters.mean(dim=1)

    @property
    def last_rows(self) -> tuple[Row, ...]:
        """The last measurement of each run."""
        # Rows are in order of steps, so that a later one replaces an earlier one.
        latest: dict[tuple[object, ...], Row] = {}
        for row in self.rows:
            latest[row["mechanism"], row["step_size"], row["seed"]] = row
        return tuple(latest.values())

    def average(self, column: str) -> dict[tuple[str, str], float]:
        """Return the mean over seeds of a column's last value, by (method, step size).

        If a run broke down, the mean is infinite for a loss and NaN for any other column.
        """
        return {key: sum(found) / len(found) for key, found in self._last_values(column).items()}

    def interval(self, column: str) -> dict[tuple[str, str], float]:
        """Return half the width of the 95 % interval of ``average``, by (method, step size).

        It is Student's interval over seeds. It covers the randomness of batches, noise and initial
        models, but not that of the data, which all runs share. NaN for one seed, and if a run broke
        down.
        """
        return {key: _half_width(found) for key, found in self._last_values(column).items()}

    def _last_values(self, column: str) -> dict[tuple[str, str], list[float]]:
        """Return the last value of a column for each seed, by (method, step size)."""
        require_choice("column", column, COLUMNS)
        # Less is better for a loss alone; for other columns there is no worst value to put in.
        failed = math.inf if "loss" in column else math.nan
        last = {(r["mechanism"], r["step_size"], r["seed"]): r for r in self.last_rows}
        values: dict[tuple[str, str], list[float]] = {}
        for trial in self.trials:
            key = trial.method.name, trial.schedule.describe()
            runs = [(*key, seed) for seed in self.seeds]
            values[key] = [
                failed if run in self.stopped else float(last[run][column]) for run in runs
            ]
        return values

    def best_step_sizes(self, column: str = "validation_loss") -> dict[str, str]:
        """Return the step size with the least value of a column, for each method."""
        chosen: dict[str, tuple[float, str]] = {}
        for (method, step_size), value in self.average(column).items():
            # Strictly less than infinity: a method whose every run broke down gets no step size.
            if value < chosen.get(method, (math.inf, ""))[0]:
                chosen[method] = value, step_size
        return {method: step_size for method, (_, step_size) in chosen.items()}

    def to_pandas(self) -> Any:
        """Return the measurements as a ``pandas.DataFrame``, one row per run and measured step."""
        return make_frame(self.rows)

    def select(self, method: str, step_size: str | None = None) -> list[Row]:
        """Return the rows of a method, with one step size or all."""
        return [
            row
            for row in self.rows
            if row["mechanism"] == method and step_size in (None, row["step_size"])
        ]


def join_results(first: Result, second: Result) -> Result:
    """Return the result of one sweep with the trials of two, which ran the same seeds and steps."""
    if (first.seeds, first.num_steps) != (second.seeds, second.num_steps):
        raise InvalidArgumentError(
            f"results must have the same seeds and steps, found {first.seeds} and {second.seeds}, "
            f"{first.num_steps} and {second.num_steps} steps"
        )
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


def _half_width(values: list[float]) -> float:
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return math.nan
    mean = sum(values) / count
    # The mean is estimated too, hence n − 1. The 0.975 quantile leaves 2.5 % on each side.
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return float(stdtrit(count - 1, 0.975)) * math.sqrt(variance / count)
