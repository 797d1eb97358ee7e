"""The price of choosing step sizes on private data, and the choice on public data instead.

Whoever chooses a step size by comparing runs has looked at all of them, so all of them count:
Gaussian mechanisms add up in squares, and Poisson sampling composes by privacy loss distributions
(:mod:`corn.privacy.composition`). That holds for runs with noise and batches of their own. Those of
a simulation have them in common, so that step sizes compare well: from the difference of two such
runs everybody could compute gradients without noise. So a price is that of the same runs with
secret keys. The comparison itself uses held-out samples without noise. They must be public; no ε
covers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from corn.covariance import ThreatModel
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.method import Method
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense, PlanTerms, compose_expenses


@dataclass(frozen=True)
class TuningPrice:
    """Price of all runs of some methods together, for the agent that loses most.

    Attributes:
        num_runs: how many there were.
        epsilon: of all runs together at ``delta``, floating point included.
        delta: δ of the budget.
        epsilon_of_one: what a single run promises that agent.
        protects: the unit, its clipping, sampling and adjacency, in words.
        against: the adversary against whom all runs hold, in words.
        assumes: what the runs must be for this to be their price, in words.
    """

    num_runs: int
    epsilon: float
    delta: float
    epsilon_of_one: float
    protects: str
    against: str
    assumes: str = "each run has secret noise and secret batches of its own"


def price_tuning(result: Result) -> dict[Method, TuningPrice]:
    """Return the price of the runs of each method that has a budget.

    A run that broke down counts too: its models were released until it stopped. An interrupted
    search is refused: it has left out the runs of its last round.
    """
    return {
        method: _price_runs({method: count}, result.num_steps)
        for method, count in _count_runs(result).items()
    }


def price_all(result: Result) -> TuningPrice | None:
    """Return the price of the runs of all methods together, without those of a trusted server.

    None if there are none. A server's runs have another adversary, which does not add up.
    """
    runs = {m: count for m, count in _count_runs(result).items() if not m.is_central}
    return _price_runs(runs, result.num_steps) if runs else None


def _count_runs(result: Result) -> dict[Method, int]:
    if result.status == "interrupted":
        raise InvalidArgumentError("result must be complete to be priced, found an interrupted one")
    runs: dict[Method, int] = {}
    for trial in result.trials:
        if trial.method.budget is not None:
            # Every step size and every seed is a run of its own on the same data.
            runs[trial.method] = runs.get(trial.method, 0) + len(result.seeds)
    return runs


def _price_runs(runs: Mapping[Method, int], num_steps: int) -> TuningPrice:
    # Agents with the same promises differ in their noise only, and the least counts.
    alike: dict[tuple[object, ...], list[int]] = {}
    for agent in range(next(iter(runs)).precision.size):
        key = tuple(_budget_of(method, agent).promise for method in runs)
        alike.setdefault(key, []).append(agent)
    prices = []
    for agents in alike.values():
        # All agents of a class have the same promises, so the first stands for them.
        own = _budget_of(next(iter(runs)), agents[0])
        spent = [
            expense
            for method, count in runs.items()
            for expense in [_expense_of(method, agents, num_steps)] * count
        ]
        total = compose_expenses(spent, own.promise.delta)
        prices.append(
            TuningPrice(
                num_runs=len(spent),
                epsilon=total.epsilon,
                delta=total.delta,
                epsilon_of_one=own.promise.epsilon,
                protects=f"{own.query.protects} ({own.query.recipe})",
                against=_describe_adversary(runs, total.max_colluders or 0),
            )
        )
    return max(prices, key=lambda price: price.epsilon)


def _describe_adversary(runs: Mapping[Method, int], max_colluders: int) -> str:
    """Return the weakest adversary of all runs: together they hold against no stronger one."""
    central = next((method for method in runs if method.is_central), None)
    return ThreatModel(max_colluders).describe() if central is None else central.against


def _budget_of(method: Method, agent: int) -> PrivacyBudget:
    if method.budget is None:
        raise InvalidArgumentError(f"{method.name!r} must have a budget to be priced, found none")
    return method.budget.of_agent(agent)


def _expense_of(method: Method, agents: Sequence[int], num_steps: int) -> Expense:
    terms = PlanTerms(_budget_of(method, agents[0]), method.threat.max_colluders)
    # A larger [R⁻¹]_ii means less privacy, so the maximum bounds every agent of the class.
    return Expense(terms, float(method.precision[list(agents)].max()), num_steps)


def borrow_held_out(problem: TrainingProblem, *, seed: int) -> TrainingProblem:
    """Return the same problem with public samples in place of those of the agents.

    One half of the validation samples is drawn from, with replacement, until every agent has as
    many samples as before, so that batches, sampling rates and noise stay the same. The other half
    is left to validate on. Nothing of the agents' data is used but its sizes.
    """
    if "validation" not in problem.public_parts:
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
    # The halves are disjoint: a sample that is trained on must not choose the step size.
    drawn = [order[:half][rng.integers(half, size=size)] for size in problem.data.sizes]
    data = AgentData.from_parts([(inputs[rows], targets[rows]) for rows in drawn])
    kept = order[half:]
    parts = {**problem.parts, "validation": (inputs[kept], targets[kept])}
    return replace(problem, data=data, parts=parts)
