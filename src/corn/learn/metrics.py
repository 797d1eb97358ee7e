"""What is measured at chosen steps: one row for each run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from corn.arrays import FloatArray
from corn.errors import InvalidArgumentError
from corn.learn.method import Method, Trial
from corn.learn.step import StepStatistics
from corn.learn.tasks import Task

Row: TypeAlias = dict[str, str | int | float]
Samples: TypeAlias = tuple[Tensor, Tensor]
PARTS = ("train", "validation", "test")
_NUM_EVALUATIONS = 20

COLUMNS = (
    "contender",
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
)
"""The columns of a table of results.

``test_loss`` is the loss of each agent's own model, averaged over agents; ``test_loss_of_average``
that of the average of all models. ``consensus_distance`` is the root mean square distance of the
agents' models from their average. ``epsilon`` is what the least protected agent has spent so far,
``epsilon_least`` the best protected; empty without a promise. Where noise was drawn from a public
seed nobody is protected, and both are called ``simulated_``: what a run with secret keys would
spend. Where something was not measured the value is NaN.
"""

PRIVATE_COLUMNS = (
    *(name for name in COLUMNS if name.startswith("train_")),
    "gradient_norm",
    "fraction_clipped",
    "noise_norm",
)
"""What no noise protects, and only the owner of the training data may see.

The norm of the noise is among it: messages show the sum of gradient and noise, and with the exact
norm of one part they show more of the other than ε counts.
"""

SHARED_COLUMNS = tuple(name for name in COLUMNS if name not in PRIVATE_COLUMNS)
"""The rest: they follow from public models, public data and the plan."""


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
    prefix = "simulated_" if is_simulated else ""
    scores = _score(task, parameters, parts)
    spread = (parameters - parameters.mean(dim=1, keepdim=True)).square().sum(dim=-1)
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
    """Losses and accuracies, each of shape (seeds, trials)."""
    shape = parameters.shape
    average = parameters.mean(dim=1)
    scores: dict[str, FloatArray] = {}
    for name, (inputs, targets) in parts.items():
        own = task.evaluate(parameters.view(-1, shape[-1]), inputs, targets)
        joint = task.evaluate(average.view(-1, shape[-1]), inputs, targets)
        scores[f"{name}_loss"] = _array(own.loss.view(shape[:-1]).mean(dim=1))
        scores[f"{name}_loss_of_average"] = _array(joint.loss.view(shape[0], shape[2]))
        if own.accuracy is not None and joint.accuracy is not None:
            scores[f"{name}_accuracy"] = _array(own.accuracy.view(shape[:-1]).mean(dim=1))
            scores[f"{name}_accuracy_of_average"] = _array(joint.accuracy.view(shape[0], shape[2]))
    return scores


def _row(trial: Trial, seed: int, step: int, prefix: str, scores: dict[str, float]) -> Row:
    method = trial.method
    row: Row = dict.fromkeys(COLUMNS, math.nan)
    row |= {
        "contender": method.name,
        "step_size": trial.schedule.describe(),
        "seed": seed,
        "step": step,
        **scores,
        **_privacy_spent(method, step, prefix),
    }
    return row


@lru_cache(maxsize=4096)
def _privacy_spent(method: Method, step: int, prefix: str) -> dict[str, Any]:
    spent = method.epsilon_spent(step)
    if spent is None or method.budget is None:
        return {"unit": ""}
    return {
        f"{prefix}epsilon": float(spent.max()),
        f"{prefix}epsilon_least": float(spent.min()),
        "delta": method.budget.delta,
        "unit": method.budget.unit,
    }


def _array(values: Tensor) -> FloatArray:
    return values.to(device="cpu", dtype=torch.float64).numpy()


def is_exploding(
    row: Row, first: Row | None, *, limit: float, measured: Iterable[str] = ("train",)
) -> bool:
    """Whether a run's models are not finite, or a loss is ``limit`` times what it began with.

    ``measured`` are the parts whose loss was measured, so that NaN is a loss and not its absence.
    """
    if not math.isfinite(float(row["consensus_distance"])):
        return True
    for name in (f"{part}_loss" for part in measured):
        found = float(row[name])
        start = 1.0 if first is None else max(1.0, float(np.nan_to_num(float(first[name]))))
        if not math.isfinite(found) or found > limit * start:
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
