"""Mechanisms by name, designed for one budget, and what each of them reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from corn.covariance import MechanismName, Objective, ThreatModel, design
from corn.covariance.threat import EAVESDROPPER
from corn.errors import InvalidArgumentError
from corn.learn.contender import Contender
from corn.learn.metrics import COLUMNS, PARTS, Row
from corn.learn.names import CONTENDERS
from corn.learn.problem import Problem
from corn.learn.tasks import Quadratic
from corn.learn.tuning import Tuning
from corn.privacy import PrivacyBudget
from corn.topology import Network

_SCORES = ("loss", "accuracy", "loss_of_average", "accuracy_of_average")


def make_contenders(
    names: Sequence[str],
    network: Network,
    budget: PrivacyBudget,
    *,
    objective: Objective,
    threat: ThreatModel = EAVESDROPPER,
) -> list[Contender]:
    """Contenders for the mechanisms named, each designed for the budget under one objective.

    ``none`` is clipped but has no noise; ``unclipped`` has neither; ``central`` trusts a server.
    The threat is what ``corn`` is designed for; each contender says whom its promise holds against.
    """
    return [_make_contender(name, network, budget, objective, threat) for name in names]


def _make_contender(
    name: str, network: Network, budget: PrivacyBudget, objective: Objective, threat: ThreatModel
) -> Contender:
    if name not in CONTENDERS:
        raise InvalidArgumentError(
            f"mechanism must be one or more of {', '.join(CONTENDERS)}, found {name!r}"
        )
    if name == "unclipped":
        return Contender.non_private(name=name)
    if name == "none":
        return Contender.non_private(budget.query)
    if name == "central":
        return Contender.central(budget, network.num_agents)
    made = design(
        network.mixing_matrix,
        budget.precision_cap,
        mechanism=cast("MechanismName", name),
        objective=objective,
        threat=threat if name == "corn" else EAVESDROPPER,
    )
    return Contender.private(name, made, budget)


def summarize_contenders(problem: Problem, tuning: Tuning) -> dict[str, dict[str, object]]:
    """What each contender reached at its best step size, averaged over seeds, and what ε it spent.

    Only what was measured is there, nothing for a contender whose every run broke down (its step
    size is None); for the quadratic task also the optimality gap.
    """
    contenders = dict.fromkeys(variant.contender for variant in tuning.result.variants)
    return {own.name: _summarize(own, problem, tuning) for own in contenders}


def select_measured(problem: Problem, rows: Sequence[Row]) -> list[Row]:
    """Rows without the columns that nobody measured, the quadratic's loss as its optimality gap."""
    columns = [name for name in COLUMNS if not all(_is_missing(row[name]) for row in rows)]
    chosen: list[Row] = [{name: row[name] for name in columns} for row in rows]
    if isinstance(problem.task, Quadratic):
        for row in chosen:
            row["optimality_gap"] = float(row.pop("train_loss")) - problem.task.minimum
    return chosen


def _is_missing(value: str | int | float) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _summarize(contender: Contender, problem: Problem, tuning: Tuning) -> dict[str, object]:
    schedule = tuning.schedules.get(contender.name)
    prefix = "simulated_" if tuning.result.is_simulated else ""
    spent = contender.epsilon_spent(tuning.result.num_steps)
    return {
        "step_size": None if schedule is None else schedule.describe(),
        **({} if schedule is None else _scores(contender.name, problem, tuning)),
        f"{prefix}epsilon": None if spent is None else float(spent.max()),
        f"{prefix}epsilon_of_each_agent": spent,
        "unit": None if contender.budget is None else contender.budget.unit,
        "against": contender.against,
    }


def _scores(name: str, problem: Problem, tuning: Tuning) -> dict[str, float]:
    columns = (*(f"{part}_{score}" for part in PARTS for score in _SCORES), "consensus_distance")
    scores = {column: tuning.score(column)[name] for column in columns}
    if isinstance(problem.task, Quadratic):
        scores["optimality_gap"] = scores["train_loss"] - problem.task.minimum
    return {column: value for column, value in scores.items() if not math.isnan(value)}
