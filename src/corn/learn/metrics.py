"""Measurements at chosen steps, one row per run, and the files they are written to."""

from __future__ import annotations

import csv
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from corn.arrays import FloatArray
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.learn.method import Method, Trial
from corn.learn.step import StepStatistics
from corn.learn.tasks import Task

Row: TypeAlias = dict[str, str | int | float]
Samples: TypeAlias = tuple[Tensor, Tensor]
PARTS = ("train", "validation", "test")

_MOST_MEASURED = 1000  # agents, of whom all are scored
_MEASURED_OF_MORE = 200  # scoring all would take longer than training them

_NUM_EVALUATIONS = 20
# A loss that grew by this factor will not come back; one that only fluctuates stays far below.
_DIVERGENCE = 1e6

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

``mechanism`` is its name. ``test_loss`` is the loss of each agent's own model, averaged
over agents (200 of them, if there are more than 1000); ``test_loss_of_average`` is the loss of the
average of all models.
``consensus_distance`` is the root mean square distance of the agents' models from their average.
``epsilon`` is the ε spent so far by the least protected agent, ``epsilon_least`` by the best
protected; both are empty without a promise. With noise from a public seed nobody is protected, and
both columns have the prefix ``simulated_``: the ε that a run with secret keys would spend.
``central_ratio`` is the noise variance that a step adds to the average of all agents, as planned,
over that of a trusted server with the same promise. A value that was not measured is NaN.
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
    # Squared distance of every model from the average of its run: (seeds, agents, trials). Relative
    # to the first model, so that equal models have a distance of exactly zero.
    shifts = parameters - parameters[:, :1]
    spread = (shifts - shifts.mean(dim=1, keepdim=True)).square().sum(dim=-1)
    scores["consensus_distance"] = _array(spread.mean(dim=1).sqrt())
    for name in ("gradient_norm", "fraction_clipped", "noise_norm"):
        if statistics is not None:
            scores[name] = _array(getattr(statistics, name))
    return [
        _row(trial, seed, step, prefix, {name: float(of[s, v]) for name, of in scores.items()})
        for s, seed in enumerate(seeds)
        for v, trial in enumerate(trials)
    ]


def _score(task: Task, parameters: Tensor, parts: Mapping[str, Samples]) -> dict[str, FloatArray]:
    """Return losses and accuracies, each of shape (seeds, trials)."""
    # Of all agents, before those to be scored are selected.
    average = parameters.mean(dim=1)
    parameters = parameters[:, choose_measured(parameters.shape[1])].contiguous()
    shape = parameters.shape
    scores: dict[str, FloatArray] = {}
    for name, (inputs, targets) in parts.items():
        # All models of all runs in one call, which shares one product with the samples.
        own = task.evaluate(parameters.view(-1, shape[-1]), inputs, targets)
        joint = task.evaluate(average.view(-1, shape[-1]), inputs, targets)
        scores[f"{name}_loss"] = _array(own.loss.view(shape[:-1]).mean(dim=1))
        scores[f"{name}_loss_of_average"] = _array(joint.loss.view(shape[0], shape[2]))
        if own.accuracy is not None and joint.accuracy is not None:
            scores[f"{name}_accuracy"] = _array(own.accuracy.view(shape[:-1]).mean(dim=1))
            scores[f"{name}_accuracy_of_average"] = _array(joint.accuracy.view(shape[0], shape[2]))
    return scores


def choose_measured(num_agents: int) -> list[int]:
    """Return the agents whose own models are scored: all of 1000, some of more, evenly spaced.

    >>> choose_measured(3), len(choose_measured(10_000))
    ([0, 1, 2], 200)
    """
    count = num_agents if num_agents <= _MOST_MEASURED else _MEASURED_OF_MORE
    return [k * num_agents // count for k in range(count)]


def _row(trial: Trial, seed: int, step: int, prefix: str, scores: dict[str, float]) -> Row:
    method = trial.method
    row: Row = dict.fromkeys(COLUMNS, math.nan)
    row |= {
        "mechanism": method.name,
        "step_size": trial.schedule.describe(),
        "seed": seed,
        "step": step,
        **scores,
        **_privacy_spent(method, step, prefix),
    }
    return row


# All trials of a method share their ε, and under Poisson sampling each takes seconds to compute.
@lru_cache(maxsize=4096)
def _privacy_spent(method: Method, step: int, prefix: str) -> dict[str, Any]:
    spent = method.epsilon_spent(step)
    if spent is None or method.budget is None:
        return {"unit": ""}
    return {
        f"{prefix}epsilon": float(spent.max()),
        f"{prefix}epsilon_least": float(spent.min()),
        # Where promises differ, each agent's ε is at its own δ.
        "delta": max(promise.delta for promise in method.budget.promises),
        "unit": method.budget.unit,
        "central_ratio": method.central_ratio,
    }


def _array(values: Tensor) -> FloatArray:
    return values.to(device="cpu", dtype=torch.float64).numpy()


def has_diverged(row: Row, first: Row | None, *, measured: Iterable[str] = ("train",)) -> bool:
    """Return whether a run's models are not finite, or a loss is 10⁶ times its first value.

    ``measured`` names the parts whose loss was measured, for which NaN means divergence.
    """
    # The distance depends on models alone, which are public: a secret run may stop by it.
    if not math.isfinite(float(row["consensus_distance"])):
        return True
    for name in (f"{part}_loss" for part in measured):
        found = float(row[name])
        # At least 1: a loss that starts near zero may grow by any factor and still be small.
        start = 1.0 if first is None else max(1.0, float(np.nan_to_num(float(first[name]))))
        if not math.isfinite(found) or found > _DIVERGENCE * start:
            return True
    return False


def choose_evaluation_steps(evaluate_at: Sequence[int] | None, num_steps: int) -> frozenset[int]:
    """Return the steps to measure at: those given and the last, or 0, the last and 19 between."""
    if evaluate_at is None:
        shares = range(_NUM_EVALUATIONS + 1)
        return frozenset(round(num_steps * k / _NUM_EVALUATIONS) for k in shares)
    outside = [step for step in evaluate_at if not 0 <= step <= num_steps]
    if outside:
        raise InvalidArgumentError(
            f"evaluate_at must be steps from 0 to {num_steps}, found {outside}"
        )
    return frozenset({*evaluate_at, num_steps})


def write_table(
    rows: Sequence[Row],
    path: Path | str,
    *,
    columns: Sequence[str] = COLUMNS,
    is_private: bool = False,
) -> None:
    """Write these columns of rows to a ``.csv`` or ``.parquet`` file; NaN is an empty CSV field.

    A private file is readable by its owner only.
    """
    target = Path(path)
    writers = {".csv": _write_csv, ".parquet": _write_parquet}
    if target.suffix not in writers:
        raise FileFormatError(f"{target}: a table's name must end in .csv or .parquet")
    target.parent.mkdir(parents=True, exist_ok=True)
    # The file gets its name when it is complete: readers never see half a table.
    with writing_whole(target, is_private=is_private) as partial:
        writers[target.suffix](rows, partial, columns)


def _write_csv(rows: Sequence[Row], path: Path, columns: Sequence[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: "" if is_missing(row[name]) else row[name] for name in columns})


def _write_parquet(rows: Sequence[Row], path: Path, columns: Sequence[str]) -> None:
    # Loaded here, as agents, which import this module, write no Parquet.
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    table = arrow.table({name: [row[name] for row in rows] for name in columns})
    parquet.write_table(table, path)


def is_missing(value: str | int | float) -> bool:
    """Return whether a value was not measured."""
    return isinstance(value, float) and math.isnan(value)
