"""Mechanisms by name, designed for one budget, and what each of them reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from corn.covariance import MechanismName, Objective, ThreatModel, design
from corn.covariance.threat import EAVESDROPPER
from corn.errors import InvalidArgumentError
from corn.learn.method import Method
from corn.learn.metrics import COLUMNS, PARTS, Row
from corn.learn.names import METHOD_NAMES
from corn.learn.problem import TrainingProblem
from corn.learn.tasks import Quadratic
from corn.learn.tuning import Tuning
from corn.privacy import PrivacyBudget
from corn.topology import Network

_SCORES = ("loss", "accuracy", "loss_of_average", "accuracy_of_average")


def make_methods(
    names: Sequence[str],
    network: Network,
    budget: PrivacyBudget,
    *,
    objective: Objective,
    threat: ThreatModel = EAVESDROPPER,
) -> list[Method]:
    """Methods for the mechanisms named, each designed for the budget under one objective.

    ``none`` is clipped but has no noise; ``unclipped`` has neither; ``central`` trusts a server.
    The threat is what ``corn`` is designed for; each method says whom its promise holds against.
    """
    return [_make_method(name, network, budget, objective, threat) for name in names]


def _make_method(
    name: str, network: Network, budget: PrivacyBudget, objective: Objective, threat: ThreatModel
) -> Method:
    if name not in METHOD_NAMES:
        raise InvalidArgumentError(
            f"mechanism must be one or more of {', '.join(METHOD_NAMES)}, found {name!r}"
        )
    if name == "unclipped":
        return Method.non_private(name=name)
    if name == "none":
        return Method.non_private(budget.query)
    if name == "central":
        return Method.central(budget, network.num_agents)
    made = design(
        network.mixing_matrix,
        budget.precision_cap,
        mechanism=cast("MechanismName", name),
        objective=objective,
        threat=threat if name == "corn" else EAVESDROPPER,
    )
    return Method.private(name, made, budget)


def summarize_methods(problem: TrainingProblem, tuning: Tuning) -> dict[str, dict[str, object]]:
    """What each method reached at its best step size, averaged over seeds, and what ε it spent.

    Only what was measured is there, nothing for a method whose every run broke down (its step
    size is None); for the quadratic task also the optimality gap.
    """
    methods = dict.fromkeys(trial.method for trial in tuning.result.trials)
    return {own.name: _summarize(own, problem, tuning) for own in methods}


def select_measured(problem: TrainingProblem, rows: Sequence[Row]) -> list[Row]:
    """Rows without the columns that nobody measured, the quadratic's loss as its optimality gap."""
    columns = [name for name in COLUMNS if not all(_is_missing(row[name]) for row in rows)]
    chosen: list[Row] = [{name: row[name] for name in columns} for row in rows]
    if isinstance(problem.task, Quadratic):
        for row in chosen:
            row["optimality_gap"] = float(row.pop("train_loss")) - problem.task.minimum
    return chosen


def _is_missing(value: str | int | float) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _summarize(method: Method, problem: TrainingProblem, tuning: Tuning) -> dict[str, object]:
    schedule = tuning.schedules.get(method.name)
    prefix = "simulated_" if tuning.result.is_simulated else ""
    spent = method.epsilon_spent(tuning.result.num_steps)
    return {
        "step_size": None if schedule is None else schedule.describe(),
        **({} if schedule is None else _scores(method.name, problem, tuning)),
        f"{prefix}epsilon": None if spent is None else float(spent.max()),
        f"{prefix}epsilon_of_each_agent": spent,
        "unit": None if method.budget is None else method.budget.unit,
        "against": method.against,
    }


def _scores(name: str, problem: TrainingProblem, tuning: Tuning) -> dict[str, float]:
    columns = (*(f"{part}_{score}" for part in PARTS for score in _SCORES), "consensus_distance")
    scores = {column: tuning.score(column)[name] for column in columns}
    if isinstance(problem.task, Quadratic):
        scores["optimality_gap"] = scores["train_loss"] - problem.task.minimum
    return {column: value for column, value in scores.items() if not math.isnan(value)}
