"""The price of choosing step sizes on private data, and the choice on public data instead.

Whoever chooses a step size by comparing runs has looked at all of them, so all of them count:
Gaussian mechanisms add up in squares, and Poisson sampling composes by privacy loss distributions
(:mod:`corn.privacy.composition`). The comparison itself uses held-out samples without noise. They
must be public; no ε covers them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.method import Method
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense, PlanTerms, compose_expenses


@dataclass(frozen=True)
class TuningPrice:
    """What all runs of some methods spend together, for the agent that loses most.

    Attributes:
        num_runs: how many there were.
        epsilon: of all runs together at ``delta``, floating point included.
        delta: δ of the budget.
        epsilon_of_one: what a single run promises that agent.
        protects: the unit, its clipping, sampling and adjacency, in words.
    """

    num_runs: int
    epsilon: float
    delta: float
    epsilon_of_one: float
    protects: str


def price_tuning(result: Result) -> dict[Method, TuningPrice]:
    """Return the price of the runs of each method that has a budget.

    A run that broke down counts too: its models were released until it stopped.
    """
    runs: dict[Method, int] = {}
    for trial in result.trials:
        runs[trial.method] = runs.get(trial.method, 0) + len(result.seeds)
    return {
        method: _price_runs(method, method.budget, count, result.num_steps)
        for method, count in runs.items()
        if method.budget is not None
    }


def _price_runs(
    method: Method, budget: PrivacyBudget, num_runs: int, num_steps: int
) -> TuningPrice:
    # Agents with the same promise differ in their noise only, and the least counts.
    worst: dict[object, tuple[int, float]] = {}
    for agent, precision in enumerate(method.precision.tolist()):
        promise = budget.promises[agent if budget.num_agents else 0]
        if precision > worst.get(promise, (0, -1.0))[1]:
            worst[promise] = agent, precision
    prices = []
    for agent, precision in worst.values():
        own = budget.of_agent(agent)
        terms = PlanTerms(own, method.threat.max_colluders)
        spent = [Expense(terms, precision, num_steps)] * num_runs
        total = compose_expenses(spent, own.promise.delta, unit=own.unit)
        words = f"{own.query.protects} ({own.query.recipe})"
        prices.append(TuningPrice(num_runs, total.epsilon, total.delta, own.promise.epsilon, words))
    return max(prices, key=lambda price: price.epsilon)


def borrow_held_out(problem: TrainingProblem, *, seed: int) -> TrainingProblem:
    """Return the same problem with public samples in place of those of the agents.

    One half of the validation samples is drawn from, with replacement, until every agent has as
    many samples as before, so that batches, sampling rates and noise stay the same. The other half
    is left to validate on. Nothing of the agents' data is used but its sizes.
    """
    if not problem.has_public_parts or "validation" not in problem.parts:
        raise InvalidArgumentError(
            "step sizes can be chosen on held-out samples only if the task has public ones: give "
            "one step size, or choose another task"
        )
    inputs, targets = problem.parts["validation"]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(targets))
    half = len(order) // 2
    if half == 0:
        raise InvalidArgumentError(
            f"held-out samples must be at least two to choose step sizes, found {len(order)}"
        )
    drawn = [order[:half][rng.integers(half, size=size)] for size in problem.data.sizes]
    data = AgentData.from_parts([(inputs[rows], targets[rows]) for rows in drawn])
    kept = order[half:]
    parts = {**problem.parts, "validation": (inputs[kept], targets[kept])}
    return replace(problem, data=data, parts=parts)
