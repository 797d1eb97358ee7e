"""Composition of the releases under several plans into one total ε of an agent or a sample.

Privacy losses on the same data add up, whatever plans, keys and machines they were released with.
Gaussian mechanisms compose to one with μ² = Σ Δ² K y, over K uses of the unit at [R⁻¹]_ii = y.
Poisson sampling composes by privacy loss distributions; the Gaussian rest is one more.

**Unit.** A release that protects an agent's whole data protects each sample of it: whatever
happens to one sample moves the agent's gradient by 2C at most. A release that protects a sample
promises nothing for the whole data.

**Neighbours.** If all plans that protect the unit have the same adjacency, so has the total. If
not, the total is for replacing, for which every mechanism can be counted: its shift then is at most
twice its contribution (under Poisson sampling: two opposite shifts).

**Adversary.** The total holds against as many insiders as every plan covers.

**Floats.** Releases of a plan are (ε₁, δ′)-close to ideal ones (``corn.privacy.floats``). The total
is the smaller one of two bounds on all computed releases, at once and plan by plan
(``docs/floats.md``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from corn.checks import require, require_count, require_in_range
from corn.privacy.budget import (
    PROTECTED,
    Adjacency,
    ClippedQuery,
    PrivacyBudget,
    Relation,
    Unit,
    describe_adversary,
)
from corn.privacy.floats import bound_reserve, set_aside
from corn.privacy.rounding import round_up, write_exactly
from corn.privacy.subsampling import ROUNDING, Releases

_MAX_ROUNDS = 40
_NUM_LEVELS = 80


@dataclass(frozen=True)
class PlanTerms:
    """The public terms under which one agent releases by a plan.

    ``budget`` is the plan's promise to this agent, with one number in each field;
    ``max_colluders`` is the number of insiders against whom it holds.
    """

    budget: PrivacyBudget
    max_colluders: int

    def __post_init__(self) -> None:
        require_count("max_colluders", self.max_colluders, least=0)
        is_one = self.budget.num_agents is None
        require(is_one, "budget", "that of one agent", "more", advice="use budget.of_agent(i)")
        # The accountant that designed the noise does not change what was released. Its name in a
        # file would repeat its warnings wherever the file is read.
        if self.budget.accounting != "gdp":
            object.__setattr__(self, "budget", replace(self.budget, accounting="gdp"))

    @property
    def precision_cap(self) -> float:
        """The largest [R⁻¹]_ii that a plan with these terms gives the agent, or a little more."""
        # Under Poisson sampling the cap is searched, and plans may be up to 1 % above it.
        margin = 1.01 if self.budget.query.is_subsampled else 1 + 1e-9
        return margin * set_aside(self.budget).precision_cap


@dataclass(frozen=True)
class Expense:
    """The releases of one agent under one plan: as many as there were, or may have been.

    ``precision`` is the largest [R⁻¹]_ii of the noise, against the plan's adversary.
    """

    terms: PlanTerms
    precision: float
    num_releases: int

    def __post_init__(self) -> None:
        require_in_range("precision", self.precision, 0)
        require_count("num_releases", self.num_releases, least=0)

    @property
    def query(self) -> ClippedQuery:
        """The clipped gradient that was released."""
        return self.terms.budget.query


@dataclass(frozen=True)
class TotalLoss:
    """The privacy of everything that was released of one agent's data, as an upper bound.

    ``epsilon`` is ε at ``delta`` for ``unit``, effects of floating point included. It is infinite
    where nothing is promised: for unit ``agent`` if any release protects only samples. ``relation``
    is the adjacency, which is zero-out if any release with the adjacency add-remove is of a batch
    of fixed size, or of an agent. All of it holds against ``max_colluders`` insiders. Both are None
    without releases.
    """

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation | None = None
    max_colluders: int | None = None

    def describe(self) -> str:
        """Return the total in words, with unit, neighbours and adversary."""
        if self.max_colluders is None:
            return "ε = 0, as nothing was released"
        promise = f"{self.describe_epsilon()} at δ = {write_exactly(self.delta)}"
        whose = f"{PROTECTED[self.unit]} ({self.relation} adjacency)"
        return f"{promise} for {whose}, against {describe_adversary(self.max_colluders)}"

    def describe_epsilon(self) -> str:
        """Return ε, rounded up."""
        is_proved = math.isfinite(self.epsilon)
        return f"ε = {round_up(self.epsilon)}" if is_proved else "no ε that can be proved"


def common_unit(expenses: Iterable[Expense]) -> Unit:
    """Return the largest unit for which all releases promise something."""
    units = {expense.query.unit for expense in expenses}
    return "sample" if "sample" in units else "agent"


def compose_expenses(
    expenses: Iterable[Expense], delta: float, *, unit: Unit | None = None
) -> TotalLoss:
    """Return the total of several plans at one δ, for a unit or else the ``common_unit``.

    >>> budget = PrivacyBudget(1, 1e-5, num_steps=100, clip=0.1)
    >>> expense = Expense(PlanTerms(budget, max_colluders=1), precision=0.01, num_releases=100)
    >>> once, twice = (compose_expenses([expense] * n, 1e-5).epsilon for n in (1, 2))
    >>> once < twice < 2 * once
    True
    """
    require(0 < delta < 1, "delta", "in (0, 1)", delta, advice="try 1e-5")
    spent = [expense for expense in expenses if expense.num_releases > 0 and expense.precision > 0]
    unit = unit or common_unit(spent)
    if not spent:
        return TotalLoss(0.0, delta, unit)
    against = min(expense.terms.max_colluders for expense in spent)
    own = [expense.query for expense in spent if expense.query.unit == unit]
    adjacency: Adjacency = "replace"
    relation: Relation = "replace-one"
    if {query.adjacency for query in own} == {"add-remove"}:
        adjacency = "add-remove"
        relations = {query.relation for query in own}
        relation = "zero-out" if "zero-out" in relations else "add-or-remove-one"
    is_promised = unit == "sample" or len(own) == len(spent)
    if not is_promised or any(math.isinf(expense.precision) for expense in spent):
        return TotalLoss(math.inf, delta, unit, relation, against)
    epsilon = _include_floats(tuple(spent), delta, unit, adjacency)
    return TotalLoss(epsilon, delta, unit, relation, against)


def _idealise(expenses: Sequence[Expense], unit: Unit, adjacency: Adjacency) -> Releases:
    """Return the mechanisms of several plans, as releases of real numbers."""
    square = 0.0
    phases = Counter[tuple[float, float]]()
    for expense in expenses:
        query = expense.query
        count = expense.num_releases
        if query.is_subsampled:
            shift = query.contribution * math.sqrt(expense.precision)
            # Equal steps of several runs are composed at once, which is much faster.
            phases[shift, query.sampling_rate or 1.0] += count
            continue
        # A sample that comes, goes or changes can turn an agent's clipped gradient around.
        is_doubled = adjacency == "replace" or query.unit != unit
        sensitivity = query.contribution * (2 if is_doubled else 1)
        square += sensitivity * sensitivity * query.participations(count) * expense.precision
    listed = tuple((*phase, count) for phase, count in phases.items())
    return Releases(math.sqrt(square) * (1 + ROUNDING), listed, adjacency)


def _include_floats(
    expenses: tuple[Expense, ...], delta: float, unit: Unit, adjacency: Adjacency
) -> float:
    """Return ε of the computed releases at δ; the smaller one of the two proofs."""
    ideal = _idealise(expenses, unit, adjacency)
    reserves = [bound_reserve(expense.terms.budget) for expense in expenses]
    ratio, failure = (math.fsum(part) for part in zip(*reserves, strict=True))
    # δ″ of each plan: the most that its failure δ′ has under a neighbouring data set.
    exposed = []
    for expense, (_, own) in zip(expenses, reserves, strict=True):
        single = _idealise([expense], unit, adjacency)
        levels = np.linspace(0, -math.log(own), _NUM_LEVELS).tolist()
        exposed.append(min(math.exp(level) * own + single.delta(level) for level in levels))
    shrink = math.exp(-ratio)
    by_plan = ideal.epsilon((delta - failure) * shrink - math.fsum(exposed))
    at_once = _solve_at_once(
        lambda x: ideal.epsilon((delta - failure * (1 + math.exp(x + ratio))) * shrink)
    )
    return (min(by_plan, at_once) + 2 * ratio) * (1 + ROUNDING)


def _solve_at_once(epsilon_at: Callable[[float], float]) -> float:
    """Return an x with ``epsilon_at(x)`` ≤ x, or ∞; the less δ is left, the larger."""
    x = epsilon_at(0.0)
    for _ in range(_MAX_ROUNDS):
        # e^x overflows beyond this, and no δ would be left long before.
        if not x < 500:
            return math.inf
        # A little above the last round: rounds approach the solution from below.
        x *= 1 + 1e-9
        found = epsilon_at(x)
        if found <= x:
            return x
        x = found
    return math.inf
